"""Running reports: files and page; on a real standalone cluster too; the command line."""

import csv
import html.parser
import json
import os
import re
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from pyspark.sql import SparkSession

import analytics.job as reports_job
from analytics.__main__ import asked_time, main, parser
from analytics.errors import JournalNotFoundError
from analytics.generator import Plan, write_journal
from analytics.job import REPORTS, ReportJob, run_reports
from analytics.session import QUICK_START
from analytics.suppression import suppressed
from analytics.times import DAY_US, HOUR_US, MINUTE_US
from store.journal_files import SCHEMA, atomic_file, write_parquet
from store.journal_schema import JournalEvent
from tests.analytics.conftest import NOW_US, START_US, event
from tests.analytics.standalone import Standalone, standalone

PLAN = Plan(seed=2, events=15_000, days=10, servers=4, gaps=0, mass_disconnects=1, restarts=1)
RUN_DEADLINE = 400.0


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("journal") / "with a space"
    write_journal(PLAN, folder)
    (folder / "date=2026-01-05" / "broken.parquet").write_bytes(b"PAR1")
    return folder


@pytest.fixture(scope="module")
def local(spark: SparkSession, journal: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    steps: list[str] = []
    names = list(REPORTS)
    result = run_reports(
        spark, ReportJob(names=names, journal=str(journal), out=f"file://{out}", now=NOW_US), steps.append
    )
    assert [Path(segment.path).name for segment in result.checked.bad] == ["broken.parquet"]
    assert steps == [
        "looking for segments",
        f"checking {len(list(journal.glob('*/*.parquet')))} segments",
        "rolling up 10 days",
        "reading rollups",
        *names,
        "writing results",
    ]
    assert {path.name for path in out.iterdir()} == {
        "report.html",
        "summary.json",
        *[f"{table}.{suffix}" for table in result.tables for suffix in ("csv", "parquet")],
    }
    return out


def rows_of(out: Path, table: str) -> list[list[str]]:
    return list(csv.reader((out / f"{table}.csv").read_text().splitlines()))


class Names(html.parser.HTMLParser):
    """Collects tags and everything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]


def test_every_table_is_one_plain_file_of_each_kind_for_its_owner(local: Path) -> None:
    assert len(list(local.glob("*.parquet"))) == 27
    for path in local.glob("*.parquet"):
        table = pq.read_table(path)
        rows = rows_of(local, path.stem)
        assert rows[0] == table.column_names
        assert len(rows) == table.num_rows + 1
    assert {stat.S_IMODE(path.stat().st_mode) for path in local.iterdir()} == {0o600}


def test_times_have_their_zone(local: Path) -> None:
    table = pq.read_table(local / "incidents_restarts.parquet")
    assert str(table.schema.field("start").type) == "timestamp[us, tz=UTC]"
    (_, row, *_) = rows_of(local, "incidents_restarts")
    assert row[0] == "2026-01-05T00:00:00+00:00"


def test_page_is_self_contained_and_readable_without_scripts(local: Path) -> None:
    text = (local / "report.html").read_text()
    page = Names()
    page.feed(text)
    own = {f"{path.stem}.csv" for path in local.glob("*.csv")}
    assert {link for link in page.links if not link.startswith("#")} <= own
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert "url(" not in text
    assert 'name="viewport"' in text
    assert "1 could not be read" in text
    assert "broken.parquet" in text
    assert page.tags.count("noscript") >= 8
    assert text.count('scope="col"') > 100
    sentences = re.findall("<li[^>]*>(.*?)</li>", text)
    assert any("routers went away at once" in sentence for sentence in sentences)
    for name in REPORTS:
        assert f'<h2 id="{name}">' in text


def test_summary_is_for_machines(local: Path) -> None:
    summary = json.loads((local / "summary.json").read_text())
    assert summary["from"] == "2026-01-05T00:00:00+00:00"
    assert summary["bad_segments"] == 1
    assert {problem["kind"] for problem in summary["problems"]} >= {"mass disconnect", "journal", "outage"}
    assert {(p["kind"], p["is_over"]) for p in summary["problems"]} >= {("outage", True), ("silence", False)}
    assert summary["figures"]["notifications"]["value"] > 1000
    assert summary["figures"]["notifications"]["previous"] is None
    assert len(summary["routers"]) == 4


def test_every_figure_has_its_change_against_the_time_before(
    spark: SparkSession, journal: Path, tmp_path: Path
) -> None:
    def told(first: int, last: int) -> dict[str, Any]:
        out = tmp_path / f"{first}-{last}"
        job = ReportJob(names=list(REPORTS), journal=str(journal), out=str(out), now=NOW_US)
        start, end = START_US + first * DAY_US, START_US + last * DAY_US
        run_reports(spark, replace(job, start=start, end=end), lambda text: None)
        summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
        return summary

    before, now = told(1, 4), told(4, 7)
    for name, figure in now["figures"].items():
        assert figure["previous"] == before["figures"][name]["value"], name
        assert figure["change"] == pytest.approx(figure["value"] - figure["previous"], abs=0.1)
    changed = {name for name, figure in now["figures"].items() if figure["change"]}
    assert changed >= {"notifications", "pushes", "subscriptions", "active_subscriptions", "latency_ms_p95"}
    scores = {router["server"]: router["score"] for router in before["routers"]}
    assert {router["server"]: router["previous_score"] for router in now["routers"]} == scores
    assert (
        "relative to the previous period of the same length" in (tmp_path / "4-7" / "report.html").read_text()
    )
    assert all(figure["previous"] is None for figure in before["figures"].values())


def test_tables_for_others_have_no_pseudonyms_and_no_small_numbers(
    spark: SparkSession, journal: Path, tmp_path: Path
) -> None:
    job = ReportJob(names=list(REPORTS), journal=str(journal), out=str(tmp_path), now=NOW_US, for_others=True)
    run_reports(spark, job, lambda text: None)
    names = {path.name for path in tmp_path.iterdir()}
    assert not {"report.html", "summary.json", "tokens_dead.csv", "stale_subscriptions.csv"} & names
    for path in tmp_path.glob("*.parquet"):
        for row in pq.read_table(path).to_pylist():
            small = [v for v in row.values() if isinstance(v, int) and not isinstance(v, bool) and 0 < v < 5]
            assert not small, path.name


def test_executors_write_what_is_too_large_for_the_driver(
    spark: SparkSession, journal: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports_job, "MOST_ROWS", 3)
    (tmp_path / ".work-of-a-killed-process" / "0" / "states").mkdir(parents=True)
    job = ReportJob(names=["health", "delivery"], journal=str(journal), out=str(tmp_path), now=NOW_US)
    spark.conf.set("spark.sql.shuffle.partitions", 2)  # so that derived tables are files, too
    try:
        page = run_reports(spark, job, lambda text: None)
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", 1)
    assert not page.tables["delivery_latency"].is_whole
    assert len(page.tables["delivery_latency"]) == 3
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith((".", "_"))} == set()
    for name, rows in page.tables.items():
        whole = pq.read_table(local / f"{name}.parquet")
        assert pq.read_table(tmp_path / f"{name}.parquet").to_pylist() == whole.to_pylist()
        ours, theirs = rows_of(tmp_path, name), rows_of(local, name)
        assert len(ours) == len(theirs) == whole.num_rows + 1
        assert ours[0] == theirs[0]
        assert rows.count_of_all == whole.num_rows
    assert "first 20 of" in (tmp_path / "report.html").read_text()
    assert not page.tables["health"].is_whole  # and yet all routers count
    figures = json.loads((local / "summary.json").read_text())["figures"]
    assert {name: figure["value"] for name, figure in page.figures.items()} == {
        name: figure["value"] for name, figure in figures.items()
    }


def test_a_share_does_not_tell_a_small_number(spark: SparkSession) -> None:
    row = {"reason": "BAD", "tokens": 3, "share": 0.03, "of_tokens": 100, "is_open": True, "start": START_US}
    hidden = {**row, "tokens": None, "share": None}
    many = {**row, "tokens": 97, "share": 0.9701, "start": START_US + 1}
    told = {**many, "tokens": 95, "share": 0.97}  # 100 less 97 would be a small number
    columns = "reason STRING, tokens BIGINT, share DOUBLE, of_tokens BIGINT, is_open BOOLEAN, start BIGINT"
    table = spark.createDataFrame([tuple(row.values()), tuple(many.values())], columns)
    assert [found.asDict() for found in suppressed(table).collect()] == [hidden, told]


def test_check_tells_by_its_exit_code(
    journal: Path, local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = ["--to", "2026-01-15"]
    command = [
        "report",
        "health",
        "--journal",
        str(journal),
        "--out",
        str(tmp_path),
        "--check",
        "--quiet",
        *to,
    ]
    assert main(command) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert all(line.startswith("! ") for line in said.err.splitlines())
    settings = tmp_path / "settings.ini"
    calm = {"outage_seconds": 9e9, "lost_subscriptions": 1_000_000, "score": 0.5}
    lines = "\n".join(f"{name} = {value}" for name, value in calm.items())
    settings.write_text(f"[STORE]\nother = 1\n[ANALYTICS]\n{lines}\n")
    (journal / "date=2026-01-05" / "broken.parquet").rename(tmp_path / "broken.parquet")
    assert main([*command, "--config", str(settings)]) == 0
    assert capsys.readouterr().err == ""
    (tmp_path / "broken.parquet").rename(journal / "date=2026-01-05" / "broken.parquet")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[ANALYTICS]\nspeed = 3\n", "has no speed"),
        ("[ANALYTICS]\nscore = much\n", "score = much is no number above zero"),
        ("[ANALYTICS]\ndead_token_days = 1.5\n", "is no whole number above zero"),
        ("no section\n", "File contains no section headers"),
    ],
)
def test_wrong_settings_are_told_in_one_line(
    tmp_path: Path, text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "settings.ini"
    settings.write_text(text)
    assert main(["report", "all", "--journal", "j", "--out", "o", "--config", str(settings)]) in (1, 2)
    error = capsys.readouterr().err
    assert complaint in error
    assert "Traceback" not in error


def test_what_cron_would_send_are_the_problems_alone(tmp_path: Path) -> None:
    """A process of its own: Spark's greetings are no news."""
    write_journal(replace(PLAN, events=3_000), tmp_path / "journal")
    command = [sys.executable, "-m", "analytics", "report", "health", "--quiet", "--to", "2026-01-15"]
    where = ["--journal", str(tmp_path / "journal"), "--out", str(tmp_path / "out")]
    run = run_on_cluster(*command, *where, cwd=ROOT)
    assert run.stdout == ""
    assert run.stderr.startswith("! ")
    assert all(line.startswith("! ") for line in run.stderr.splitlines())


def test_the_last_days_end_with_the_last_full_hour() -> None:
    command = ["report", "all", "--journal", "j", "--out", "o", "--days", "2"]
    start, end = asked_time(parser().parse_args(command), datetime(2026, 1, 9, 7, 42, 11, 5, UTC))
    assert (start, end) == (START_US + 2 * DAY_US + 7 * HOUR_US, START_US + 4 * DAY_US + 7 * HOUR_US)


def test_no_events_in_the_time_asked_for(spark: SparkSession, journal: Path, tmp_path: Path) -> None:
    job = ReportJob(names=["health"], journal=str(journal), out=str(tmp_path), end=1, now=NOW_US)
    with pytest.raises(JournalNotFoundError, match="no readable events"):
        run_reports(spark, job, lambda text: None)
    late = replace(job, end=None, start=NOW_US)
    with pytest.raises(JournalNotFoundError, match="the last event is of 14 January 2026, before the time"):
        run_reports(spark, late, lambda text: None)
    empty = ReportJob(names=["health"], journal=str(tmp_path), out=str(tmp_path), now=NOW_US)
    with pytest.raises(JournalNotFoundError, match="no closed journal segments"):
        run_reports(spark, empty, lambda text: None)


def test_a_journal_that_has_just_begun(spark: SparkSession, tmp_path: Path) -> None:
    started = event(0, JournalEvent.SERVER_STARTED, seq=0, daemon="d", uptime_us=0, count=0)
    with atomic_file(tmp_path / "first.parquet") as file:
        write_parquet([pa.RecordBatch.from_pylist([started], SCHEMA)], file)
    job = ReportJob(
        names=list(REPORTS), journal=str(tmp_path), out=str(tmp_path / "_out"), now=START_US + MINUTE_US
    )
    assert run_reports(spark, job, lambda text: None).findings == []
    assert "No problems found" in (tmp_path / "_out" / "report.html").read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("cluster"), workers=2) as running:
        yield running


