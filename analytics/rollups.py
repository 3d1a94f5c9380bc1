"""Daily rollups: what Spark makes of a journal, and all that the reports need of it.

Pure: DataFrame in, DataFrame out. A day's rollup depends on that day's events only, and rollups of several
days together are those of all their events, so days can be made anew one by one.

Nine events of ten are received notifications and pushes. They are summed by hour and by token; everything
else (`life`) is kept as it is.
"""

from collections.abc import Callable, Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from analytics.rollups_schema import BUCKETS_PER_OCTAVE, TRAFFIC
from analytics.schema import EVENTS
from analytics.times import DAY_US, HOUR_US
from store.journal_schema import JournalEvent as E

HOURLY_KEYS = ("event", "server", "provider", "kind", "error")


def is_event(*events: E) -> Column:
    """Whether a row is one of these events."""
    return F.col("event").isin([event.value for event in events])


def day_of(us: Column) -> Column:
    """The UTC day of a time, by which rollups are partitioned; without the calendar, which takes longer."""
    return F.date_from_unix_date(((us - F.pmod(us, F.lit(DAY_US))) / DAY_US).cast("int")).alias("date")


def day() -> Column:
    """The UTC day of an event."""
    return day_of(F.unix_micros("time"))


def life(events: DataFrame) -> DataFrame:
    """Every event that is not traffic, as it is."""
    return events.where(~is_event(*TRAFFIC)).select(day(), *EVENTS.names)


def hours(events: DataFrame) -> DataFrame:
    """Traffic per hour: events (`number`), their counts, their totals, latency bucket."""
    us = F.unix_micros("time")
    latency = F.when(F.col("latency_us") > 1, F.col("latency_us")).otherwise(1)
    bucket = F.when(F.col("latency_us").isNotNull(), F.floor(F.log2(latency) * BUCKETS_PER_OCTAVE)).cast(
        "int"
    )
    rows = events.where(is_event(*TRAFFIC)).select(
        (us - F.pmod(us, F.lit(HOUR_US))).alias("hour_us"),
        *HOURLY_KEYS,
        bucket.alias("bucket"),
        "count",
        "total",
    )
    sums = rows.groupBy("hour_us", *HOURLY_KEYS, "bucket").agg(
        F.count("*").alias("number"),
        F.sum(F.coalesce("count", F.lit(1))).alias("entries"),
        F.sum(F.coalesce("total", "count", F.lit(1))).alias("total"),
    )
    return sums.withColumn("date", day_of(F.col("hour_us")))


def tokens(events: DataFrame) -> DataFrame:
    """Traffic per token and day: notifications received, successful pushes, when the last of them was."""
    success = is_event(E.PUSH_SENT, E.CRON_SENT)
    rows = events.where((is_event(E.NTF_RECEIVED) | success) & F.col("token").isNotNull())
    return rows.groupBy(day(), "token").agg(
        F.sum(F.when(is_event(E.NTF_RECEIVED), 1).otherwise(0)).alias("received"),
        F.sum(F.when(success, 1).otherwise(0)).alias("pushes"),
        F.max(F.when(success, F.unix_micros("time"))).alias("last_push_us"),
    )


ROLLUPS: Mapping[str, Callable[[DataFrame], DataFrame]] = {"life": life, "hours": hours, "tokens": tokens}
