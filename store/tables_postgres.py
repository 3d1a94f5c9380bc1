"""The tables of a PostgreSQL store: one in its place, or one that is being made in a schema of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import asyncpg

from store.interface import SchemaError, StoreError
from store.policy import STATEMENT_TIMEOUT
from store.postgres_engine import Pools
from store.postgres_errors import store_errors
from store.postgres_migrate import SCHEMA, STEPS, migrate, schema_version
from store.tables import BYTE_KEYS, COUNT_TOKEN_ROUTERS, PAGE, SOURCE_NOTE, TABLES, Key, Marks, Row, Table

MOVING = f"{SCHEMA}_moving"

_LAST = "(SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('{}', '{}')::regclass), 0))"
_SEQUENCES = (
    ("unsent_notifications", "seq"),
    ("smp_servers", "server_key"),
    ("tokens", "token_key"),
    ("subscriptions", "sub_key"),
    ("statement_subscriptions", "sub_key"),
    ("statement_pushes", "push_key"),
)
"In the order of `Marks`."

_MARKS = f"""
SELECT coalesce(sum(tokens), 0)::bigint, coalesce(sum(active_tokens), 0)::bigint,
    coalesce(sum(subscriptions), 0)::bigint, coalesce(sum(active_subscriptions), 0)::bigint,
    {", ".join(_LAST.format(*sequence) for sequence in _SEQUENCES)}
FROM totals
"""
_SET_TOTALS = """
INSERT INTO totals (daemon_id, tokens, active_tokens, subscriptions, active_subscriptions)
VALUES (0, $1, $2, $3, $4)
"""
_NOTES = "CREATE TABLE IF NOT EXISTS moving_notes (name text PRIMARY KEY, note text NOT NULL)"
_PUT_NOTE = """
INSERT INTO moving_notes VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET note = excluded.note
"""
_ALIVE = "SELECT name FROM {}.daemons WHERE alive_until > clock_timestamp() ORDER BY name"


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection of its own for long work; PostgreSQL's errors become the store's."""
    pools = Pools(url, size=1, statement_timeout=STATEMENT_TIMEOUT)
    db = await pools.connect()
    try:
        with store_errors():
            await pools.check_sessions(db)
            yield db
    finally:
        await db.close()


class PostgresTables:
    """Reads the rows of a store."""

    schema = SCHEMA

    def __init__(self, db: asyncpg.Connection) -> None:
        self.db = db

    async def use(self) -> None:
        """To be called first."""
        await self.db.execute(f"SET search_path = {self.schema}")

    async def check_schema(self) -> None:
        if await schema_version(self.db) != STEPS.latest:
            raise SchemaError("the database has no schema of ours, or an old one: run `ntf-server migrate`")

    @asynccontextmanager
    async def standing_still(self) -> AsyncIterator[None]:
        """Nobody writes meanwhile: daemons that try wait, and fail when their patience ends."""
        await check_no_daemon(self.db)
        async with self.db.transaction(isolation="repeatable_read"):
            await self.db.execute(f"LOCK TABLE {', '.join(t.name for t in TABLES)}, totals IN SHARE MODE")
            yield

    async def page(self, table: Table, after: Key, upto: Marks | None) -> list[Row]:
        keys = ", ".join(table.key)
        marks = ", ".join(f"${place}" for place in range(1, len(after) + 1))
        limits = upto.limits(table) if upto else ""
        rows = await self.db.fetch(
            f"SELECT {_as_read(table)} FROM {table.name}"
            f" WHERE ({keys}) > ({marks}){limits} ORDER BY {keys} LIMIT {PAGE}",
            *after,
        )
        return [tuple(row) for row in rows]

    async def count(self, table: Table) -> int:
        return int(await self.db.fetchval(f"SELECT count(*) FROM {table.name}"))

    async def marks(self) -> Marks:
        return Marks(*await self.db.fetchrow(_MARKS))


async def check_no_daemon(db: asyncpg.Connection) -> None:
    if await db.fetchval("SELECT to_regclass($1)", f"{SCHEMA}.daemons") is not None:
        alive = [row[0] for row in await db.fetch(_ALIVE.format(SCHEMA))]
        if alive:
            raise StoreError(f"the database is in use by {', '.join(alive)}: stop every daemon first")


async def holds_data(db: asyncpg.Connection) -> bool:
    """Whether there is a store in its place that was ever used."""
    if await db.fetchval("SELECT to_regclass($1)", f"{SCHEMA}.tokens") is None:
        return False
    used = [f"EXISTS (SELECT 1 FROM {SCHEMA}.{table.name})" for table in TABLES]
    return bool(await db.fetchval(f"SELECT {' OR '.join(used)}"))


async def came_from(db: asyncpg.Connection) -> str | None:
    """The name of the change log that the store in its place was made with, if it was."""
    if await db.fetchval("SELECT to_regclass($1)", f"{SCHEMA}.moving_notes") is None:
        return None
    name: str | None = await db.fetchval(
        f"SELECT note FROM {SCHEMA}.moving_notes WHERE name = $1", SOURCE_NOTE
    )
    return name


async def put_aside(db: asyncpg.Connection, name: str) -> None:
    await db.execute(f"ALTER SCHEMA {SCHEMA} RENAME TO {name}")


