"""Key figures of a time, and their change against the time of the same length before it."""

from collections.abc import Mapping

from analytics.inputs import Window
from analytics.reports import health
from analytics.results import Rows
from analytics.warehouse import Warehouse

WELL = 90
"The score of a router that nobody has to look at."

FIGURES = """
SELECT stack(3, 'notifications', coalesce(sum(entries) FILTER (WHERE event = 'ntf_received'), 0),
  'pushes', coalesce(sum(number) FILTER (WHERE event = 'push_sent'), 0),
  'failed_pushes', coalesce(sum(number) FILTER (WHERE event = 'push_failed'), 0)) AS (name, value)
FROM traffic WHERE hour_us >= :first_hour
UNION ALL SELECT 'subscriptions', count(*) FROM subs WHERE coalesce(gone_us, :end) >= :end
UNION ALL SELECT 'tokens', count(*) FROM token_lives WHERE coalesce(gone_us, :end) >= :end
UNION ALL SELECT stack(5, 'registered_tokens', count_if(event = 'token_registered'),
  'deleted_tokens', count_if(event = 'token_deleted'), 'invalid_tokens', count_if(event = 'token_invalid'),
  'disconnections', count_if(event = 'smp_disconnected'), 'lost_subscriptions',
  coalesce(sum(greatest(0, expected - `count`)) FILTER (WHERE event = 'smp_drift'), 0))
FROM life WHERE us >= :start"""
"How much happened, and how much is there at the end?"

ROUTERS = f"""
SELECT coalesce(sum(active), 0) AS active_subscriptions, count(*) AS routers,
  count_if(score >= {WELL}) AS well_routers
FROM ({health.TABLES["health"]})"""
"How many routers are healthy, and how many subscriptions are active?"

Figures = Mapping[str, Mapping[str, float | None]]


def figures(warehouse: Warehouse, tables: Mapping[str, Rows]) -> dict[str, float]:
    """What a warehouse says of its window, and what was made of it."""
    values: dict[str, float] = {row["name"]: row["value"] for row in warehouse.rows("figures", FIGURES)}
    if (routers := tables.get("health")) is not None:
        values |= router_figures(warehouse, routers)
    if (providers := tables.get("delivery_providers")) is not None:
        values["latency_ms_p95"] = round(max((row["latency_ms_p95"] or 0 for row in providers), default=0), 1)
    return values


def router_figures(warehouse: Warehouse, routers: Rows) -> dict[str, float]:
    """What all routers come to, from their rows if these are all there are."""
    if not routers.is_whole:
        (values,) = warehouse.rows("routers", ROUTERS)
        return values
    return {
        "active_subscriptions": sum(row["active"] for row in routers),
        "routers": len(routers),
        "well_routers": sum(row["score"] >= WELL for row in routers),
    }


def window_before(warehouse: Warehouse) -> Window | None:
    """The time of the same length before; None if the journal does not reach back so far."""
    start, end = warehouse.window.start, warehouse.window.end
    earlier = Window(start - (end - start), start)
    return earlier if warehouse.first_us is not None and warehouse.first_us <= earlier.start else None


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
