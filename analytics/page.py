"""One self-contained HTML page: what is wrong in plain words, tiles, plots and the beginnings of all tables.

Sentences, tiles, heat map, bars and tables need no JavaScript; uPlot draws what changes over time.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import pairwise
from typing import Any

from analytics.figures import WELL, Figures
from analytics.findings import Finding, moment, number, span
from analytics.inputs import Window
from analytics.plots import Chart, charts_of
from analytics.results import TIME_COLUMNS, Row, Rows, iso_time
from analytics.segments import Checked
from analytics.times import DAY_US, HOUR_US

ROWS_SHOWN = 20
ROUTERS_SHOWN = 20
BARS_SHOWN = 12
MOST_CELLS = 60
MOST_LABELS = 9
MOST_PROBLEMS = 12
ENOUGH_ACTIVE = 0.9
ASSETS = files("analytics") / "assets"
SCROLL = '<div class="scroll" role="region" tabindex="0" aria-label="{}">'
"What is wider than a phone can be moved by keyboard, too."

TITLES = {
    "health": "Routers",
    "delivery": "Delivery",
    "tokens": "Tokens",
    "stale": "Stale subscriptions",
    "incidents": "Incidents",
    "capacity": "Capacity",
}
BARS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "delivery_errors": ("Failed attempts by reason", "pushes", ("provider", "outcome", "error")),
    "tokens_funnel": ("Registered tokens by the stage they reached", "tokens", ("stage",)),
    "tokens_invalid": ("Tokens rejected as invalid by providers", "tokens", ("provider", "reason")),
    "tokens_deleted": ("Tokens deleted, by reason", "tokens", ("provider", "reason")),
    "stale_summary": ("Stale and orphan subscriptions", "subscriptions", ("server", "reason")),
    "incidents_gaps": ("Notifications missed in gaps", "missed", ("server",)),
}


@dataclass(frozen=True)
class ReportPage:
    """Everything the page shows."""

    window: Window
    checked: Checked
    notes: Sequence[str]
    findings: Sequence[Finding]
    figures: Figures
    sections: Mapping[str, Mapping[str, Rows]]

    @property
    def tables(self) -> dict[str, Rows]:
        """Of all sections."""
        return {name: rows for section in self.sections.values() for name, rows in section.items()}


def asset(name: str) -> str:
    """A file that is shipped with the package."""
    return (ASSETS / name).read_text("utf-8")


def render(page: ReportPage) -> str:
    """The whole page."""
    charts = charts_of(page.tables, page.window)
    body = [header(page), problems(page), tiles(page), contents(page)]
    body += [section(name, page.sections[name], charts, page.window) for name in page.sections]
    body.append(inputs(page))
    data = json.dumps({name: chart.data for name, chart in charts.items()}).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title(page)}</title><style>{asset('uPlot.min.css')}{asset('page.css')}"
        "</style></head>"
        f'<body>{"".join(body)}<script type="application/json" id="charts">{data}</script>'
        f"<script>{asset('uPlot.iife.min.js')}</script><script>{asset('page.js')}</script></body></html>\n"
    )


def title(page: ReportPage) -> str:
    """What a tab of a browser says."""
    many = len(page.findings)
    problems = f"{many} {plural('problem', many)}" if many else "No problems"
    return f"{problems} – notification server"


def header(page: ReportPage) -> str:
    """What this is about."""
    period = f"{moment(page.window.start)} to {moment(page.window.end)} {iso_time(page.window.end)[:4]} (UTC)"
    return f"<header><h1>Notification server</h1><p class=soft>{period}</p></header>"


def problems(page: ReportPage) -> str:
    """One sentence per problem, worst first."""
    notes = "".join(f"<p class=soft>{escape(note)}</p>" for note in page.notes)
    if not page.findings:
        said = "No problems found: no router, provider or daemon needs attention."
        return f'<main><p class="well">{said}</p>{notes}'
    sentences = [f"<li{' class=over' * each.is_over}>{escape(each.text)}</li>" for each in page.findings]
    shown, rest = "".join(sentences[:MOST_PROBLEMS]), sentences[MOST_PROBLEMS:]
    more = ""
    if rest:
        folded = f"<ul class=problems>{''.join(rest)}</ul>"
        more = f"<details><summary>{len(rest)} minor {plural('issue', len(rest))}</summary>{folded}</details>"
    return f'<main><h2 id="problems">What needs attention</h2><ul class="problems">{shown}</ul>{more}{notes}'


def tiles(page: ReportPage) -> str:
    """The figures that say most, with their change."""
    shown, tables = [], page.tables
    if tables.get("health"):
        shown += router_tiles(page.figures)
    names = {
        "notifications": "notifications received",
        "pushes": "pushes accepted",
        "failed_pushes": "failed pushes",
        "tokens": "tokens",
        "lost_subscriptions": "subscriptions lost by routers",
    }
    for name, label in names.items():
        figure = page.figures.get(name)
        if figure is not None:
            shown.append(tile(number(figure["value"] or 0), label, change(figure)))
    if tables.get("delivery_providers"):
        slowest = page.figures["latency_ms_p95"]
        shown.append(tile(span((slowest["value"] or 0) / 1000), "p95 push latency", change(slowest, " ms")))
    compared = any(figure["change"] is not None for figure in page.figures.values())
    against = (
        "<p class=soft>Changes are relative to the previous period of the same length.</p>"
        if compared
        else ""
    )
    return f'<div class="tiles">{"".join(shown)}</div>{against}'


def router_tiles(figures: Figures) -> list[str]:
    """Whether all get their notifications."""
    active, well = figures["active_subscriptions"], figures["well_routers"]
    held, routers = figures["subscriptions"]["value"] or 0, figures["routers"]["value"] or 0
    share, is_well = (active["value"] or 0) / held if held else 1.0, well["value"] == routers
    of_all = f"of {number(held)} {plural('subscription', round(held))} active"
    return [
        tile(f"{share:.1%}" if held else "–", of_all, change(active), is_bad=share < ENOUGH_ACTIVE),
        tile(f"{well['value']:.0f} of {routers:.0f}", "healthy routers", change(well), is_bad=not is_well),
    ]


def tile(value: str, label: str, more: str = "", *, is_bad: bool = False) -> str:
    """One figure."""
    extra = f"<span>{escape(more)}</span>" if more else ""
    kind = "tile bad" if is_bad else "tile"
    return f'<div class="{kind}"><b>{escape(value)}</b><span>{escape(label)}</span>{extra}</div>'


def change(figure: Mapping[str, float | None], unit: str = "") -> str:
    """Against the previous period of the same length."""
    change, before = figure["change"], figure["previous"]
    if change is None:
        return ""
    if not round(change):
        return "unchanged"
    share = f" ({change / before:+.0%})" if before and abs(change) >= before / 200 else ""
    return f"{change:+,.0f}{unit}{share}"


def contents(page: ReportPage) -> str:
    """Links to the sections."""
    links = "".join(f'<li><a href="#{name}">{TITLES[name]}</a></li>' for name in page.sections)
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>'


def section(name: str, tables: Mapping[str, Rows], charts: Mapping[str, Chart], window: Window) -> str:
    """One report: plots, then its tables, folded."""
    parts = [f'<h2 id="{name}">{TITLES[name]}</h2>']
    if name == "health" and tables["health"]:
        parts.append(heat_map(tables["health"], tables["health_hours"], window))
    parts += [
        f'<h3 class="plot">{escape(chart.title)}</h3><div class="chart" data-chart="{escape(key)}" '
        f'role="img" aria-label="{escape(chart.title)}">'
        "<noscript>Plots need JavaScript; the numbers are below.</noscript></div>"
        for key, chart in charts.items()
        if chart.section == name
    ]
    for table, rows in tables.items():
        if table in BARS and rows:
            parts.append(bars(rows, *BARS[table]))
        parts.append(table_html(table, rows))
    return "".join(parts)


def heat_map(routers: Rows, hours: Rows, window: Window) -> str:
    """Routers, the worst first, by time: how much of what they hold was lost, and for how long."""
    length = max(HOUR_US, window.end - window.first_hour)
    step = HOUR_US * -(-length // (MOST_CELLS * HOUR_US))
    cells: dict[tuple[str, int], list[float]] = {}
    for row in hours:
        cell = cells.setdefault((row["server"], (row["hour"] - window.first_hour) // step), [0.0, 0.0, 0.0])
        cell[0] += row["lost_seconds"]
        cell[1] = max(cell[1], row["lost"])
        cell[2] += row["received"]
    columns = range(-(-length // step))
    heads = heat_heads(window.first_hour, step, len(columns))
    rows = "".join(
        heat_row(router, [cells.get((router["server"], at)) for at in columns], window, step)
        for router in routers[:ROUTERS_SHOWN]
    )
    legend = (
        '<p class="legend"><span><i style="background:var(--heat0)"></i>nothing lost</span><span>'
        '<i style="background:color-mix(in srgb,var(--bad) 50%,var(--heat0))"></i>lost for part of the period'
        '</span><span><i style="background:var(--bad)"></i>all lost for the entire period</span></p>'
    )
    return (
        f"<h3>Lost subscriptions by router and time</h3>{legend}{SCROLL.format('Lost subscriptions')}"
        "<table class=heat><colgroup><col class=name></colgroup><thead><tr>"
        f'<th scope="col">score, router</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def heat_heads(start: int, step: int, number: int) -> str:
    """Labels where days begin, or hours if there are few days; not all of them if there are many."""
    unit, label = (DAY_US, "%-d %b") if step * number > 2 * DAY_US else (HOUR_US, "%H:%M")
    every = unit * -(-step * number // (MOST_LABELS * unit))
    times = range(-(-start // unit) * unit, start + step * number, every)
    places = [(at - start) // step for at in times]
    first = f'<td class="blank" colspan="{places[0]}"></td>' if places[0] else ""
    return first + "".join(
        f'<th scope="col" colspan="{following - place}">{moment(at, label)}</th>'
        for at, (place, following) in zip(times, pairwise([*places, number]), strict=True)
    )


def heat_row(router: Row, cells: Sequence[list[float] | None], window: Window, step: int) -> str:
    """One router's cells."""
    shown = []
    for at, cell in enumerate(cells):
        when = moment(window.first_hour + at * step)
        if cell is None:
            shown.append(f'<td class="none" title="{when}: nothing known"></td>')
            continue
        seconds, lost, received = cell
        share = min(1.0, seconds / (max(1, router["subscriptions"]) * step / 1e6))
        percent = 0 if not lost else round(40 + 60 * share**0.5)  # what happened at all is seen
        style = f' style="background:color-mix(in srgb,var(--bad) {percent}%,var(--heat0))"'
        text = f"{when}: {number(lost)} lost, {number(received)} notifications"
        shown.append(f'<td title="{text}"{style if percent else ""}></td>')
    score = f"<span{'' if router['score'] >= WELL else ' class=low'}>{int(router['score'])}</span>"
    name = f'<th scope="row" title="score of 100">{score} {escape(router["server"])}</th>'
    return f"<tr>{name}{''.join(shown)}</tr>"


