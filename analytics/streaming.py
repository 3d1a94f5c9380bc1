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

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from analytics.errors import JournalNotFoundError
from analytics.files import SEGMENT_SUFFIXES
from analytics.inputs import Limits
from analytics.job import answer, current_rollups, folder, work_folder
from analytics.reports import health
from analytics.rollups import Progress
from analytics.session import SparkOptions, resize
from analytics.warehouse import Rollups, open_warehouse

LOOK_AGAIN = 0.5  # seconds
CHECKPOINT_FOLDER = "_checkpoint"
ANY_AGE = "36500d"
"By default Spark leaves out files that are a week older than the newest: late segments may be."
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
    options: Callable[[], SparkOptions] | None = None
    "How Spark should run by now: journals grow while it does."


def keep_current(session: SparkSession, job: StreamJob, progress: Progress) -> None:
    """Write the health tables now, and anew whenever there are new segments; returns if `once`."""
    with running(session, job, progress) as query:
        with interrupts() as interrupted:
            while query.isActive and not interrupted.wait(LOOK_AGAIN):
                pass
        if interrupted.is_set():
            raise KeyboardInterrupt
        query.awaitTermination()  # raises what ended it


@contextmanager
def running(session: SparkSession, job: StreamJob, progress: Progress) -> Iterator[StreamingQuery]:
    """Watch until the block ends."""
    query = start(session, job, progress)
    try:
        yield query
    finally:
        query.stop()
        gateway = session.sparkContext._gateway
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


def start(session: SparkSession, job: StreamJob, progress: Progress) -> StreamingQuery:
    """Begin to watch."""
    os.umask(0o077)  # what reports tell is for their owner
    suffixes = ",".join(suffix.removeprefix(".") for suffix in SEGMENT_SUFFIXES)
    reader = session.readStream.format("binaryFile").schema(FILES)
    reader = reader.option("recursiveFileLookup", "true").option("pathGlobFilter", f"*.{{{suffixes}}}")
    files = reader.option("maxFileAge", ANY_AGE).load(job.journal).select("path")

    def on_batch(new: DataFrame, number: int) -> None:
        progress(f"{new.count()} new segments")
        update(session, job, progress)

    writer = files.writeStream.foreachBatch(on_batch)
    writer = writer.option("checkpointLocation", f"{job.out.rstrip('/')}/{CHECKPOINT_FOLDER}")
    often = {"availableNow": True} if job.once else {"processingTime": f"{job.every} seconds"}
    return writer.trigger(**often).start()


def update(session: SparkSession, job: StreamJob, progress: Progress) -> None:
    """Bring rollups and tables up to date."""
    if job.options is not None:
        resize(session, job.options())
    out = folder(session, job.out)
    try:
        with (
            current_rollups(session, job.journal, job.rollups, progress) as (checked, made),
            work_folder(session, job.out) as work,
        ):
            warehouse = open_warehouse(Rollups(session, made, job.now(), work), limits=job.limits)
            tables = {
                name: answer(warehouse, name, query, out, for_others=False)
                for name, query in health.TABLES.items()
            }
    except JournalNotFoundError as error:  # nothing that can be read yet
        progress(str(error))
        return
    if bad := checked.bad:
        progress(f"{len(bad)} segments cannot be read; the last is {bad[-1].path}: {bad[-1].error}")
    hours, routers = tables["health_hours"].count_of_all, len(tables["health"])
    progress(f"{hours:,} hours of {routers} routers are up to date")
