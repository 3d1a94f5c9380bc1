"""All reports over journals of growing size: time and peak memory, next to DuckDB's on the same files."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from analytics.class_archive import archive_options
from analytics.files import ROLLUPS_FOLDER
from analytics.java import find_java
from analytics.manifest import MANIFEST_NAME, Manifest
from bench.measure import Row, beside, figure
from bench.part import Part
from tests.analytics.standalone import standalone

POLL_SECONDS = 0.2
ARCHIVE_DEADLINE = 400.0
WRITES_ARCHIVE = "-XX:ArchiveClassesAtExit"
DUCKDB = "DuckDB"
NOTHING_KNOWN, NEW_DAY, NOTHING_NEW = "nothing known yet", "after one new day", "nothing new"
SECONDS_WANTED = {1_000_000: 22.0, 10_000_000: 40.0}
"From an empty folder to all reports."
LATER_WANTED = {NEW_DAY: 18.0, NOTHING_NEW: 12.0}
MEGABYTES_WANTED = {10_000_000: 2048.0}
MILLION = 1_000_000
CPU_PER_MILLION_WANTED = 3.0
GENERATED = 40_000_000
"The most at once: a generator holds all of its events in memory."
TIMES_FASTER = 1.6
"With two workers instead of one."
SMALL_EXECUTOR, LARGE_EXECUTOR = "512m", "1g"
TIMES_MORE = 10
"Events of the second run with small executors, beside the first."
SAME_MEMORY = 0.8
"Of the driver, with so many more events."
_DUCKDB = """
import sys
from analytics.inputs import Limits, Window
from tests.analytics.reference import TABLES, Reference
import duckdb
files = sys.argv[1] + "/*/*.parquet"
times = "SELECT min(epoch_us(time)), max(epoch_us(time))"
first, last = duckdb.sql(f"{times} FROM read_parquet('{files}', hive_partitioning = false)").fetchall()[0]
reference = Reference(files, Window(first, last + 1), Limits())
for table in TABLES:
    reference.table(table)
