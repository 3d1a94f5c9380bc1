"""The health tables are kept current over kills and with late segments, with the numbers of a report."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from analytics.generator import Plan, write_journal
from analytics.job import ReportJob, run_reports
from analytics.maintenance import compact
from analytics.session import BYTES_PER_PARTITION, SparkOptions
from analytics.streaming import StreamJob, keep_current, running
from tests.analytics.conftest import NOW_US, START

PLAN = Plan(
    seed=6, events=6_000, days=8, servers=3, gaps=0, mass_disconnects=0, restarts=1, rows_per_segment=300
)
TABLES = ("health", "health_outages", "health_hours")
LINE_DEADLINE = 300


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """All but the last three days and one segment, which are in `aside`."""
    folder = tmp_path / "journal"
    write_journal(PLAN, folder)
    days = sorted(folder.glob("date=*"))
    (tmp_path / "aside").mkdir()
    for path in (*days[-3:], max(days[1].glob("*.parquet"))):
        path.rename(tmp_path / "aside" / path.name)
    return folder


def bring(journal: Path, number: int) -> None:
    """The next day, or with 0 the late segment, whose file is old."""
    aside = sorted((journal.parent / "aside").glob("*.parquet" if number == 0 else "date=*"))
    target = journal if number else sorted(journal.glob("date=*"))[1]
    if number == 0:
        os.utime(aside[0], (1, 1))
    aside[0].rename(target / aside[0].name)


def stream(spark: SparkSession, journal: Path, out: Path) -> list[str]:
    told: list[str] = []
    job = StreamJob(journal=str(journal), out=str(out), now=lambda: NOW_US, once=True)
    keep_current(spark, job, told.append)
    return told


def same_as_a_report(spark: SparkSession, journal: Path, out: Path) -> None:
    batch = journal.parent / "batch"
    job = ReportJob(
        names=["health"],
        journal=str(journal),
        out=str(batch),
        now=NOW_US,
        rollups=str(batch / "r"),
        full=True,
    )
    run_reports(spark, job, lambda text: None)
    for table in TABLES:
        assert (out / f"{table}.csv").read_text() == (batch / f"{table}.csv").read_text()
    assert len((out / "health_hours.csv").read_text().splitlines()) > 100


def test_new_late_and_compacted_segments(spark: SparkSession, journal: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert stream(spark, journal, out)[-1].endswith("of 3 routers are up to date")
    first = (out / "health_hours.csv").read_text()
    assert stream(spark, journal, out) == []  # nothing new
    bring(journal, 0)
    assert "rolling up 1 days" in stream(spark, journal, out)
    bring(journal, 1)
    assert "rolling up 1 days" in stream(spark, journal, out)
    compact(journal, START.date().replace(day=31))
    assert any(line.startswith("rolling up") for line in stream(spark, journal, out))
    assert (out / "health_hours.csv").read_text() != first
    same_as_a_report(spark, journal, out)


def test_a_journal_that_grows_gets_more_partitions(
    spark: SparkSession, journal: Path, tmp_path: Path
) -> None:
    sizes = iter((0, 2 * BYTES_PER_PARTITION, 0))
    seen: list[str | None] = []

    def options() -> SparkOptions:
        return SparkOptions(input_bytes=next(sizes), settings={"spark.sql.adaptive.enabled": "false"})

    def progress(text: str) -> None:
        if text.endswith("are up to date"):
            seen.append(spark.conf.get("spark.sql.shuffle.partitions"))

    job = StreamJob(
        journal=str(journal), out=str(tmp_path / "out"), now=lambda: NOW_US, once=True, options=options
    )
    for _ in range(3):
        bring(journal, 1)
        keep_current(spark, job, progress)
    assert seen == ["1", "2", "1"]
    assert spark.conf.get("spark.sql.adaptive.enabled") == "false"
    same_as_a_report(spark, journal, tmp_path / "out")


def test_reports_while_the_stream_goes_on(spark: SparkSession, journal: Path, tmp_path: Path) -> None:
    """Both bring the same rollups up to date, in turn."""
    out, told = tmp_path / "out", list[str]()
    job = StreamJob(journal=str(journal), out=str(out), now=lambda: NOW_US, every=1)
    report = ReportJob(names=["health"], journal=str(journal), out=str(tmp_path / "report"), now=NOW_US)
    with running(spark, job, told.append) as query:
        for number in (1, 0, 1):
            bring(journal, number)
            run_reports(spark, report, told.append)
        query.processAllAvailable()
    for table in TABLES:
        assert (out / f"{table}.csv").read_text() == (tmp_path / "report" / f"{table}.csv").read_text()
    same_as_a_report(spark, journal, out)


@contextmanager
def streaming(journal: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, until it is killed with everything it started."""
    command = [sys.executable, "-m", "analytics", "stream", "--journal", str(journal), "--out", str(out)]
    with subprocess.Popen(
        [*command, "--every", "1"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    lines = []
    for line in process.stderr or ():
        lines.append(line)
        if words in line:
            return
    raise AssertionError(lines)


@pytest.mark.timeout(LINE_DEADLINE)
def test_killed_in_the_middle_and_started_again(spark: SparkSession, journal: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with streaming(journal, out) as process:
        wait_for(process, "are up to date")
        bring(journal, 1)
        wait_for(process, "rolling up")
    bring(journal, 0)
    bring(journal, 1)
    told = stream(spark, journal, out)
    assert told[-1].endswith("are up to date")
    same_as_a_report(spark, journal, out)


@pytest.mark.timeout(LINE_DEADLINE)
def test_ctrl_c_ends_it_without_a_word(journal: Path, tmp_path: Path) -> None:
    with streaming(journal, tmp_path / "out") as process:
        wait_for(process, "are up to date")
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait() == 130
