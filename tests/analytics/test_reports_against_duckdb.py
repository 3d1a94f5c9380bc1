"""Every number of every report on generated data, against an independent computation in DuckDB."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from analytics.generator import Answers
from tests.analytics.conftest import LIMITS, WINDOW, Numbers, Row
from tests.analytics.reference import TABLES, Reference


@pytest.fixture(scope="module")
def reference(journal: tuple[Path, Answers]) -> Iterator[Reference]:
    made = Reference(f"{journal[0]}/*/*.parquet", WINDOW, LIMITS)
    yield made
    made.close()


def key(row: Row) -> list[str]:
    return [str(row[name]) for name in row if isinstance(row[name], str) or name in ("hour", "day", "start")]


def same(mine: object, other: object) -> bool:
    if isinstance(mine, int | float) and isinstance(other, int | float):
        return math.isclose(mine, other, rel_tol=1e-9, abs_tol=1e-9)
    return mine == other


@pytest.mark.parametrize("name", TABLES)
def test_table_equals_reference(name: str, numbers: Numbers, reference: Reference) -> None:
    ours, theirs = numbers[name], reference.table(name)
    assert ours, "an empty table tests nothing"
    assert len(ours) == len(theirs)
    assert list(ours[0]) == list(theirs[0])
    for mine, other in zip(sorted(ours, key=key), sorted(theirs, key=key), strict=True):
        different = {
            column: (mine[column], other[column]) for column in mine if not same(mine[column], other[column])
        }
        assert not different, mine


def test_reference_covers_every_table(numbers: Numbers) -> None:
    assert set(numbers) == set(TABLES)
