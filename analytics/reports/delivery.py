"""Delivery: how late pushes are, how many fail and why, how much is coalesced and trimmed."""

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from analytics.inputs import Inputs
from analytics.transforms import (
    count_if,
    hour_start,
    is_event,
    percentiles,
    quantity,
    ratio,
    time_us,
    to_time,
    total_if,
)
from store.journal_schema import JournalEvent as E

ATTEMPTS = (E.PUSH_SENT, E.PUSH_FAILED, E.PUSH_RETRIED)


def sent_pushes(inputs: Inputs) -> DataFrame:
    """Accepted pushes of the window with their hour; texts are empty, not absent, so that rows join."""
    sent = inputs.in_window().where(is_event(E.PUSH_SENT))
    known = [F.coalesce(name, F.lit("")).alias(name) for name in ("provider", "server")]
    return sent.select(
        to_time(hour_start(time_us())).alias("hour"), *known, "latency_us", quantity().alias("entries")
    )


def latency(inputs: Inputs, *keys: str) -> DataFrame:
    """One row per keys: pushes, entries, p50/p95/p99 from NMSG to accepted push."""
    sent = sent_pushes(inputs)
    totals = sent.groupBy(*keys).agg(F.count("*").alias("pushes"), F.sum("entries").alias("entries"))
    return totals.join(percentiles(sent, keys, "latency_us"), list(keys), "left").orderBy(*keys)


def by_provider(inputs: Inputs) -> DataFrame:
    """One row per provider: outcome rates, latency, coalescing factor (entries per push), trimmed entries."""
    sent, failed, retried = (F.col(name) for name in ("sent", "failed", "retried"))
    rows = inputs.in_window().where(
        is_event(*ATTEMPTS, E.PUSH_COALESCED, E.PUSH_TRIMMED, E.CRON_SENT) & F.col("provider").isNotNull()
    )
    totals = rows.groupBy("provider").agg(
        count_if(is_event(E.PUSH_SENT)).alias("sent"),
        count_if(is_event(E.PUSH_FAILED)).alias("failed"),
        count_if(is_event(E.PUSH_RETRIED)).alias("retried"),
        total_if(is_event(E.PUSH_SENT), quantity()).alias("entries"),
        total_if(is_event(E.PUSH_COALESCED), quantity()).alias("coalesced"),
        total_if(is_event(E.PUSH_TRIMMED), quantity()).alias("trimmed"),
        count_if(is_event(E.CRON_SENT)).alias("periodic"),
    )
    rates = {
        "success_rate": ratio(sent, sent + failed),
        "failure_rate": ratio(failed, sent + failed),
        "retry_rate": ratio(retried, sent + failed + retried),
        "coalescing_factor": ratio(F.col("entries"), sent),
    }
    latencies = percentiles(sent_pushes(inputs), ["provider"], "latency_us")
    return totals.withColumns(rates).join(latencies, "provider", "left").orderBy("provider")


def errors(inputs: Inputs) -> DataFrame:
    """One row per (provider, outcome, error class): how often, and as a share of the provider's attempts."""
    attempts = inputs.in_window().where(is_event(*ATTEMPTS) & F.col("provider").isNotNull())
    whole = attempts.groupBy("provider").agg(F.count("*").alias("attempts"))
    bad = attempts.where(is_event(E.PUSH_FAILED, E.PUSH_RETRIED))
    return (
        bad.groupBy(
            "provider", F.col("event").alias("outcome"), F.coalesce("error", F.lit("unknown")).alias("error")
        )
        .agg(F.count("*").alias("pushes"))
        .join(whole, "provider")
        .withColumn("share", ratio(F.col("pushes"), F.col("attempts")))
        .orderBy("provider", "outcome", F.desc("pushes"), "error")
    )


def tables(inputs: Inputs) -> Mapping[str, DataFrame]:
    """The report's tables by name."""
    return {
        "delivery_providers": by_provider(inputs),
        "delivery_hours": latency(inputs, "hour"),
        "delivery_latency": latency(inputs, "hour", "provider", "server"),
        "delivery_errors": errors(inputs),
    }