async def remove_new(db: asyncpg.Connection) -> bool:
    """Whether there was one."""
    found: bool = await db.fetchval("SELECT to_regnamespace($1) IS NOT NULL", MOVING)
    await db.execute(f"DROP SCHEMA IF EXISTS {MOVING} CASCADE")
    return found


class NewPostgresTables(PostgresTables):
    """A store that is being made."""

    schema = MOVING

    async def use(self) -> None:
        await migrate(self.db, schema=MOVING)
        await super().use()
        await self.db.execute(_NOTES)

    async def begin(self, source: str) -> None:
        before = await self.note(SOURCE_NOTE)
        if before is not None and before != source:
            await remove_new(self.db)
            await self.use()
        await self.put_note(SOURCE_NOTE, source)

    async def count_token_routers(self) -> None:
        async with self.db.transaction():
            for sql in COUNT_TOKEN_ROUTERS:
                await self.db.execute(sql)

    async def append(self, table: Table, rows: Sequence[Row], note: str) -> None:
        async with self.db.transaction():
            await self._copy(table, rows, table.name, self.schema)
            await self.put_note(table.name, note)

    async def _copy(self, table: Table, rows: Sequence[Row], to: str, schema: str | None) -> None:
        await self.db.copy_records_to_table(
            to, records=_as_written(table, rows), columns=table.columns, schema_name=schema
        )

    async def note(self, name: str) -> str | None:
        note: str | None = await self.db.fetchval("SELECT note FROM moving_notes WHERE name = $1", name)
        return note

    async def put_note(self, name: str, note: str) -> None:
        await self.db.execute(_PUT_NOTE, name, note)

    async def rows(self, table: Table, keys: Sequence[Key]) -> list[Row]:
        """Those that exist."""
        names = ", ".join(table.key)
        found = await self.db.fetch(
            f"SELECT {_as_read(table)} FROM {table.name}"
            f" JOIN unnest({_key_arrays(table)}) asked({names}) USING ({names})",
            *(list(parts) for parts in zip(*keys, strict=True)),
        )
        return [tuple(row) for row in found]

    async def delete(self, table: Table, keys: Sequence[Key]) -> None:
        match = " AND ".join(f"{table.name}.{column} = gone.{column}" for column in table.key)
        await self.db.execute(
            f"DELETE FROM {table.name} USING unnest({_key_arrays(table)}) gone({', '.join(table.key)})"
            f" WHERE {match}",
            *(list(parts) for parts in zip(*keys, strict=True)),
        )

    async def upsert(self, table: Table, rows: Sequence[Row]) -> None:
        if table.neutral:
            # Two tokens may have swapped devices: none may meet the other's old one.
            (key,) = table.key
            await self.db.execute(
                f"UPDATE {table.name} SET {table.neutral} = int8send({key}) WHERE {key} = ANY($1::bigint[])",
                [row[0] for row in rows],
            )
        changed = f"moving_changed_{table.name}"
        await self.db.execute(
            f"CREATE TEMP TABLE IF NOT EXISTS {changed} (LIKE {table.name}) ON COMMIT DELETE ROWS"
        )
        await self.db.execute(f"TRUNCATE {changed}")
        await self._copy(table, rows, changed, None)
        names = ", ".join(table.columns)
        updates = ", ".join(f"{c} = excluded.{c}" for c in table.columns if c not in table.key)
        action = f"UPDATE SET {updates}" if updates else "NOTHING"
        await self.db.execute(
            f"INSERT INTO {table.name} ({names}) OVERRIDING SYSTEM VALUE SELECT {names} FROM {changed}"
            f" ON CONFLICT ({', '.join(table.key)}) DO {action}"
        )

    async def set_marks(self, marks: Marks) -> None:
        totals, lasts = marks[:4], marks[4:]
        async with self.db.transaction():
            await self.db.execute("DELETE FROM totals")
            await self.db.execute(_SET_TOTALS, *totals)
            for (table, column), last in zip(_SEQUENCES, lasts, strict=True):
                await self.db.execute(
                    "SELECT setval(pg_get_serial_sequence($1, $2), greatest($3, 1), $3 > 0)",
                    table,
                    column,
                    last,
                )

    async def prepare_use(self) -> None:
        for table in TABLES:
            await self.db.execute(f"ANALYZE {table.name}")

    async def finish(self) -> None:
        """Put the store in its place, in one transaction: where there is one, it must be empty.

        The notes stay: they tell where it came from.
        """
        async with self.db.transaction():
            await check_no_daemon(self.db)
            if await holds_data(self.db):
                raise StoreError("the database holds a store already")
            await self.db.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
            await self.db.execute(f"ALTER SCHEMA {MOVING} RENAME TO {SCHEMA}")


def _key_arrays(table: Table) -> str:
    types = ("bytea" if column in BYTE_KEYS else "bigint" for column in table.key)
    return ", ".join(f"${place}::{kind}[]" for place, kind in enumerate(types, 1))


def _as_read(table: Table) -> str:
    return ", ".join(f"{c}::int" if c in table.booleans else c for c in table.columns)


def _as_written(table: Table, rows: Sequence[Row]) -> Sequence[Row]:
    if not table.booleans:
        return rows
    is_boolean = [column in table.booleans for column in table.columns]
    return [
        tuple(bool(value) if boolean else value for value, boolean in zip(row, is_boolean, strict=True))
        for row in rows
    ]
