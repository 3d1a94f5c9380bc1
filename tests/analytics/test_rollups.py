"""Rollups: the same whoever makes them, whatever order, copies, damage; only changed days are made anew."""

import fcntl
import os
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from analytics.errors import JournalNotFoundError, UnreadableError
from analytics.files import LOCK_NAME, HadoopFolder, LocalFolder
from analytics.generator import Answers, Plan, write_journal
from analytics.maintenance import compact, retain
from analytics.manifest import Manifest
from analytics.rollups import ROLLUPS, update_rollups
from analytics.rollups_schema import TRAFFIC
from analytics.times import DAY_US
from store.journal_files import SCHEMA, atomic_file, write_parquet
from tests.analytics.conftest import as_json_lines, warehouse_of
from tests.analytics.rollup_reference import write_rollups

PLAN = Plan(
    seed=4, events=5_000, days=8, servers=3, gaps=0, mass_disconnects=0, restarts=1, rows_per_segment=300
)

PART = 5_000


def content(folder: Path) -> dict[str, list[Any]]:
    """All rows of all rollups, in an order of their own."""
    with duckdb.connect() as db:
        return {name: sorted(rows_of(db, folder / name), key=str) for name in ROLLUPS}


def rows_of(db: duckdb.DuckDBPyConnection, rollup: Path) -> list[Any]:
    files = f"read_parquet('{rollup}/*/*.parquet', hive_partitioning = true)"
    columns = sorted(row[0] for row in db.execute(f"DESCRIBE SELECT * FROM {files}").fetchall())
    times = {"time": "epoch_us(time)", "date": "date::VARCHAR"}
    listed = ", ".join(times.get(column, f'"{column}"') for column in columns)
    return list(db.execute(f"SELECT {listed} FROM {files}").fetchall())


def make(journal: Path, rollups: Path, spark: SparkSession, **options: Any) -> list[str]:
    """Bring rollups up to date; returns what was told."""
    told: list[str] = []
    update_rollups(spark, LocalFolder(str(journal)), LocalFolder(str(rollups)), told.append, **options)
    return told


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    """Small: each event is treated alike."""
    folder = tmp_path_factory.mktemp("generated")
    plan = Plan(seed=7, events=20_000, days=8, servers=4, gaps=0, mass_disconnects=1, restarts=1)
    return folder, write_journal(plan, folder)


