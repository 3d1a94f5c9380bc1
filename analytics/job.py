"""Running reports: rollups up to date, questions asked, results written."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from analytics.errors import JournalNotFoundError
from analytics.figures import compared, figures, window_before
from analytics.files import ROLLUPS_FOLDER, Folder, HadoopFolder, LocalFolder, is_local
from analytics.findings import Thresholds, find
from analytics.inputs import Limits, Window
from analytics.making import Progress, update_rollups
from analytics.manifest import UNKNOWN_DAY, day_of_folder
from analytics.page import ReportPage, render
from analytics.reports import capacity, delivery, health, incidents, stale, tokens
from analytics.segments import Checked, Segment
from analytics.spark import LazySpark
from analytics.tables import TIME_COLUMNS, as_csv, as_parquet, iso_time
from analytics.warehouse import Row, Rows, Warehouse, open_warehouse

REPORTS: Mapping[str, Callable[[Warehouse], dict[str, Rows]]] = {
    "health": health.tables,
    "delivery": delivery.tables,
    "tokens": tokens.tables,
    "stale": stale.tables,
    "incidents": incidents.tables,
    "capacity": capacity.tables,
}
COMPARED = ("health", "delivery")
"Reports that figures are taken from."
PAGE_NAME = "report.html"
SUMMARY_NAME = "summary.json"
FEWEST = 5
TOLD_OF_ROUTERS = ("server", "score", "subscriptions", "active", "lost", "availability")
ABOUT_SOMEBODY = frozenset({"tokens_dead", "stale_subscriptions"})


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


def run_reports(spark: LazySpark, job: ReportJob, progress: Progress) -> ReportPage:
    """Bring the rollups up to date, ask them, write Parquet, CSV and one HTML page."""
    os.umask(0o077)  # what reports tell is for their owner
    with current_rollups(spark, job.journal, job.rollups, progress, full=job.full) as (checked, rollups):
        progress("reading rollups")
        warehouse = ask(spark, job, rollups)
        before = look_back(spark, job, rollups, warehouse)
    sections = {}
    for name in job.names:
        progress(name)
        sections[name] = REPORTS[name](warehouse)
    progress("writing results")
    tables = {name: rows for section in sections.values() for name, rows in section.items()}
    page = ReportPage(
        window=warehouse.window,
        checked=checked,
        notes=warehouse.notes,
        findings=find(tables, job.thresholds, of_the_time(checked.bad, warehouse.window)),
        figures=compared(figures(warehouse, tables), None if before is None else before.figures),
        sections=sections,
    )
    out = folder(spark, job.out)
    write_tables(out, suppressed(tables) if job.for_others else tables)
    if not job.for_others:
        out.write(SUMMARY_NAME, json.dumps(summary(page, before), indent=1))
        out.write(PAGE_NAME, render(page))
    return page


@contextmanager
def current_rollups(
    spark: LazySpark, journal: str, rollups: str | None, progress: Progress, *, full: bool = False
) -> Iterator[tuple[Checked, Path]]:
    """What was found in a journal, and its rollups up to date, while no other process changes them."""
    made = folder(spark, rollups or f"{journal.rstrip('/')}/{ROLLUPS_FOLDER}")
    with made.reserved():
        checked = update_rollups(folder(spark, journal), made, spark, progress, full=full)
        with made.local_copy() as local:
            yield checked, local


def of_the_time(bad: Sequence[Segment], window: Window) -> list[str]:
    """Bad segments but those whose folder says that they are older or newer: these stay what they are."""
    days = (iso_time(window.start)[:10], iso_time(window.end - 1)[:10])
    return [
        segment.path
        for segment in bad
        if (day := day_of_folder(segment.path)) == UNKNOWN_DAY or days[0] <= day <= days[1]
    ]


def look_back(spark: LazySpark, job: ReportJob, rollups: Path, warehouse: Warehouse) -> Before | None:
    """The time of the same length before; None if not enough is known of it."""
    window = window_before(warehouse)
    if window is None:
        return None
    try:
        earlier = ask(spark, replace(job, start=window.start, end=window.end), rollups)
    except JournalNotFoundError:  # no snapshot is so old
        return None
    names = [name for name in COMPARED if name in job.names]
    tables = {table: rows for name in names for table, rows in REPORTS[name](earlier).items()}
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


def folder(spark: LazySpark, path: str) -> Folder:
    """A folder here, or one that only Spark's libraries can reach."""
    return LocalFolder(path) if is_local(path) else HadoopFolder(spark.context, path)


def ask(spark: LazySpark, job: ReportJob, rollups: Path) -> Warehouse:
    """The rollups, ready for questions."""
    kept = nullcontext() if job.snapshots is None else folder(spark, job.snapshots).local_copy()
    with kept as snapshots:
        return open_warehouse(
            rollups, limits=job.limits, now_us=job.now, start=job.start, end=job.end, snapshots=snapshots
        )


def suppressed(tables: Mapping[str, Rows]) -> dict[str, Rows]:
    """Tables for others: numbers from 1 to 4 could be about somebody, lists of pseudonyms are."""
    kept = {name: rows for name, rows in tables.items() if name not in ABOUT_SOMEBODY}
    return {name: Rows(rows.columns, [without_small(row) for row in rows]) for name, rows in kept.items()}


def without_small(row: Row) -> Row:
    """A small number is none, and so is what may tell it: a share, or the difference of two large ones."""
    has_small = any(is_small(value) for value in row.values())
    return {name: coarse(name, value, has_small=has_small) for name, value in row.items()}


def coarse(name: str, value: Any, *, has_small: bool) -> Any:
    """A value that tells nothing about single people."""
    if isinstance(value, float):
        return None if has_small else float(f"{value:.2g}")
    if name in TIME_COLUMNS or isinstance(value, bool) or not isinstance(value, int):
        return value
    return None if is_small(value) else value - value % FEWEST


def is_small(value: Any) -> bool:
    """Whether it counts too few people."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < FEWEST


def write_tables(out: Folder, tables: Mapping[str, Rows]) -> None:
    """Every table twice, for programs and for people."""
    for name, rows in tables.items():
        out.write(f"{name}.parquet", as_parquet(rows))
        out.write(f"{name}.csv", as_csv(rows))
