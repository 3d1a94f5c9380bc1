"""Snapshots of the store, and reports that start from them."""

import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from analytics.inputs import Limits
from analytics.reports import capacity, health, stale
from analytics.segments import JournalNotFoundError
from analytics.snapshot import SnapshotError, SqliteSource, write_snapshot
from store.journal_schema import JournalEvent as E
from store.journal_schema import epoch_of, pseudonym
from store.migrate import migrate
from tests.analytics.conftest import START, Ask, at, event

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
        for key, hosts, port in ((1, "a.example,onion", ""), (2, "B.example", "7001")):
            db.execute(
                "INSERT INTO smp_servers (server_key, hosts, port, key_hash, service_id, associated_count)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (key, hosts, port, b"h", b"service" if key == 1 else None, 1 if key == 1 else 0),
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
        (pseudonym(KEY, b"S1" * 12), pseudonym(KEY, b"T1" * 12), "a.example:5223", "ACTIVE", True),
        (pseudonym(KEY, b"S2" * 12), pseudonym(KEY, b"T2" * 12), "b.example:7001", "END", False),
        (pseudonym(KEY, b"S3" * 12), pseudonym(KEY, b"T1" * 12), "b.example:7001", "ERR", False),
    }
    servers = pq.read_table(out / "servers/date=2026-01-05/000000.parquet", partitioning=None).to_pylist()
    assert [(s["server"], s["subscriptions"], s["associated"], s["has_service"]) for s in servers] == [
        ("a.example:5223", 1, 1, True),
        ("b.example:7001", 2, 0, False),
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


def test_reports_know_what_is_older_than_the_journal(database: Path, tmp_path: Path, ask: Ask) -> None:
    out = tmp_path / "snapshots"
    for day in (5, 7, 20):
        write_snapshot(SqliteSource(database), KEY, datetime(2026, 1, day, tzinfo=UTC), out)
    s2 = pseudonym(KEY, b"S2" * 12)
    name = "b.example:7001"
    moved: Any = {"subscription": s2, "server": name, "status_from": "END", "status_to": "ACTIVE"}
    rows = [{**event(3 * DAY, E.SUB_STATUS_CHANGED, **moved), "epoch": epoch_of(KEY)}]
    limits = Limits(never_active_days=5, dead_token_days=100)
    warehouse = ask(rows, first_day=2.1, days=10, limits=limits, snapshots=out)
    servers = {
        r["server"]: (r["subscriptions"], r["active"], r["error"]) for r in health.tables(warehouse)["health"]
    }
    assert servers == {"a.example:5223": (1, 1, 0), name: (2, 1, 1)}
    (listed,) = stale.tables(warehouse)["stale_subscriptions"]
    assert (listed["subscription"], listed["first_seen"]) == (pseudonym(KEY, b"S3" * 12).hex(), at(2 * DAY))
    first = capacity.tables(warehouse)["capacity_daily"][0]
    assert (first["tokens"], first["subscriptions"]) == (1, 3)


def test_no_snapshot(tmp_path: Path, database: Path, ask: Ask) -> None:
    rows = [event(1, E.SMP_CONNECTED, server="a.example:5223", latency_us=1)]
    with pytest.raises(JournalNotFoundError, match="no snapshots in"):
        ask(rows, snapshots=tmp_path / "nowhere")
    write_snapshot(SqliteSource(database), KEY, datetime(2026, 2, 1, tzinfo=UTC), tmp_path / "later")
    with pytest.raises(JournalNotFoundError, match="no snapshot before the end"):
        ask(rows, snapshots=tmp_path / "later")
