"""One Spark session for the tests that need it, and short ways to make journals and rollups."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from analytics.files import LocalFolder
from analytics.generator import Answers, Plan, write_journal
from analytics.inputs import Limits, Window
from analytics.job import REPORTS
from analytics.results import Rows
from analytics.session import SparkOptions, spark_session
from analytics.times import DAY_US
from analytics.warehouse import Rollups, Warehouse, open_warehouse
from ntf_server.journal_segments import write_jsonl
from store.journal_files import SCHEMA, atomic_file
from store.journal_schema import JournalEvent
from tests.analytics.rollup_reference import write_rollups

START = datetime(2026, 1, 5, tzinfo=UTC)
START_US = int(START.timestamp()) * 1_000_000
NOW_US = START_US + 1000 * DAY_US

Row = dict[str, Any]
Ask = Callable[..., Warehouse]

# Smaller than the defaults, so that a journal of some weeks has dead tokens and stale subscriptions.
LIMITS = Limits(dead_token_days=5, never_active_days=2, inactive_days=3, unreachable_days=2)
# Leaves events before and after it.
WINDOW = Window(START_US + 2 * DAY_US, START_US + 22 * DAY_US)


QUERIES = {name: query for report in REPORTS.values() for name, query in report.items()}


class Tables(Mapping[str, Rows]):
    """All tables of a warehouse, each computed when it is first looked at."""

    def __init__(self, warehouse: Warehouse) -> None:
        self._warehouse = warehouse
        self._known: dict[str, Rows] = {}

    def __getitem__(self, name: str) -> Rows:
        if name not in self._known:
            self._known[name] = self._warehouse.rows(name, QUERIES[name])
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(QUERIES)

    def __len__(self) -> int:
        return len(QUERIES)


@pytest.fixture(scope="session")
def no_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file where a cache is looked for."""
    file = tmp_path_factory.mktemp("cache") / "file"
    file.touch()
    return file


@pytest.fixture(scope="package", autouse=True)
def no_class_archive(no_folder: Path) -> Iterator[None]:
    """Writing one costs more than many tests, and the user's cache is not ours. Tests of other packages need
    their tools' caches: the variable is set for those of this one only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(no_folder))
        yield


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, no_folder: Path) -> Iterator[SparkSession]:
    # Small queries: compiling them costs far more than running them interpreted.
    settings = {
        "spark.local.dir": str(tmp_path_factory.mktemp("spark")),
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{tmp_path_factory.mktemp('spark-events')}",
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.compress": "false",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # it is made before what is made for this package
            patch.setenv("XDG_CACHE_HOME", str(no_folder))
            options = SparkOptions(master="local[2]", settings=settings, input_bytes=0)
            session = stack.enter_context(spark_session(options))
        yield session


@pytest.fixture(scope="session")
def journal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    """A generated journal that every report has something to say about."""
    folder = tmp_path_factory.mktemp("generated")
    plan = Plan(seed=7, events=160_000, days=24, servers=4, gaps=3, mass_disconnects=1, restarts=2)
    return folder, write_journal(plan, folder)


def as_json_lines(segment: Path) -> None:
    """Rewrite a segment as a daemon with `format = jsonl` writes it."""
    events = pq.read_table(segment, partitioning=None)
    with atomic_file(segment.with_suffix(".jsonl")) as file:
        write_jsonl(events.to_batches(), file)
    segment.unlink()


def event(at_s: float, name: JournalEvent, *, writer: bytes = b"w1", **columns: Any) -> Row:
    """One journal row, `at_s` seconds after START."""
    time = START_US + round(at_s * 1_000_000)
    return {"time": time, "event": name.value, "writer": writer, "epoch": 1, **columns}


def rollups_of(rows: list[Row], folder: Path) -> Path:
    """Write the rollups of rows; each gets a number in the order of time."""
    ordered = sorted(rows, key=lambda row: int(row["time"]))
    numbered = [{"seq": i, **row} for i, row in enumerate(ordered)]
    write_rollups(pa.Table.from_pylist(numbered, schema=SCHEMA), folder)
    return folder


def warehouse_of(
    spark: SparkSession,
    rollups: Path,
    *,
    limits: Limits | None = None,
    now_us: int = NOW_US,
    snapshots: Path | None = None,
    **more: Any,
) -> Warehouse:
    """A warehouse over rollups."""
    more["snapshots"] = None if snapshots is None else LocalFolder(str(snapshots))
    folder = LocalFolder(str(rollups))
    opened = Rollups(spark, folder, now_us, LocalFolder(f"{rollups}.work"))
    return open_warehouse(opened, limits=limits or Limits(), **more)


@pytest.fixture
def ask(spark: SparkSession, tmp_path: Path) -> Ask:
    """A warehouse over the rollups of rows; the window is `days` long from START."""
    numbers = itertools.count()

    def make(rows: list[Row], *, days: float = 1.0, first_day: float = 0.0, **more: Any) -> Warehouse:
        rollups = rollups_of(rows, tmp_path / f"rollups{next(numbers)}")
        span = {"start": START_US + int(first_day * DAY_US), "end": START_US + int(days * DAY_US)}
        return warehouse_of(spark, rollups, **{**span, **more})

    return make


def at(seconds: float) -> int:
    """Microseconds of a time `seconds` after START."""
    return START_US + round(seconds * 1_000_000)
