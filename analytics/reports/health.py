"""Subscription health per SMP server: which servers lose our subscriptions, worst first."""

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from analytics.inputs import Inputs
from analytics.times import DAY_US, MINUTE_US, SECOND_US
from analytics.transforms import (
    count_if,
    is_event,
    order,
    present_names,
    quantity,
    ratio,
    subscription_states,
    time_us,
    total_if,
)
from store.journal_schema import JournalEvent as E

KNOWN_STATUSES: Mapping[str, tuple[str, ...]] = {
    "active": ("ACTIVE",),
    "inactive": ("INACTIVE",),
    "pending": ("NEW", "PENDING"),
    "end": ("END",),
    "auth": ("AUTH",),
    "deleted": ("DELETED",),
}
PENALTY_WORTH_NAMING = 1.0


def statuses_by_server(inputs: Inputs) -> DataFrame:
    """Per server: living subscriptions, how many are in each group of statuses, when one was last active."""
    status = F.coalesce("status", F.lit("unknown"))
    known = [name for names in KNOWN_STATUSES.values() for name in names]
    groups = [count_if(status.isin(list(names))).alias(group) for group, names in KNOWN_STATUSES.items()]
    last_active = F.max(F.when(status == "ACTIVE", inputs.window.end).otherwise(F.col("last_active_us")))
    return (
        subscription_states(inputs.history)
        .where(F.col("server").isNotNull())
        .groupBy("server")
        .agg(
            F.count("*").alias("subscriptions"),
            *groups,
            count_if(~status.isin(known)).alias("error"),
            last_active.alias("last_active_us"),
        )
    )


def connection_events(inputs: Inputs) -> DataFrame:
    """Per server, within the window: disconnections, flaps, drift and healing."""
    flap = (
        is_event(E.SUB_STATUS_CHANGED)
        & (F.col("status_from") == "ACTIVE")
        & (F.coalesce("status_to", F.lit("")) != "ACTIVE")
    )
    drift = F.abs(F.coalesce("expected", F.lit(0)) - F.coalesce("count", F.lit(0)))
    rows = inputs.in_window().where(F.col("server").isNotNull())
    return rows.groupBy("server").agg(
        count_if(is_event(E.SMP_DISCONNECTED)).alias("disconnects"),
        total_if(flap, quantity()).alias("flaps"),
        count_if(is_event(E.SMP_DRIFT)).alias("drift_events"),
        total_if(is_event(E.SMP_DRIFT), drift).alias("drift_size"),
        count_if(is_event(E.SMP_HEALED)).alias("healed_events"),
    )


def recoveries(inputs: Inputs) -> DataFrame:
    """Per server: mean time from a disconnection within the window to the next connection."""
    rows = inputs.events.where(
        is_event(E.SMP_DISCONNECTED, E.SMP_CONNECTED) & F.col("server").isNotNull()
    ).select("server", "event", "time", "writer", "seq", time_us().alias("us"))
    after = Window.partitionBy("server").orderBy("time", "writer", "seq")
    following = F.lead(F.struct("event", "us")).over(after)
    down = (
        rows.withColumn("next", following)
        .where(inputs.window.holds(F.col("us")))
        .where((F.col("event") == E.SMP_DISCONNECTED.value) & (F.col("next.event") == E.SMP_CONNECTED.value))
    )
    return down.groupBy("server").agg(
        F.count("*").alias("recoveries"),
        (F.sum(F.col("next.us") - F.col("us")) / F.count("*") / SECOND_US).alias("mean_recover_s"),
    )


def service_coverage(inputs: Inputs) -> DataFrame:
    """Per server: share of its subscriptions under the last service subscription."""
    last = inputs.events.where(is_event(E.SMP_SERVICE_SUBSCRIBED) & F.col("server").isNotNull())
    latest = last.groupBy("server").agg(F.max_by(F.struct("count", "total"), order()).alias("last"))
    return latest.select("server", ratio(F.col("last.count"), F.col("last.total")).alias("service_coverage"))


def penalties(window_days: float) -> Mapping[str, Column]:
    """Points taken from 100 and why; every part is bounded so that one fault cannot hide another."""
    lost = 1 - F.coalesce("active_share", F.lit(1.0))
    return {
        "not active": 60 * lost,
        "flapping": F.least(
            F.lit(15.0), 5 * F.coalesce(ratio(F.col("flaps"), F.col("subscriptions")), F.lit(0.0))
        ),
        "disconnects": F.least(F.lit(10.0), F.col("disconnects") / F.lit(window_days)),
        "slow to recover": F.least(
            F.lit(10.0), F.coalesce("mean_recover_s", F.lit(0.0)) * SECOND_US / MINUTE_US
        ),
        "drift": F.least(F.lit(5.0), F.col("drift_events").cast("double")),
    }


def server_health(inputs: Inputs) -> DataFrame:
    """One row per server with its score (100 is perfect) and the reasons for what is missing; worst first."""
    window = inputs.window
    counts = ["subscriptions", *KNOWN_STATUSES, "error"]
    servers = (
        connection_events(inputs)
        .join(statuses_by_server(inputs), "server", "full")
        .join(recoveries(inputs), "server", "left")
        .join(service_coverage(inputs), "server", "left")
        .na.fill(
            0, [*counts, "flaps", "disconnects", "recoveries", "drift_events", "drift_size", "healed_events"]
        )
    )
    shares = {f"{g}_share": ratio(F.col(g), F.col("subscriptions")) for g in (*KNOWN_STATUSES, "error")}
    scored = servers.withColumns(shares)
    taken = penalties(max(1, window.end - window.start) / DAY_US)
    reasons = present_names([(name, points >= PENALTY_WORTH_NAMING) for name, points in taken.items()])
    total = sum(taken.values(), F.lit(0.0))
    return scored.select(
        "server",
        F.greatest(F.lit(0.0), 100 - total).alias("score"),
        reasons.alias("reasons"),
        *counts,
        *shares,
        ((F.lit(window.end) - F.col("last_active_us")) / SECOND_US).alias("seconds_since_active"),
        "flaps",
        "disconnects",
        "recoveries",
        "mean_recover_s",
        "drift_events",
        "drift_size",
        "healed_events",
        "service_coverage",
    ).orderBy("score", "server")


def tables(inputs: Inputs) -> Mapping[str, DataFrame]:
    """The report's tables by name."""
    return {"health": server_health(inputs)}
