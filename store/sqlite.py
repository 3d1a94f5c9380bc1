"""The store in an SQLite file: one connection writes, one reads, each with a queue of its own; a third folds
the log."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite

from store import migrate, sqlite_database
from store.interface import SchemaOld, StoreUnavailable
from store.policy import BUSY_TIMEOUT, DEFAULT_CAPS, Durability, RowCaps
from store.records import Notification, SentEntry, ServerKey, Stored, TokenKey, TokenPush
from store.routers import Routers
from store.rule_filter import RuleFilter
from store.sql_store import Database, Transaction, flattened, run_each, shared
from store.sqlite_database import Arrived, SqliteDatabase, SqliteTransaction, at_once
from store.sqlite_engine import (
    Checkpoints,
    DatabaseFile,
    GroupReader,
    GroupWriter,
    connect_options,
    connected,
    run_in_thread,
    thread_queue,
)
from store.sqlite_errors import store_errors
from store.statements import Statements
from store.subscriptions import Subscriptions
from store.tokens import Tokens
from store.work_queue import CommitObserver, Operation, WorkQueue

T = TypeVar("T")
R = TypeVar("R")

_SETTINGS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA secure_delete = ON",  # what is deleted is overwritten: keys and codes
    "PRAGMA temp_store = MEMORY",
    "PRAGMA cache_size = -16384",  # KiB
    "PRAGMA wal_autocheckpoint = 12000",  # pages: much more than `Checkpoints` leaves there
    "PRAGMA journal_size_limit = 67108864",  # bytes: the log shrinks again after a burst
)

_RUN_EACH = at_once(run_each)


class SqliteStore(Tokens, Subscriptions, Routers, Statements):
    """NtfStore in the file `path`."""

    def __init__(
        self,
        path: Path,
        *,
        busy_timeout: float = BUSY_TIMEOUT,
        auto_migrate: bool = True,
        caps: RowCaps = DEFAULT_CAPS,
        durability: Durability = Durability.PROCESS,
        on_commit: CommitObserver | None = None,
    ) -> None:
        self._path = path
        self._syncs_arrivals = durability is Durability.MACHINE
        self._busy_timeout = busy_timeout
        self._auto_migrate = auto_migrate
        self._connections: list[aiosqlite.Connection] = []
        self._writer: WorkQueue[SqliteTransaction] | None = None
        self._reader: WorkQueue[SqliteDatabase] | None = None
        self._checkpoints: Checkpoints | None = None
        self._file = DatabaseFile(path)
        self._rule_filter = RuleFilter()
        self._run_writes = GroupWriter(
            self._file,
            on_commit,
            lambda db: SqliteTransaction(db, self._rule_filter, caps),
            on_rollback=self._rule_filter.forget,
        )
        self._run_reads = GroupReader(self._file, SqliteDatabase)

    async def open(self) -> None:
        """Create or upgrade the database. StoreUnavailable or SchemaError, and nothing changed, if it
        cannot be used."""
        try:
            with store_errors(self._path):
                writing = await self._connect(self._prepare)
                reading = await self._connect(_prepare_reader)
                folding = await self._connect(_set_up)
                self._file.remember()
                self._rule_filter.forget()
        except BaseException:
            await self._disconnect()
            raise
        self._checkpoints = Checkpoints(folding)
        self._writer = WorkQueue("store writer", partial(self._write_group, writing, self._checkpoints))
        self._reader = thread_queue("store reader", reading, self._run_reads)
        self._checkpoints.start()
        self._writer.start()
        self._reader.start()

    async def close(self) -> None:
        for part in (self._writer, self._reader, self._checkpoints):
            if part is not None:
                await part.stop()
        await self._disconnect()

    async def _connect(self, prepare: Callable[[sqlite3.Connection], None]) -> aiosqlite.Connection:
        migrate.protect(self._path)
        options = connect_options(self._busy_timeout)
        connection = await connected(lambda: sqlite3.connect(self._path, **options))
        self._connections.append(connection)
        await run_in_thread(connection, prepare)
        return connection

    async def _disconnect(self) -> None:
        """The writer last: it can fold the log into the database when it is alone."""
        while self._connections:
            await self._connections.pop().close()

    def _prepare(self, db: sqlite3.Connection) -> None:
        # First of all: nothing may be written to a file that is not ours.
        steps = migrate.STEPS.plan(migrate.schema_version(db), migrate.STEPS.latest)
        if steps and not self._auto_migrate:
            raise SchemaOld(f"{self._path} has an old schema: start, or `ntf-server migrate`, upgrades it")
        _set_up(db)
        migrate.apply(db, steps)
        # A lock or a missing permission shows now, not at the first command.
        db.execute("BEGIN IMMEDIATE")
        db.execute("ROLLBACK")

    async def _write_group(
        self, connection: aiosqlite.Connection, checkpoints: Checkpoints, group: Sequence[Operation]
    ) -> list[Any]:
        results, rows = await run_in_thread(
            connection, lambda db: (self._run_writes(db, group), db.total_changes)
        )
        checkpoints.committed(rows)
        return results

    async def _write(self, call: Callable[[Transaction], Awaitable[T]], *, durable: bool) -> T:
        result: T = await self._writing.run(_RUN_EACH, call, durable=durable)
        return result

    async def _write_grouped(
        self, write: Callable[[Transaction, Sequence[T]], Awaitable[list[R]]], items: Sequence[T]
    ) -> list[R]:
        results: list[R] = await self._writing.run(at_once(flattened(write)), items, durable=True)
        return results

    async def _read(self, call: Callable[[Database], Awaitable[T]]) -> T:
        result: T = await self._reading.run(_RUN_EACH, call)
        return result

    async def _read_grouped(
        self, read: Callable[[Database, Sequence[T]], Awaitable[list[R]]], items: Sequence[T]
    ) -> list[R]:
        results: list[R] = await self._reading.run(at_once(flattened(read)), items)
        return results

    @property
    def _writing(self) -> WorkQueue[SqliteTransaction]:
        if self._writer is None:
            raise StoreUnavailable("the store is not open")
        return self._writer

    @property
    def _reading(self) -> WorkQueue[SqliteDatabase]:
        if self._reader is None:
            raise StoreUnavailable("the store is not open")
        return self._reader

    async def add_notifications(
        self, key: ServerKey, notifications: Sequence[Notification], *, received_at: int
    ) -> list[Stored | None]:
        return await self._writing.run(
            sqlite_database.add, Arrived(key, notifications, received_at), durable=self._syncs_arrivals
        )

    add_late_notifications = add_notifications  # there is no other daemon

    async def pushes(self, keys: Sequence[TokenKey]) -> list[TokenPush]:
        return await self._reading.run(sqlite_database.pushes, keys)

    async def set_sent(self, entries: Sequence[SentEntry]) -> None:
        await self._writing.run(sqlite_database.set_sent, entries)

    async def check(self) -> None:
        if self._file.damage is not None:
            raise self._file.damage
        await self._write(_write_the_same, durable=True)


def _set_up(db: sqlite3.Connection) -> None:
    for setting in _SETTINGS:
        db.execute(setting)


def _prepare_reader(db: sqlite3.Connection) -> None:
    _set_up(db)
    db.execute("PRAGMA query_only = ON")


async def _write_the_same(tx: Transaction) -> None:
    """SQLite leaves out updates of rows that change nothing, but not this one."""
    version = await tx.fetchval(shared("PRAGMA user_version"))
    await tx.execute(shared(f"PRAGMA user_version = {version}"))
