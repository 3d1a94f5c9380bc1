"""One Spark session for the tests that need it, and short ways to make journals and rollups."""

import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from analytics.generator import Answers, Plan, write_journal
from analytics.inputs import Limits, Window
from analytics.spark import LazySpark
from analytics.times import DAY_US
from analytics.warehouse import Warehouse, open_warehouse
from store.journal_files import SCHEMA
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


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LazySpark]:
    # Small queries: compiling them costs far more than running them interpreted.
    settings = {
        "spark.local.dir": str(tmp_path_factory.mktemp("spark")),
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.adaptive.enabled": "false",
    }
    with LazySpark("local[2]", "2g", settings) as session:
        yield session


@pytest.fixture(scope="session")
def journal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    """A generated journal that every report has something to say about."""
    folder = tmp_path_factory.mktemp("generated")
    plan = Plan(seed=7, events=160_000, days=24, servers=4, gaps=3, mass_disconnects=1, restarts=2)
    return folder, write_journal(plan, folder)


def event(at_s: float, name: JournalEvent, *, writer: bytes = b"w1", **columns: Any) -> Row:
    """One journal row, `at_s` seconds after START."""
    time = START_US + round(at_s * 1_000_000)
    return {"time": time, "event": name.value, "writer": writer, "epoch": 1, **columns}


def rollups_of(rows: list[Row], folder: Path) -> Path:
    """Write the rollups of rows; each gets a number in the order of time."""
    ordered = sorted(rows, key=lambda row: int(row["time"]))
    numbered = [{"seq": i, **row} for i, row in enumerate(ordered)]
    db = duckdb.connect()
    events = pa.Table.from_pylist(numbered, schema=SCHEMA)
    db.execute("SET TimeZone = 'UTC'")
    db.register("events", events)
    write_rollups(db, folder)
    return folder


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """A warehouse over the rollups of rows; the window is `days` long from START."""
    numbers = itertools.count()

    def make(rows: list[Row], *, days: float = 1.0, first_day: float = 0.0, **more: Any) -> Warehouse:
        rollups = rollups_of(rows, tmp_path / f"rollups{next(numbers)}")
        span = {"start": START_US + int(first_day * DAY_US), "end": START_US + int(days * DAY_US)}
        return open_warehouse(rollups, **{"limits": Limits(), "now_us": NOW_US, **span, **more})

    return make


def at(seconds: float) -> int:
    """Microseconds of a time `seconds` after START."""
    return START_US + round(seconds * 1_000_000)
