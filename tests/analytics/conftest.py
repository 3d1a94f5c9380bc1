"""One Spark session for all tests, and short ways to make journals."""

import functools
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import TimestampType

from analytics.generator import Answers, Plan, write_journal
from analytics.inputs import Inputs, Limits, Window
from analytics.job import REPORTS, spark_session
from analytics.schema import EVENTS
from analytics.spark_segments import check_segments, list_segments, read_events
from analytics.times import DAY_US
from store.journal_schema import JournalEvent

START = datetime(2026, 1, 5, tzinfo=UTC)
START_US = int(START.timestamp()) * 1_000_000

Row = dict[str, Any]
MakeInputs = Callable[..., Inputs]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    # Hundreds of small queries: compiling them costs far more than running them interpreted.
    settings = {
        "spark.local.dir": str(tmp_path_factory.mktemp("spark")),
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.adaptive.enabled": "false",
    }
    with spark_session("local[2]", "2g", settings) as session:
        yield session


@pytest.fixture(scope="session")
def journal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    """A generated journal that every report has something to say about."""
    folder = tmp_path_factory.mktemp("generated")
    plan = Plan(seed=7, events=160_000, days=24, servers=4, gaps=3, mass_disconnects=1, restarts=2)
    return folder, write_journal(plan, folder)


def event(at_s: float, name: JournalEvent, *, writer: bytes = b"w1", **columns: Any) -> Row:
    """One journal row, `at_s` seconds after START."""
    return {"us": START_US + round(at_s * 1_000_000), "event": name.value, "writer": writer, **columns}


def frame(spark: SparkSession, rows: list[Row]) -> DataFrame:
    """Rows as a journal; each gets the number of its place."""
    names = [field.name for field in EVENTS.fields if field.name != "time"]
    numbered = [{"seq": i, **row} for i, row in enumerate(rows)]
    types = ", ".join(f"`{f.name}` {f.dataType.simpleString()}" for f in EVENTS.fields if f.name != "time")
    data = [(row["us"], *[row.get(name) for name in names]) for row in numbered]
    made = spark.createDataFrame(data, f"us bigint, {types}").withColumn("time", F.timestamp_micros("us"))
    return made.select(*EVENTS.names)


@pytest.fixture
def make_inputs(spark: SparkSession) -> MakeInputs:
    """Inputs from rows; the window is `days` long from START."""

    def make(
        rows: list[Row], *, days: float = 1.0, first_day: float = 0.0, limits: Limits | None = None
    ) -> Inputs:
        day = 86_400_000_000
        window = Window(START_US + int(first_day * day), START_US + int(days * day))
        events = frame(spark, rows)
        return Inputs(events, events, window, limits or Limits())

    return make


# Smaller than the defaults, so that a journal of some weeks has dead tokens and stale subscriptions.
LIMITS = Limits(dead_token_days=5, never_active_days=2, inactive_days=3, unreachable_days=2)
# Neither starts nor ends with a day, and leaves events before and after it.
WINDOW = Window(START_US + 2 * DAY_US + 12_345_678, START_US + 22 * DAY_US + 3_600_000_001)

Numbers = dict[str, list[Row]]


def all_numbers(events: DataFrame) -> Numbers:
    """Every table of every report, in one query: much of their work is the same."""
    events = events.where(F.unix_micros("time") < WINDOW.end)
    inputs = Inputs(events, events, WINDOW, LIMITS)
    tables = {name: table for report in REPORTS.values() for name, table in report(inputs).items()}
    texts = [
        table.select(F.lit(name).alias("name"), F.to_json(F.struct(*plain_columns(table))).alias("row"))
        for name, table in tables.items()
    ]
    numbers: Numbers = {name: [] for name in tables}
    for name, text in functools.reduce(DataFrame.unionByName, texts).collect():
        numbers[name].append({**dict.fromkeys(tables[name].columns), **json.loads(text)})
    return {name: sorted(rows, key=str) for name, rows in numbers.items()}


def read_journal(spark: SparkSession, folder: Path) -> tuple[DataFrame, int]:
    """The events of a journal and how many of its segments are bad."""
    checked = check_segments(spark, list_segments(spark, str(folder)))
    return read_events(spark, checked.good), len(checked.bad)


@pytest.fixture(scope="session")
def numbers(spark: SparkSession, journal: tuple[Path, Answers]) -> Numbers:
    """All numbers of the generated journal, from a single partition."""
    events, bad = read_journal(spark, journal[0])
    assert bad == 0
    return all_numbers(events.coalesce(1))


def plain_columns(table: DataFrame) -> list[Column]:
    """A table's columns; times in microseconds."""
    return [
        F.unix_micros(f.name).alias(f.name) if isinstance(f.dataType, TimestampType) else F.col(f.name)
        for f in table.schema.fields
    ]


def collected(table: DataFrame) -> list[Row]:
    """A table's rows as dictionaries, in order; times in microseconds."""
    return [row.asDict() for row in table.select(*plain_columns(table)).collect()]


def at(seconds: float) -> int:
    """Microseconds of a time `seconds` after START."""
    return START_US + round(seconds * 1_000_000)
