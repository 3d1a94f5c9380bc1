"""Parts of the benchmark: all registered, runnable with their options, and within the time of a run."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import replace
from pathlib import Path

import pytest

import bench
from bench import page, results
from bench.measure import figure
from bench.part import Part
from bench.registry import PARTS
from tests.docs.reference import GENERATED

WHOLE_SECONDS, QUICK_SECONDS = 15 * 60, 4 * 60
by_name = pytest.mark.parametrize("part", PARTS, ids=[part.name for part in PARTS])


def test_every_part_is_registered() -> None:
    declared = [
        value
        for module in pkgutil.iter_modules(bench.__path__)
        if module.name != "__main__"
        for value in vars(importlib.import_module(f"bench.{module.name}")).values()
        if isinstance(value, Part)
    ]
    assert {part.name for part in declared} == {part.name for part in PARTS}
    assert len({part.name for part in PARTS}) == len({part.title for part in PARTS}) == len(PARTS)


@by_name
def test_options(part: Part) -> None:
    """A whole run needs none, and those of a quick one exist and are of the same kind."""
    whole = part.options(quick=False)
    inspect.signature(part.measure).bind(Path(), **whole)
    assert {name: type(value) for name, value in part.quick.items()}.items() <= {
        (name, type(value)) for name, value in whole.items()
    }
    assert part.quick_repeats <= part.repeats
    assert part.quick_seconds <= part.seconds


def test_a_run_ends_in_time() -> None:
    assert sum(part.seconds for part in PARTS) <= WHOLE_SECONDS
    assert sum(part.quick_seconds for part in PARTS) <= QUICK_SECONDS


def test_every_part_is_on_the_page() -> None:
    text = GENERATED["performance.md"]()
    for part in PARTS:
        assert f"\n## {part.title}\n" in text


def test_the_committed_results_are_of_todays_parts() -> None:
    known = {part.name for part in PARTS}
    assert {part.name for part in results.read(page.RESULTS).parts} <= known


def test_a_part_of_a_run_of_its_own_is_shown_instead() -> None:
    whole = results.read(page.RESULTS)
    (tls,) = [part for part in whole.parts if part.name == "tls"]
    row = figure("measured apart", "s", 1.0)
    alone = replace(whole, parts=[replace(tls, rows=[row])], started="one day", commit="a1b2")
    shown = page.render(whole, alone)
    (section,) = [text for text in shown.split("\n## ") if "--only tls`" in text]
    assert "| measured apart |" in section
    assert "This part was measured in a run of its own: one day, commit `a1b2`." in section
    assert shown.count("in a run of its own") == 1
