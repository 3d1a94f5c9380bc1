"""All that is told is Spark's work."""

import ast
import json
import sys
from pathlib import Path

import pytest
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
BRINGING = {"collect", "first", "head", "tail", "toArrow", "toLocalIterator", "toPandas"}
"Methods of tables that bring their rows to the driver."
BRINGS = {"tables.py": {"collect"}, "sources.py": {"collect"}}
"The first rows of a table; what checks of segments found."
PLACING = {"cache", "checkpoint", "coalesce", "localCheckpoint", "persist", "repartition"}
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


def called(path: Path) -> set[str]:
    """Names of all methods that are called."""
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    return {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)} - functions_called(
        calls
    )


def functions_called(calls: list[ast.Call]) -> set[str]:
    """Of `pyspark.sql.functions`, some of which are named as methods are."""
    return {
        call.func.attr
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "F"
    }


@pytest.mark.parametrize(
    ("methods", "where"),
    [(BRINGING, BRINGS), (PLACING, {"tables.py": {"coalesce", "localCheckpoint", "repartition"}})],
)
def test_one_module_brings_rows_to_the_driver_and_knows_about_partitions(
    methods: set[str], where: dict[str, set[str]]
) -> None:
    modules = Path(analytics.__file__).parent.rglob("*.py")
    assert {path.name: found for path in modules if (found := called(path) & methods)} == where


def jobs(spark: SparkSession) -> list[str]:
    """What each of Spark's jobs until now was for."""
    (log,) = Path(str(spark.conf.get("spark.eventLog.dir")).removeprefix("file://")).iterdir()
    events = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    started = [event for event in events if event["Event"] == "SparkListenerJobStart"]
    return [event["Properties"].get("spark.job.description", "") for event in started]


def test_a_derived_table_does_not_need_itself() -> None:
    for name, query in {**BASE, **SNAPSHOT, **DERIVED}.items():
        assert name not in WORD.findall(query)


def test_every_table_is_made_by_jobs_of_spark(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OTHER_ENGINES:
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    write_journal(PLAN, tmp_path / "journal")
    before = len(jobs(spark))
    journal, out = str(tmp_path / "journal"), str(tmp_path / "out")
    job = ReportJob(names=list(REPORTS), journal=journal, out=out, now=NOW_US)
    run_reports(spark, job, lambda text: None)
    done = set(jobs(spark)[before:])
    assert done >= {*QUERIES, "figures", "check segments", *(f"rollup {name}" for name in ROLLUPS)}
