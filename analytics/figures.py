"""Key figures of a time, and their change against the time of the same length before it."""

from collections.abc import Mapping

from analytics.inputs import Window
from analytics.warehouse import Rows, Warehouse

WELL = 90
"The score of a router that nobody has to look at."

FIGURES = """
WITH traffic AS (SELECT * FROM hours WHERE hour_us >= $first_hour),
happened AS (SELECT * FROM life WHERE us >= $start)
SELECT
  (SELECT coalesce(sum(entries), 0) FROM traffic WHERE event = 'ntf_received') AS notifications,
  (SELECT coalesce(sum(number), 0) FROM traffic WHERE event = 'push_sent') AS pushes,
  (SELECT coalesce(sum(number), 0) FROM traffic WHERE event = 'push_failed') AS failed_pushes,
  (SELECT count(*) FROM subs WHERE coalesce(gone_us, $end) >= $end) AS subscriptions,
  (SELECT count(*) FROM token_lives WHERE coalesce(gone_us, $end) >= $end) AS tokens,
  (SELECT count(*) FROM happened WHERE event = 'token_registered') AS registered_tokens,
  (SELECT count(*) FROM happened WHERE event = 'token_deleted') AS deleted_tokens,
  (SELECT count(*) FROM happened WHERE event = 'token_invalid') AS invalid_tokens,
  (SELECT count(*) FROM happened WHERE event = 'smp_disconnected') AS disconnections,
  (SELECT coalesce(sum(greatest(0, expected - "count")), 0) FROM happened WHERE event = 'smp_drift')
    AS lost_subscriptions
"""

Figures = Mapping[str, Mapping[str, float | None]]


def figures(warehouse: Warehouse, tables: Mapping[str, Rows]) -> dict[str, float]:
    """What a warehouse says of its window, and what was made of it."""
    (counted,) = warehouse.rows(FIGURES)
    values: dict[str, float] = {name: int(value) for name, value in counted.items()}
    if (routers := tables.get("health")) is not None:
        values["active_subscriptions"] = sum(row["active"] for row in routers)
        values["routers"] = len(routers)
        values["well_routers"] = sum(row["score"] >= WELL for row in routers)
    if (providers := tables.get("delivery_providers")) is not None:
        values["latency_ms_p95"] = round(max((row["latency_ms_p95"] or 0 for row in providers), default=0), 1)
    return values


def window_before(warehouse: Warehouse) -> Window | None:
    """The time of the same length before; None if the journal does not reach back so far."""
    start, end = warehouse.window.start, warehouse.window.end
    (known,) = warehouse.rows("SELECT min(us) AS first FROM life")
    earlier = Window(start - (end - start), start)
    return earlier if known["first"] is not None and known["first"] <= earlier.start else None


def compared(now: Mapping[str, float], before: Mapping[str, float] | None) -> Figures:
    """Every figure with what it was and by how much it changed."""
    return {
        name: {
            "value": value,
            "previous": None if before is None else before[name],
            "change": None if before is None else round(value - before[name], 1),
        }
        for name, value in now.items()
    }
