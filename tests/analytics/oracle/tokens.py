"""Token lifecycle: from registered to active, churn, invalid reasons, dead tokens and what they hold."""

from tests.analytics.oracle.warehouse import DAILY_TOTALS, Rows, Warehouse

FUNNEL = """
WITH t AS (SELECT * FROM token_lives WHERE registered_us >= $start),
steps AS (
  SELECT 1 AS number, 'registered' AS stage, count(registered_us) AS tokens, NULL::DOUBLE[] AS took FROM t
  UNION ALL SELECT 2, 'confirmed', count(confirmed_us),
    quantile_cont(confirmed_us - registered_us, [0.5, 0.95]) FROM t
  UNION ALL SELECT 3, 'active', count(verified_us),
    quantile_cont(verified_us - confirmed_us, [0.5, 0.95]) FROM t)
SELECT stage, tokens, tokens / nullif(first(tokens) OVER (ORDER BY number), 0) AS share,
  took[1] / 1e6 AS seconds_p50, took[2] / 1e6 AS seconds_p95
FROM steps ORDER BY number
"""

STEPS = ("registered", "confirmed", "verified", "replaced", "deleted", "invalid")

CHURN = f"""
WITH {DAILY_TOTALS},
happened AS (
  SELECT us - us % $day AS day_us, {", ".join(f"count_if(event = 'token_{s}') AS {s}" for s in STEPS)}
  FROM life WHERE us >= $start GROUP BY 1)
SELECT day_us AS day, {", ".join(f"coalesce({step}, 0)::BIGINT AS {step}" for step in STEPS)},
  tokens - tokens_net AS active_at_start, tokens AS active_at_end,
  (coalesce(deleted, 0) + coalesce(invalid, 0)) / nullif(tokens - tokens_net, 0) AS churn_rate
FROM totals LEFT JOIN happened USING (day_us) ORDER BY day
"""

INVALID = """
WITH n AS (SELECT provider, error AS reason, count(*) AS tokens FROM life
           WHERE event = 'token_invalid' AND us >= $start GROUP BY ALL)
SELECT *, tokens / sum(tokens) OVER (PARTITION BY provider) AS share FROM n
ORDER BY provider, tokens DESC, reason
"""

GONE = """
SELECT provider, error AS reason, count(*) AS tokens FROM life
WHERE event = 'token_deleted' AND us >= $start GROUP BY ALL ORDER BY provider, tokens DESC, reason
"""

DEAD = """
SELECT lower(hex(token)) AS token, provider, last_event, last_push_us AS last_push,
  ($end - coalesce(last_push_us, first_us)) / $day AS silent_days,
  (SELECT count(*) FROM states s WHERE s.token = t.token) AS subscriptions
FROM token_lives t WHERE gone_us IS NULL AND $end - coalesce(last_push_us,
  first_us) >= $dead_token_days * $day
ORDER BY subscriptions DESC, silent_days DESC, token
"""


def tables(warehouse: Warehouse) -> dict[str, Rows]:
    """The report's tables by name."""
    return {
        "tokens_funnel": warehouse.rows(FUNNEL),
        "tokens_churn": warehouse.rows(CHURN),
        "tokens_invalid": warehouse.rows(INVALID),
        "tokens_deleted": warehouse.rows(GONE),
        "tokens_dead": warehouse.rows(DEAD),
    }
