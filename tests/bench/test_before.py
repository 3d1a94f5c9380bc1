"""Before and after: both versions in turn, one table, and a clear word where there is no history."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from bench import page, results
from bench.__main__ import main
from bench.before import REPEATS, in_turn, inside
from bench.earlier import HERE, Version, schema_of
from bench.inside import NAMES
from bench.measure import Peer, figure
from bench.part import Rows
from bench.runner import gathered
from bench.server import measured
from tests.test_architecture import ROOT

EARLIER = Version(HERE.python, schema=1)


async def schema(_: Path, *, added: int = 0) -> Rows:
    return [figure("schema", "in all", measured.get().schema + added, aim=1)]


def failing(_: Path) -> Rows:
    raise RuntimeError("as it must")


def test_the_earlier_version_stands_beside_todays() -> None:
    part = in_turn(schema, {"added": 1}, EARLIER, "0ld")
    (row,) = part.rows
    assert row.values == (HERE.schema + 1,) * REPEATS
    assert row.peer == Peer("0ld", (2,) * REPEATS)
    assert part.error == ""
    (measured_now,) = gathered([part])
    text = page.render(results.read(page.RESULTS), measured_now)
    assert "## Before and after\n" in text
    assert "commit `0ld`" in text
    assert f"| schema | 2 | {HERE.schema + 1} | in all |" in text


def test_a_part_of_a_run_of_its_own_is_shown_instead() -> None:
    part = replace(in_turn(schema, {}, EARLIER, "0ld"), name="tls")
    (alone,) = gathered([part])
    shown = page.render(results.read(page.RESULTS), None, replace(alone, started="one day", commit="a1b2"))
    (section,) = [text for text in shown.split("\n## ") if "--only tls`" in text]
    assert "| schema |" in section
    assert "This part was measured in a run of its own: one day, commit `a1b2`." in section
    assert shown.count("in a run of its own") == 1


def test_a_failure_leaves_no_row() -> None:
    part = in_turn(failing, {}, EARLIER, "0ld")
    assert part.rows == []
    assert "as it must" in part.error


def test_the_newest_schema_of_a_commit() -> None:
    if (ROOT / ".git").exists():
        assert schema_of("HEAD") <= HERE.schema


def test_without_the_history() -> None:
    with pytest.raises(SystemExit, match="this needs a clone with the history"):
        main(["before", "--commit", "0" * 40])


def test_today_has_every_name_that_an_earlier_version_may_lack() -> None:
    for module, name in NAMES:
        assert hasattr(importlib.import_module(module), name)


def test_parts_are_measured_with_the_installed_version() -> None:
    assert all(cost > 0 for cost in inside("tls", 512, 1))
