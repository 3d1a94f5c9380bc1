"""Capacity: how tokens, subscriptions and notifications grow, and where that leads."""

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from analytics.inputs import Inputs
from analytics.times import DAY_US
from analytics.transforms import (
    count_if,
    daily_net,
    day_start,
    days_from_the_one_before,
    is_event,
    quantity,
    ratio,
    running_total,
    subscription_lives,
    time_us,
    to_time,
    token_activity,
    total_if,
    window_days,
)
from store.journal_schema import JournalEvent as E

HORIZONS = (30, 90, 365)
TOKEN_BYTES = 1_000  # a token's row with its share of the indexes, in the SQLite store
SUBSCRIPTION_BYTES = 700  # likewise, with its last notification


def subscription_changes(inputs: Inputs) -> DataFrame:
    """Changes of the number of subscriptions: us, change (+1 or -1)."""
    lives = subscription_lives(inputs.history)
    born = lives.select(F.col("first_us").alias("us"), F.lit(1).alias("change"))
    gone = lives.where(F.col("gone_us").isNotNull())
    return born.unionByName(gone.select(F.col("gone_us").alias("us"), F.lit(-1).alias("change")))


def daily_traffic(inputs: Inputs) -> DataFrame:
    """Per day of the window: notifications received, tokens that received any, pushes accepted."""
    received = is_event(E.NTF_RECEIVED)
    rows = inputs.in_window().where(is_event(E.NTF_RECEIVED, E.PUSH_SENT))
    return rows.groupBy(day_start(time_us()).alias("day_us")).agg(
        total_if(received, quantity()).alias("notifications"),
        F.countDistinct(F.when(received, F.col("token"))).alias("receiving_tokens"),
        count_if(is_event(E.PUSH_SENT)).alias("pushes"),
    )


def daily(inputs: Inputs) -> DataFrame:
    """One row per day of the window: tokens and subscriptions at its end, traffic during it."""
    first, _ = window_days(inputs)
    days = (
        days_from_the_one_before(inputs)
        .join(daily_net(token_activity(inputs.history), first, "tokens_net"), "day_us", "left")
        .join(daily_net(subscription_changes(inputs), first, "subscriptions_net"), "day_us", "left")
        .join(daily_traffic(inputs), "day_us", "left")
        .na.fill(0)
    )
    totals = running_total(
        running_total(days, "day_us", "tokens_net", "tokens"), "day_us", "subscriptions_net", "subscriptions"
    )
    return (
        totals.where(F.col("day_us") >= first)
        .select(
            to_time(F.col("day_us")).alias("day"),
            "tokens",
            "tokens_net",
            "subscriptions",
            "subscriptions_net",
            "notifications",
            "pushes",
            "receiving_tokens",
            ratio(F.col("notifications"), F.col("receiving_tokens")).alias("notifications_per_token"),
        )
        .orderBy("day")
    )


def projection(days: DataFrame, first_day: int) -> DataFrame:
    """One row per measure: its value at the end, daily growth (least squares) and projected values.

    `store_bytes` is an estimate from the numbers of tokens and subscriptions.
    """
    x = (F.unix_micros("day") - F.lit(first_day)) / DAY_US
    store = F.col("tokens") * TOKEN_BYTES + F.col("subscriptions") * SUBSCRIPTION_BYTES
    measured = days.withColumns({"x": x.cast("bigint"), "store_bytes": store})
    measures = ["tokens", "subscriptions", "notifications", "store_bytes"]
    pairs = F.array(
        *[F.struct(F.lit(m).alias("measure"), F.col(m).cast("bigint").alias("y")) for m in measures]
    )
    points = measured.select("x", F.explode(pairs).alias("p")).select("x", "p.measure", "p.y")
    n, sx, sy, sxy, sxx = (F.col(name) for name in ("n", "sx", "sy", "sxy", "sxx"))
    sums = points.groupBy("measure").agg(
        F.count("*").alias("n"),
        F.sum("x").alias("sx"),
        F.sum("y").alias("sy"),
        F.sum(F.col("x") * F.col("y")).alias("sxy"),
        F.sum(F.col("x") * F.col("x")).alias("sxx"),
        F.max_by("y", "x").alias("now"),
    )
    slope = F.coalesce(ratio(n * sxy - sx * sy, n * sxx - sx * sx), F.lit(0.0))
    ahead = [
        F.greatest(F.lit(0.0), F.col("now") + F.col("per_day") * d).alias(f"in_{d}_days") for d in HORIZONS
    ]
    return sums.withColumn("per_day", slope).select("measure", "now", "per_day", *ahead).orderBy("measure")


def tables(inputs: Inputs) -> Mapping[str, DataFrame]:
    """The report's tables by name."""
    days = daily(inputs)
    return {"capacity_daily": days, "capacity_projection": projection(days, window_days(inputs)[0])}
