"""Which commits wait for the disk: the database itself notes how each notification is written."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import asyncpg
import pytest

from store.interface import NtfStore
from store.policy import Durability
from store.postgres import PostgresStore
from store.sqlite import SqliteStore
from tests.postgres import PostgresCluster
from tests.store.builders import active_token, entity, new_subscription, nmsg, subscribe

_SQLITE_NOTES = """
CREATE TABLE notes (synchronous);
CREATE TRIGGER note AFTER INSERT ON unsent_notifications
BEGIN INSERT INTO notes SELECT synchronous FROM pragma_synchronous; END;
"""
_POSTGRES_NOTES = """
SET search_path = ntf;
CREATE TABLE notes (synchronous text);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO notes VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$;
CREATE TRIGGER note AFTER INSERT ON unsent_notifications FOR EACH ROW EXECUTE FUNCTION note();
"""
_READ_NOTES = "SELECT DISTINCT synchronous FROM notes"

Notes = Callable[[], Awaitable[list[str]]]
SYNCHRONOUS = {1: "off", 2: "on"}
"NORMAL and FULL of SQLite, in PostgreSQL's words."


async def noting_sqlite(path: Path, durability: Durability) -> tuple[NtfStore, Notes]:
    store = SqliteStore(path, durability=durability)
    await store.open()
    with closing(sqlite3.connect(path)) as db:
        db.executescript(_SQLITE_NOTES)

    async def notes() -> list[str]:
        with closing(sqlite3.connect(path)) as db:
            return [SYNCHRONOUS[value] for (value,) in db.execute(_READ_NOTES)]

    return store, notes


async def noting_postgres(url: str, durability: Durability) -> tuple[NtfStore, Notes]:
    store = PostgresStore(url, durability=durability)
    await store.open()
    db = await asyncpg.connect(url)
    await db.execute(_POSTGRES_NOTES)

    async def notes() -> list[str]:
        rows = [row[0] for row in await db.fetch(_READ_NOTES)]
        await db.close()
        return rows

    return store, notes


@pytest.mark.parametrize(("durability", "waits"), [(Durability.PROCESS, "off"), (Durability.MACHINE, "on")])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_notifications_wait_for_the_disk_where_asked_for(
    kind: str, durability: Durability, waits: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "sqlite":
        store, notes = await noting_sqlite(tmp_path / "ntf.db", durability)
    else:
        cluster: PostgresCluster = request.getfixturevalue("postgres")
        store, notes = await noting_postgres(cluster.new_database(), durability)
    token = await active_token(store)
    notifier_id = entity()
    created = await subscribe(store, new_subscription(token.key, notifier_id=notifier_id))
    stored = await store.add_notifications(created.server_key, [nmsg(notifier_id)], received_at=1)
    assert None not in stored
    assert await notes() == [waits]
    await store.close()
