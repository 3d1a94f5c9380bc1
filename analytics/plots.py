"""What changes over time, as data for uPlot: lines, bands between them, and marks for incidents. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analytics.inputs import Window
from analytics.results import Row, Rows
from analytics.times import DAY_US, SECOND_US

ROUTERS_SHOWN = 4
MOST_POINTS = 2_000
COLORS = ("--c1", "--c2", "--c3", "--c4", "--c5")

Tables = Mapping[str, Rows]


@dataclass(frozen=True)
class Chart:
    """A plot, the section it belongs to, and what the page's script draws."""

    section: str
    title: str
    data: dict[str, Any]


def charts_of(tables: Tables, window: Window) -> dict[str, Chart]:
    """All plots that there are numbers for."""
    makers = (routers(tables, window), delivery(tables), tokens(tables), capacity(tables))
    return dict(item for maker in makers for item in maker)


def seconds(us: int) -> int:
    """The unit of plots."""
    return us // SECOND_US


def lines(x: Sequence[int], **series: Sequence[Any]) -> dict[str, Any]:
    """Lines over the same times; underscores of their names become spaces."""
    listed = [
        {"label": label.replace("_", " "), "y": list(y), "color": COLORS[i % len(COLORS)]}
        for i, (label, y) in enumerate(series.items())
    ]
    return {"x": [seconds(at) for at in x], "series": listed}


def columns(rows: Sequence[Row], x: str, *names: str) -> dict[str, Any]:
    """Lines of whole columns."""
    return lines([row[x] for row in rows], **{name: [row[name] for row in rows] for name in names})


def routers(tables: Tables, window: Window) -> Iterator[tuple[str, Chart]]:
    """The worst routers: active, pending and lost subscriptions, with their incidents marked."""
    hours, outages = tables.get("health_hours"), tables.get("health_outages")
    if hours is None or outages is None:
        return
    for router in tables["health"][:ROUTERS_SHOWN]:
        name = router["server"]
        mine = [row for row in hours if row["server"] == name][-MOST_POINTS:]
        known = [row for row in mine if row["subscriptions"] is not None]
        if not known:
            continue
        data = columns(known, "hour", "active", "lost", "pending")
        data["stepped"] = True  # what is told of an hour is true of all of it
        data["marks"] = [
            [seconds(o["start"]), seconds(o["end"] if o["end"] is not None else window.end)]
            for o in outages
            if o["server"] == name
        ]
        yield f"router-{name}", Chart("health", f"{name}: subscriptions by hour, incidents marked", data)


def delivery(tables: Tables) -> Iterator[tuple[str, Chart]]:
    """Latency as bands in milliseconds, pushes and failures by provider."""
    if hours := tables.get("delivery_hours"):
        shown = hours[-MOST_POINTS:]
        data = lines(
            [row["hour"] for row in shown],
            **{f"p{p}": [row[f"latency_ms_p{p}"] for row in shown] for p in (50, 95, 99)},
        )
        data["bands"] = [[2, 1, "--c1"], [3, 2, "--c3"]]
        yield "latency", Chart("delivery", "From notification to accepted push, milliseconds", data)
    if outcomes := tables.get("delivery_outcomes"):
        for column, title in (("sent", "Accepted pushes by hour"), ("failed", "Failed pushes by hour")):
            yield f"pushes-{column}", Chart("delivery", title, by_provider(outcomes, column))


def by_provider(rows: Sequence[Row], column: str) -> dict[str, Any]:
    """One line per provider."""
    times = sorted({row["hour"] for row in rows})[-MOST_POINTS:]
    found: dict[str, dict[int, int]] = {}
    for row in rows:
        found.setdefault(row["provider"], {})[row["hour"]] = row[column]
    return lines(times, **{name: [by.get(at, 0) for at in times] for name, by in sorted(found.items())})


def tokens(tables: Tables) -> Iterator[tuple[str, Chart]]:
    """Who comes and goes."""
    if days := tables.get("tokens_churn"):
        flow = columns(days, "day", "registered", "verified", "deleted", "invalid")
        yield "churn", Chart("tokens", "Tokens that came and went, by day", flow)
        level = columns(days, "day", "active_at_end")
        yield "active-tokens", Chart("tokens", "Active tokens at the end of the day", level)


def capacity(tables: Tables) -> Iterator[tuple[str, Chart]]:
    """Growth, and where it leads."""
    days = tables.get("capacity_trend") or tables.get("capacity_daily")
    if not days:
        return
    ahead = {row["measure"]: row for row in tables["capacity_projection"]}
    for measure in ("subscriptions", "notifications"):
        title = f"{measure.capitalize()} by day, projected"
        yield measure, Chart("capacity", title, projected(days, measure, ahead[measure]))


def projected(days: Sequence[Row], measure: str, row: Row) -> dict[str, Any]:
    """A measure and, if there is a trend, its expected value with a range."""
    known = [(day["day"], day[measure]) for day in days]
    if row["in_30_days"] is None:
        return columns(days, "day", measure)
    last = known[-1][0]
    times = [*[at for at, _ in known], *[last + n * DAY_US for n in (30, 90)]]
    past: list[Any] = [None] * (len(known) - 1)
    ahead = {
        name: [*past, row["now"], *[row[f"in_{n}_days{suffix}"] for n in (30, 90)]]
        for name, suffix in (("expected", ""), ("low", "_low"), ("high", "_high"))
    }
    data = lines(times, **{measure: [*[value for _, value in known], None, None]}, **ahead)
    for line in data["series"][1:]:
        line |= {"color": "--c5", "dash": [6, 4]}
    data["bands"] = [[4, 3, "--c5"]]
    return data
