"""Capacity: how tokens, subscriptions and notifications grow, and where that leads."""

from collections.abc import Mapping

HORIZONS = (30, 90, 365)
TOKEN_BYTES = 1_000  # a token's row with its share of the indexes, in the SQLite store
SUBSCRIPTION_BYTES = 700  # a subscription's, with its last notification
ENOUGH_DAYS = 3  # a line through fewer whole days is no trend
ERRORS_EITHER_SIDE = 2  # standard errors of the slope between the expected and the low or high projection
WEEK = 7


def daily(start: str) -> str:
    """SQL: tokens, subscriptions and traffic of each day from a start."""
    return f"""
WITH received AS (
  SELECT hour_us - hour_us % :day AS day_us,
    sum(entries) FILTER (WHERE event = 'ntf_received') AS notifications,
    sum(number) FILTER (WHERE event = 'push_sent') AS pushes
  FROM traffic WHERE hour_us >= {start} - {start} % :hour GROUP BY 1),
who AS (SELECT day_us, count(*) AS receiving_tokens FROM tokens WHERE received > 0 GROUP BY day_us)
SELECT day_us AS day, tokens, tokens_net, subscriptions, subscriptions_net,
  coalesce(notifications, 0) AS notifications, coalesce(pushes, 0) AS pushes,
  coalesce(receiving_tokens, 0) AS receiving_tokens,
  notifications / nullif(receiving_tokens, 0) AS notifications_per_token
FROM daily_totals LEFT JOIN received USING (day_us) LEFT JOIN who USING (day_us)
WHERE day_us >= {start} - {start} % :day"""


def projected(expected: str, around: str) -> str:
    """SQL: the columns of all horizons, from a value and its error after HORIZON days; never below zero."""
    columns = []
    for days in HORIZONS:
        value, error = (text.replace("HORIZON", str(days)) for text in (expected, around))
        for suffix, sign in (("", None), ("_low", "-"), ("_high", "+")):
            each = f"({value})" if sign is None else f"({value}) {sign} ({error})"
            columns.append(
                f"CASE WHEN per_day IS NOT NULL THEN greatest(0, {each}) END AS in_{days}_days{suffix}"
            )
    return ", ".join(columns)


def times(rates: Mapping[str, str]) -> str:
    """SQL: the columns of all horizons, each a subscription's times a rate."""
    return ", ".join(
        f"{rate} * s.in_{days}_days{suffix} AS in_{days}_days{suffix}"
        for days in HORIZONS
        for suffix, rate in rates.items()
    )


TREND = f"""
SELECT * FROM ({daily(":trend_start")})
WHERE day >= :trend_start - :hour AND day + :day <= :end ORDER BY day"""
"Whole days up to the end, those before the window too; a part of a day tells nothing about growth."

TABLES: Mapping[str, str] = {
    # How many tokens, subscriptions and notifications were there each day?
    "capacity_daily": f"{daily(':start')} ORDER BY day",
    # How did they grow over whole days?
    "capacity_trend": TREND,
    # Where does that lead? A line through the whole days; notifications are as many for each subscription as
    # in the last week: they rise and fall with the days of the week, which a line would take for a trend.
    "capacity_projection": f"""
WITH days AS ({TREND}),
measured AS (
  SELECT day, stack(3, 'store_bytes', tokens * {TOKEN_BYTES} + subscriptions * {SUBSCRIPTION_BYTES},
    'subscriptions', subscriptions, 'tokens', tokens) AS (measure, value) FROM days),
placed AS (
  SELECT measure, value, row_number() OVER (PARTITION BY measure ORDER BY day) - 1 AS x FROM measured),
fitted AS (
  SELECT measure, count(*) AS whole_days, max_by(value, x) AS now,
    CASE WHEN count(*) >= {ENOUGH_DAYS} THEN regr_slope(value, x) END AS per_day,
    sqrt(greatest(0, regr_syy(value, x) - regr_slope(value, x) * regr_sxy(value, x))
      / greatest(1, count(*) - 2) / nullif(regr_sxx(value, x), 0)) AS error
  FROM placed GROUP BY measure),
asked AS (SELECT explode(array('store_bytes', 'subscriptions', 'tokens')) AS measure),
lines AS (
  SELECT measure, coalesce(whole_days, 0) AS whole_days, now, per_day,
    {projected("now + per_day * HORIZON", f"{ERRORS_EITHER_SIDE} * error * HORIZON")}
  FROM asked LEFT JOIN fitted USING (measure)),
week AS (
  SELECT * FROM (SELECT * FROM days ORDER BY day DESC LIMIT {WEEK}) WHERE subscriptions > 0),
rates AS (
  SELECT CAST(bround(avg(notifications)) AS BIGINT) AS now, avg(notifications / subscriptions) AS rate,
    coalesce({ERRORS_EITHER_SIDE} * stddev_samp(notifications / subscriptions) / sqrt(count(*)), 0) AS around
  FROM week)
SELECT * FROM lines
UNION ALL
SELECT 'notifications', s.whole_days, r.now, rate * s.per_day,
  {times({"": "rate", "_low": "if(rate > around, rate - around, 0 * rate)", "_high": "(rate + around)"})}
FROM lines s CROSS JOIN rates r WHERE s.measure = 'subscriptions'
ORDER BY measure""",
}
