"""Stale and orphan subscriptions: what could be deleted, and why, for an operator to review."""

from tests.analytics.oracle.warehouse import Rows, Warehouse

STALE = """
CREATE TABLE stale AS
WITH dead AS (
  SELECT token, true AS on_dead FROM token_lives
  WHERE gone_us IS NULL AND $end - coalesce(last_push_us, first_us) >= $dead_token_days * $day),
unreachable AS (
  SELECT server, true AS unreachable FROM contacts
  WHERE (CASE WHEN contact_us IS NULL THEN first_us WHEN disconnected_us > contact_us
    THEN disconnected_us END)
    <= $end - $unreachable_days * $day),
reasons AS (
  SELECT s.*, list_filter([
    CASE WHEN last_active_us IS NULL AND first_us <= $end - $never_active_days * $day THEN 'never active' END,
    CASE WHEN status <> 'ACTIVE' AND last_active_us <= $end - $inactive_days * $day
      THEN 'inactive too long' END,
    CASE WHEN unreachable THEN 'server unreachable' END,
    CASE WHEN on_dead THEN 'dead token' END], lambda reason: reason IS NOT NULL) AS reasons
  FROM states s LEFT JOIN unreachable USING (server) LEFT JOIN dead USING (token))
SELECT * FROM reasons WHERE len(reasons) > 0
"""

LISTED = """
SELECT lower(hex(subscription)) AS subscription, lower(hex(token)) AS token, server, status,
  first_us AS first_seen, last_active_us AS last_active, array_to_string(reasons, ', ') AS reasons
FROM stale ORDER BY server, token, subscription
"""

SUMMARY = """
SELECT server, reason, count(*) AS subscriptions FROM (SELECT server, unnest(reasons) AS reason FROM stale)
GROUP BY ALL ORDER BY server, reason
"""


def tables(warehouse: Warehouse) -> dict[str, Rows]:
    """The report's tables by name."""
    warehouse.run(STALE)
    return {"stale_summary": warehouse.rows(SUMMARY), "stale_subscriptions": warehouse.rows(LISTED)}
