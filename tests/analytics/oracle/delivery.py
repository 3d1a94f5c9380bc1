"""Delivery: how late pushes are, how many fail and why, how much is coalesced and trimmed."""

from analytics.rollups_schema import BUCKETS_PER_OCTAVE
from tests.analytics.oracle.warehouse import Rows, Warehouse

PERCENTS = (50, 95, 99)


def percentiles() -> str:
    """SQL: latencies in milliseconds from `bucket`, its pushes `n`, those `up_to` it and the `whole`."""
    parts = []
    for percent in PERCENTS:
        place = f"({percent} / 100.0 * whole)"
        within = f"least(1, greatest(0, ({place} - up_to + n) / n))"
        value = f"pow(2, (bucket + {within}) / {BUCKETS_PER_OCTAVE}) / 1000"
        parts.append(f"min(CASE WHEN up_to >= {place} THEN {value} END) AS latency_ms_p{percent}")
    return ", ".join(parts)


def latency(*keys: str) -> str:
    """SQL: one row per keys with pushes, entries and percentiles."""
    by = ", ".join(keys)
    return f"""
    WITH sent AS (SELECT *, hour_us AS hour FROM hours WHERE event = 'push_sent' AND hour_us >= $first_hour),
    b AS (SELECT {by}, bucket, sum(number) AS n, sum(entries) AS e FROM sent GROUP BY ALL),
    c AS (SELECT *, sum(n) OVER (PARTITION BY {by} ORDER BY bucket) AS up_to,
            sum(n) OVER (PARTITION BY {by}) AS whole FROM b)
    SELECT {by}, sum(n)::BIGINT AS pushes, sum(e)::BIGINT AS entries, {percentiles()}
    FROM c GROUP BY {by} ORDER BY {by}"""


def total(what: str, event: str) -> str:
    """SQL: a sum over events of one kind."""
    return f"coalesce(sum({what}) FILTER (event = '{event}'), 0)::BIGINT"


OUTCOMES = ", ".join(f"{total('number', f'push_{name}')} AS {name}" for name in ("sent", "failed", "retried"))

PROVIDERS = f"""
WITH o AS (
  SELECT provider, {OUTCOMES}, {total("entries", "push_sent")} AS entries,
    {total("total - entries", "push_sent")} AS sent_again, {total("entries", "push_coalesced")} AS coalesced,
    {total("entries", "push_trimmed")} AS trimmed, {total("number", "cron_sent")} AS periodic
  FROM hours WHERE hour_us >= $first_hour AND provider IS NOT NULL GROUP BY provider),
l AS ({latency("provider")})
SELECT o.*, nullif(sent, 0) / nullif(sent + failed, 0) AS success_rate,
  failed / nullif(sent + failed, 0) AS failure_rate,
  retried / nullif(sent + failed + retried, 0) AS retry_rate,
  o.entries / nullif(sent, 0) AS coalescing_factor, latency_ms_p50, latency_ms_p95, latency_ms_p99
FROM o LEFT JOIN l USING (provider) ORDER BY provider
"""

ERRORS = """
WITH a AS (SELECT * FROM hours WHERE event IN ('push_sent', 'push_failed', 'push_retried')
           AND hour_us >= $first_hour AND provider IS NOT NULL),
w AS (SELECT provider, sum(number) AS attempts FROM a GROUP BY provider)
SELECT provider, event AS outcome, coalesce(error, 'unknown') AS error, sum(number)::BIGINT AS pushes,
  any_value(attempts)::BIGINT AS attempts, sum(number) / any_value(attempts) AS share
FROM a JOIN w USING (provider) WHERE event <> 'push_sent'
GROUP BY ALL ORDER BY provider, outcome, pushes DESC, error
"""

KINDS = f"""
SELECT kind, {OUTCOMES} FROM hours WHERE kind IS NOT NULL AND hour_us >= $first_hour
GROUP BY kind ORDER BY kind
"""

BY_HOUR = f"""
SELECT hour_us AS hour, provider, {OUTCOMES} FROM hours
WHERE event IN ('push_sent', 'push_failed', 'push_retried') AND provider IS NOT NULL
  AND hour_us >= $first_hour GROUP BY ALL ORDER BY hour, provider
"""


def tables(warehouse: Warehouse) -> dict[str, Rows]:
    """The report's tables by name."""
    return {
        "delivery_providers": warehouse.rows(PROVIDERS),
        "delivery_kinds": warehouse.rows(KINDS),
        "delivery_hours": warehouse.rows(latency("hour")),
        "delivery_outcomes": warehouse.rows(BY_HOUR),
        "delivery_latency": warehouse.rows(latency("hour", "provider", "server")),
        "delivery_errors": warehouse.rows(ERRORS),
    }