"""


@dataclass(frozen=True)
class Cost:
    """What one run took: seconds of wall time and of CPU, and megabytes at their peak."""

    seconds: float
    cpu: float
    megabytes: float
    driver_megabytes: float
    "Of these, the command itself: without executors, unless they are in its process."


def logged(folder: Path) -> Iterator[dict[str, Any]]:
    """The events that Spark logged in one run."""
    for log in folder.iterdir():
        yield from map(json.loads, log.read_text().splitlines())


def jobs_of(folder: Path) -> int:
    """How many jobs Spark had in one run."""
    return sum(event["Event"] == "SparkListenerJobStart" for event in logged(folder))


def rows_read(rollups: Path) -> int:
    """A segment is read once for each day that it has events of."""
    manifest = Manifest.from_json((rollups / MANIFEST_NAME).read_text())
    return sum(segment.rows * len(segment.days) for segment in manifest.segments.values())


def seconds_with_tasks(folder: Path) -> float:
    """How long any executor had something to do."""
    tasks = [event["Task Info"] for event in logged(folder) if event["Event"] == "SparkListenerTaskEnd"]
    busy, until = 0, 0
    for task in sorted(tasks, key=lambda task: task["Launch Time"]):
        busy += max(0, task["Finish Time"] - max(until, task["Launch Time"]))
        until = max(until, task["Finish Time"])
    return busy / 1000


def with_event_log(folder: Path) -> list[str]:
    """Options of a report whose Spark tells what it does."""
    folder.mkdir()
    told = {"enabled": "true", "dir": f"file://{folder}", "rolling.enabled": "false", "compress": "false"}
    return [word for name, value in told.items() for word in ("--conf", f"spark.eventLog.{name}={value}")]


def run(command: list[str], *, with_cluster: bool = False) -> Cost:
    """Run a command and watch its whole process tree, or all that this process started."""
    started = time.perf_counter()
    before = tree_usage(psutil.Process())[1] if with_cluster else 0.0
    peak, driver, cpu = 0.0, 0.0, 0.0
    with tempfile.TemporaryFile() as output:
        process = psutil.Popen(command, stdout=output, stderr=output)
        while process.poll() is None:
            own, used = tree_usage(process)
            size, used = tree_usage(psutil.Process()) if with_cluster else (own, used)
            peak, driver, cpu = max(peak, size), max(driver, own), max(cpu, used)
            time.sleep(POLL_SECONDS)
        output.seek(0)
        if process.returncode:
            raise RuntimeError(output.read().decode(errors="replace"))
    return Cost(time.perf_counter() - started, cpu - before, peak / 1e6, driver / 1e6)


def tree_usage(process: psutil.Process) -> tuple[float, float]:
    """Resident bytes and CPU seconds of a process and all its children."""
    size = used = 0.0
    try:
        for member in [process, *process.children(recursive=True)]:
            times = member.cpu_times()
            size += member.memory_info().rss
            used += times.user + times.system
    except psutil.NoSuchProcess:
        pass
    return size, used


def report(folder: Path, *more: str) -> list[str]:
    """The command for all reports over the journal in a folder."""
    where = ["--journal", str(folder / "journal"), "--out", str(folder / "out")]
    return [sys.executable, "-m", "analytics", "report", "all", *where, *more]


def generate(events: int, folder: Path) -> None:
    """A journal of so many events, by as many daemons as it takes."""
    command = [sys.executable, "-m", "analytics", "generate", "--out", str(folder / "journal")]
    for seed, before in enumerate(range(0, events, GENERATED), 1):
        run([*command, "--events", str(min(GENERATED, events - before)), "--seed", str(seed)])


def wait_for_archive() -> None:
    """Return when reports use the archive of classes that the last one has written."""
    deadline = time.monotonic() + ARCHIVE_DEADLINE
    while WRITES_ARCHIVE in archive_options(find_java()):
        if time.monotonic() > deadline:
            raise RuntimeError("Java wrote no archive of classes")
        time.sleep(POLL_SECONDS)


def costs(folder: Path, *, new_day: bool) -> dict[str, Cost]:
    """Reports and DuckDB on the journal in a folder."""
    journal = folder / "journal"
    if WRITES_ARCHIVE in archive_options(find_java()):  # by the first of all reports: not what is measured
        run(report(folder))
        wait_for_archive()
        shutil.rmtree(journal / ROLLUPS_FOLDER)
    found = {NOTHING_KNOWN: run(report(folder, *with_event_log(folder / "events")))}
    if new_day:
        shutil.rmtree(journal / ROLLUPS_FOLDER)
        last = max(journal.glob("date=*"))
        last.rename(folder / last.name)
        run(report(folder))
        (folder / last.name).rename(last)
        found[NEW_DAY] = run(report(folder))
    found[NOTHING_NEW] = run(report(folder))
    found[DUCKDB] = run([sys.executable, "-c", _DUCKDB, str(journal)])
    return found


def on_cluster(workers: int, folder: Path, executor: str = SMALL_EXECUTOR) -> tuple[Cost, float]:
    """The cost, and the seconds in which executors had tasks; each worker and its executor on a core."""
    place = folder / f"cluster-{workers}"
    place.mkdir()
    cores = sorted(os.sched_getaffinity(0))[:2]
    with standalone(place, workers=workers, memory="2g", cores=cores) as cluster:
        options = ["--master", cluster.url, "--rollups", str(place / "rollups")]
        options += ["--conf", "spark.driver.host=127.0.0.1", "--conf", f"spark.executor.memory={executor}"]
        log = with_event_log(place / "events")
        cost = run(report(folder, *options, *log), with_cluster=True)
    return cost, seconds_with_tasks(place / "events")


def on_clusters(folder: Path, amount: int) -> list[Row]:
    """The same journal on standalone clusters of one and of two workers."""
    generate(amount, folder)
    (one, one_busy), (two, two_busy) = (on_cluster(workers, folder) for workers in (1, 2))
    what, peer = f"{amount:,} events on two workers", "one worker"
    return [
        figure(f"{what}: time", "s", two.seconds, peer=beside(peer, one.seconds, at_least=TIMES_FASTER)),
        figure(f"{what}: of it, executors had tasks", "s", two_busy, peer=beside(peer, one_busy)),
        figure(f"{what}: CPU", "s CPU", two.cpu, peer=beside(peer, one.cpu)),
    ]


def in_small_executors(folder: Path, events: int) -> list[Row]:
    """A tenth of the events and all of them, on two workers whose memory is limited."""
    rows: list[Row] = []
    driver: Row | None = None
    for amount in (events // TIMES_MORE, events):
        place = folder / str(amount)
        place.mkdir()
        generate(amount, place)
        cost, _ = on_cluster(2, place, LARGE_EXECUTOR)
        shutil.rmtree(place)
        what = f"{amount:,} events, executors of {LARGE_EXECUTOR}"
        peer = (
            None if driver is None else beside("a tenth of the events", *driver.values, at_least=SAME_MEMORY)
        )
        driver = figure(f"{what}: memory of the driver", "MB", cost.driver_megabytes, peer=peer)
        rows += [
            figure(f"{what}: time", "s", cost.seconds),
            figure(f"{what}: CPU", "s CPU", cost.cpu),
            driver,
        ]
    return rows


def at_size(folder: Path, amount: int, *, new_day: bool) -> tuple[list[Row], Cost]:
    """The figures of one size, and the cost of a first run."""
    generate(amount, folder)
    found = costs(folder, new_day=new_day)
    duckdb = found.pop(DUCKDB)
    rows = []
    for name, cost in found.items():
        what = f"{amount:,} events, {name}"
        seconds = SECONDS_WANTED.get(amount) if name == NOTHING_KNOWN else LATER_WANTED[name]
        megabytes = MEGABYTES_WANTED.get(amount)
        rows += [
            figure(f"{what}: time", "s", cost.seconds, aim=seconds, peer=beside(DUCKDB, duckdb.seconds)),
            figure(f"{what}: CPU", "s CPU", cost.cpu, peer=beside(DUCKDB, duckdb.cpu)),
            figure(
                f"{what}: memory", "MB", cost.megabytes, aim=megabytes, peer=beside(DUCKDB, duckdb.megabytes)
            ),
        ]
    what = f"{amount:,} events, {NOTHING_KNOWN}"
    rows.append(figure(f"{what}: jobs of Spark", "in all", jobs_of(folder / "events")))
    read = rows_read(folder / "journal" / ROLLUPS_FOLDER)
    rows.append(figure(f"{what}: rows read", "in all", read))
    return rows, found[NOTHING_KNOWN]


def measure(
    folder: Path,
    *,
    events: tuple[int, ...] = (1_000_000,),
    new_day: int = 0,
    cluster_events: int = 0,
    small_executor_events: int = 0,
) -> list[Row]:
    rows: list[Row] = []
    first: tuple[int, Cost] | None = None
    for amount in events:
        place = folder / str(amount)
        place.mkdir()
        found, whole = at_size(place, amount, new_day=bool(new_day))
        rows += found
        if first is None:
            first = amount, whole
        else:
            more = (whole.cpu - first[1].cpu) / ((amount - first[0]) / MILLION)
            what = f"from {first[0]:,} to {amount:,} events: CPU of each further million"
            rows.append(figure(what, "s CPU", more, aim=CPU_PER_MILLION_WANTED))
        shutil.rmtree(place)
    if cluster_events:
        (folder / "cluster").mkdir()
        rows += on_clusters(folder / "cluster", cluster_events)
    if small_executor_events:
        (folder / "small").mkdir()
        rows += in_small_executors(folder / "small", small_executor_events)
    return rows


ANALYTICS = Part(
    name="analytics",
    title="Analytics",
    measure=measure,
    quick={"events": (50_000,)},
    repeats=1,
    seconds=70,
    quick_seconds=18,
    why="Reports run beside a daemon, on the same machine.",
    how="All reports as processes, the JVM and Python's workers included; memory at its peak. Beside them"
    " DuckDB with 14 of the tables, from the same files, each time from all events. All of it:"
    " `--only analytics --set analytics.events=1000000,10000000 analytics.new_day=1`. With"
    " `analytics.cluster_events=40000000` also on standalone clusters of one and two workers, each pinned to"
    " a core of its own; the driver uses what they leave. With `analytics.small_executor_events=100000000`"
    " also with executors of 1 GB, for a tenth of the events and for all of them.",
    bound="Spark's start and the planning of its queries, which take the same time whatever there is to do;"
    " then reading events that no rollup holds yet.",
)
