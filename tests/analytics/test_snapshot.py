"""Snapshots of the store, and reports that start from them."""

import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from analytics.baseline import read_baseline
from analytics.inputs import Inputs, Limits, Window
from analytics.reports import capacity, health, stale
from analytics.snapshot import SnapshotError, SqliteSource, write_snapshot
from store.journal_schema import JournalEvent as E
from store.journal_schema import pseudonym
from store.migrate import migrate
from tests.analytics.conftest import START, START_US, at, collected, event, frame

KEY = b"k" * 32
TOKENS = {b"T1" * 12: ("AP", "ACTIVE"), b"T2" * 12: ("FC", "INVALID,BAD")}
SUBS = {b"S1" * 12: (1, 1, "ACTIVE"), b"S2" * 12: (2, 2, "END"), b"S3" * 12: (1, 2, "ERR")}
DAY = 86_400


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "ntf.db"
    migrate(path)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA journal_mode = WAL")  # as the daemon does
        for key, hosts in ((1, "a.example,onion"), (2, "b.example")):
            db.execute(
                "INSERT INTO smp_servers (server_key, hosts, port, key_hash, service_id, associated_count)"
                " VALUES (?, ?, '', ?, ?, ?)",
                (key, hosts, b"h", b"service" if key == 1 else None, 1 if key == 1 else 0),
            )
        for key, (token_id, (provider, status)) in enumerate(TOKENS.items(), 1):
            db.execute(
                "INSERT INTO tokens (token_key, token_id, device_token, verify_key, dh_private, dh_secret,"
                " code, status, updated_on) VALUES (?, ?, ?, x'', x'', x'', x'', ?, ?)",
                (key, token_id, provider.encode() + b"\x05secret", status, 1_767_571_200),
            )
        for sub_id, (token, server, state) in SUBS.items():
            db.execute(
                "INSERT INTO subscriptions (subscription_id, token_key, server_key, notifier_id,"
                " notifier_key, state, associated) VALUES (?, ?, ?, ?, x'', ?, ?)",
                (sub_id, token, server, sub_id, state, server == 1),
            )
    return path


def test_snapshot_has_pseudonyms_only(database: Path, tmp_path: Path) -> None:
    out = tmp_path / "snapshots"
    result = write_snapshot(SqliteSource(database), KEY, START, out)
    assert result.rows == {"tokens": 2, "subscriptions": 3, "servers": 2}
    tokens = pq.read_table(out / "tokens/date=2026-01-05/000000.parquet", partitioning=None).to_pylist()
    assert [(t["token"], t["provider"], t["status"], t["taken"], t["updated"]) for t in tokens] == [
        (pseudonym(KEY, token), provider, status, START, START)
        for token, (provider, status) in TOKENS.items()
    ]
    subs = pq.read_table(out / "subscriptions/date=2026-01-05/000000.parquet", partitioning=None).to_pylist()
    assert {(s["subscription"], s["token"], s["server"], s["status"], s["associated"]) for s in subs} == {
        (pseudonym(KEY, b"S1" * 12), pseudonym(KEY, b"T1" * 12), "a.example", "ACTIVE", True),
        (pseudonym(KEY, b"S2" * 12), pseudonym(KEY, b"T2" * 12), "b.example", "END", False),
        (pseudonym(KEY, b"S3" * 12), pseudonym(KEY, b"T1" * 12), "b.example", "ERR", False),
    }
    servers = pq.read_table(out / "servers/date=2026-01-05/000000.parquet", partitioning=None).to_pylist()
    assert [(s["server"], s["subscriptions"], s["associated"], s["has_service"]) for s in servers] == [
        ("a.example", 1, 1, True),
        ("b.example", 2, 0, False),
    ]
    assert sum(1 for _ in out.rglob("*.parquet")) == 3


def test_snapshot_is_one_moment_beside_a_writing_daemon(database: Path, tmp_path: Path) -> None:
    tables = SqliteSource(database).tables()
    name, rows = next(tables)
    assert (name, len(list(rows))) == ("tokens", 2)
    with closing(sqlite3.connect(database)) as db, db:
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("DELETE FROM tokens")
    assert {name: len(list(rows)) for name, rows in tables} == {"subscriptions": 3, "servers": 2}


@pytest.mark.parametrize("content", [None, b"", b"no database at all, but long enough to be looked at" * 20])
def test_no_store(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ntf.db"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SnapshotError, match=str(path)):
        write_snapshot(SqliteSource(path), KEY, START, tmp_path / "out")
    assert not list(tmp_path.rglob("*.parquet*"))


def test_reports_know_what_is_older_than_the_journal(
    spark: SparkSession, database: Path, tmp_path: Path
) -> None:
    out = tmp_path / "snapshots"
    for day in (5, 7, 20):
        write_snapshot(SqliteSource(database), KEY, datetime(2026, 1, day, tzinfo=UTC), out)
    window = Window(START_US + 2 * DAY * 1_000_000 + 1, START_US + 10 * DAY * 1_000_000)
    baseline = read_baseline(spark, str(out), window)
    assert baseline is not None
    s2 = pseudonym(KEY, b"S2" * 12)
    rows = [event(3 * DAY, E.SUB_STATUS_CHANGED, subscription=s2, server="b.example", status_to="ACTIVE")]
    events = frame(spark, rows)
    inputs = Inputs(
        events, events.unionByName(baseline), window, Limits(never_active_days=5, dead_token_days=100)
    )
    servers = {
        r["server"]: (r["subscriptions"], r["active"], r["error"])
        for r in collected(health.server_health(inputs))
    }
    assert servers == {"a.example": (1, 1, 0), "b.example": (2, 1, 1)}
    (listed,) = collected(stale.stale_subscriptions(inputs))
    assert (listed["subscription"], listed["first_seen"]) == (pseudonym(KEY, b"S3" * 12).hex(), at(2 * DAY))
    first = collected(capacity.daily(inputs))[0]
    assert (first["tokens"], first["subscriptions"]) == (1, 3)


def test_no_snapshot(spark: SparkSession, tmp_path: Path, database: Path) -> None:
    window = Window(START_US, START_US + 1)
    assert read_baseline(spark, str(tmp_path / "nowhere"), window) is None
    write_snapshot(SqliteSource(database), KEY, datetime(2026, 2, 1, tzinfo=UTC), tmp_path / "later")
    assert read_baseline(spark, str(tmp_path / "later"), window) is None
