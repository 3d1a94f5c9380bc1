"""How benchmarks measure: CPU time per unit, best of many short runs, as other processes only add to it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

ROUNDS = 60
ROUND_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a report. `met` is None where nothing was promised."""

    name: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None


def at_most(name: str, value: float, unit: str, limit: float) -> Row:
    return Row(name, value, unit, f"<= {limit:g}", value <= limit)


def at_least(name: str, value: float, unit: str, limit: float) -> Row:
    return Row(name, value, unit, f">= {limit:g}", value >= limit)


def best_of(
    works: Mapping[str, tuple[Callable[[], object], int]],
    rounds: int = ROUNDS,
    round_seconds: float = ROUND_SECONDS,
) -> dict[str, float]:
    """Microseconds of CPU time per unit of each work; a work is a callable and the units one call does.

    Rounds of all works take turns, so that a busy machine disturbs them alike and their ratios stay fair.
    """
    repeats = {name: _repeats(call, round_seconds) for name, (call, _) in works.items()}
    best = dict.fromkeys(works, float("inf"))
    gc.collect()
    for _ in range(rounds):
        for name, (call, units) in works.items():
            best[name] = min(best[name], _cpu(call, repeats[name]) / (repeats[name] * units))
    return {name: seconds * 1e6 for name, seconds in best.items()}


def _repeats(call: Callable[[], object], round_seconds: float) -> int:
    """How many calls fill a round; finding out also warms the work up."""
    count = 1
    while (spent := _cpu(call, count)) < round_seconds / 4:
        count *= 2
    return max(1, round(count * round_seconds / spent))


def _cpu(call: Callable[[], object], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        call()
    return time.process_time() - start


def print_rows(title: str, rows: Sequence[Row]) -> bool:
    """Prints the table; True if every target was met."""
    table = Table(title=title)
    for heading in ("what", "value", "unit", "target", ""):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    verdicts = {None: "", True: "met", False: "MISSED"}
    for row in rows:
        table.add_row(row.name, f"{row.value:.3g}", row.unit, row.target, verdicts[row.met])
    Console().print(table)
    return all(row.met is not False for row in rows)
