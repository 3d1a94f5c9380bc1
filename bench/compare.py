"""What got slower between two results, beyond the spread of their repeats.

A figure with a peer is compared by its ratio: both were measured in the same minute. Times without a peer are
taken in bare Ed25519 verifications of their own run, so that a slower machine is no slower program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from bench.measure import Better, Row
from bench.results import PartResult, Results
from bench.table import number

TOLERANCE = 0.05
"A change smaller than this is none, however narrow the spreads."
UNKNOWN_SPREAD = 0.25
"The same for figures that were measured once."
TIMED = {"us CPU", "ms CPU", "s CPU", "us", "ms", "s", "1/s"}
"Units that a faster machine changes."


@dataclass(frozen=True)
class Change:
    """`gain` above 0 is an improvement: the difference as a share of the larger one."""

    part: str
    row: str
    measure: str
    old: float
    new: float
    gain: float
    beyond: bool
    "The spreads do not meet, and the change is not small."

    @property
    def worse(self) -> bool:
        return self.beyond and self.gain < 0

    def line(self) -> str:
        what = f"{self.part}: {self.row}"
        kind = ("SLOWER" if self.worse else "better") if self.beyond else "same"
        return f"{kind:7} {what:72} {number(self.old):>9} → {number(self.new):>9} {self.measure}"


def changes(old: Results, new: Results) -> Iterator[Change]:
    for after in new.parts:
        before = old.part(after.name)
        if before is None or before.options != after.options:
            continue
        rows = {row.name: row for row in before.rows}
        for row in after.rows:
            if (known := rows.get(row.name)) is not None and known.unit == row.unit:
                yield change(before, known, after, row)


def change(before: PartResult, old: Row, after: PartResult, new: Row) -> Change:
    if old.ratios and new.ratios:
        return judged(after.name, new.name, "ratio", Better.HIGHER, old.ratios, new.ratios)
    speed = median(after.yardstick) / median(before.yardstick) if new.unit in TIMED else 1.0
    better = Better.HIGHER if new.higher else Better.LOWER
    scaled = [value * speed if new.higher else value / speed for value in new.values]
    return judged(after.name, new.name, new.unit, better, old.values, scaled)


def judged(
    part: str, row: str, measure: str, better: Better, old: Sequence[float], new: Sequence[float]
) -> Change:
    before, after = median(old), median(new)
    difference = after - before if better is Better.HIGHER else before - after
    gain = difference / max(abs(before), abs(after)) if difference else 0.0
    apart = min(new) > max(old) or max(new) < min(old)
    small = TOLERANCE if min(len(old), len(new)) > 1 else UNKNOWN_SPREAD
    return Change(part, row, measure, before, after, gain, apart and abs(gain) > small)


def missing(old: Results, new: Results) -> Iterator[str]:
    """What cannot be compared, and why."""
    for before in old.parts:
        after = new.part(before.name)
        if after is None:
            yield f"{before.name}: not in the new results"
        elif after.error:
            yield f"{before.name}: failed: {after.error.splitlines()[-1]}"
        elif after.options != before.options:
            yield f"{before.name}: measured with other options"
        else:
            known = {(row.name, row.unit) for row in after.rows}
            for row in before.rows:
                if (row.name, row.unit) not in known:
                    yield f"{before.name}: {row.name}: not in the new results"


def print_comparison(old: Results, new: Results, *, everything: bool) -> bool:
    """True if nothing got slower and nothing failed."""
    found = sorted(changes(old, new), key=lambda one: one.gain)
    for one in found:
        if one.beyond or everything:
            print(one.line())
    for line in missing(old, new):
        print(line)
    worse = sum(one.worse for one in found)
    better = sum(one.beyond and not one.worse for one in found)
    print(f"{len(found)} figures compared: {worse} slower beyond the spread, {better} better")
    if old.machine != new.machine:
        print("The machines or their libraries differ.")
    return not worse and not any(part.error for part in new.parts)
