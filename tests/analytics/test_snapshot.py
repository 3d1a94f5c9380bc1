"""Snapshots of the store, and reports that start from them."""

import asyncio
import re
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pyarrow.parquet as pq
import pytest

from analytics.__main__ import main
from analytics.errors import AnalyticsError, JournalNotFoundError
from analytics.inputs import Limits
from analytics.snapshot import QUERIES, TABLES, SnapshotResult, sqlite_store, write_snapshot
from analytics.snapshot_postgres import postgres_store
from store.journal_schema import JournalEvent as E
from store.journal_schema import epoch_of, pseudonym
from store.migrate import migrate
from store.postgres import PostgresStore
from store.rows import DELETED
from tests.analytics.conftest import START, Ask, Tables, at, event
from tests.postgres import PostgresCluster

KEY = b"k" * 32
TOKENS = {b"T1" * 12: ("AP", "ACTIVE"), b"T2" * 12: ("FC", "INVALID,BAD")}
SUBS = {b"S1" * 12: (1, 1, "ACTIVE"), b"S2" * 12: (2, 2, "END"), b"S3" * 12: (1, 2, "ERR")}
DAY = 86_400


Execute = Callable[[str, tuple[Any, ...]], Awaitable[Any]]


async def fill(execute: Execute) -> None:
    """The same rows in any kind of store."""
    for key, hosts, port in ((1, "a.example,onion", ""), (2, "B.example", "7001")):
        await execute(
            "INSERT INTO smp_servers (server_key, hosts, port, key_hash, service_id, associated_count) {}"
            " VALUES ($1, $2, $3, $4, $5, $6)",
            (key, hosts, port, b"h", b"service" if key == 1 else None, 1 if key == 1 else 0),
        )
    everyone = {**TOKENS, b"T3" * 12: ("AP", DELETED)}
    for key, (token_id, (provider, status)) in enumerate(everyone.items(), 1):
        await execute(
            "INSERT INTO tokens (token_key, token_id, device_token, verify_key, dh_private, dh_secret,"
            " code, status, updated_on) {} VALUES ($1, $2, $3, $4, $4, $4, $4, $5, $6)",
            (key, token_id, provider.encode() + b"\x05secret", bytes([key]), status, 1_767_571_200),
        )
    for sub_id, (token, server, state) in {**SUBS, b"S4" * 12: (3, 1, "ACTIVE")}.items():
        await execute(
            "INSERT INTO subscriptions (subscription_id, token_key, server_key, notifier_id,"
            " notifier_key, state, associated) VALUES ($1, $2, $3, $1, $4, $5, $6)",
            (sub_id, token, server, b"", state, server == 1),
        )


@pytest.fixture
async def database(tmp_path: Path) -> Path:
    path = tmp_path / "ntf.db"
    migrate(path)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA journal_mode = WAL")  # as the daemon does

        async def execute(statement: str, values: tuple[Any, ...]) -> None:
            db.execute(re.sub(r"\$(\d)", r"?\1", statement.format("")), values)

        await fill(execute)
    return path


@pytest.fixture
async def postgres_url(postgres: PostgresCluster) -> str:
    url = postgres.new_database()
    store = PostgresStore(url)
    await store.open()
    await store.close()
    db = await asyncpg.connect(url)
    await db.execute("SET search_path = ntf")
    await fill(lambda statement, values: db.execute(statement.format("OVERRIDING SYSTEM VALUE"), *values))
    await db.close()
    return url


def take(database: Path, at: datetime, out: Path) -> SnapshotResult:
    with sqlite_store(database) as ask:
        return write_snapshot(ask, KEY, at, out)


def rows_in(folder: Path, table: str) -> list[dict[str, Any]]:
    (file,) = (folder / table).glob("*/*.parquet")
    rows: list[dict[str, Any]] = pq.read_table(file, partitioning=None).to_pylist()
    return sorted(rows, key=str)


async def test_a_lost_router_shows_in_the_states_of_its_queues(database: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(database)) as db, db:
        db.execute("UPDATE smp_servers SET lost = 1")
    take(database, START, tmp_path / "out")
    states = [row["status"] for row in rows_in(tmp_path / "out", "subscriptions")]
    assert sorted(states) == ["END", "ERR", "INACTIVE"]


def test_both_kinds_of_store_give_the_same_rows(database: Path, postgres_url: str, tmp_path: Path) -> None:
    for name, source in (("a", sqlite_store(database)), ("b", postgres_store(postgres_url))):
        with source as ask:
            write_snapshot(ask, KEY, START, tmp_path / name)
    for table, schema in TABLES.items():
        rows = rows_in(tmp_path / "a", table)
        assert rows == rows_in(tmp_path / "b", table)
        assert rows
        assert set(rows[0]) == set(schema.names)


