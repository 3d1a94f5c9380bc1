"""Running reports: rollups up to date, questions asked, results written."""

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from analytics.errors import JournalNotFoundError
from analytics.figures import compared, figures, window_before
from analytics.files import ROLLUPS_FOLDER, Folder, HadoopFolder, LocalFolder, is_local
from analytics.findings import Thresholds, find
from analytics.inputs import Limits, Window
from analytics.manifest import UNKNOWN_DAY, day_of_folder
from analytics.page import ROUTERS_SHOWN, ReportPage, render
from analytics.reports import capacity, delivery, health, incidents, stale, tokens
from analytics.results import Rows, as_csv, as_parquet, iso_time
from analytics.rollups import Progress, update_rollups
from analytics.segments import Checked, Segment
from analytics.suppression import ABOUT_SOMEBODY, suppressed
from analytics.tables import write
from analytics.warehouse import Rollups, Warehouse, open_warehouse

REPORTS: Mapping[str, Mapping[str, str]] = {
    "health": health.TABLES,
    "delivery": delivery.TABLES,
    "tokens": tokens.TABLES,
    "stale": stale.TABLES,
    "incidents": incidents.TABLES,
    "capacity": capacity.TABLES,
}
COMPARED = {"health": "health", "delivery": "delivery_providers"}
"Reports and their tables that figures are taken from."
AT_ONCE = 3
"Tables: while one is planned on the driver, others are computed."
PAGE_NAME = "report.html"
WORK_FOLDER = ".work-"
SUMMARY_NAME = "summary.json"
MOST_ROWS = 10_000
"Of a table, on the driver."
SEARCHED = frozenset({"health", "health_outages", "incidents_gaps", "incidents_refused", "incidents_tokens"})
"Tables whose every row may be a problem."
TOLD_OF_ROUTERS = ("server", "score", "subscriptions", "active", "lost", "availability")


@dataclass(frozen=True, kw_only=True)
class ReportJob:
    """What to report on. Paths are local or any Hadoop file system's URL; times are microseconds."""

    names: list[str]
    journal: str
    out: str
    now: int
    start: int | None = None
    end: int | None = None
    snapshots: str | None = None
    rollups: str | None = None
    full: bool = False
    for_others: bool = False
    "What leaves the machine: no page, no pseudonyms, no small numbers."
    limits: Limits = field(default_factory=Limits)
    thresholds: Thresholds = field(default_factory=Thresholds)

    @property
    def result(self) -> str:
        """What to look at: the page, or the folder of the tables."""
        return self.out if self.for_others else f"{self.out.rstrip('/')}/{PAGE_NAME}"


@dataclass(frozen=True)
class Before:
    """What figures and routers' scores were."""

    figures: dict[str, float]
    scores: dict[str, float]


def run_reports(session: SparkSession, job: ReportJob, progress: Progress) -> ReportPage:
    """Bring the rollups up to date, ask them, write Parquet, CSV and one HTML page."""
    os.umask(0o077)  # what reports tell is for their owner
    out = folder(session, job.out)
    with (
        current_rollups(session, job.journal, job.rollups, progress, full=job.full) as (checked, made),
        work_folder(session, job.out) as work,
    ):
        progress("reading rollups")
        rollups = Rollups(session, made, job.now, work)
        warehouse = ask(session, job, rollups)
        sections = dict(answered(warehouse, job, out, progress))
        tables = {name: rows for section in sections.values() for name, rows in section.items()}
        counted = figures(warehouse, tables)
        before = look_back(session, job, rollups, warehouse)
    progress("writing results")
    page = ReportPage(
        window=warehouse.window,
        checked=checked,
        notes=[*warehouse.notes, *size_notes(tables)],
        findings=find(tables, job.thresholds, of_the_time(checked.bad, warehouse.window)),
        figures=compared(counted, None if before is None else before.figures),
        sections=sections,
    )
    if not job.for_others:
        out.write(SUMMARY_NAME, json.dumps(summary(page, before), indent=1))
        out.write(PAGE_NAME, render(page))
    return page


