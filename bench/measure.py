"""How benchmarks measure and what they report: figures with their spread, beside a peer of the same run."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from statistics import median

ROUNDS = 20
ROUND_SECONDS = 0.01


class Better(Enum):
    LOWER = "lower"
    HIGHER = "higher"
    NEITHER = "neither"


UNITS: Mapping[str, Better] = {
    "us CPU": Better.LOWER,
    "ms CPU": Better.LOWER,
    "s CPU": Better.LOWER,
    "us": Better.LOWER,
    "ms": Better.LOWER,
    "s": Better.LOWER,
    "B": Better.LOWER,
    "kB": Better.LOWER,
    "MB": Better.LOWER,
    "times": Better.LOWER,
    "% of budget": Better.LOWER,
    "lost": Better.LOWER,
    "1/s": Better.HIGHER,
    "in all": Better.NEITHER,
}
"Every unit that a figure may have, and which way it is better."


@dataclass(frozen=True, slots=True)
class Cores:
    """One for the daemon, the others for everybody else; without a second one they share it."""

    daemon: frozenset[int]
    others: frozenset[int]

    @classmethod
    def divide(cls) -> Cores:
        cores = sorted(os.sched_getaffinity(0))
        return cls(frozenset(cores[-1:]), frozenset(cores[:-1] or cores))


def run_on(cores: frozenset[int]) -> None:
    """This thread, and every thread and process that it starts from now on."""
    os.sched_setaffinity(0, cores)


def ratio(unit: str, value: float, peer: float) -> float:
    """How well we do beside a peer: 1 is as well, 2 twice as fast or half the cost."""
    ours, theirs = (value, peer) if UNITS[unit] is Better.HIGHER else (peer, value)
    return ours / theirs if theirs else 1.0


@dataclass(frozen=True, slots=True)
class Peer:
    """The same work done by something else in the same run; `aim` is the least ratio wanted."""

    name: str
    values: tuple[float, ...]
    aim: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, once for each repeat. `aim` is the most or the least wanted, as its unit has it."""

    name: str
    unit: str
    values: tuple[float, ...]
    aim: float | None = None
    peer: Peer | None = None

    @property
    def ratios(self) -> tuple[float, ...]:
        """Repeat by repeat: a slow minute of the machine slows both."""
        theirs = self.peer.values if self.peer else ()
        return tuple(ratio(self.unit, ours, peer) for ours, peer in zip(self.values, theirs, strict=False))

    @property
    def met(self) -> bool | None:
        """None where nothing is aimed at."""
        verdicts = []
        if self.aim is not None:
            typical = median(self.values)
            verdicts.append(typical >= self.aim if self.higher else typical <= self.aim)
        if self.peer is not None and self.peer.aim is not None:
            verdicts.append(median(self.ratios) >= self.peer.aim)
        return all(verdicts) if verdicts else None

    @property
    def higher(self) -> bool:
        return UNITS[self.unit] is Better.HIGHER


def figure(name: str, unit: str, *values: float, aim: float | None = None, peer: Peer | None = None) -> Row:
    if unit not in UNITS:
        raise ValueError(f"{name}: no such unit: {unit}")
    return Row(name, unit, values, aim, peer)


def beside(name: str, *values: float, at_least: float | None = None) -> Peer:
    return Peer(name, values, at_least)


def best_of(
    works: Mapping[str, tuple[Callable[[], object], int]],
    rounds: int = ROUNDS,
    round_seconds: float = ROUND_SECONDS,
) -> dict[str, float]:
    """Microseconds of CPU time per unit of each work; a work is a callable and the units one call does.

    The best round counts, as other processes only add to it. Rounds of all works take turns, so that a busy
    machine disturbs them alike and their ratios stay fair.
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


def resident_memory() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
