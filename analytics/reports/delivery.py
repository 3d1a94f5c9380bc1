"""Delivery: how late pushes are, how many fail and why, how much is coalesced and trimmed."""

from collections.abc import Mapping

LATENCIES = "latency_ms_p50, latency_ms_p95, latency_ms_p99"


def total(what: str, event: str) -> str:
    """SQL: a sum over events of one kind."""
    return f"coalesce(sum({what}) FILTER (WHERE event = '{event}'), 0)"


OUTCOMES = ", ".join(f"{total('number', f'push_{name}')} AS {name}" for name in ("sent", "failed", "retried"))

TABLES: Mapping[str, str] = {
    # How many pushes did each provider take, and how late?
    "delivery_providers": f"""
WITH o AS (
  SELECT provider, {OUTCOMES}, {total("entries", "push_sent")} AS entries,
    {total("total - entries", "push_sent")} AS sent_again, {total("entries", "push_coalesced")} AS coalesced,
    {total("entries", "push_trimmed")} AS trimmed, {total("number", "cron_sent")} AS periodic
  FROM traffic WHERE hour_us >= :first_hour AND provider IS NOT NULL GROUP BY provider)
SELECT provider, sent, failed, retried, o.entries, sent_again, coalesced, trimmed, periodic,
  nullif(sent, 0) / nullif(sent + failed, 0) AS success_rate,
  failed / nullif(sent + failed, 0) AS failure_rate,
  retried / nullif(sent + failed + retried, 0) AS retry_rate,
  o.entries / nullif(sent, 0) AS coalescing_factor, {LATENCIES}
FROM o LEFT JOIN (SELECT * FROM latencies WHERE by_what = 'provider') USING (provider) ORDER BY provider""",
    # What were pushes for, and what became of them?
    "delivery_kinds": f"""
SELECT kind, {OUTCOMES} FROM traffic WHERE kind IS NOT NULL AND hour_us >= :first_hour
GROUP BY kind ORDER BY kind""",
    # How late were pushes, hour by hour?
    "delivery_hours": f"""
SELECT hour, pushes, entries, {LATENCIES} FROM latencies WHERE by_what = 'hour' ORDER BY hour""",
    # How many pushes did each provider take, hour by hour?
    "delivery_outcomes": f"""
SELECT hour_us AS hour, provider, {OUTCOMES} FROM traffic
WHERE event IN ('push_sent', 'push_failed', 'push_retried') AND provider IS NOT NULL
  AND hour_us >= :first_hour GROUP BY hour_us, provider ORDER BY hour, provider""",
    # How late were pushes by hour, provider and router?
    "delivery_latency": f"""
SELECT hour, provider, server, pushes, entries, {LATENCIES} FROM latencies WHERE by_what = 'router'
ORDER BY hour, provider NULLS LAST, server NULLS LAST""",
    # Why did pushes fail?
    "delivery_errors": """
WITH a AS (
  SELECT provider, event, coalesce(error, 'unknown') AS error, number FROM traffic
  WHERE event IN ('push_sent', 'push_failed', 'push_retried') AND hour_us >= :first_hour
    AND provider IS NOT NULL),
n AS (SELECT provider, event, error, sum(number) AS pushes FROM a GROUP BY provider, event, error),
w AS (SELECT *, sum(pushes) OVER (PARTITION BY provider) AS attempts FROM n)
SELECT provider, event AS outcome, error, pushes, attempts, pushes / attempts AS share
FROM w WHERE event <> 'push_sent' ORDER BY provider, outcome, pushes DESC, error""",
}
