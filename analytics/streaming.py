"""Keeping the health tables current: Spark watches the journal, and each batch brings the rollups up to date.

A batch only says that there are new segments. What becomes of them is the same as in a report: so are the
numbers, copies and late segments included, and a batch that a crash interrupted can be repeated.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from analytics.errors import JournalNotFoundError
from analytics.files import SEGMENT_SUFFIXES
from analytics.inputs import Limits
from analytics.job import current_rollups, folder, write_tables
from analytics.making import Progress
from analytics.reports import health
from analytics.spark import LazySpark
from analytics.warehouse import open_warehouse

LOOK_AGAIN = 0.5  # seconds
CHECKPOINT_FOLDER = "_checkpoint"
FILES = "path STRING, modificationTime TIMESTAMP, length LONG, content BINARY"


@dataclass(frozen=True, kw_only=True)
class StreamJob:
    """What to watch. Paths are local or any Hadoop file system's URL."""

    journal: str
    out: str
    now: Callable[[], int]
    "Microseconds."
    rollups: str | None = None
    every: int = 60
    "Seconds between two looks."
    once: bool = False
    "End when there is nothing new."
    limits: Limits = field(default_factory=Limits)


def keep_current(spark: LazySpark, job: StreamJob, progress: Progress) -> None:
    """Write the health tables now, and anew whenever there are new segments; returns if `once`."""
    query = start(spark, job, progress)
    try:
        with interrupts() as interrupted:
            while query.isActive and not interrupted.wait(LOOK_AGAIN):
                pass
        if interrupted.is_set():
            raise KeyboardInterrupt
        query.awaitTermination()  # raises what ended it
    finally:
        query.stop()
        gateway = spark.session.sparkContext._gateway
        assert gateway is not None
        gateway.gateway_property.pool.dict.clear()  # a thread of Py4J outlives all else and holds `on_batch`


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Set by Ctrl-C, which must not hit Py4J in the middle of a command."""
    event = threading.Event()
    before = signal.signal(signal.SIGINT, lambda number, frame: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def start(spark: LazySpark, job: StreamJob, progress: Progress) -> StreamingQuery:
    """Begin to watch."""
    os.umask(0o077)  # what reports tell is for their owner
    suffixes = ",".join(suffix.removeprefix(".") for suffix in SEGMENT_SUFFIXES)
    reader = spark.session.readStream.format("binaryFile").schema(FILES)
    reader = reader.option("recursiveFileLookup", "true").option("pathGlobFilter", f"*.{{{suffixes}}}")
    files = reader.load(job.journal).select("path")

    def on_batch(new: DataFrame, number: int) -> None:
        progress(f"{new.count()} new segments")
        update(spark, job, progress)

    writer = files.writeStream.foreachBatch(on_batch)
    writer = writer.option("checkpointLocation", f"{job.out.rstrip('/')}/{CHECKPOINT_FOLDER}")
    often = {"availableNow": True} if job.once else {"processingTime": f"{job.every} seconds"}
    return writer.trigger(**often).start()


def update(spark: LazySpark, job: StreamJob, progress: Progress) -> None:
    """Bring rollups and tables up to date."""
    try:
        with current_rollups(spark, job.journal, job.rollups, progress) as (checked, rollups):
            tables = health.tables(open_warehouse(rollups, limits=job.limits, now_us=job.now()))
    except JournalNotFoundError as error:  # nothing that can be read yet
        progress(str(error))
        return
    if bad := checked.bad:
        progress(f"{len(bad)} segments cannot be read; the last is {bad[-1].path}: {bad[-1].error}")
    write_tables(folder(spark, job.out), tables)
    progress(f"{len(tables['health_hours']):,} hours of {len(tables['health'])} routers are up to date")