def bars(rows: Rows, title: str, value: str, names: tuple[str, ...]) -> str:
    """Horizontal bars with their labels and values."""
    most = max((row[value] or 0 for row in rows), default=0) or 1
    ordered = rows if names == ("stage",) else sorted(rows, key=lambda row: -(row[value] or 0))
    lines = "".join(
        f'<div class="bar"><span>{escape(" ".join(str(row[n]).removeprefix("push_") for n in names))}</span>'
        f'<div style="width:{100 * (row[value] or 0) / most:.1f}%"></div>'
        f"<span>{number(row[value] or 0)}</span></div>"
        for row in ordered[:BARS_SHOWN]
    )
    return f"<h3>{escape(title)}</h3>{lines}"


def table_html(name: str, rows: Rows) -> str:
    """The first rows of a table, folded."""
    title = escape(name.replace("_", " "))
    if not rows:
        return f"<p class=soft>{title}: none.</p>"
    head = "".join(f'<th scope="col"{kind(rows, column)}>{escape(column)}</th>' for column in rows.columns)
    body = "".join(
        f"<tr>{''.join(cell(column, row[column]) for column in rows.columns)}</tr>"
        for row in rows[:ROWS_SHOWN]
    )
    first = f"{len(rows)} {plural('row', len(rows))}"
    if rows.count_of_all > ROWS_SHOWN:
        first = f"first {ROWS_SHOWN} of {rows.count_of_all:,} rows"
    return (
        f"<details><summary>{title} ({first})</summary>{SCROLL.format(title)}<table class=data>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<p class=soft>All rows: <a href="{name}.csv">{name}.csv</a></p></details>'
    )


