"""Every number of the reports on generated data, from the rollups that Spark made, against computations in
DuckDB: one from the events themselves, one with other queries from rollups of DuckDB's. Once with one
partition, where nothing is shuffled, and once with several. Spark reads a journal with everything that can be
wrong with one; DuckDB reads the same events without that, except for those of a wrong clock."""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from analytics.files import LocalFolder
from analytics.generator import Answers, Plan, write_journal
from analytics.inputs import Window
from analytics.results import Rows
from analytics.rollups import update_rollups
from analytics.rollups_schema import TRAFFIC
from analytics.session import BYTES_PER_PARTITION, SparkOptions, sized_settings
from analytics.times import DAY_US
from store.journal_files import SCHEMA, atomic_file, write_parquet
from tests.analytics.conftest import (
    LIMITS,
    NOW_US,
    QUERIES,
    START_US,
    WINDOW,
    Row,
    Tables,
    as_json_lines,
    warehouse_of,
)
from tests.analytics.oracle import capacity, delivery, health, incidents, stale, tokens
from tests.analytics.oracle.warehouse import open_warehouse
from tests.analytics.reference import TABLES, Reference
from tests.analytics.rollup_reference import write_rollups

Numbers = dict[str, Rows]
WRONG_TIMES = 100
FIRST_KEY = Plan(seed=7, events=20_000, days=8, servers=4, gaps=1, mass_disconnects=1, restarts=1)
SECOND_KEY = replace(FIRST_KEY, seed=8, start="2026-01-13")
ORACLES = (health, delivery, tokens, stale, incidents, capacity)


def older(segment: Path) -> None:
    """Split a segment in two of an older version, which lack the columns that are empty in them."""
    events = pq.read_table(segment, partitioning=None)
    is_traffic = pc.is_in(events["event"], pa.array([e.value for e in TRAFFIC]))
    for part, rows in enumerate((events.filter(is_traffic), events.filter(pc.invert(is_traffic)))):
        known = [name for name in rows.column_names if rows[name].null_count < rows.num_rows]
        assert len(known) < rows.num_columns
        pq.write_table(rows.select(known), segment.with_name(f"older-{part}.parquet"))
    segment.unlink()


def of_a_wrong_clock(segment: Path, target: Path) -> None:
    """Write events of a segment's daemon that seem to be ten years younger."""
    events = pq.read_table(segment, partitioning=None)
    events = events.take(pa.array(range(0, events.num_rows, events.num_rows // WRONG_TIMES)))[:WRONG_TIMES]
    times = pc.add(events["time"].cast(pa.int64()), 10 * 365 * DAY_US).cast(SCHEMA.field("time").type)
    events = events.set_column(events.column_names.index("time"), SCHEMA.field("time"), times)
    numbers = pc.add(events["seq"], 10**9)
    events = events.set_column(events.column_names.index("seq"), SCHEMA.field("seq"), numbers)
    with atomic_file(target) as file:
        write_parquet(events.to_batches(), file)


@pytest.fixture(scope="module")
def wrong_times(journal: tuple[Path, Answers], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("wrong") / "wrong.parquet"
    of_a_wrong_clock(sorted(journal[0].glob("*/*.parquet"))[6], file)
    return file


@pytest.fixture(scope="module")
def faulty(
    journal: tuple[Path, Answers], wrong_times: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The journal with copies, damage, several formats and versions, and a wrong clock."""
    folder = tmp_path_factory.mktemp("faulty") / "journal"
    shutil.copytree(journal[0], folder)
    segments = sorted(folder.glob("*/*.parquet"))
    shutil.copy(wrong_times, folder)
    shutil.copy(segments[0], segments[0].with_name("copy.parquet"))
    shutil.copy(segments[1], folder / "copy-elsewhere.parquet")
    whole = segments[2].read_bytes()
    segments[2].with_name("cut-off.parquet").write_bytes(whole[: len(whole) // 2])
    segments[2].with_name("flipped.parquet").write_bytes(whole[:999] + bytes([whole[999] ^ 1]) + whole[1000:])
    as_json_lines(segments[3])
    shutil.copy(segments[3].with_suffix(".jsonl"), folder / "copy.jsonl")
    older(segments[4])
    return folder


@pytest.fixture(scope="module", params=[1, 4])
def partitions(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[int]:
    """As a journal has them that is so large; none is joined with another although they are small."""
    options = SparkOptions(input_bytes=request.param * BYTES_PER_PARTITION)
    settings = {**sized_settings(options), "spark.sql.adaptive.coalescePartitions.enabled": "false"}
    before = {name: spark.conf.get(name) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield options.partitions
    for name, earlier in before.items():
        assert earlier is not None
        spark.conf.set(name, earlier)


@pytest.fixture(scope="module")
def numbers(
    spark: SparkSession, faulty: Path, partitions: int, tmp_path_factory: pytest.TempPathFactory
) -> Numbers:
    folder = tmp_path_factory.mktemp("rollups")
    checked = update_rollups(spark, LocalFolder(str(faulty)), LocalFolder(str(folder)), print)
    assert {Path(segment.path).stem for segment in checked.bad} == {"cut-off", "flipped"}
    warehouse = warehouse_of(spark, folder, limits=LIMITS, start=WINDOW.start, end=WINDOW.end)
    assert [note.partition(":")[0] for note in warehouse.notes] == [f"{WRONG_TIMES} events were put aside"]
    return dict(Tables(warehouse))


@pytest.fixture(scope="module")
def oracle(
    journal: tuple[Path, Answers], wrong_times: Path, tmp_path_factory: pytest.TempPathFactory
) -> Numbers:
    folder = tmp_path_factory.mktemp("oracle") / "rollups"
    write_rollups([f"{journal[0]}/*/*.parquet", str(wrong_times)], folder)
    with open_warehouse(folder, WINDOW, LIMITS, NOW_US) as warehouse:
        return {name: rows for report in ORACLES for name, rows in report.tables(warehouse).items()}


def test_table_equals_oracle_when_the_key_changed(
    spark: SparkSession, partitions: int, tmp_path: Path
) -> None:
    """The same daemon with another key: nobody from before is there any more."""
    journal, rollups, known = tmp_path / "journal", tmp_path / "rollups", tmp_path / "known"
    write_journal(FIRST_KEY, journal)
    write_journal(SECOND_KEY, journal)
    update_rollups(spark, LocalFolder(str(journal)), LocalFolder(str(rollups)), print)
    window = Window(START_US + DAY_US, START_US + 15 * DAY_US)
    warehouse = warehouse_of(spark, rollups, limits=LIMITS, start=window.start, end=window.end)
    (told,) = warehouse.notes
    assert told.startswith("The journal's key changed on 13 January 2026.")
    write_rollups([f"{journal}/*/*.parquet"], known)
    with open_warehouse(known, window, LIMITS, NOW_US) as oracle:
        theirs = {name: rows for report in ORACLES for name, rows in report.tables(oracle).items()}
    for name, rows in Tables(warehouse).items():
        assert [plain(row) for row in rows] == [plain(row) for row in theirs[name]], name


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
