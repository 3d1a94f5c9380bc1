"""Every number of the reports on generated data, from the rollups that Spark made, against an independent
computation in DuckDB from the events themselves."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from analytics.files import LocalFolder
from analytics.generator import Answers
from analytics.job import REPORTS
from analytics.making import update_rollups
from analytics.spark import LazySpark
from analytics.warehouse import Rows, open_warehouse
from tests.analytics.conftest import LIMITS, NOW_US, WINDOW, Row
from tests.analytics.reference import TABLES, Reference

Numbers = dict[str, Rows]
WORKED_OUT_BY_HAND = {
    "health",
    "health_outages",
    "health_hours",
    "delivery_kinds",
    "delivery_outcomes",
    "tokens_deleted",
    "incidents_providers",
    "incidents_refused",
    "incidents_tokens",
    "incidents_losses",
    "incidents_daemons",
    "capacity_trend",
    "capacity_projection",
}
"Tables that other tests check."


@pytest.fixture(scope="module")
def numbers(
    spark: LazySpark, journal: tuple[Path, Answers], tmp_path_factory: pytest.TempPathFactory
) -> Numbers:
    folder = tmp_path_factory.mktemp("rollups")
    update_rollups(LocalFolder(str(journal[0])), LocalFolder(str(folder)), spark, print)
    warehouse = open_warehouse(folder, limits=LIMITS, now_us=NOW_US, start=WINDOW.start, end=WINDOW.end)
    return {name: rows for report in REPORTS.values() for name, rows in report(warehouse).items()}


@pytest.fixture(scope="module")
def reference(journal: tuple[Path, Answers]) -> Iterator[Reference]:
    made = Reference(f"{journal[0]}/*/*.parquet", WINDOW, LIMITS)
    yield made
    made.close()


def key(row: Row) -> list[str]:
    return [str(row[name]) for name in row if isinstance(row[name], str) or name in ("hour", "day", "start")]


def same(column: str, mine: object, other: object) -> bool:
    if isinstance(mine, int | float) and isinstance(other, int | float):
        exactness = 0.05 if column.startswith("latency_ms") else 1e-9  # latencies are counted in buckets
        return math.isclose(mine, other, rel_tol=exactness, abs_tol=1e-9)
    return mine == other


@pytest.mark.parametrize("name", TABLES)
def test_table_equals_reference(name: str, numbers: Numbers, reference: Reference) -> None:
    ours, theirs = numbers[name], reference.table(name)
    assert ours, "an empty table tests nothing"
    assert len(ours) == len(theirs)
    assert list(ours[0]) == list(theirs[0])
    for mine, other in zip(sorted(ours, key=key), sorted(theirs, key=key), strict=True):
        different = {
            column: (mine[column], other[column])
            for column in mine
            if not same(column, mine[column], other[column])
        }
        assert not different, mine


def test_reference_covers_every_table(numbers: Numbers) -> None:
    assert set(numbers) == set(TABLES) | WORKED_OUT_BY_HAND
