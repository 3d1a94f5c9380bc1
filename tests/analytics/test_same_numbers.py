"""The same numbers whatever the partitioning, the order, copies of segments and damaged segments."""

import functools
import shutil
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from analytics.generator import Answers, Plan, write_journal
from analytics.inputs import Inputs, Limits, Window
from analytics.job import REPORTS
from analytics.segments import check_segments, list_segments, read_events

PLAN = Plan(seed=11, events=40_000, days=16, servers=4, gaps=0, mass_disconnects=1, restarts=1)
LIMITS = Limits(dead_token_days=5, never_active_days=2, inactive_days=3, unreachable_days=2)

Numbers = dict[str, list[str]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    folder = tmp_path_factory.mktemp("small")
    return folder, write_journal(PLAN, folder)


def all_numbers(events: DataFrame) -> Numbers:
    """Every table of every report as exact texts, in one query."""
    inputs = Inputs(events, events, Window(PLAN.start_us, PLAN.end_us), LIMITS)
    tables = {name: table for report in REPORTS.values() for name, table in report(inputs).items()}
    texts = [
        t.select(F.lit(n).alias("name"), F.to_json(F.struct("*")).alias("row")) for n, t in tables.items()
    ]
    numbers: Numbers = {name: [] for name in tables}
    for row in functools.reduce(DataFrame.unionByName, texts).collect():
        numbers[row["name"]].append(row["row"])
    return {name: sorted(rows) for name, rows in numbers.items()}


def read(spark: SparkSession, folder: Path) -> tuple[DataFrame, int]:
    checked = check_segments(spark, list_segments(spark, str(folder)))
    return read_events(spark, checked.good), len(checked.bad)


@pytest.fixture(scope="module")
def expected(spark: SparkSession, small: tuple[Path, Answers]) -> Numbers:
    events, bad = read(spark, small[0])
    assert bad == 0
    numbers = all_numbers(events.coalesce(1))
    assert all(rows for name, rows in numbers.items() if name != "incidents_gaps")
    return numbers


@pytest.mark.parametrize("partitions", [7, 64])
def test_partitions_and_order(
    spark: SparkSession, small: tuple[Path, Answers], expected: Numbers, partitions: int
) -> None:
    events, _ = read(spark, small[0])
    assert all_numbers(events.orderBy(F.rand(partitions)).repartition(partitions)) == expected


def test_copies_and_damaged_segments(
    spark: SparkSession, small: tuple[Path, Answers], expected: Numbers, tmp_path: Path
) -> None:
    folder = tmp_path / "journal"
    shutil.copytree(small[0], folder)
    first, second, third = sorted(folder.glob("*/*.parquet"))[:3]
    shutil.copy(first, first.with_name("copy.parquet"))
    shutil.copy(second, folder / "copy-elsewhere.parquet")
    content = third.read_bytes()
    third.with_name("truncated.parquet").write_bytes(content[: len(content) // 2])
    middle = len(content) // 2
    corrupt = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    third.with_name("corrupt.parquet").write_bytes(corrupt)
    third.with_name("empty.parquet").write_bytes(b"")
    third.with_name(".open-segment.parquet").write_bytes(content)
    events, bad = read(spark, folder)
    assert bad == 3
    assert all_numbers(events) == expected
