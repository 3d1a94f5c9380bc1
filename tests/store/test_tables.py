"""A move copies the tables that both kinds of database have, whole, and a sum tells any difference."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.statuses import SubInput
from store import migrate
from store.interface import NtfStore, StoreError
from store.moving import CopyDiffers, Follower, compare, copy, copy_parents
from store.postgres import PostgresStore
from store.records import SentEntry, ServerKey, SubKey, TokenKey
from store.sqlite import SqliteStore
from store.tables import TABLES, TOKENS, Sum
from store.tables_postgres import NewPostgresTables, PostgresTables, connected, holds_data
from store.tables_sqlite import ChangeLog, NewSqliteTables, SqliteTables
from tests.postgres import PostgresCluster
from tests.store.builders import (
    NOW,
    SERVICE_ID,
    TODAY,
    active_token,
    device,
    happened,
    new_subscription,
    new_token,
    nmsg,
    router,
    subscribe,
    unique,
)
from tests.store.test_contract_statements import accept, rule, statement, subscribed

SHORT_LIVED = {"statement_registrations", "statement_listening"}
"Devices that have an hour to show their code, and the last seconds: whoever needs them makes them again."
NOT_MOVED = {"totals", "sqlite_sequence", *SHORT_LIVED}
PAIR = [TokenKey(4), TokenKey(5)]
"Tokens with the same key, in a store that was filled once."
OF_DAEMONS = {"totals", "daemons", "leases", "handovers", "schema_version", *SHORT_LIVED}


def quietly(what: str, done: int, total: int) -> None:
    assert done <= total


def test_every_table_of_sqlite_is_moved_whole(tmp_path: Path) -> None:
    migrate.migrate(tmp_path / "ntf.db")
    with closing(sqlite3.connect(tmp_path / "ntf.db")) as db:
        tables = db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        assert {name for (name,) in tables} - NOT_MOVED == {table.name for table in TABLES}
        for table in TABLES:
            columns = db.execute(f"SELECT name FROM pragma_table_info('{table.name}')").fetchall()
            assert {name for (name,) in columns} == set(table.columns)


async def test_every_table_of_postgres_is_moved_whole(postgres: PostgresCluster) -> None:
    url = postgres.new_database()
    store = PostgresStore(url)
    await store.open()
    await store.close()
    async with connected(url) as db:
        rows = await db.fetch(
            "SELECT table_name, column_name, data_type FROM information_schema.columns"
            " WHERE table_schema = 'ntf'"
        )
    moved = {table.name: table for table in TABLES}
    assert {row[0] for row in rows} - OF_DAEMONS == set(moved)
    for name, table in moved.items():
        assert {row[1] for row in rows if row[0] == name} == set(table.columns)
        booleans = {row[1] for row in rows if row[0] == name and row[2] == "boolean"}
        assert booleans == table.booleans


def test_sums_do_not_depend_on_order_and_see_every_change() -> None:
    rows = [(1, b"a", "x", None), (2, b"b", "", 3)]
    assert (
        Sum().with_rows(rows)
        == Sum().with_rows(reversed(rows))
        == Sum().with_rows(rows[:1]).with_rows(rows[1:])
    )
    for other in ((1, b"a", "x", 0), (1, "a", "x", None), (1, b"", "ax", None)):
        assert Sum().with_rows([other, rows[1]]) != Sum().with_rows(rows)


async def fill(store: NtfStore) -> None:
    """A little of everything that a store can hold."""
    token, other, third = [await active_token(store) for _ in range(3)]
    for _ in PAIR:
        await store.create_token(replace(new_token(), verify_key=b"one key of two"))
    await store.set_cron(token.key, 20, NOW)
    one = await subscribe(store, new_subscription(token.key, router("one.example")))
    queues = [
        await subscribe(store, new_subscription(other.key, router("two.example", "5224"))) for _ in range(5)
    ]
    await store.set_service_id(one.server_key, SERVICE_ID)
    await store.set_subscribed(one.server_key, [one.queue.notifier_id], service_id=SERVICE_ID)
    ids = [created.queue.notifier_id for created in queues]
    await store.move_queues(queues[0].server_key, [happened(ids[0], SubInput.FAILED)], now=NOW)
    await store.add_notifications(queues[0].server_key, [nmsg(name) for name in ids], received_at=NOW)
    (push,) = await store.pushes([other.key])
    await store.set_sent([SentEntry(other.key, entry.sub_key, entry.seq) for entry in push.entries[:3]])
    gone = await subscribe(store, new_subscription(third.key, router("three.example")))
    assert gone.created
    await store.delete_token(third.key)
    wanted = rule()
    await subscribed(store, wanted, rule(), client=unique(32))
    await accept(store, statement(wanted))


@pytest.fixture
async def filled(tmp_path: Path) -> Path:
    path = tmp_path / "ntf.db"
    store = SqliteStore(path)
    await store.open()
    await fill(store)
    await store.close()
    return path


async def whole_copy(path: Path, url: str) -> None:
    async with connected(url) as db:
        with closing(SqliteTables(path)) as source:
            new = NewPostgresTables(db)
            await new.use()
            await copy_parents(source, new, quietly)
            await copy(source, new, quietly)
            await compare(source, new, quietly)
            await new.set_marks(await source.marks())
        await new.prepare_use()
        await new.finish()


async def test_there_and_back(filled: Path, postgres: PostgresCluster, tmp_path: Path) -> None:
    """The same rows, counts and next keys, and both stores go on."""
    url = postgres.new_database()
    await whole_copy(filled, url)
    back = tmp_path / "back.db"
    async with connected(url) as db:
        tables = PostgresTables(db)
        await tables.use()
        new = NewSqliteTables(back)
        async with tables.standing_still():
            await copy_parents(tables, new, quietly)
            await copy(tables, new, quietly)
            await compare(tables, new, quietly)
            await new.set_marks(await tables.marks())
        new.finish()
    seen = []
    for store in (SqliteStore(filled), PostgresStore(url), SqliteStore(back)):
        await store.open()
        counts = await store.counts()
        token = await active_token(store)
        created = await subscribe(store, new_subscription(token.key, router("new.example")))
        stored = await store.add_notifications(
            created.server_key, [nmsg(created.queue.notifier_id)], received_at=NOW
        )
        assert stored[0] is not None
        (push,) = await store.pushes([token.key])
        seen.append((counts, token.key, created.server_key, created.queue.key, push.entries[0].seq))
        await store.close()
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0].subscriptions == 6


async def test_a_changed_row_is_found(filled: Path, postgres: PostgresCluster) -> None:
    url = postgres.new_database()
    await whole_copy(filled, url)
    async with connected(url) as db:
        await db.execute("UPDATE ntf.subscriptions SET notifier_key = 'x' WHERE sub_key = 1")
        tables = PostgresTables(db)
        await tables.use()
        with closing(SqliteTables(filled)) as source, pytest.raises(CopyDiffers, match="subscriptions"):
            await compare(source, tables, quietly)


async def test_a_store_in_its_place_is_not_overwritten(filled: Path, postgres: PostgresCluster) -> None:
    url = postgres.new_database()
    store = PostgresStore(url)
    await store.open()
    await active_token(store)
    await store.close()
    with pytest.raises(StoreError, match="holds a store already"):
        await whole_copy(filled, url)
    async with connected(url) as db:
        assert await holds_data(db)
        assert await db.fetchval("SELECT count(*) FROM ntf.tokens") == 1


Change = Callable[[SqliteStore], Awaitable[object]]


async def delete_and_register_again(store: SqliteStore) -> None:
    (token,) = await store.tokens_by_key([TokenKey(2)])
    page = await store.queues(await server_of(store), after=SubKey(0), limit=1)
    await store.delete_token(token.key)
    await store.create_token(new_token(token.device_token))
    again = await active_token(store)
    await subscribe(
        store, new_subscription(again.key, router("two.example", "5224"), notifier_id=page[0].notifier_id)
    )


async def server_of(store: SqliteStore) -> ServerKey:
    return next(known.key for known in await store.servers() if known.server.hosts == ("two.example",))


async def swap_devices(store: SqliteStore) -> None:
    """Two tokens with the same key: neither may meet the other's old device."""
    one, two = await store.tokens_by_key(PAIR)
    await store.replace_device_token(one.key, device(), b"c" * 32, TODAY)
    await store.replace_device_token(two.key, one.device_token, b"d" * 32, TODAY)
    await store.replace_device_token(one.key, two.device_token, b"e" * 32, TODAY)


