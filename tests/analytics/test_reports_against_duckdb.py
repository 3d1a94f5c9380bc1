"""Every number of the reports on generated data, from the rollups that Spark made, against computations in
DuckDB: one from the events themselves, one with other queries from rollups of DuckDB's. Once with one
partition, where nothing is shuffled, and once with several."""

import math
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest
from pyspark.sql import SparkSession

from analytics.files import LocalFolder
from analytics.generator import Answers
from analytics.results import Rows
from analytics.rollups import update_rollups
from tests.analytics.conftest import LIMITS, NOW_US, QUERIES, WINDOW, Row, Tables, warehouse_of
from tests.analytics.oracle import capacity, delivery, health, incidents, stale, tokens
from tests.analytics.oracle.warehouse import open_warehouse
from tests.analytics.reference import TABLES, Reference
from tests.analytics.rollup_reference import write_rollups

Numbers = dict[str, Rows]
PARTITIONS = "spark.sql.shuffle.partitions"
ORACLES = (health, delivery, tokens, stale, incidents, capacity)


@pytest.fixture(scope="module", params=[1, 4])
def numbers(
    request: pytest.FixtureRequest,
    spark: SparkSession,
    journal: tuple[Path, Answers],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Numbers]:
    folder = tmp_path_factory.mktemp("rollups")
    before = spark.conf.get(PARTITIONS)
    spark.conf.set(PARTITIONS, request.param)
    update_rollups(spark, LocalFolder(str(journal[0])), LocalFolder(str(folder)), print)
    warehouse = warehouse_of(spark, folder, limits=LIMITS, start=WINDOW.start, end=WINDOW.end)
    yield dict(Tables(warehouse))
    assert before is not None
    spark.conf.set(PARTITIONS, before)


@pytest.fixture(scope="module")
def oracle(journal: tuple[Path, Answers], tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    folder = tmp_path_factory.mktemp("oracle") / "rollups"
    db = duckdb.connect()
    db.execute("SET TimeZone = 'UTC'")
    source = f"read_parquet('{journal[0]}/*/*.parquet', hive_partitioning = false)"
    db.execute(f"CREATE VIEW events AS SELECT * FROM {source}")
    write_rollups(db, folder)
    warehouse = open_warehouse(folder, WINDOW, LIMITS, NOW_US)
    return {name: rows for report in ORACLES for name, rows in report.tables(warehouse).items()}


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


def plain(row: Row) -> Row:
    """Exact up to the order in which floating-point numbers were added."""
    return {
        name: float(f"{value:.10g}") if isinstance(value, float) else value for name, value in row.items()
    }


@pytest.mark.parametrize("name", QUERIES)
def test_table_equals_oracle(name: str, numbers: Numbers, oracle: Numbers) -> None:
    assert numbers[name].columns == oracle[name].columns
    ours, theirs = ([plain(row) for row in tables[name]] for tables in (numbers, oracle))
    different = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
    assert different[:3] == []


def test_hardly_a_table_is_empty(numbers: Numbers) -> None:
    empty = {name for name, rows in numbers.items() if not rows}
    assert empty == {"incidents_losses", "incidents_refused", "incidents_tokens"}
