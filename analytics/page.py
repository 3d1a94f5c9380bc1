"""One self-contained HTML page with the plots and the beginnings of all tables of a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any

from analytics.charts import bar_chart, line_chart, number_text

ROWS_SHOWN = 50
BARS_SHOWN = 20

STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem;color:#222}
h1{font-size:1.6rem}
h2{margin-top:2.5rem;border-bottom:2px solid #1f6f8b}h3{font-size:1rem;margin-bottom:.3rem}
table{border-collapse:collapse;font-size:.8rem;display:block;overflow-x:auto}
th,td{padding:.2rem .5rem;border-bottom:1px solid #e4e4e4;text-align:right;white-space:nowrap}
th{background:#f3f6f7}td.text{text-align:left}figure{margin:1rem 0}figcaption{font-weight:600}
svg{width:100%;height:auto}svg text{font-size:11px;fill:#444}
figure p{margin:.2rem 0;font-size:.8rem}figure span{margin-right:1rem}
figure i{display:inline-block;width:.8rem;height:.8rem;margin-right:.3rem}.bad{color:#a02c3c}
"""


@dataclass(frozen=True)
class TableData:
    """A table's name, columns, first rows (times as text) and number of all rows."""

    name: str
    columns: list[str]
    rows: list[tuple[Any, ...]]
    total: int

    def column(self, name: str) -> list[Any]:
        """One column's values."""
        at = self.columns.index(name)
        return [row[at] for row in self.rows]


@dataclass(frozen=True)
class ReportPage:
    """Everything the page shows."""

    start: int
    end: int
    segments: int
    events: int
    bad: Sequence[tuple[str, str]]
    sections: Mapping[str, Sequence[TableData]]


def lines(title: str, x: str, *series: str) -> Callable[[TableData], str]:
    """A plot of columns over another."""
    return lambda t: line_chart(title, [str(v)[:16] for v in t.column(x)], [(s, t.column(s)) for s in series])


def bars(title: str, value: str, *names: str) -> Callable[[TableData], str]:
    """A plot of one column's first rows, labelled by others."""

    def draw(table: TableData) -> str:
        labels = [
            " ".join(str(v) for v in row) for row in zip(*[table.column(n) for n in names], strict=True)
        ]
        pairs = [
            (name, float(v)) for name, v in zip(labels, table.column(value), strict=True) if v is not None
        ]
        return bar_chart(title, pairs[:BARS_SHOWN])

    return draw


PLOTS: Mapping[str, Sequence[Callable[[TableData], str]]] = {
    "health": [bars("Health score, worst servers first", "score", "server")],
    "delivery_hours": [
        lines(
            "From notification to accepted push, microseconds",
            "hour",
            *[f"latency_us_p{p}" for p in (50, 95, 99)],
        ),
        lines("Pushes per hour", "hour", "pushes"),
    ],
    "delivery_errors": [bars("Failed attempts", "pushes", "provider", "outcome", "error")],
    "tokens_funnel": [bars("Registered tokens by stage reached", "tokens", "stage")],
    "tokens_churn": [lines("Active tokens at the end of the day", "day", "active_at_end")],
    "tokens_invalid": [bars("Tokens refused by providers", "tokens", "provider", "reason")],
    "stale_summary": [bars("Stale and orphan subscriptions", "subscriptions", "server", "reason")],
    "incidents_gaps": [bars("Missed notifications", "missed", "server", "start")],
    "incidents_disconnects": [bars("Subscriptions lost in mass disconnects", "subscriptions", "start")],
    "incidents_restarts": [bars("Seconds until 99 % were active again", "restore_s", "start")],
    "capacity_daily": [
        lines("Tokens and subscriptions", "day", "tokens", "subscriptions"),
        lines("Notifications per day", "day", "notifications", "pushes"),
    ],
}


def render(page: ReportPage) -> str:
    """The whole page."""
    body = [
        f"<h1>Notification server report</h1><p>{when(page.start)} to {when(page.end)} (UTC)</p>",
        inputs(page),
    ]
    for name, tables in page.sections.items():
        body.append(f'<h2 id="{escape(name)}">{escape(name.capitalize())}</h2>')
        for table in tables:
            body += [draw(table) for draw in PLOTS.get(table.name, ()) if table.rows]
            body.append(table_html(table))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Notification server report</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def inputs(page: ReportPage) -> str:
    """What was read, and what had to be left out."""
    read = f"<p>{page.events:,} events in {page.segments:,} segments."
    if not page.bad:
        return f"{read} No segment was skipped.</p>"
    items = "".join(f"<li>{escape(path)}: {escape(error)}</li>" for path, error in page.bad[:ROWS_SHOWN])
    return f'{read} <strong class="bad">{len(page.bad)} segments were skipped:</strong></p><ul>{items}</ul>'


def table_html(table: TableData) -> str:
    """The first rows of a table."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = "".join(f"<tr>{''.join(cell(value) for value in row)}</tr>" for row in table.rows[:ROWS_SHOWN])
    hidden = table.total - min(len(table.rows), ROWS_SHOWN)
    more = f"<p>{hidden:,} more rows in {escape(table.name)}.csv</p>" if hidden else ""
    empty = "" if table.rows else "<p>None.</p>"
    return f"<h3>{escape(table.name)}</h3><table><tr>{head}</tr>{rows}</table>{empty}{more}"


def cell(value: Any) -> str:
    """One value."""
    if value is None:
        return "<td></td>"
    if isinstance(value, bool):
        return f"<td>{'yes' if value else 'no'}</td>"
    if isinstance(value, int | float):
        return f"<td>{number_text(value)}</td>"
    return f'<td class="text">{escape(str(value))}</td>'


def when(us: int) -> str:
    """A time to the second."""
    return f"{datetime.fromtimestamp(us // 1_000_000, UTC):%Y-%m-%d %H:%M:%S}"
