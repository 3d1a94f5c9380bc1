"""The documentation's page about performance: results as tables, and what each part says about itself."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench.measure import Row
from bench.part import Part
from bench.registry import PARTS
from bench.results import Machine, PartResult, Results, read
from bench.table import COLUMNS, cells, number, spread

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "latest.json"
PAGE = ROOT / "docs" / "performance.md"
WIDTH = 125

INTRODUCTION = """# Performance

<!-- made by: python -m bench page -->

Every figure of this page comes from one run of one command, but for parts that say so. Repeat it on a machine
that does nothing else:

```
scripts/setup dev
.venv/bin/python -m bench                       # all of it, about eleven minutes
.venv/bin/python -m bench --quick               # smaller sizes, about four
.venv/bin/python -m bench --only tls storm      # single parts; --list names them
.venv/bin/python -m bench --json new.json
.venv/bin/python -m bench compare bench/results/latest.json new.json
.venv/bin/python -m bench --since COMMIT        # the benchmark of an earlier commit and today's in turn
```

`compare` and `--since` show what got slower beyond the spread, and fail if anything did: the first between
two runs, the second between two versions that it measures itself, with the same libraries.

How to read it:

- A figure is the median over the repeats of its part, each in a process of its own; the spread is the least
  and the most.
- "CPU" is processor time of the process named, with all its threads. Rates and times without "CPU" are by the
  clock, and all processes of a part share this machine's cores.
- "Beside it" is the same work done by something else in the same run. The ratio is 1 where we do as well, 0.5
  where we take twice the time; it says more than the figure, as it does not depend on how fast the machine
  was just then.
- An aim is "met" or "MISSED" by the median.
"""


def alone() -> list[Path]:
    """Results of parts that take longer than all others together, each measured in a run of its own."""
    return sorted(path for path in RESULTS.parent.glob("*.json") if path != RESULTS)


def written(path: Path = RESULTS) -> str:
    """The page of these results."""
    return render(read(path), *map(read, alone()))


def render(results: Results, *apart: Results) -> str:
    """The parts of runs of their own, `apart`, are shown instead of those of `results`."""
    runs = {part.name: run for run in apart for part in run.parts}
    others = [part for part in results.parts if part.name not in runs]
    results = replace(results, parts=[*others, *(part for run in apart for part in run.parts)])
    blocks = [INTRODUCTION, *_machine(results), *_aims(results)]
    for part in PARTS:
        blocks += section(part, results.part(part.name))
        if run := runs.get(part.name):
            when = f"{run.started}, commit `{run.commit}`"
            blocks.append(paragraph(f"This part was measured in a run of its own: {when}."))
    return "\n".join(blocks).rstrip() + "\n"


def _machine(results: Results) -> Iterator[str]:
    machine: Machine = results.machine
    speeds = [speed for part in results.parts for speed in part.yardstick]
    versions = ", ".join(f"{name} {version}" for name, version in machine.libraries.items())
    what = "a quick run with smaller sizes" if results.quick else "a whole run"
    yield "## The machine\n"
    yield "| | |\n|---|---|"
    when = f"{results.started}, {results.seconds / 60:.0f} minutes, commit `{results.commit}`"
    yield f"| run | {what}, {when} |"
    yield f"| processor | {machine.cpu}, {machine.cores} cores |"
    yield f"| memory | {machine.memory_gb} GB |"
    yield f"| system | {machine.system}, Python {machine.python} |"
    yield f"| libraries | SQLite {machine.sqlite}, OpenSSL {machine.openssl}, {versions} |"
    yield f"| load average before and after | {results.load[0]}, {results.load[1]} |"
    if speeds:
        between = spread(speeds) or number(speeds[0])
        yield f"| a bare Ed25519 verification, before each repeat | {between} us CPU |"
    yield ""


def _aims(results: Results) -> Iterator[str]:
    titles = {part.name: part.title for part in PARTS}
    rows = [(part.name, row) for part in results.parts for row in part.rows if row.met is not None]
    missed = [(name, row) for name, row in rows if not row.met]
    yield "## Aims\n"
    yield f"{len(rows) - len(missed)} of {len(rows)} are met.\n"
    if missed:
        yield "| missed | in | median | aim |\n|---|---|---|---|"
    for name, row in missed:
        what, typical, _, unit, _, ratio, aim, _ = cells(row)
        shown = f"{typical} {unit}" if row.aim is not None else f"ratio {ratio}"
        yield f"| {what} | [{titles[name]}](#{anchor(titles[name])}) | {shown} | {aim} |"
    yield ""


def anchor(title: str) -> str:
    """As the site makes it."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return "-".join(kept.split())


def section(part: Part, result: PartResult | None) -> Iterator[str]:
    yield f"## {part.title}\n"
    yield paragraph(f"{part.why} `python -m bench --only {part.name}`")
    if result is None or not result.rows:
        yield "Not measured in this run.\n" if result is None else "Failed in this run.\n"
    else:
        yield from _table(result.rows)
        yield _conditions(result)
    yield paragraph(f"How: {part.how}")
    yield paragraph(f"What bounds it: {part.bound}")


def paragraph(text: str) -> str:
    """What stands in backquotes stays in one line."""
    joined = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    filled = textwrap.fill(joined, WIDTH, break_long_words=False, break_on_hyphens=False)
    return filled.replace("\0", " ") + "\n"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Columns that are empty in every row are left out."""
    filled = [cells(row) for row in rows]
    kept = [at for at in range(len(COLUMNS)) if at == 0 or any(line[at] for line in filled)]
    for line in (COLUMNS, ("---",) * len(COLUMNS), *filled):
        yield "| " + " | ".join(line[at] for at in kept) + " |"
    yield ""


def _conditions(result: PartResult) -> str:
    options = ", ".join(f"{name} {_option(value)}" for name, value in result.options.items())
    times = "once" if result.repeats == 1 else f"{result.repeats} times"
    speed = f"a verification took {number(median(result.yardstick))} us"
    return paragraph(
        f"Measured {times}{f' with {options}' if options else ''}; load {result.load[0]}, {speed}."
    )


def _option(value: object) -> str:
    if isinstance(value, list | tuple):
        return " and ".join(map(_option, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