def answered(
    warehouse: Warehouse, job: ReportJob, out: Folder, progress: Progress
) -> Iterator[tuple[str, dict[str, Rows]]]:
    """Each report with what is shown of its tables, which are written as a whole."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        futures: dict[str, dict[str, Future[Rows]]] = {
            report: {
                name: threads.submit(answer, warehouse, name, query, out, for_others=job.for_others)
                for name, query in REPORTS[report].items()
            }
            for report in job.names
        }
        for report, tables in futures.items():
            progress(report)
            yield report, {name: future.result() for name, future in tables.items()}


def answer(warehouse: Warehouse, name: str, query: str, out: Folder, *, for_others: bool) -> Rows:
    """What is shown of a table; all of it is written, a large one by executors."""
    frame = warehouse.frame(query)
    rows = warehouse.tables.rows(name, frame, MOST_ROWS)
    if not for_others or name not in ABOUT_SOMEBODY:
        write_table(
            warehouse, name, suppressed(frame) if for_others else frame, None if for_others else rows, out
        )
    if rows.is_whole or name != "health_hours":
        return rows
    return Rows(rows.columns, hours_shown(warehouse, name, frame), rows.count_of_all)


def write_table(warehouse: Warehouse, name: str, frame: DataFrame, known: Rows | None, out: Folder) -> None:
    """Write a table twice, for programs and for people."""
    rows = warehouse.tables.rows(name, frame, MOST_ROWS) if known is None else known
    if not rows.is_whole:
        write(name, frame, out)
        return
    out.write(f"{name}.parquet", as_parquet(rows))
    out.write(f"{name}.csv", as_csv(rows))


def hours_shown(warehouse: Warehouse, name: str, hours: DataFrame) -> Rows:
    """Of many routers, the hours of those that the page shows."""
    worst = warehouse.rows("health", health.TABLES["health"])[:ROUTERS_SHOWN]
    shown = hours.where(F.col("server").isin([row["server"] for row in worst]))
    return warehouse.tables.rows(name, shown, MOST_ROWS * ROUTERS_SHOWN)


def size_notes(tables: Mapping[str, Rows]) -> list[str]:
    """Which tables the page shows in part only."""
    return [
        f"{name} has {rows.count_of_all:,} rows; problems are looked for in the first {len(rows):,}."
        for name, rows in tables.items()
        if not rows.is_whole and name in SEARCHED
    ]


@contextmanager
def current_rollups(
    session: SparkSession, journal: str, rollups: str | None, progress: Progress, *, full: bool = False
) -> Iterator[tuple[Checked, Folder]]:
    """What was found in a journal, and its rollups up to date, while no other process changes them."""
    made = folder(session, rollups or f"{journal.rstrip('/')}/{ROLLUPS_FOLDER}")
    with made.reserved():
        yield update_rollups(session, folder(session, journal), made, progress, full=full), made


@contextmanager
def work_folder(session: SparkSession, out: str) -> Iterator[Folder]:
    """A folder that executors can reach, for tables that are too large for memory; removed in the end."""
    folder(session, out).remove_left(WORK_FOLDER)
    name = f"{WORK_FOLDER}{uuid.uuid4().hex}"
    work = folder(session, f"{out.rstrip('/')}/{name}")
    try:
        yield work
    finally:
        work.remove("")


def of_the_time(bad: Sequence[Segment], window: Window) -> list[str]:
    """Bad segments but those whose folder says that they are older or newer: these stay what they are."""
    days = (iso_time(window.start)[:10], iso_time(window.end - 1)[:10])
    return [
        segment.path
        for segment in bad
        if (day := day_of_folder(segment.path)) == UNKNOWN_DAY or days[0] <= day <= days[1]
    ]


def look_back(session: SparkSession, job: ReportJob, rollups: Rollups, warehouse: Warehouse) -> Before | None:
    """The time of the same length before; None if not enough is known of it."""
    window = window_before(warehouse)
    if window is None or job.for_others:
        return None
    try:
        earlier = ask(session, replace(job, start=window.start, end=window.end), rollups)
    except JournalNotFoundError:  # no snapshot is so old
        return None
    names = [table for report, table in COMPARED.items() if report in job.names]
    tables = {
        table: earlier.rows(table, query, MOST_ROWS)
        for queries in REPORTS.values()
        for table, query in queries.items()
        if table in names
    }
    scores = {row["server"]: row["score"] for row in tables.get("health", ())}
    return Before(figures(earlier, tables), scores)


def summary(page: ReportPage, before: Before | None) -> dict[str, Any]:
    """The report for machines."""
    scores = before.scores if before is not None else {}
    return {
        "from": iso_time(page.window.start),
        "to": iso_time(page.window.end),
        "events": page.checked.rows,
        "bad_segments": len(page.checked.bad),
        "notes": list(page.notes),
        "problems": [{"kind": f.kind, "text": f.text, "is_over": f.is_over} for f in page.findings],
        "figures": page.figures,
        "routers": [
            {name: row[name] for name in TOLD_OF_ROUTERS} | {"previous_score": scores.get(row["server"])}
            for row in page.tables.get("health", ())
        ],
    }


def folder(session: SparkSession, path: str) -> Folder:
    """A folder here, or one that only Spark's libraries can reach."""
    return LocalFolder(path) if is_local(path) else HadoopFolder(session.sparkContext, path)


def ask(session: SparkSession, job: ReportJob, rollups: Rollups) -> Warehouse:
    """The rollups, ready for questions."""
    snapshots = None if job.snapshots is None else folder(session, job.snapshots)
    return open_warehouse(rollups, limits=job.limits, start=job.start, end=job.end, snapshots=snapshots)
