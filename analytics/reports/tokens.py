"""Token lifecycle: from registered to active, churn, invalid reasons, dead tokens and what they hold."""

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from analytics.inputs import Inputs
from analytics.times import DAY_US, SECOND_US
from analytics.transforms import (
    TOKEN_EVENTS,
    count_if,
    daily_net,
    day_start,
    days_from_the_one_before,
    dead_tokens,
    is_event,
    ratio,
    running_total,
    subscription_states,
    time_us,
    to_time,
    token_activity,
    window_days,
)
from store.journal_schema import JournalEvent as E

STAGES = (
    ("registered", None, "registered_us"),
    ("confirmed", "registered_us", "confirmed_us"),
    ("active", "confirmed_us", "active_us"),
)


def first_steps(inputs: Inputs) -> DataFrame:
    """Tokens registered within the window: when they first reached each stage, microseconds."""
    rows = inputs.events.where(is_event(*TOKEN_EVENTS) & F.col("token").isNotNull())
    steps = rows.groupBy("token").agg(
        F.min(F.when(is_event(E.TOKEN_REGISTERED), time_us())).alias("registered_us"),
        F.min(F.when(is_event(E.TOKEN_CONFIRMED), time_us())).alias("confirmed_us"),
        F.min(F.when(is_event(E.TOKEN_VERIFIED), time_us())).alias("active_us"),
    )
    return steps.where(inputs.window.holds(F.col("registered_us")))


def funnel(inputs: Inputs) -> DataFrame:
    """One row per stage: tokens that reached it, share of the registered, time since the stage before."""
    steps = first_steps(inputs)
    parts = []
    for number, (stage, before, reached) in enumerate(STAGES):
        took = F.lit(None).cast("bigint") if before is None else F.col(reached) - F.col(before)
        parts.append(
            steps.agg(
                F.lit(number).alias("number"),
                F.lit(stage).alias("stage"),
                F.count(reached).alias("tokens"),
                ratio(F.count(reached), F.count("registered_us")).alias("share"),
                (F.percentile(took, 0.5) / SECOND_US).alias("seconds_p50"),
                (F.percentile(took, 0.95) / SECOND_US).alias("seconds_p95"),
            )
        )
    return parts[0].unionByName(parts[1]).unionByName(parts[2]).orderBy("number").drop("number")


def churn(inputs: Inputs) -> DataFrame:
    """One row per day of the window: events of token life, active tokens at its start, churn rate."""
    first, _ = window_days(inputs)
    rows = inputs.in_window().where(is_event(*TOKEN_EVENTS))
    happened = rows.groupBy(day_start(time_us()).alias("day_us")).agg(
        *[count_if(is_event(event)).alias(event.value.removeprefix("token_")) for event in TOKEN_EVENTS]
    )
    net = daily_net(token_activity(inputs.history), first, "net")
    filled = days_from_the_one_before(inputs).join(net, "day_us", "left").na.fill(0)
    totals = running_total(filled, "day_us", "net", "active_at_end").where(F.col("day_us") >= first)
    gone = F.col("deleted") + F.col("invalid")
    at_start = F.col("active_at_end") - F.col("net")
    return (
        totals.join(happened, "day_us", "left")
        .na.fill(0)
        .select(
            to_time(F.col("day_us")).alias("day"),
            *[event.value.removeprefix("token_") for event in TOKEN_EVENTS],
            at_start.alias("active_at_start"),
            "active_at_end",
            ratio(gone, at_start).alias("churn_rate"),
        )
        .orderBy("day")
    )


def invalid_reasons(inputs: Inputs) -> DataFrame:
    """One row per (provider, reason): how many tokens a provider refused, and as a share of its refusals."""
    rows = inputs.in_window().where(is_event(E.TOKEN_INVALID))
    provider = F.coalesce("provider", F.lit("unknown")).alias("provider")
    reasons = rows.groupBy(provider, F.coalesce("error", F.lit("unknown")).alias("reason"))
    whole = rows.groupBy(provider).agg(F.count("*").alias("refusals"))
    return (
        reasons.agg(F.count("*").alias("tokens"))
        .join(whole, "provider")
        .select("provider", "reason", "tokens", ratio(F.col("tokens"), F.col("refusals")).alias("share"))
        .orderBy("provider", F.desc("tokens"), "reason")
    )


def dead(inputs: Inputs) -> DataFrame:
    """Dead tokens with how long they have been silent and how many subscriptions they hold; most first."""
    tokens = dead_tokens(inputs.history, inputs.window.end, inputs.limits.dead_token_days)
    held = subscription_states(inputs.history).groupBy("token").agg(F.count("*").alias("subscriptions"))
    return (
        tokens.join(held, "token", "left")
        .na.fill(0, ["subscriptions"])
        .select(
            F.lower(F.hex("token")).alias("token"),
            "provider",
            "last_event",
            to_time(F.col("last_push_us")).alias("last_push"),
            (F.col("silent_us") / DAY_US).alias("silent_days"),
            "subscriptions",
        )
        .orderBy(F.desc("subscriptions"), F.desc("silent_days"), "token")
    )


def tables(inputs: Inputs) -> Mapping[str, DataFrame]:
    """The report's tables by name."""
    return {
        "tokens_funnel": funnel(inputs),
        "tokens_churn": churn(inputs),
        "tokens_invalid": invalid_reasons(inputs),
        "tokens_dead": dead(inputs),
    }
