"""Incidents: gaps in received notifications, mass disconnects, and what restarts cost."""

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from analytics.inputs import Inputs
from analytics.times import HOUR_US, MINUTE_US, SECOND_US
from analytics.transforms import (
    calendar,
    count_if,
    day_start,
    hour_start,
    is_event,
    quantity,
    time_us,
    to_time,
    total_if,
)
from store.journal_schema import JournalEvent as E

HOURS_PER_WEEK = 168
ENOUGH_SAMPLES = 3  # fewer and one bad week would be half of its own baseline
RESTORED_PERCENT = 99


def hourly_received(inputs: Inputs) -> DataFrame:
    """Notifications per (server, hour) in every hour fully covered by the journal, zeros included."""
    last = inputs.events.agg(hour_start(F.max(time_us())).alias("end_us"))
    received = (
        inputs.events.where(is_event(E.NTF_RECEIVED) & F.col("server").isNotNull())
        .groupBy("server", hour_start(time_us()).alias("hour_us"))
        .agg(F.sum(quantity()).alias("received"))
    )
    spans = (
        received.groupBy("server")
        .agg((F.min("hour_us") + HOUR_US).alias("first"))
        .crossJoin(last)
        .select("server", "first", (F.col("end_us") - HOUR_US).alias("last"))
    )
    hours = calendar(spans, "first", "last", HOUR_US, "hour_us")
    return hours.join(received, ["server", "hour_us"], "left").na.fill(0, ["received"])


def with_baseline(hours: DataFrame) -> DataFrame:
    """Adds each hour's baseline: the median of the same hour of the week, or of the day if too few."""
    hour = F.col("hour_us") / HOUR_US
    keyed = hours.withColumn("hour_of_week", F.pmod(hour.cast("bigint"), F.lit(HOURS_PER_WEEK)))
    keyed = keyed.withColumn("hour_of_day", F.pmod("hour_of_week", F.lit(24)))

    def medians(key: str) -> DataFrame:
        usual = F.when(F.count("*") >= ENOUGH_SAMPLES, F.percentile("received", 0.5))
        return keyed.groupBy("server", key).agg(usual.alias(f"by_{key}"))

    return (
        keyed.join(medians("hour_of_week"), ["server", "hour_of_week"])
        .join(medians("hour_of_day"), ["server", "hour_of_day"])
        .withColumn("baseline", F.coalesce("by_hour_of_week", "by_hour_of_day"))
        .select("server", "hour_us", "received", "baseline")
    )


def islands(rows: DataFrame, keys: list[str], at: str, step_us: int) -> DataFrame:
    """Adds `island`, equal for rows of the same keys that follow each other without a missing step."""
    number = F.row_number().over(Window.partitionBy(*keys).orderBy(at))
    return rows.withColumn("island", F.col(at) - number * F.lit(step_us).cast("bigint"))


def gaps(inputs: Inputs) -> DataFrame:
    """Runs of hours in which a server sent far fewer notifications than it usually does at that time."""
    limits = inputs.limits
    received, baseline = F.col("received"), F.col("baseline")
    far_below = (baseline - received) >= limits.gap_sigmas * F.sqrt(baseline)
    low = with_baseline(hourly_received(inputs)).where(
        (baseline > 0) & far_below & (received <= limits.gap_share * baseline)
    )
    runs = islands(low, ["server"], "hour_us", HOUR_US).groupBy("server", "island")
    found = runs.agg(
        F.min("hour_us").alias("start_us"),
        (F.max("hour_us") + HOUR_US).alias("end_us"),
        F.sum("received").alias("received"),
        (F.sum((baseline * 2).cast("bigint")) / 2).alias("expected"),  # medians are whole or half numbers
    )
    return (
        found.where(F.col("end_us") > inputs.window.start)
        .select(
            "server",
            to_time(F.col("start_us")).alias("start"),
            to_time(F.col("end_us")).alias("end"),
            "received",
            "expected",
            (F.col("expected") - F.col("received")).alias("missed"),
        )
        .orderBy("start", "server")
    )


def disconnections(inputs: Inputs) -> DataFrame:
    """Disconnections within the window, without those that the daemon's own stop caused."""
    stops = inputs.events.where(is_event(E.SERVER_STOPPED)).groupBy("writer")
    stopped = stops.agg(F.max(time_us()).alias("stopped_us"))
    lost = inputs.in_window().where(is_event(E.SMP_DISCONNECTED) & F.col("server").isNotNull())
    rows = lost.join(stopped, "writer", "left").withColumn("us", time_us())
    by_our_stop = F.coalesce(F.col("us") >= F.col("stopped_us") - MINUTE_US, F.lit(False))
    minute = F.col("us") - F.pmod("us", F.lit(MINUTE_US))
    return rows.where(~by_our_stop).select(
        "writer", "seq", "server", "changed", "us", minute.alias("minute_us")
    )


