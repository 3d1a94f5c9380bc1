"""Every number of every report on generated data, against an independent computation in DuckDB."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from analytics.generator import Answers
from analytics.inputs import Inputs, Limits, Window
from analytics.job import REPORTS
from analytics.segments import check_segments, list_segments, read_events
from tests.analytics.conftest import START_US, collected
from tests.analytics.reference import DAY, TABLES, Reference

# Smaller than the defaults, so that a journal of some weeks has dead tokens and stale subscriptions.
LIMITS = Limits(dead_token_days=5, never_active_days=2, inactive_days=3, unreachable_days=2)
# Neither starts nor ends with a day, and leaves events before and after it.
WINDOW = Window(START_US + 2 * DAY + 12_345_678, START_US + 22 * DAY + 3_600_000_001)


@pytest.fixture(scope="module")
def reference(journal: tuple[Path, Answers]) -> Iterator[Reference]:
    made = Reference(f"{journal[0]}/*/*.parquet", WINDOW, LIMITS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def inputs(spark: SparkSession, journal: tuple[Path, Answers]) -> Inputs:
    checked = check_segments(spark, list_segments(spark, str(journal[0])))
    events = read_events(spark, checked.good).where(f"unix_micros(time) < {WINDOW.end}").persist()
    return Inputs(events, events, WINDOW, LIMITS)


def key(row: dict[str, Any]) -> list[str]:
    return [str(row[name]) for name in row if isinstance(row[name], str) or name in ("hour", "day", "start")]


def same(mine: object, other: object) -> bool:
    if isinstance(mine, int | float) and isinstance(other, int | float):
        return math.isclose(mine, other, rel_tol=1e-9, abs_tol=1e-9)
    return mine == other


@pytest.mark.parametrize("report", REPORTS)
def test_report_equals_reference(report: str, inputs: Inputs, reference: Reference) -> None:
    for name, table in REPORTS[report](inputs).items():
        ours, theirs = collected(table), reference.table(name)
        assert ours, f"{name} is empty: the data does not test it"
        assert len(ours) == len(theirs), name
        assert list(ours[0]) == list(theirs[0]), name
        for mine, other in zip(sorted(ours, key=key), sorted(theirs, key=key), strict=True):
            different = {n: (mine[n], other[n]) for n in mine if not same(mine[n], other[n])}
            assert not different, (name, mine)


def test_reference_covers_every_table(inputs: Inputs) -> None:
    assert {name for tables in REPORTS.values() for name in tables(inputs)} == set(TABLES)
