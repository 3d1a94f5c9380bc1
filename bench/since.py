"""What got slower since an earlier commit: its benchmark and today's in turn, part by part, in one run.

Both run with today's libraries, so that only our code differs. What was measured with other sizes, or is new,
is named and not compared.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import results
from bench.compare import print_comparison
from bench.earlier import ROOT, checked_out
from bench.part import Part
from bench.results import PartResult, Results, joined
from bench.runner import say


def compare(commit: str, parts: Sequence[Part], *, rounds: int, quick: bool) -> bool:
    """True if nothing got slower and nothing failed. Each part is told as soon as it is known."""
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="ntf-since-") as folder:
        source = Path(folder) / "source"
        with checked_out(commit, source):
            for number, part in enumerate(parts, 1):
                say(f"[{number}/{len(parts)}] {part.name}")
                turns = [(tree, measure(tree, part.name, quick=quick)) for tree in (source, ROOT) * rounds]
                then, now = (
                    [found for tree, found in turns if found and tree is one] for one in (source, ROOT)
                )
                if then and now:
                    verdicts.append(print_comparison(merged(then), merged(now), everything=True))
                else:
                    say(f"    not measured by {'this version' if then else commit}")
                    verdicts.append(bool(now))
    return all(verdicts)


def measure(tree: Path, name: str, *, quick: bool) -> Results | None:
    """One part, by the code of that tree; None where it has no such part, or cannot run it."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "bench", "--only", name, "--json", file.name]
        done = subprocess.run(
            [*command, "--quick"] if quick else command,
            cwd=tree,
            env=os.environ
            | {"PYTHONPATH": str(tree)},  # before what is installed, for daemons it starts, too
            stdout=subprocess.DEVNULL,
            check=False,
        )
        return results.read(Path(file.name)) if done.returncode == 0 else None


def merged(runs: Sequence[Results]) -> Results:
    """Several runs as one, with the values of all rounds."""
    names = dict.fromkeys(part.name for run in runs for part in run.parts)
    return replace(runs[0], parts=[_merged([run.part(name) for run in runs]) for name in names])


def _merged(rounds: Sequence[PartResult | None]) -> PartResult:
    known = [one for one in rounds if one is not None]
    return replace(
        known[0],
        rows=joined(one.rows for one in known),
        repeats=sum(one.repeats for one in known),
        yardstick=[speed for one in known for speed in one.yardstick],
    )
