"""Token lifecycle: from registered to active, churn, invalid reasons, dead tokens and what they hold."""

from collections.abc import Mapping

STEPS = ("registered", "confirmed", "verified", "replaced", "deleted", "invalid")
COUNTED = ", ".join(f"count_if(event = 'token_{step}') AS {step}" for step in STEPS)
HAPPENED = ", ".join(f"coalesce({step}, 0) AS {step}" for step in STEPS)

TABLES: Mapping[str, str] = {
    # How many of the tokens registered became active, and how fast?
    "tokens_funnel": """
WITH t AS (
  SELECT count(registered_us) AS registered, count(confirmed_us) AS confirmed, count(verified_us) AS active,
    percentile(confirmed_us - registered_us, array(0.5D, 0.95D)) AS to_confirm,
    percentile(verified_us - confirmed_us, array(0.5D, 0.95D)) AS to_verify
  FROM token_lives WHERE registered_us >= :start),
steps AS (
  SELECT registered, stack(3, 1, 'registered', registered, CAST(NULL AS DOUBLE), CAST(NULL AS DOUBLE),
    2, 'confirmed', confirmed, to_confirm[0], to_confirm[1], 3, 'active', active, to_verify[0], to_verify[1])
    AS (number, stage, tokens, us_p50, us_p95) FROM t)
SELECT stage, tokens, tokens / nullif(registered, 0) AS share, us_p50 / 1e6 AS seconds_p50,
  us_p95 / 1e6 AS seconds_p95
FROM steps ORDER BY number""",
    # How many tokens came and went, day by day?
    "tokens_churn": f"""
WITH happened AS (
  SELECT us - us % :day AS day_us, {COUNTED} FROM life WHERE us >= :start GROUP BY 1)
SELECT day_us AS day, {HAPPENED}, tokens - tokens_net AS active_at_start, tokens AS active_at_end,
  (coalesce(deleted, 0) + coalesce(invalid, 0)) / nullif(tokens - tokens_net, 0) AS churn_rate
FROM daily_totals LEFT JOIN happened USING (day_us) WHERE day_us >= :start - :start % :day ORDER BY day""",
    # Why did providers call tokens invalid?
    "tokens_invalid": """
WITH n AS (
  SELECT provider, error AS reason, count(*) AS tokens FROM life
  WHERE event = 'token_invalid' AND us >= :start GROUP BY provider, error)
SELECT *, tokens / sum(tokens) OVER (PARTITION BY provider) AS share FROM n
ORDER BY provider NULLS LAST, tokens DESC, reason NULLS LAST""",
    # Why were tokens deleted?
    "tokens_deleted": """
SELECT provider, error AS reason, count(*) AS tokens FROM life
WHERE event = 'token_deleted' AND us >= :start GROUP BY provider, error
ORDER BY provider NULLS LAST, tokens DESC, reason NULLS LAST""",
    # Which tokens get no pushes any more, and how many subscriptions do they hold?
    "tokens_dead": """
WITH held AS (SELECT token, count(*) AS subscriptions FROM states GROUP BY token),
dead AS (
  SELECT *, :end - coalesce(last_push_us, first_us) AS silent_us FROM token_lives WHERE gone_us IS NULL)
SELECT lower(hex(d.token)) AS token, provider, last_event, last_push_us AS last_push,
  silent_us / :day AS silent_days, coalesce(subscriptions, 0) AS subscriptions
FROM dead d LEFT JOIN held h ON h.token = d.token WHERE silent_us >= :dead_token_days * :day
ORDER BY subscriptions DESC, silent_days DESC, token""",
}