ROOT = Path(__file__).parents[2]
QUICK = ("spark.executor.memory=512m", "spark.driver.host=127.0.0.1", "spark.sql.shuffle.partitions=4")


def run_on_cluster(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    run = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=RUN_DEADLINE, env=environment, cwd=cwd
    )
    assert run.returncode == 0, run.stderr
    return run


def test_the_command_on_a_standalone_cluster_gives_the_same_numbers(
    cluster: Standalone, journal: Path, local: Path, tmp_path: Path
) -> None:
    out, before = tmp_path / "out", cluster.executors(QUICK_START.split()[0])
    options = ["--master", cluster.url, "--memory", "512m"]
    options += [word for conf in QUICK for word in ("--conf", conf)]
    where = ("--journal", journal, "--out", out, "--rollups", tmp_path / "rollups")
    run = run_on_cluster(sys.executable, "-m", "analytics", "report", "incidents", *where, *options, cwd=ROOT)
    assert run.stdout.strip() == f"{out}/report.html"
    assert "skipped" in run.stderr
    for table in ("incidents_gaps", "incidents_disconnects", "incidents_restarts"):
        assert rows_of(out, table) == rows_of(local, table)
    assert all(
        now > then for now, then in zip(cluster.executors(QUICK_START.split()[0]), before, strict=True)
    )


