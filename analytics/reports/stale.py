"""Stale and orphan subscriptions: what could be deleted, and why, for an operator to review."""

from collections.abc import Mapping

TABLES: Mapping[str, str] = {
    # How many subscriptions of each router are stale, by reason? One may have several.
    "stale_summary": """
SELECT server, reason, count(*) AS subscriptions FROM (SELECT server, explode(reasons) AS reason FROM stale)
GROUP BY server, reason ORDER BY server NULLS LAST, reason""",
    # Which are they?
    "stale_subscriptions": """
SELECT lower(hex(subscription)) AS subscription, lower(hex(token)) AS token, server, status,
  first_us AS first_seen, last_active_us AS last_active, array_join(reasons, ', ') AS reasons
FROM stale ORDER BY server NULLS LAST, token NULLS LAST, subscription""",
}
