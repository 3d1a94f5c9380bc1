"""One table of all figures, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.measure import Row
from bench.part import Part
from bench.results import Results

COLUMNS = ("what", "median", "spread", "unit", "beside it", "ratio", "aim", "")
VERDICTS = {None: "", True: "met", False: "MISSED"}
WIDTH = 170
"Where the output is no terminal."


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """From the least to the most, where there was more than one."""
    low, high = number(min(values)), number(max(values))
    return "" if low == high else f"{low}–{high}"


def cells(row: Row) -> tuple[str, ...]:
    """What both the terminal and the page show of a figure, in the order of COLUMNS."""
    peer, aims = row.peer, []
    if row.aim is not None:
        aims.append(f"{'≥' if row.higher else '≤'} {number(row.aim)}")
    if peer is not None and peer.aim is not None:
        aims.append(f"ratio ≥ {number(peer.aim)}")
    return (
        row.name,
        number(median(row.values)),
        spread(row.values),
        row.unit,
        f"{peer.name}: {number(median(peer.values))}" if peer else "",
        number(median(row.ratios)) if peer else "",
        ", ".join(aims),
        VERDICTS[row.met],
    )


def print_table(results: Results, parts: Sequence[Part] = ()) -> None:
    table = Table(show_lines=False)
    for heading in COLUMNS:
        table.add_column(heading, justify="right" if heading in ("median", "ratio") else "left")
    titles = {part.name: part.title for part in parts}
    for part in results.parts:
        table.add_section()
        note = f"{part.name}: {part.repeats} × in {part.seconds:.0f} s, load {part.load[0]}, {part.load[1]}"
        table.add_row(f"[bold]{titles.get(part.name, part.name)}[/]", "", "", "", note)
        for row in part.rows:
            table.add_row(*cells(row))
        if part.error:
            table.add_row("[red]FAILED[/]", "", "", "", part.error.splitlines()[-1])
    console = Console()
    Console(width=None if console.is_terminal else WIDTH).print(table)


def summary(results: Results) -> str:
    rows = [row for part in results.parts for row in part.rows]
    met, missed = (sum(row.met is verdict for row in rows) for verdict in (True, False))
    failed = [part.name for part in results.parts if part.error]
    text = f"{len(rows)} figures in {results.seconds / 60:.1f} minutes: {met} aims met, {missed} missed"
    return f"{text}; failed: {', '.join(failed)}" if failed else text
