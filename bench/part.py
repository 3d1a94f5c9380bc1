"""A part of the benchmark declares itself: what it measures, how, and how long it may take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.measure import Row

Rows = Sequence[Row]
Measure = Callable[..., Rows | Coroutine[Any, Any, Rows]]
Options = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One section of the table and of the page."""

    name: str
    title: str
    measure: Measure
    "Takes an empty folder and its options as keywords; the defaults are those of a whole run."
    quick: Options = field(default_factory=dict)
    "What is different with --quick."
    repeats: int = 3
    quick_repeats: int = 1
    seconds: float
    "All repeats together, on an idle machine; no repeat is begun that would not end in time."
    quick_seconds: float
    why: str
    "What depends on it."
    how: str
    "How it is measured: who runs where, and what is beside it."
    bound: str
    "What it cannot get below, and what takes the rest."

    def options(self, *, quick: bool) -> dict[str, Any]:
        given = inspect.signature(self.measure).parameters.values()
        defaults = {one.name: one.default for one in given if one.default is not one.empty}
        return defaults | dict(self.quick) if quick else defaults