@pytest.fixture(scope="module")
def reference(
    journal: tuple[Path, Answers], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("reference")
    write_rollups([f"{journal[0]}/*/*.parquet"], folder)
    return content(folder)


def test_spark_makes_the_same_rollups(
    spark: SparkSession, journal: tuple[Path, Answers], reference: dict[str, list[Any]], tmp_path: Path
) -> None:
    make(journal[0], tmp_path, spark)
    made = content(tmp_path)
    for name in ROLLUPS:
        assert len(made[name]) == len(reference[name]) > 100
        different = [pair for pair in zip(made[name], reference[name], strict=True) if pair[0] != pair[1]]
        assert different[:3] == []


def test_order_and_partitions_do_not_matter(
    spark: SparkSession, journal: tuple[Path, Answers], reference: dict[str, list[Any]], tmp_path: Path
) -> None:
    """From segments of other sizes, whose folders say nothing or the wrong day."""
    files = sorted(journal[0].glob("*/*.parquet"))
    events = pa.concat_tables(pq.read_table(file, partitioning=None) for file in files)
    shuffled = events.take(np.random.default_rng(5).permutation(events.num_rows))
    other = tmp_path / "other"
    for number, start in enumerate(range(0, shuffled.num_rows, PART)):
        file = other / ["", "date=2026-01-07", "date=2026-13-01"][number % 3] / f"{number}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as target:
            write_parquet(shuffled.slice(start, PART).to_batches(), target)
    make(other, tmp_path / "rollups", spark)
    assert content(tmp_path / "rollups") == reference


def test_copies_and_damaged_segments(
    spark: SparkSession, journal: tuple[Path, Answers], reference: dict[str, list[Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "journal"
    shutil.copytree(journal[0], folder)
    first, second, third = sorted(folder.glob("*/*.parquet"))[:3]
    shutil.copy(first, first.with_name("copy.parquet"))
    shutil.copy(second, folder / "copy-elsewhere.parquet")
    whole = third.read_bytes()
    middle = len(whole) // 2
    third.with_name("truncated.parquet").write_bytes(whole[:middle])
    third.with_name("corrupt.parquet").write_bytes(
        whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    )
    third.with_name("empty.parquet").write_bytes(b"")
    third.with_name(".open-segment.parquet").write_bytes(whole)
    rollups = LocalFolder(str(tmp_path / "rollups"))
    checked = update_rollups(spark, LocalFolder(str(folder)), rollups, print)
    assert sorted(Path(segment.path).name for segment in checked.bad) == [
        "corrupt.parquet",
        "empty.parquet",
        "truncated.parquet",
    ]
    assert content(tmp_path / "rollups") == reference


def test_only_changed_days_are_made_anew_and_the_numbers_are_the_same(
    spark: SparkSession, tmp_path: Path
) -> None:
    journal, rollups = tmp_path / "journal", tmp_path / "rollups"
    write_journal(PLAN, journal)
    days = sorted(journal.glob("date=*"))
    late = max(days[2].glob("*.parquet"))
    late.rename(tmp_path / late.name)
    days[-1].rename(tmp_path / days[-1].name)
    assert make(journal, rollups, spark)[-1] == "rolling up 7 days"
    assert make(journal, rollups, spark) == ["looking for segments"]
    (tmp_path / late.name).rename(late)
    (tmp_path / days[-1].name).rename(days[-1])
    before = {path: path.stat().st_mtime_ns for path in rollups.glob("life/*/*.parquet")}
    (rollups / "life" / ".spark-staging-of-a-killed-process" / "date=2026-01-05").mkdir(parents=True)
    assert make(journal, rollups, spark)[-1] == "rolling up 2 days"
    kept = [path for path, changed in before.items() if path.exists() and path.stat().st_mtime_ns == changed]
    assert {path.parent.name for path in kept} == {day.name for day in days} - {days[2].name, days[-1].name}
    assert not list(rollups.glob("life/.spark-staging-*"))
    assert make(journal, tmp_path / "full", spark, full=True)[-1] == "rolling up 8 days"
    assert content(rollups) == content(tmp_path / "full")


def test_a_day_that_lost_its_traffic_has_none_any_more(spark: SparkSession, tmp_path: Path) -> None:
    journal, rollups = tmp_path / "journal", tmp_path / "rollups"
    write_journal(PLAN, journal)
    make(journal, rollups, spark)
    day = sorted(journal.glob("date=*"))[3]
    for segment in day.glob("*.parquet"):
        events = pq.read_table(segment, partitioning=None)
        kept = events.filter(pc.invert(pc.is_in(events["event"], pa.array([e.value for e in TRAFFIC]))))
        with atomic_file(segment) as file:
            write_parquet(kept.to_batches(), file)
    assert make(journal, rollups, spark)[-1] == "rolling up 1 days"
    make(journal, tmp_path / "full", spark, full=True)
    assert content(rollups) == content(tmp_path / "full")
    assert (rollups / "life" / day.name).is_dir()
    assert not (rollups / "hours" / day.name).exists()


def test_days_end_at_midnight_also_before_1970(spark: SparkSession, tmp_path: Path) -> None:
    """The first second of a clock that was never set is not the last one of the day before."""
    journal, rollups = tmp_path / "journal", tmp_path / "rollups"
    times = (-DAY_US - 1, -DAY_US, -1, 0, DAY_US - 1, DAY_US)
    rows = [
        {"time": time, "event": "server_stopped", "daemon": "d", "writer": b"w", "epoch": 1, "seq": seq}
        for seq, time in enumerate(times)
    ]
    journal.mkdir()
    with (journal / "segment.parquet").open("wb") as file:
        write_parquet(pa.Table.from_pylist(rows, schema=SCHEMA).to_batches(), file)
    assert make(journal, rollups, spark)[-1] == "rolling up 4 days"
    found = {day.name: pq.read_table(day, partitioning=None) for day in (rollups / "life").glob("date=*")}
    assert {name: table["seq"].to_pylist() for name, table in found.items()} == {
        "date=1969-12-30": [0],
        "date=1969-12-31": [1, 2],
        "date=1970-01-01": [3, 4],
        "date=1970-01-02": [5],
    }


def test_rollups_are_for_one_process_at_a_time(tmp_path: Path) -> None:
    folder = LocalFolder(str(tmp_path))
    with folder.reserved():
        other = os.open(tmp_path / LOCK_NAME, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    with LocalFolder("/proc/nowhere").reserved():
        """Whoever cannot write need not wait."""


def test_damaged_rollups_are_told_in_one_line(spark: SparkSession, tmp_path: Path) -> None:
    broken = tmp_path / "life" / "date=2026-01-05" / "part.parquet"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"PAR1 cut off")
    with pytest.raises(UnreadableError, match="--full rebuilds those of days in the journal"):
        warehouse_of(spark, tmp_path)


def test_days_that_retention_deleted_stay_rolled_up(spark: SparkSession, tmp_path: Path) -> None:
    journal, rollups = tmp_path / "journal", tmp_path / "rollups"
    write_journal(PLAN, journal)
    make(journal, rollups, spark)
    before = content(rollups)
    for day in sorted(journal.glob("date=*"))[:6]:
        shutil.rmtree(day)
    assert make(journal, rollups, spark) == ["looking for segments"]
    assert content(rollups) == before


@pytest.mark.parametrize("step", ["checking", "rolling up"])
@pytest.mark.parametrize("upkeep", [retain, compact])
def test_retention_and_compaction_during_a_rollup_lose_nothing(
    spark: SparkSession, tmp_path: Path, upkeep: Callable[[Path, date], object], step: str
) -> None:
    journal, rollups = tmp_path / "journal", tmp_path / "rollups"
    write_journal(PLAN, journal)
    as_json_lines(min(journal.glob("*/*.parquet")))
    make(journal, rollups, spark)
    before = content(rollups)
    said: list[str] = []

    def progress(text: str) -> None:
        said.append(text)
        if text.startswith(step) and said.count(text) == 1:
            upkeep(journal, date(2026, 1, 7))

    checked = update_rollups(spark, LocalFolder(str(journal)), LocalFolder(str(rollups)), progress, full=True)
    assert checked.bad == []
    assert content(rollups) == before
    assert make(journal, rollups, spark) == ["looking for segments"]


def test_no_journal(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(JournalNotFoundError, match="no such folder"):
        make(tmp_path / "nowhere", tmp_path / "rollups", spark)
    with pytest.raises(JournalNotFoundError, match="no closed journal segments"):
        make(tmp_path, tmp_path / "rollups", spark)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"version": 1}', '{"version": 0, "days": {}, "segments": []}']
)
def test_an_unreadable_manifest_is_as_good_as_none(text: str) -> None:
    assert Manifest.from_json(text) == Manifest()


def test_folders_of_hadoop_do_as_local_ones_do(spark: SparkSession, tmp_path: Path) -> None:
    journal = tmp_path / "with a space"
    write_journal(PLAN, journal)
    (journal / "_rollups").mkdir()
    (journal / "_rollups" / "x.parquet").write_bytes(b"")
    local, remote = LocalFolder(str(journal)), HadoopFolder(spark.sparkContext, f"file://{journal}")
    assert [(f.path, f.size) for f in remote.segments()] == [(f.path, f.size) for f in local.segments()]
    for folder in (local, remote):
        assert folder.read_text("note") is None
        folder.write("note", "grüße")
        assert folder.read_text("note") == "grüße"
        folder.write("below/copy", "grüße".encode())
        assert folder.read_text("below/copy") == "grüße"
        assert "note" in folder.names("")
        assert folder.names("nowhere") == []
        folder.rename("below/copy", "below/moved")
        assert folder.names("below") == ["moved"]
        folder.rename("below/moved", "below/copy")
        with folder.reserved():
            folder.remove("note")
        folder.remove("below")
        folder.remove("nothing")
        assert folder.read_text("below/copy") is None
    with pytest.raises(JournalNotFoundError, match="no such folder"):
        HadoopFolder(spark.sparkContext, f"file://{tmp_path}/nowhere").segments()
