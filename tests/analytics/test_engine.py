"""All that is told is Spark's work."""

import ast
import json
from pathlib import Path

from pyspark.sql import SparkSession

import analytics
from analytics.generator import Plan, write_journal
from analytics.job import REPORTS, ReportJob, run_reports
from analytics.lives import DERIVED
from analytics.rollups import ROLLUPS
from analytics.tables import WORD
from analytics.warehouse import BASE, SNAPSHOT
from tests.analytics.conftest import NOW_US, QUERIES

OTHER_ENGINES = {"duckdb", "pandas", "polars", "datafusion", "chdb", "dask", "modin", "sqlite3"}
READS_THE_STORE = {"snapshot.py": {"sqlite3"}}
PLAN = Plan(seed=5, events=4_000, days=8, servers=3, gaps=0, mass_disconnects=0, restarts=1)


def imported(path: Path) -> set[str]:
    """Top-level names of all imports, wherever in the file they stand."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_no_other_query_engine_is_imported() -> None:
    modules = sorted(Path(analytics.__file__).parent.rglob("*.py"))
    assert len(modules) > 20
    others = {path.name: found for path in modules if (found := imported(path) & OTHER_ENGINES)}
    assert others == READS_THE_STORE


def jobs(spark: SparkSession) -> list[str]:
    """What each of Spark's jobs until now was for."""
    (log,) = Path(str(spark.conf.get("spark.eventLog.dir")).removeprefix("file://")).iterdir()
    events = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    started = [event for event in events if event["Event"] == "SparkListenerJobStart"]
    return [event["Properties"].get("spark.job.description", "") for event in started]


def test_a_derived_table_does_not_need_itself() -> None:
    for name, query in {**BASE, **SNAPSHOT, **DERIVED}.items():
        assert name not in WORD.findall(query)


def test_every_table_is_made_by_jobs_of_spark(spark: SparkSession, tmp_path: Path) -> None:
    write_journal(PLAN, tmp_path / "journal")
    before = len(jobs(spark))
    journal, out = str(tmp_path / "journal"), str(tmp_path / "out")
    job = ReportJob(names=list(REPORTS), journal=journal, out=out, now=NOW_US)
    run_reports(spark, job, lambda text: None)
    done = set(jobs(spark)[before:])
    assert done >= {*QUERIES, "figures", "check segments", *(f"rollup {name}" for name in ROLLUPS)}
