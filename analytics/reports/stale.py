"""Stale and orphan subscriptions: what could be deleted, and why, for an operator to review."""

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from analytics.inputs import Inputs
from analytics.times import DAY_US
from analytics.transforms import dead_tokens, server_contacts, subscription_states, to_time

NEVER_ACTIVE = "never active"
INACTIVE = "inactive too long"
UNREACHABLE = "server unreachable"
DEAD_TOKEN = "dead token"


def unreachable_servers(inputs: Inputs) -> DataFrame:
    """Servers without contact for too long: server, lost_us (when contact was lost, or first tried)."""
    lost = F.when(F.col("contact_us").isNull(), F.col("server_first_us")).when(
        F.col("disconnected_us") > F.col("contact_us"), F.col("disconnected_us")
    )
    limit = inputs.window.end - inputs.limits.unreachable_days * DAY_US
    servers = server_contacts(inputs.history).select("server", lost.alias("lost_us"))
    return servers.where(F.col("lost_us") <= limit)


def stale_subscriptions(inputs: Inputs) -> DataFrame:
    """The list for review: living subscriptions with at least one reason to delete them."""
    limits, end = inputs.limits, inputs.window.end
    dead = dead_tokens(inputs.history, end, limits.dead_token_days).select(
        "token", F.lit(True).alias("on_dead")
    )
    status, last_active = F.coalesce("status", F.lit("unknown")), F.col("last_active_us")
    holds: dict[str, Column] = {
        NEVER_ACTIVE: last_active.isNull() & (F.col("first_us") <= end - limits.never_active_days * DAY_US),
        INACTIVE: (status != "ACTIVE") & (last_active <= end - limits.inactive_days * DAY_US),
        UNREACHABLE: F.col("lost_us").isNotNull(),
        DEAD_TOKEN: F.col("on_dead").isNotNull(),
    }
    reasons = F.array_compact(
        F.array(*[F.when(condition, F.lit(reason)) for reason, condition in holds.items()])
    )
    return (
        subscription_states(inputs.history)
        .join(unreachable_servers(inputs), "server", "left")
        .join(dead, "token", "left")
        .withColumn("reasons", reasons)
        .where(F.size("reasons") > 0)
        .select(
            F.lower(F.hex("subscription")).alias("subscription"),
            F.lower(F.hex("token")).alias("token"),
            "server",
            status.alias("status"),
            to_time(F.col("first_us")).alias("first_seen"),
            to_time(last_active).alias("last_active"),
            F.concat_ws(", ", "reasons").alias("reasons"),
        )
        .orderBy("server", "token", "subscription")
    )


def summary(listed: DataFrame) -> DataFrame:
    """One row per (server, reason): how many subscriptions of the list have it."""
    reason = F.explode(F.split("reasons", ", ")).alias("reason")
    return (
        listed.select("server", reason)
        .groupBy("server", "reason")
        .agg(F.count("*").alias("subscriptions"))
        .orderBy("server", "reason")
    )


def tables(inputs: Inputs) -> Mapping[str, DataFrame]:
    """The report's tables by name."""
    listed = stale_subscriptions(inputs)
    return {"stale_summary": summary(listed), "stale_subscriptions": listed}
