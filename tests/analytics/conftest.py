"""One Spark session for all tests, and short ways to make journals."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import TimestampType

from analytics.generator import Answers, Plan, write_journal
from analytics.inputs import Inputs, Limits, Window
from analytics.job import spark_session
from analytics.schema import EVENTS
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
    with spark_session("local[2]", "1g", settings) as session:
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


def collected(table: DataFrame) -> list[Row]:
    """A table's rows as dictionaries, in order; times in microseconds."""
    columns = [
        F.unix_micros(f.name).alias(f.name) if isinstance(f.dataType, TimestampType) else F.col(f.name)
        for f in table.schema.fields
    ]
    return [row.asDict() for row in table.select(*columns).collect()]


def at(seconds: float) -> int:
    """Microseconds of a time `seconds` after START."""
    return START_US + round(seconds * 1_000_000)