def kind(rows: Rows, column: str) -> str:
    """Texts stand on the left."""
    return ' class="text"' if any(isinstance(row[column], str) for row in rows[:ROWS_SHOWN]) else ""


def cell(column: str, value: Any) -> str:
    """One value."""
    if value is None:
        return "<td></td>"
    if column in TIME_COLUMNS:
        return f'<td data-v="{value}">{iso_time(value)[:19].replace("T", " ")}</td>'
    if isinstance(value, bool):
        return f"<td>{'yes' if value else 'no'}</td>"
    if isinstance(value, int | float):
        is_plain = isinstance(value, int) or (value == int(value) and abs(value) < 1e15)
        return f'<td data-v="{value}">{value:{"," if is_plain else ",.4g"}}</td>'
    return f'<td class="text">{escape(str(value))}</td>'


def inputs(page: ReportPage) -> str:
    """What was read, and what had to be left out."""
    good, bad = len(page.checked.good), page.checked.bad
    read = f'<h2 id="inputs">Read</h2><p>{page.checked.rows:,} events in {good:,} {plural("segment", good)}.'
    if not bad:
        return f"{read} No segment was skipped.</p></main>"
    items = "".join(f"<li>{escape(each.path)}: {escape(each.error or '')}</li>" for each in bad[:ROWS_SHOWN])
    return f"{read} {len(bad)} could not be read:</p><ul>{items}</ul></main>"


def plural(noun: str, count: int) -> str:
    """One of them, or several."""
    return noun if count == 1 else f"{noun}s"
