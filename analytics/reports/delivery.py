"""Delivery: how late pushes are, how many fail and why, how much is coalesced and trimmed."""

from analytics.rollups_schema import BUCKETS_PER_OCTAVE
from analytics.warehouse import Rows, Warehouse

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


OUTCOMES = """
SELECT provider, sum(number) FILTER (event = 'push_sent') AS sent,
  coalesce(sum(number) FILTER (event = 'push_failed'), 0) AS failed,
  coalesce(sum(number) FILTER (event = 'push_retried'), 0) AS retried,
  coalesce(sum(entries) FILTER (event = 'push_sent'), 0) AS entries,
  coalesce(sum(total - entries) FILTER (event = 'push_sent'), 0) AS sent_again,
  coalesce(sum(entries) FILTER (event = 'push_coalesced'), 0) AS coalesced,
  coalesce(sum(entries) FILTER (event = 'push_trimmed'), 0) AS trimmed,
  coalesce(sum(number) FILTER (event = 'cron_sent'), 0) AS periodic
FROM hours WHERE hour_us >= $first_hour AND provider IS NOT NULL GROUP BY provider
"""

PROVIDERS = f"""
WITH o AS ({OUTCOMES}), l AS ({latency("provider")})
SELECT o.provider, coalesce(sent, 0)::BIGINT AS sent, failed::BIGINT AS failed, retried::BIGINT AS retried,
  entries::BIGINT AS entries, sent_again::BIGINT AS sent_again, coalesced::BIGINT AS coalesced,
  trimmed::BIGINT AS trimmed, periodic::BIGINT AS periodic,
  o.sent / nullif(coalesce(o.sent, 0) + failed, 0) AS success_rate,
  failed / nullif(coalesce(o.sent, 0) + failed, 0) AS failure_rate,
  retried / nullif(coalesce(o.sent, 0) + failed + retried, 0) AS retry_rate,
  o.entries / nullif(o.sent, 0) AS coalescing_factor, latency_ms_p50, latency_ms_p95, latency_ms_p99
FROM (SELECT * FROM o) o LEFT JOIN (SELECT * EXCLUDE (pushes, entries) FROM l) l USING (provider)
ORDER BY provider
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

KINDS = """
SELECT kind, coalesce(sum(number) FILTER (event = 'push_sent'), 0)::BIGINT AS sent,
  coalesce(sum(number) FILTER (event = 'push_failed'), 0)::BIGINT AS failed,
  coalesce(sum(number) FILTER (event = 'push_retried'), 0)::BIGINT AS retried
FROM hours WHERE kind IS NOT NULL AND hour_us >= $first_hour GROUP BY kind ORDER BY kind
"""

BY_HOUR = """
SELECT hour_us AS hour, provider, coalesce(sum(number) FILTER (event = 'push_sent'), 0)::BIGINT AS sent,
  coalesce(sum(number) FILTER (event = 'push_failed'), 0)::BIGINT AS failed,
  coalesce(sum(number) FILTER (event = 'push_retried'), 0)::BIGINT AS retried
FROM hours WHERE event IN ('push_sent', 'push_failed', 'push_retried') AND provider IS NOT NULL
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