async def notify_and_push(store: SqliteStore) -> None:
    key = await server_of(store)
    page = await store.queues(key, after=SubKey(0), limit=10)
    await store.add_notifications(key, [nmsg(row.notifier_id) for row in page], received_at=NOW)
    (push,) = await store.pushes([TokenKey(2)])
    await store.set_sent([SentEntry(TokenKey(2), entry.sub_key, entry.seq) for entry in push.entries])


@pytest.mark.parametrize("change", [delete_and_register_again, swap_devices, notify_and_push, fill])
async def test_changes_during_the_copy_arrive(
    filled: Path, postgres: PostgresCluster, change: Change
) -> None:
    """Before, between and after the parts of the copy; the log says what to bring over."""
    store = SqliteStore(filled)
    await store.open()
    async with connected(postgres.new_database()) as db:
        with closing(SqliteTables(filled)) as source, closing(ChangeLog(source)) as log:
            assert log.start() == log.start()
            new = NewPostgresTables(db)
            await new.use()
            await fill(store)
            with source.snapshot():
                await copy_parents(source, new, quietly)
            await change(store)
            await copy(source, new, quietly)
            follower = Follower(source, log, new)
            assert await follower.catch_up() > 0
            await fill(store)
            await follower.catch_up_and_compare(quietly)
            await store.close()
            assert await follower.catch_up() == 0
            assert (await follower.compare_counts())["tokens"] == await source.count(TOKENS)
            assert log.remove()
            assert not log.remove()


async def test_a_change_between_reading_and_forgetting_is_not_forgotten(filled: Path) -> None:
    store = SqliteStore(filled)
    await store.open()
    with closing(SqliteTables(filled)) as source, closing(ChangeLog(source)) as log:
        log.start()
        await store.set_cron(TokenKey(1), 30, NOW)
        last = log.last()
        await store.set_cron(TokenKey(1), 40, NOW)
        assert log.keys(TOKENS) == [(1,)]
        log.forget(last)
        assert log.keys(TOKENS) == [(1,)]
        log.forget(log.last())
        assert log.size() == 0
    await store.close()
