"""`ntf-analytics sql`: a question of the operator's own, over rollups, derived tables and report tables."""

import csv
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from io import StringIO
from typing import Any

from pyspark.sql import SparkSession
from rich.console import Console
from rich.table import Table

from analytics.errors import AnalyticsError
from analytics.files import is_within
from analytics.inputs import Limits
from analytics.job import REPORTS, ReportJob, ask, current_rollups, work_folder
from analytics.lives import DERIVED
from analytics.results import Rows
from analytics.rollups import Progress
from analytics.tables import WORD
from analytics.warehouse import Rollups, Warehouse

BASE_TABLES = ("life", "hours", "tokens", "history")
REPORT_TABLES: Mapping[str, str] = {
    name: query for tables in REPORTS.values() for name, query in tables.items()
}
FORMATS = ("table", "csv", "json")
NO_RESULT = "the query returns no columns: write a SELECT"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to ask of which journal. Paths are local or Hadoop URLs; times are microseconds."""

    query: str
    journal: str
    now: int
    start: int | None = None
    end: int | None = None
    snapshots: str | None = None
    rollups: str | None = None
    out: str | None = None
    "Executors write the whole result there as Parquet files."
    most: int = 1000
    "Rows that are shown."
    limits: Limits = field(default_factory=Limits)

    @property
    def job(self) -> ReportJob:
        """The same journal and window, as reports take them."""
        return ReportJob(
            names=[],
            journal=self.journal,
            out=self.out or "",
            now=self.now,
            start=self.start,
            end=self.end,
            snapshots=self.snapshots,
            rollups=self.rollups,
            limits=self.limits,
        )


@contextmanager
def opened(session: SparkSession, question: Question, progress: Progress) -> Iterator[Warehouse]:
    """The tables of the question's window, with rollups that are up to date."""
    os.umask(0o077)  # results are for their owner
    with (
        current_rollups(session, question.journal, question.rollups, progress) as (_, made),
        work_folder(session, made.path) as work,
    ):
        yield ask(session, question.job, Rollups(session, made, question.now, work))


def ask_question(session: SparkSession, question: Question, progress: Progress) -> Rows:
    """Bring the rollups up to date and return the first rows of the result."""
    if question.out is not None and is_within(question.out, question.journal):
        raise AnalyticsError("--out must not be within the journal")
    with opened(session, question, progress) as warehouse:
        progress("running the query")
        frame = with_reports(warehouse, question.query).frame(question.query)
        if not frame.columns:
            raise AnalyticsError(NO_RESULT)
        if question.out is not None:
            frame.write.mode("errorifexists").parquet(question.out)
        return warehouse.tables.rows("sql", frame, question.most)


def with_reports(warehouse: Warehouse, query: str) -> Warehouse:
    """The warehouse, which also has the report tables that the query mentions."""
    for name in set(WORD.findall(query)) & REPORT_TABLES.keys():
        warehouse.tables.add(name, warehouse.frame(REPORT_TABLES[name]))
    return warehouse


def list_tables(session: SparkSession, question: Question, progress: Progress) -> Rows:
    """Every table that a query can name, with the names and types of its columns."""
    with opened(session, question, progress) as warehouse:
        return Rows(["table", "columns"], [{"table": n, "columns": c} for n, c in schemas(warehouse).items()])


def schemas(warehouse: Warehouse) -> dict[str, str]:
    """The columns of every table, with their types."""
    found = {}
    for name in (*BASE_TABLES, *DERIVED, *REPORT_TABLES):
        schema = warehouse.frame(REPORT_TABLES.get(name, f"SELECT * FROM {name}")).schema
        found[name] = ", ".join(f"{each.name} {each.dataType.simpleString()}" for each in schema)
    return found


def show(rows: Rows, how: str, width: int | None = None) -> str:
    """The rows as a table for a terminal, as CSV, or as JSON with an object per line."""
    if how == "json":
        return "".join(f"{json.dumps(dict(row), default=as_text)}\n" for row in rows)
    texts = [[as_text(row[name]) for name in rows.columns] for row in rows]
    file = StringIO()
    if how == "csv":
        csv.writer(file, lineterminator="\n").writerows([rows.columns, *texts])
        return file.getvalue()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows.columns:
        table.add_column(name, overflow="fold")
    for line in texts:
        table.add_row(*line)
    Console(file=file, width=width, markup=False, highlight=False).print(table)
    return file.getvalue()


def as_text(value: Any) -> str:
    """A value as people write it: bytes in hex, times in ISO 8601."""
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, bool):
        return str(value).lower()
    return value.isoformat() if isinstance(value, datetime) else str(value)
