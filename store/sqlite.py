"""The store in an SQLite file: one connection writes, one reads, each with a queue of its own; a third folds
the log."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite

from protocol.encoding import EntityId
from store import (
    migrate,
    sqlite_deletion,
    sqlite_notifications,
    sqlite_routers,
    sqlite_statements,
    sqlite_subscriptions,
    sqlite_tokens,
)
from store.interface import SchemaOld, StoreUnavailable
from store.policy import BUSY_TIMEOUT, DEFAULT_CAPS, Durability, RowCaps
from store.records import (
    CreatedSubscription,
    NewSubscription,
    Notification,
    SentEntry,
    ServerKey,
    SnewRefusal,
    Stored,
)
from store.rule_filter import RuleFilter
from store.sql_store import SqlModules, SqlStore
from store.sqlite_checkpoints import Checkpoints
from store.sqlite_engine import (
    DatabaseFile,
    GroupReader,
    GroupWriter,
    connect_options,
    connected,
    flattened,
    run_each,
    run_in_thread,
    thread_queue,
)
from store.sqlite_errors import store_errors
from store.sqlite_transaction import Transaction
from store.work_queue import CommitObserver, Operation, WorkQueue

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

_GROUPED: dict[Callable[[Any, Any], Any], Callable[[Any, Any], Any]] = {
    read: flattened(read) for read in (sqlite_tokens.tokens, sqlite_subscriptions.subscriptions)
}


class SqliteStore(SqlStore):
    """NtfStore in the file `path`."""

    _sql = SqlModules(
        sqlite_tokens,
        sqlite_subscriptions,
        sqlite_routers,
        sqlite_notifications,
        sqlite_deletion,
        sqlite_statements,
    )

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
        self._writer: WorkQueue[Transaction] | None = None
        self._reader: WorkQueue[sqlite3.Connection] | None = None
        self._checkpoints: Checkpoints | None = None
        self._file = DatabaseFile(path)
        self._rule_filter = RuleFilter()
        self._run_writes = GroupWriter(
            self._file,
            on_commit,
            lambda db: Transaction(db, self._rule_filter),
            on_rollback=self._rule_filter.forget,
        )
        self._run_reads = GroupReader(self._file)
        self._create_subscriptions = flattened(sqlite_subscriptions.creator(caps))

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

    async def _write(self, call: Callable[[Transaction], R], *, durable: bool = True) -> R:
        return await self._writing.run(run_each, call, durable=durable)

    async def _read(self, call: Callable[[sqlite3.Connection], R]) -> R:
        return await self._reading.run(run_each, call)

    async def _read_grouped(self, read: Callable[[Any, Any], Any], ids: Sequence[EntityId]) -> Any:
        return await self._reading.run(_GROUPED[read], ids)

    async def _create(self, news: Sequence[NewSubscription]) -> list[CreatedSubscription | SnewRefusal]:
        created: list[CreatedSubscription | SnewRefusal]
        created = await self._writing.run(self._create_subscriptions, news, durable=True)
        return created

    @property
    def _writing(self) -> WorkQueue[Transaction]:
        if self._writer is None:
            raise StoreUnavailable("the store is not open")
        return self._writer

    @property
    def _reading(self) -> WorkQueue[sqlite3.Connection]:
        if self._reader is None:
            raise StoreUnavailable("the store is not open")
        return self._reader

    async def add_notifications(
        self, key: ServerKey, notifications: Sequence[Notification], *, received_at: int
    ) -> list[Stored | None]:
        return await self._write(
            lambda tx: sqlite_notifications.add(tx, key, notifications, received_at),
            durable=self._syncs_arrivals,
        )

    add_late_notifications = add_notifications  # there is no other daemon

    async def set_sent(self, entries: Sequence[SentEntry]) -> None:
        await self._writing.run(sqlite_notifications.set_sent, entries)

    async def check(self) -> None:
        if self._file.damage is not None:
            raise self._file.damage
        await self._write(_write_the_same)


def _set_up(db: sqlite3.Connection) -> None:
    for setting in _SETTINGS:
        db.execute(setting)


def _prepare_reader(db: sqlite3.Connection) -> None:
    _set_up(db)
    db.execute("PRAGMA query_only = ON")


def _write_the_same(tx: Transaction) -> None:
    """SQLite leaves out updates of rows that change nothing, but not this one."""
    (version,) = tx.db.execute("PRAGMA user_version").fetchone()
    tx.db.execute(f"PRAGMA user_version = {version}")
