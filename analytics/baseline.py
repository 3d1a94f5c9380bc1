"""What a snapshot knows and the journal may not: tokens and subscriptions older than the first segment."""

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from analytics.inputs import Window
from analytics.schema import EVENTS
from store.journal_schema import JournalEvent as E

WRITER = b"snapshot"


def token_events(tokens: DataFrame) -> DataFrame:
    """Tokens of a snapshot as the journal's event that leads to their status."""
    status = F.col("status")
    event = (
        F.when(status == "ACTIVE", E.TOKEN_VERIFIED.value)
        .when(status == "CONFIRMED", E.TOKEN_CONFIRMED.value)
        .when(status.startswith("INVALID") | (status == "EXPIRED"), E.TOKEN_INVALID.value)
        .otherwise(E.TOKEN_REGISTERED.value)
    )
    return as_events(tokens, event=event, token=F.col("token"), provider=F.col("provider"))


def subscription_events(subscriptions: DataFrame) -> DataFrame:
    """Subscriptions of a snapshot as if they had been created with their status at that moment."""
    return as_events(
        subscriptions,
        event=F.lit(E.SUB_CREATED.value),
        token=F.col("token"),
        subscription=F.col("subscription"),
        server=F.col("server"),
        status_to=F.col("status"),
    )


def as_events(rows: DataFrame, **columns: Column) -> DataFrame:
    """Rows in the journal's schema, at the time the snapshot was taken."""
    given = {"time": F.col("taken"), "writer": F.lit(WRITER), "seq": F.lit(0), **columns}
    absent = F.lit(None)
    return rows.select(
        *[given.get(field.name, absent).cast(field.dataType).alias(field.name) for field in EVENTS.fields]
    )


def read_baseline(spark: SparkSession, path: str, window: Window) -> DataFrame | None:
    """Events for the snapshot that suits the window: the last before its start, else the first within it."""
    base = path.rstrip("/")
    try:
        tokens = spark.read.parquet(f"{base}/tokens")
        subscriptions = spark.read.parquet(f"{base}/subscriptions")
    except AnalysisException:
        return None
    taken = F.unix_micros("taken")
    times = tokens.select(taken.alias("us")).union(subscriptions.select(taken.alias("us")))
    row = times.agg(
        F.max(F.when(F.col("us") <= window.start, F.col("us"))).alias("before"),
        F.min(F.when(window.holds(F.col("us")), F.col("us"))).alias("within"),
    ).first()
    chosen = None if row is None else (row.before if row.before is not None else row.within)
    if chosen is None:
        return None
    at = taken == F.lit(chosen)
    return token_events(tokens.where(at)).unionByName(subscription_events(subscriptions.where(at)))