def test_spark_submit_with_an_archive_and_a_file_system_that_only_hadoop_knows(
    cluster: Standalone, journal: Path, local: Path, tmp_path: Path
) -> None:
    """As the documentation says it: the archive is all that the cluster gets."""
    own = "-XX:+UseSerialGC"
    before = cluster.executors(own)
    archive, main_file = tmp_path / "ntf-server.zip", tmp_path / "ntf-analytics.py"
    with zipfile.ZipFile(archive, "w") as file:
        for package in ("analytics", "store", "protocol"):
            for source in (ROOT / package).rglob("*.*"):
                file.write(source, source.relative_to(ROOT))
    main_file.write_text((ROOT / "analytics" / "__main__.py").read_text())
    mounted = {"journal": journal, "results": tmp_path / "results", "rollups": tmp_path / "rollups"}
    for folder in mounted.values():
        folder.mkdir(exist_ok=True)
    mounts = [
        f"spark.hadoop.fs.viewfs.mounttable.ntf.link./{name}=file://{quote(str(folder))}"
        for name, folder in mounted.items()
    ]
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    options = [
        word
        for conf in (*QUICK, *mounts, f"spark.executor.extraJavaOptions={own}")
        for word in ("--conf", conf)
    ]
    where = ("--journal", "viewfs://ntf/journal", "--rollups", "viewfs://ntf/rollups")
    run = run_on_cluster(
        *(
            submit,
            "--master",
            cluster.url,
            "--driver-memory",
            "512m",
            *options,
            "--py-files",
            archive,
            main_file,
        ),
        *("report", "incidents", *where, "--out", "viewfs://ntf/results"),
        cwd=tmp_path,
    )
    assert run.stdout.strip().splitlines()[-1] == "viewfs://ntf/results/report.html"
    for table in ("incidents_gaps", "incidents_disconnects", "incidents_restarts"):
        assert rows_of(tmp_path / "results", table) == rows_of(local, table)
    assert all(now > then for now, then in zip(cluster.executors(own), before, strict=True))