def mass_disconnects(inputs: Inputs) -> DataFrame:
    """Times at which many of the servers seen that day went away within two minutes."""
    limits = inputs.limits
    rows = disconnections(inputs)
    pairs = F.explode(F.array(F.col("minute_us"), F.col("minute_us") - MINUTE_US))
    covered = rows.withColumn(
        "from_us", pairs
    )  # each minute belongs to the pair it starts and the one it ends
    seen = inputs.events.where(F.col("server").isNotNull()).groupBy(day_start(time_us()).alias("day_us"))
    per_pair = (
        covered.groupBy("from_us")
        .agg(F.countDistinct("server").alias("servers"))
        .withColumn("day_us", day_start(F.col("from_us") + MINUTE_US))
        .join(seen.agg(F.countDistinct("server").alias("seen")), "day_us")
        .where(F.col("servers") >= limits.mass_servers)
        .where(F.col("servers") >= limits.mass_share * F.col("seen"))
        .select("from_us", "seen", F.lit(0).alias("all"))
    )
    marked = islands(per_pair, ["all"], "from_us", MINUTE_US)
    events = covered.join(marked, "from_us").groupBy("island", "writer", "seq", "server", "us")
    once = events.agg(F.max("changed").alias("changed"), F.max("seen").alias("seen"))
    return (
        once.groupBy("island")
        .agg(
            to_time(F.min("us")).alias("start"),
            to_time(F.max("us")).alias("end"),
            F.countDistinct("server").alias("servers"),
            F.max("seen").alias("servers_seen"),
            total_if(F.col("changed").isNotNull(), F.col("changed")).alias("subscriptions"),
        )
        .drop("island")
        .orderBy("start")
    )


def processes(inputs: Inputs) -> DataFrame:
    """One row per process that wrote events: its start, last event, whether it stopped orderly."""
    start = is_event(E.SERVER_STARTED)
    return inputs.events.groupBy("writer").agg(
        F.min(F.when(start, time_us())).alias("started_us"),
        F.min_by("count", F.when(start, F.struct("time", "seq"))).alias("subscriptions"),
        F.min(time_us()).alias("first_us"),
        F.max(time_us()).alias("last_us"),
        (count_if(is_event(E.SERVER_STOPPED)) > 0).alias("stopped"),
    )


def activations(inputs: Inputs) -> DataFrame:
    """Subscriptions that each process made active again: writer, us, number."""
    columns = ["writer", "us", "number"]
    own = inputs.events.where(
        is_event(E.SUB_STATUS_CHANGED, E.SUB_CREATED) & F.col("subscription").isNotNull()
    )
    became_active = is_event(E.SUB_STATUS_CHANGED) & (F.col("status_to") == "ACTIVE")
    single = (
        own.groupBy("writer", "subscription")
        .agg(
            F.min(F.when(became_active, time_us())).alias("us"),
            count_if(is_event(E.SUB_CREATED)).alias("created"),
        )
        .where(F.col("us").isNotNull() & (F.col("created") == 0))
        .select("writer", "us", F.lit(1).cast("bigint").alias("number"))
    )
    bulk = inputs.events.where(became_active & F.col("subscription").isNull())
    services = inputs.events.where(is_event(E.SMP_SERVICE_SUBSCRIBED)).groupBy("writer", "server")
    first = services.agg(
        F.min_by(F.struct(time_us().alias("us"), "changed"), F.struct("time", "seq")).alias("first")
    )
    by_service = first.select("writer", "first.us", F.col("first.changed").alias("number"))
    return single.unionByName(
        bulk.select("writer", time_us().alias("us"), quantity().alias("number")).select(*columns)
    ).unionByName(by_service)


def restarts(inputs: Inputs) -> DataFrame:
    """One row per start: how long nobody ran before, how long until 99 % of subscriptions were active."""
    previous = Window.partitionBy("all").orderBy("first_us", "writer")
    rows = (
        processes(inputs)
        .withColumn("all", F.lit(0))
        .withColumns({"before_us": F.lag("last_us").over(previous), "clean": F.lag("stopped").over(previous)})
    )
    started = rows.where(inputs.window.holds(F.col("started_us"))).drop("all")
    up_to = (
        Window.partitionBy("writer").orderBy("us").rangeBetween(Window.unboundedPreceding, Window.currentRow)
    )
    made_active = activations(inputs).withColumn("sum", F.sum("number").over(up_to))
    enough: Column = (F.col("subscriptions") > 0) & (
        F.col("sum") * 100 >= F.col("subscriptions") * RESTORED_PERCENT
    )
    restored = (
        made_active.join(started.select("writer", "subscriptions"), "writer")
        .where(enough)
        .groupBy("writer")
        .agg(F.min("us").alias("restored_us"))
    )
    return (
        started.join(restored, "writer", "left")
        .select(
            to_time(F.col("started_us")).alias("start"),
            to_time(F.col("restored_us")).alias("end"),
            "subscriptions",
            ((F.col("started_us") - F.col("before_us")) / SECOND_US).alias("down_s"),
            "clean",
            ((F.col("restored_us") - F.col("started_us")) / SECOND_US).alias("restore_s"),
        )
        .orderBy("start")
    )


def tables(inputs: Inputs) -> Mapping[str, DataFrame]:
    """The report's tables by name."""
    return {
        "incidents_gaps": gaps(inputs),
        "incidents_disconnects": mass_disconnects(inputs),
        "incidents_restarts": restarts(inputs),
    }
