"""Queries of the operator's own: which tables they can name, what is shown, what is written; the example."""

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from analytics.errors import AnalyticsError
from analytics.generator import Plan, write_journal
from analytics.question import Question, ask_question, list_tables, show
from analytics.results import Rows
from store.journal_schema import JournalEvent
from tests.analytics.conftest import NOW_US

ROOT = Path(__file__).parent.parent.parent
PLAN = Plan(seed=3, events=4_000, days=3, servers=3, gaps=0, mass_disconnects=0, restarts=0)
DOCUMENTED = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("journal")
    write_journal(PLAN, folder)
    return folder


def ask(spark: SparkSession, journal: Path, query: str, **more: object) -> Rows:
    question = Question(query=query, journal=str(journal), now=NOW_US, **more)  # type: ignore[arg-type]
    return ask_question(spark, question, lambda text: None)


def test_tables_can_be_joined(spark: SparkSession, journal: Path) -> None:
    rows = ask(
        spark,
        journal,
        "SELECT h.server, h.subscriptions, count(s.subscription) AS living"
        " FROM health h JOIN states s USING (server) GROUP BY ALL ORDER BY h.server",
    )
    assert len(rows) == PLAN.servers
    assert all(row["living"] == row["subscriptions"] > 0 for row in rows)
    assert not list((journal / "_rollups").glob(".work*"))


def test_what_is_shown_is_limited_and_all_is_written(
    spark: SparkSession, journal: Path, tmp_path: Path
) -> None:
    out = tmp_path / "result"
    rows = ask(spark, journal, "SELECT * FROM subs", most=2, out=str(out))
    assert len(rows) == 2
    assert rows.count_of_all == pq.read_table(out).num_rows > 2
    with pytest.raises(PySparkException, match="PATH_ALREADY_EXISTS"):
        ask(spark, journal, "SELECT 1", out=str(out))


@pytest.mark.parametrize("inside", ["results", "date=2026-01-05/results"])
def test_results_do_not_become_segments(spark: SparkSession, journal: Path, inside: str) -> None:
    with pytest.raises(AnalyticsError, match="must not be within the journal"):
        ask(spark, journal, "SELECT 1", out=str(journal / inside))


def test_a_query_needs_columns(spark: SparkSession, journal: Path) -> None:
    with pytest.raises(AnalyticsError, match="write a SELECT"):
        ask(spark, journal, "CREATE TEMPORARY VIEW mine AS SELECT 1")


def test_an_unknown_table_is_named(spark: SparkSession, journal: Path) -> None:
    with pytest.raises(PySparkException, match="nowhere"):
        ask(spark, journal, "SELECT * FROM nowhere")


def test_formats() -> None:
    rows = Rows(["server", "token", "is_up"], [{"server": "a:1", "token": b"\x01\xff", "is_up": True}])
    assert show(rows, "csv") == "server,token,is_up\na:1,01ff,true\n"
    assert json.loads(show(rows, "json")) == {"server": "a:1", "token": "01ff", "is_up": True}
    assert show(rows, "table", width=80).split() == ["server", "token", "is_up", "a:1", "01ff", "true"]


def test_every_table_is_documented(spark: SparkSession, journal: Path) -> None:
    question = Question(query="", journal=str(journal), now=NOW_US)
    found = {row["table"]: row["columns"] for row in list_tables(spark, question, lambda text: None)}
    page = (ROOT / "docs" / "analytics-tables.md").read_text("utf-8")
    documented = dict(DOCUMENTED.findall(page))
    assert documented == found, "\n".join(f"| `{name}` | {columns} |" for name, columns in found.items())


def latencies_by_hour(journal: Path) -> dict[int, list[int]]:
    """Of all pushes, by hour of the day."""
    found: dict[int, list[int]] = {}
    for file in journal.glob("*/*.parquet"):
        for row in pq.read_table(
            file, columns=["time", "event", "latency_us"], partitioning=None
        ).to_pylist():
            if row["event"] == JournalEvent.PUSH_SENT:
                found.setdefault(row["time"].hour, []).append(row["latency_us"])
    return found


def test_the_example(spark: SparkSession, journal: Path) -> None:
    ask(spark, journal, "SELECT 1 AS one")  # makes the rollups
    example = runpy.run_path(str(ROOT / "contrib" / "spark" / "busy_hours.py"))
    hours = example["busy_hours"](spark, str(journal))
    sent = latencies_by_hour(journal)
    assert {row.hour: row.pushes for row in hours.collect()} == {hour: len(of) for hour, of in sent.items()}
    for row in hours.collect():  # exact up to half a bucket
        assert row.latency_ms_p95 == pytest.approx(np.percentile(sent[row.hour], 95) / 1000, rel=0.03)
    assert re.search(r"^\d\d:00 █+ +[\d,]+ pushes, p95 [\d,]+ ms$", example["plot"](hours), re.MULTILINE)