async def delete_tokens(url: str) -> None:
    db = await asyncpg.connect(url)
    await db.execute("DELETE FROM ntf.tokens")
    await db.close()


def test_a_snapshot_of_postgres_is_one_moment_too(postgres_url: str) -> None:
    with postgres_store(postgres_url) as ask:
        assert len(list(ask(QUERIES["tokens"]))) == 2
        with ThreadPoolExecutor() as other:  # this thread's event loop is the store's
            other.submit(asyncio.run, delete_tokens(postgres_url)).result()
        assert [len(list(ask(QUERIES[name]))) for name in ("subscriptions", "servers")] == [3, 2]


def test_the_command_takes_a_snapshot_of_postgres(
    postgres_url: str, postgres: PostgresCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, address = tmp_path / "journal.key", tmp_path / "url"
    key.write_bytes(KEY)
    address.write_text(f"{postgres_url}\n")
    command = ["snapshot", "--out", str(tmp_path / "out")]
    assert main([*command, "--url-file", str(address), "--key", str(key)]) == 0
    assert "subscriptions: 3 rows" in capsys.readouterr().err
    assert main([*command, "--url", postgres_url]) == 1
    assert "--key is needed" in capsys.readouterr().err
    assert main([*command, "--url", postgres.new_database(), "--key", str(key)]) == 1
    assert "run `ntf-server migrate`" in capsys.readouterr().err
    nowhere = "postgresql://secret:password@127.0.0.1:1/ntf"
    assert main([*command, "--url", nowhere, "--key", str(key)]) == 1
    told = capsys.readouterr().err
    assert "cannot be reached" in told
    assert "password" not in told


def test_snapshot_has_pseudonyms_only(database: Path, tmp_path: Path) -> None:
    out = tmp_path / "snapshots"
    result = take(database, START, out)
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
    with sqlite_store(database) as ask:
        assert len(list(ask(QUERIES["tokens"]))) == 2
        with closing(sqlite3.connect(database)) as db, db:
            db.execute("PRAGMA foreign_keys = ON")
            db.execute("DELETE FROM tokens")
        assert [len(list(ask(QUERIES[name]))) for name in ("subscriptions", "servers")] == [3, 2]


@pytest.mark.parametrize("content", [None, b"", b"no database at all, but long enough to be looked at" * 20])
def test_no_store(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ntf.db"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(AnalyticsError, match=str(path)):
        take(path, START, tmp_path / "out")
    assert not list(tmp_path.rglob("*.parquet*"))


def test_reports_know_what_is_older_than_the_journal(database: Path, tmp_path: Path, ask: Ask) -> None:
    out = tmp_path / "snapshots"
    for day in (5, 7, 20):
        take(database, datetime(2026, 1, day, tzinfo=UTC), out)
    s2 = pseudonym(KEY, b"S2" * 12)
    name = "b.example:7001"
    moved: Any = {"subscription": s2, "server": name, "status_from": "END", "status_to": "ACTIVE"}
    rows = [{**event(3 * DAY, E.SUB_STATUS_CHANGED, **moved), "epoch": epoch_of(KEY)}]
    limits = Limits(never_active_days=5, dead_token_days=100)
    warehouse = ask(rows, first_day=2.1, days=10, limits=limits, snapshots=out)
    servers = {
        r["server"]: (r["subscriptions"], r["active"], r["error"]) for r in Tables(warehouse)["health"]
    }
    assert servers == {"a.example:5223": (1, 1, 0), name: (2, 1, 1)}
    (listed,) = Tables(warehouse)["stale_subscriptions"]
    assert (listed["subscription"], listed["first_seen"]) == (pseudonym(KEY, b"S3" * 12).hex(), at(2 * DAY))
    first = Tables(warehouse)["capacity_daily"][0]
    assert (first["tokens"], first["subscriptions"]) == (1, 3)


def test_no_snapshot(tmp_path: Path, database: Path, ask: Ask) -> None:
    rows = [event(1, E.SMP_CONNECTED, server="a.example:5223", latency_us=1)]
    with pytest.raises(JournalNotFoundError, match="no snapshots in"):
        ask(rows, snapshots=tmp_path / "nowhere")
    take(database, datetime(2026, 2, 1, tzinfo=UTC), tmp_path / "later")
    with pytest.raises(JournalNotFoundError, match="no snapshot before the end"):
        ask(rows, snapshots=tmp_path / "later")
