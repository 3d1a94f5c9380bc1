"""Capacity: how tokens, subscriptions and notifications grow, and where that leads."""

from collections.abc import Sequence

import numpy as np

from analytics.times import DAY_US, HOUR_US
from tests.analytics.oracle.warehouse import DAILY_TOTALS, Row, Rows, Warehouse

HORIZONS = (30, 90, 365)
TOKEN_BYTES = 1_000  # a token's row with its share of the indexes, in the SQLite store
SUBSCRIPTION_BYTES = 700  # likewise, with its last notification
ENOUGH_DAYS = 3  # a line through fewer whole days is no trend
TREND_DAYS = 56  # how growth was before says little; a report of one day has a trend, too
WEEK = 7
ERRORS_EITHER_SIDE = 2  # standard errors of the slope between the expected and the low or high projection

DAILY = f"""
WITH {DAILY_TOTALS},
traffic AS (
  SELECT hour_us - hour_us % $day AS day_us, sum(entries) FILTER (event = 'ntf_received') AS notifications,
    sum(number) FILTER (event = 'push_sent') AS pushes
  FROM hours WHERE hour_us >= $first_hour GROUP BY 1),
who AS (SELECT day_us, count(*) AS receiving_tokens FROM tokens WHERE received > 0 GROUP BY 1)
SELECT day_us AS day, tokens, tokens_net, subscriptions, subscriptions_net,
  coalesce(notifications, 0)::BIGINT AS notifications, coalesce(pushes, 0)::BIGINT AS pushes,
  coalesce(receiving_tokens, 0) AS receiving_tokens,
  notifications / nullif(receiving_tokens, 0) AS notifications_per_token
FROM totals LEFT JOIN traffic USING (day_us) LEFT JOIN who USING (day_us) ORDER BY day
"""


def trend(warehouse: Warehouse) -> Rows:
    """Whole days up to the end, those before the window too; a part of a day tells nothing about growth."""
    window = warehouse.window
    (known,) = warehouse.rows("SELECT min(us) AS first FROM life")
    first = window.start if known["first"] is None else known["first"]
    start = min(window.start, max(first, window.end - TREND_DAYS * DAY_US))
    days = warehouse.rows(DAILY, start=start, first_hour=start - start % HOUR_US)
    whole = [day for day in days if day["day"] >= start - HOUR_US and day["day"] + DAY_US <= window.end]
    return Rows(days.columns, whole)


def projection(days: Sequence[Row]) -> Rows:
    """One row per measure: its value now, daily growth, and projected values with their range.

    Projections are absent where there are too few days, and never fall below zero.
    """
    measures = {
        "store_bytes": [
            day["tokens"] * TOKEN_BYTES + day["subscriptions"] * SUBSCRIPTION_BYTES for day in days
        ],
        "subscriptions": [day["subscriptions"] for day in days],
        "tokens": [day["tokens"] for day in days],
    }
    rows = {name: projected(name, np.array(values, float)) for name, values in measures.items()}
    return Rows(list(rows["tokens"]), [notifications(rows["subscriptions"], days), *rows.values()])


def notifications(subscriptions: Row, days: Sequence[Row]) -> Row:
    """Notifications of a day: as many for each subscription as in the last week.

    They rise and fall with the days of the week, which a line would take for a trend.
    """
    week = [day for day in days[-WEEK:] if day["subscriptions"]]
    row: Row = {**dict.fromkeys(subscriptions), "measure": "notifications", "whole_days": len(days)}
    if not week:
        return row
    row["now"] = round(sum(day["notifications"] for day in week) / len(week))
    if subscriptions["per_day"] is None:
        return row
    rates = np.array([day["notifications"] / day["subscriptions"] for day in week])
    rate = float(rates.mean())
    around = ERRORS_EITHER_SIDE * float(rates.std(ddof=1)) / len(rates) ** 0.5 if len(rates) > 1 else 0.0
    row["per_day"] = rate * subscriptions["per_day"]
    for horizon in HORIZONS:
        for suffix, each in (("", rate), ("_low", max(0.0, rate - around)), ("_high", rate + around)):
            name = f"in_{horizon}_days{suffix}"
            row[name] = each * subscriptions[name]
    return row


def projected(name: str, values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> Row:
    """One measure's row, by a line through its whole days."""
    row: Row = {"measure": name, "whole_days": len(values), "now": None, "per_day": None}
    for horizon in HORIZONS:
        row |= {f"in_{horizon}_days": None, f"in_{horizon}_days_low": None, f"in_{horizon}_days_high": None}
    if len(values):
        row["now"] = int(values[-1])
    if len(values) < ENOUGH_DAYS:
        return row
    x = np.arange(len(values), dtype=float)
    slope, level = np.polyfit(x, values, 1)
    rest = values - (slope * x + level)
    error = float(np.sqrt((rest @ rest) / max(1, len(values) - 2) / ((x - x.mean()) @ (x - x.mean()))))
    row["per_day"] = float(slope)
    for horizon in HORIZONS:
        expected = row["now"] + slope * horizon
        around = ERRORS_EITHER_SIDE * error * horizon
        row[f"in_{horizon}_days"] = max(0.0, float(expected))
        row[f"in_{horizon}_days_low"] = max(0.0, float(expected - around))
        row[f"in_{horizon}_days_high"] = max(0.0, float(expected + around))
    return row


def tables(warehouse: Warehouse) -> dict[str, Rows]:
    """The report's tables by name."""
    days = trend(warehouse)
    return {
        "capacity_daily": warehouse.rows(DAILY),
        "capacity_trend": days,
        "capacity_projection": projection(days),
    }