def test_generate_compact_retain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "j")
    assert main(["generate", "--out", folder, "--events", "5000", "--days", "10", "--seed", "3"]) == 0
    assert capsys.readouterr().out.strip() == f"{folder}/answers.json"
    assert main(["compact", "--journal", folder]) == 0
    assert "events" in capsys.readouterr().err
    assert main(["retain", "--journal", folder, "--days", "1"]) == 0
    told = capsys.readouterr().err
    assert "10 days deleted" in told
    assert "never rolled up" in told
    assert not list(Path(folder).glob("date=*"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["compact", "--journal", "/nowhere"], "no such folder: /nowhere"),
        (["retain", "--journal", "/nowhere", "--days", "3"], "no such folder: /nowhere"),
        (["snapshot", "--database", "/nowhere/ntf.db", "--out", "/tmp"], "cannot read /nowhere/journal.key"),
        (["generate", "--out", "/nowhere/x", "--days", "3"], "3 days are too few"),
        (
            ["report", "all", "--journal", "j", "--out", "o", "--from", "2026-01-02", "--to", "2026-01-01"],
            "--from must be before --to",
        ),
        (
            ["report", "all", "--journal", "j", "--out", "o", "--days", "1", "--to", "2026-01-01"],
            "give either that or --from and --to",
        ),
        (["report", "all", "--journal", "j", "--out", "j/report"], "--out must not be within the journal"),
        (
            ["stream", "--journal", "s3a://x/j/", "--out", "s3a://x/j/o"],
            "--out must not be within the journal",
        ),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert complaint in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["report", "nonsense", "--journal", "j", "--out", "o"],
        ["report", "all", "--journal", "j", "--out", "o", "--from", "yesterday"],
        ["report", "all", "--journal", "j", "--out", "o", "--conf", "nothing"],
        ["retain", "--journal", "j", "--days", "0"],
        ["compact", "--journal", "s3a://bucket/journal"],
    ],
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "stream", "generate", "snapshot", "compact", "retain"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "--" in capsys.readouterr().out
