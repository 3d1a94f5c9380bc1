"""Running reports: the one place that makes a Spark session, reads, runs and writes."""

import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import TimestampType

from analytics.baseline import read_baseline
from analytics.inputs import Inputs, Limits, Window
from analytics.java import find_java
from analytics.page import ReportPage, TableData, render
from analytics.reports import capacity, delivery, health, incidents, stale, tokens
from analytics.segments import Checked, JournalNotFoundError, day_of
from analytics.spark_segments import check_segments, list_segments, read_events

Tables = Callable[[Inputs], Mapping[str, DataFrame]]

REPORTS: Mapping[str, Tables] = {
    "health": health.tables,
    "delivery": delivery.tables,
    "tokens": tokens.tables,
    "stale": stale.tables,
    "incidents": incidents.tables,
    "capacity": capacity.tables,
}
PAGE_NAME = "report.html"
ROWS_ON_PAGE = 2_000  # for plots; the tables on the page show fewer, the CSV files all

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ReportJob:
    """What to report on. Paths are local or any Hadoop file system's URL; times are microseconds."""

    names: list[str]
    journal: str
    out: str
    start: int | None = None
    end: int | None = None
    snapshots: str | None = None
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class ReportResult:
    """What was read and written."""

    window: Window
    checked: Checked
    tables: dict[str, int] = field(default_factory=dict)
    page: str = ""


@contextmanager
def spark_session(
    master: str, memory: str = "2g", more: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """A session on any master, stopped at the end. On a cluster the executors are sent this package.

    `more` are Spark settings that take precedence over those made here.
    """
    find_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.memory": memory,
        "spark.sql.files.ignoreMissingFiles": "true",  # retention may run at the same time
    }
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)),
        }
    builder = SparkSession.builder.master(master).appName("ntf-analytics")
    for name, value in {**settings, **(more or {})}.items():
        builder = builder.config(name, value)
    with tempfile.TemporaryDirectory(prefix="ntf-analytics-") as folder:
        spark = builder.getOrCreate()
        try:
            if not master.startswith("local"):
                send_package(spark, Path(folder) / "ntf_analytics.zip")
            yield spark
        finally:
            spark.stop()


def send_package(spark: SparkSession, archive: Path) -> None:
    """Make `analytics` and `store` importable on executors, which only need Python and pyarrow."""
    root = Path(__file__).parent.parent
    with zipfile.ZipFile(archive, "w") as file:
        for package in ("analytics", "store"):
            for source in sorted((root / package).rglob("*.py")):
                file.write(source, source.relative_to(root))
    spark.sparkContext.addPyFile(str(archive))


def run_reports(spark: SparkSession, job: ReportJob, progress: Progress) -> ReportResult:
    """Check segments, run the reports, write Parquet, CSV and one HTML page."""
    progress("looking for segments")
    paths = list_segments(spark, job.journal)
    if not paths:
        raise JournalNotFoundError(f"no closed journal segments in {job.journal}")
    paths = [path for path in paths if job.end is None or starts_before(path, job.end)]
    progress(f"checking {len(paths)} segments")
    checked = check_segments(spark, paths)
    inputs = make_inputs(spark, job, checked)
    result = ReportResult(inputs.window, checked, page=f"{job.out.rstrip('/')}/{PAGE_NAME}")
    sections: dict[str, list[TableData]] = {}
    for name in job.names:
        sections[name] = []
        for table, frame in REPORTS[name](inputs).items():
            progress(f"{name}: {table}")
            sections[name].append(write_table(spark, table, frame, job.out))
            result.tables[table] = sections[name][-1].total
    progress("writing the page")
    bad = [(segment.path, segment.error or "") for segment in checked.bad]
    page = ReportPage(inputs.window.start, inputs.window.end, len(checked.good), checked.rows, bad, sections)
    write_text(spark, result.page, render(page))
    return result


def starts_before(path: str, end: int) -> bool:
    """Whether a segment's day begins before `end`; segments outside of day folders always may."""
    day = day_of(path)
    return day is None or to_us(datetime.fromisoformat(day)) < end


def to_us(at: datetime) -> int:
    """A time, UTC unless it says otherwise, in microseconds."""
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return (at - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)


def make_inputs(spark: SparkSession, job: ReportJob, checked: Checked) -> Inputs:
    """Events before the window's end; the window defaults to all there is, ending with the last event."""
    events = read_events(spark, checked.good)
    us = F.unix_micros("time")
    if job.end is not None:
        events = events.where(us < job.end)
    row = events.agg(F.min(us), F.max(us)).first()
    first, last = row if row is not None else (None, None)
    if first is None or last is None:
        raise JournalNotFoundError(f"no readable events of the time asked for in {job.journal}")
    window = Window(
        job.start if job.start is not None else first, job.end if job.end is not None else last + 1
    )
    history = events
    if job.snapshots is not None:
        baseline = read_baseline(spark, job.snapshots, window)
        if baseline is None:
            raise JournalNotFoundError(f"no snapshot before the end of the time asked for in {job.snapshots}")
        history = events.unionByName(baseline)
    return Inputs(events, history, window, job.limits)


def write_table(spark: SparkSession, name: str, frame: DataFrame, out: str) -> TableData:
    """Write a table as Parquet and CSV, in its order, in one file each; returns its beginning."""
    base = out.rstrip("/")
    frame.coalesce(1).write.mode("overwrite").parquet(f"{base}/{name}.parquet")
    written = spark.read.schema(frame.schema).parquet(f"{base}/{name}.parquet")
    written.coalesce(1).write.mode("overwrite").csv(f"{base}/{name}.csv", header=True)
    # Times as text: collected as objects they would come in the driver's own time zone.
    texts = [
        F.col(f.name).cast("string").alias(f.name) if isinstance(f.dataType, TimestampType) else F.col(f.name)
        for f in written.schema.fields
    ]
    rows = [tuple(row) for row in written.select(*texts).limit(ROWS_ON_PAGE).collect()]
    total = len(rows) if len(rows) < ROWS_ON_PAGE else written.count()
    return TableData(name, written.columns, rows, total)


def write_text(spark: SparkSession, path: str, text: str) -> None:
    """Write a text file to any Hadoop file system."""
    context: Any = spark.sparkContext
    target = context._jvm.org.apache.hadoop.fs.Path(path)
    stream = target.getFileSystem(context._jsc.hadoopConfiguration()).create(target, True)
    try:
        stream.write(bytearray(text.encode()))
    finally:
        stream.close()
