"""The store in an SQLite file: one connection writes, one reads, each with a queue of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import aiosqlite

from protocol.device_token import DeviceToken
from protocol.encoding import EntityId
from protocol.statuses import TokenInput
from store import (
    migrate,
    sqlite_deletion,
    sqlite_notifications,
    sqlite_routers,
    sqlite_subscriptions,
    sqlite_tokens,
)
from store.interface import SchemaError, StoreUnavailable
from store.policy import BUSY_TIMEOUT, DEFAULT_CAPS, RowCaps
from store.records import (
    Counts,
    CreatedSubscription,
    DeletedSubscription,
    Deletion,
    Moved,
    NewSubscription,
    NewToken,
    Notification,
    QueueEvent,
    QueueRow,
    SentEntry,
    ServerKey,
    ServerRecord,
    ServiceCredentials,
    SnewRefusal,
    Stored,
    StoredRouter,
    SubKey,
    SubscriptionRecord,
    TokenKey,
    TokenMove,
    TokenPush,
    TokenRecord,
)
from store.sqlite_engine import (
    STATEMENT_CACHE,
    CommitObserver,
    DatabaseFile,
    GroupReader,
    GroupWriter,
    WorkQueue,
    flattened,
    run_each,
    run_in_thread,
)
from store.sqlite_errors import store_errors
from store.sqlite_transaction import Transaction

R = TypeVar("R")

_SETTINGS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA secure_delete = ON",  # what is deleted is overwritten: keys and codes
    "PRAGMA temp_store = MEMORY",
    "PRAGMA cache_size = -16384",  # KiB
    "PRAGMA wal_autocheckpoint = 4000",  # pages: a page changed often is copied to the database less often
    "PRAGMA journal_size_limit = 67108864",  # bytes: the log shrinks again after a burst
)

_TOKENS = flattened(sqlite_tokens.tokens)
_SUBSCRIPTIONS = flattened(sqlite_subscriptions.subscriptions)


class SqliteStore:
    """NtfStore in the file `path`."""

    def __init__(
        self,
        path: Path,
        *,
        busy_timeout: float = BUSY_TIMEOUT,
        auto_migrate: bool = True,
        caps: RowCaps = DEFAULT_CAPS,
        on_commit: CommitObserver | None = None,
    ) -> None:
        self._path = path
        self._busy_timeout = busy_timeout
        self._auto_migrate = auto_migrate
        self._connections: list[aiosqlite.Connection] = []
        self._writer: WorkQueue[Transaction] | None = None
        self._reader: WorkQueue[sqlite3.Connection] | None = None
        self._file = DatabaseFile(path)
        self._run_writes = GroupWriter(self._file, on_commit)
        self._run_reads = GroupReader(self._file)
        self._create_subscriptions = flattened(sqlite_subscriptions.creator(caps))

    async def open(self) -> None:
        """Create or upgrade the database. StoreUnavailable or SchemaError, and nothing changed, if it
        cannot be used."""
        try:
            with store_errors(self._path):
                writing = await self._connect(self._prepare)
                reading = await self._connect(_prepare_reader)
                self._file.remember()
        except BaseException:
            await self._disconnect()
            raise
        self._writer = WorkQueue("store writer", writing, self._run_writes)
        self._reader = WorkQueue("store reader", reading, self._run_reads)
        self._writer.start()
        self._reader.start()

    async def close(self) -> None:
        for queue in (self._writer, self._reader):
            if queue is not None:
                await queue.stop()
        await self._disconnect()

    async def _connect(self, prepare: Callable[[sqlite3.Connection], None]) -> aiosqlite.Connection:
        migrate.protect(self._path)
        connection = await aiosqlite.connect(
            self._path,
            timeout=self._busy_timeout,
            isolation_level=None,
            cached_statements=STATEMENT_CACHE,
        )
        self._connections.append(connection)
        await run_in_thread(connection, prepare)
        return connection

    async def _disconnect(self) -> None:
        """The writer last: it can fold the log into the database when it is alone."""
        while self._connections:
            await self._connections.pop().close()

    def _prepare(self, db: sqlite3.Connection) -> None:
        # First of all: nothing may be written to a file that is not ours.
        steps = migrate.plan(migrate.schema_version(db), migrate.latest_version())
        if steps and not self._auto_migrate:
            raise SchemaError(f"{self._path} has an old schema: run the migration")
        for setting in _SETTINGS:
            db.execute(setting)
        migrate.apply(db, steps)
        # A lock or a missing permission shows now, not at the first command.
        db.execute("BEGIN IMMEDIATE")
        db.execute("ROLLBACK")

    async def _write(self, call: Callable[[Transaction], R], *, durable: bool = True) -> R:
        return await self._writing.run(run_each, call, durable=durable)

    async def _read(self, call: Callable[[sqlite3.Connection], R]) -> R:
        return await self._reading.run(run_each, call)

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

    # Tokens

    async def tokens(self, token_ids: Sequence[EntityId]) -> list[TokenRecord | None]:
        return await self._reading.run(_TOKENS, token_ids)

    async def tokens_by_key(self, keys: Sequence[TokenKey]) -> list[TokenRecord]:
        return await self._read(lambda db: sqlite_tokens.by_key(db, keys))

    async def token_by_device(self, device_token: DeviceToken, verify_key: bytes) -> TokenRecord | None:
        return await self._read(lambda db: sqlite_tokens.by_device(db, device_token, verify_key))

    async def create_token(self, token: NewToken) -> TokenRecord:
        return await self._write(lambda tx: sqlite_tokens.create(tx, token))

    async def move_token(self, seen: TokenRecord, event: TokenInput, updated_on: int) -> TokenMove | None:
        return await self._write(lambda tx: sqlite_tokens.move(tx, seen, event, updated_on))

    async def replace_device_token(
        self, key: TokenKey, device_token: DeviceToken, code: bytes, updated_on: int
    ) -> bool:
        return await self._write(
            lambda tx: sqlite_tokens.replace_device(tx, key, device_token, code, updated_on)
        )

    async def delete_token(self, key: TokenKey) -> Deletion | None:
        return await self._write(lambda tx: sqlite_tokens.delete(tx, key))

    async def set_cron(self, key: TokenKey, minutes: int, due: int | None) -> bool:
        return await self._write(lambda tx: sqlite_tokens.set_cron(tx, key, minutes, due))

    async def due_crons(self, now: int, limit: int) -> list[TokenRecord]:
        return await self._read(lambda db: sqlite_tokens.due_crons(db, now, limit))

    async def set_cron_due(self, due: Sequence[tuple[TokenKey, int]]) -> None:
        await self._write(lambda tx: sqlite_tokens.set_cron_due(tx, due), durable=False)

    async def next_cron_due(self) -> int | None:
        return await self._read(sqlite_tokens.next_cron_due)

    async def purge_tokens(self, *, unverified_before: int, invalid_before: int, limit: int) -> Deletion:
        return await self._write(
            lambda tx: sqlite_tokens.purge(tx, unverified_before, invalid_before, limit), durable=False
        )

    async def delete_more(self) -> Deletion:
        return await self._write(sqlite_deletion.more, durable=False)

    async def delete_unused_servers(self) -> int:
        """Looked for on the reader's connection: a scan of all routers holds up no write."""
        unused = await self._read(sqlite_routers.unused_servers)
        if not unused:
            return 0
        return await self._write(lambda tx: sqlite_routers.delete_unused(tx, unused), durable=False)

    # Subscriptions

    async def subscriptions(self, subscription_ids: Sequence[EntityId]) -> list[SubscriptionRecord | None]:
        return await self._reading.run(_SUBSCRIPTIONS, subscription_ids)

    async def create_subscriptions(
        self, news: Sequence[NewSubscription]
    ) -> list[CreatedSubscription | SnewRefusal]:
        return await self._writing.run(self._create_subscriptions, news, durable=True)

    async def delete_subscription(self, key: SubKey) -> DeletedSubscription | None:
        return await self._write(lambda tx: sqlite_subscriptions.delete(tx, key))

    # Routers

    async def servers(self) -> list[StoredRouter]:
        return await self._read(sqlite_routers.servers)

    async def server(self, key: ServerKey) -> ServerRecord:
        return await self._read(lambda db: sqlite_routers.server(db, key))

    async def subscription_count(self, key: ServerKey) -> int:
        return await self._read(lambda db: sqlite_routers.subscription_count(db, key))

    async def subscribable_count(self) -> int:
        return await self._read(sqlite_routers.subscribable_count)

    async def queues(
        self, key: ServerKey, *, after: SubKey, limit: int, associated: bool | None = None
    ) -> list[QueueRow]:
        return await self._read(lambda db: sqlite_routers.queues(db, key, after, limit, associated))

    async def queues_by_id(self, key: ServerKey, notifier_ids: Sequence[EntityId]) -> list[QueueRow]:
        return await self._read(lambda db: sqlite_routers.queues_by_id(db, key, notifier_ids))

    async def due_retries(self, key: ServerKey, now: int, limit: int) -> list[QueueRow]:
        return await self._write(lambda tx: sqlite_routers.due_retries(tx, key, now, limit), durable=False)

    async def next_retry(self, key: ServerKey) -> int | None:
        return await self._read(lambda db: sqlite_routers.next_retry(db, key))

    async def set_subscribed(
        self, key: ServerKey, notifier_ids: Sequence[EntityId], *, service_id: EntityId | None
    ) -> list[Moved]:
        return await self._write(
            lambda tx: sqlite_routers.set_subscribed(tx, key, notifier_ids, service_id), durable=False
        )

    async def move_queues(self, key: ServerKey, events: Sequence[QueueEvent], *, now: int) -> list[Moved]:
        return await self._write(lambda tx: sqlite_routers.move_queues(tx, key, events, now), durable=False)

    async def set_disconnected(self, key: ServerKey) -> int:
        change = sqlite_routers.set_disconnected
        return await self._by_page(change, key, False) + await self._by_page(change, key, True)

    async def set_service_subscribed(self, key: ServerKey) -> int:
        return await self._by_page(sqlite_routers.set_service_subscribed, key, True)

    async def _by_page(
        self,
        change: Callable[[Transaction, ServerKey, bool, SubKey], sqlite_routers.Page],
        key: ServerKey,
        associated: bool,
    ) -> int:
        """Change the state of all queues of a router, in transactions of bounded size."""
        changed, last = 0, SubKey(0)
        while True:
            after = last
            page = await self._write(lambda tx: change(tx, key, associated, after), durable=False)  # noqa: B023
            changed += page.changed
            if page.last is None:
                return changed
            last = page.last

    async def set_credentials(self, key: ServerKey, credentials: ServiceCredentials) -> None:
        await self._write(lambda tx: sqlite_routers.set_credentials(tx, key, credentials))

    async def set_service_id(self, key: ServerKey, service_id: EntityId) -> bool:
        return await self._write(lambda tx: sqlite_routers.set_service_id(tx, key, service_id))

    async def clear_service(self, key: ServerKey) -> None:
        await self._write(lambda tx: sqlite_routers.clear_service(tx, key))

    # Notifications

    async def add_notifications(
        self, key: ServerKey, notifications: Sequence[Notification], *, received_at: int
    ) -> list[Stored | None]:
        return await self._write(
            lambda tx: sqlite_notifications.add(tx, key, notifications, received_at), durable=False
        )

    async def pushes(self, keys: Sequence[TokenKey]) -> list[TokenPush]:
        return await self._read(lambda db: sqlite_notifications.pushes(db, keys))

    async def set_sent(self, entries: Sequence[SentEntry]) -> None:
        await self._writing.run(sqlite_notifications.set_sent, entries)

    async def unsent_tokens(self, *, after: TokenKey, limit: int) -> list[TokenKey]:
        return await self._read(lambda db: sqlite_notifications.unsent_tokens(db, after, limit))

    async def check(self) -> None:
        await self._read(lambda db: None)

    async def counts(self) -> Counts:
        return await self._read(sqlite_notifications.counts)


def _prepare_reader(db: sqlite3.Connection) -> None:
    for setting in _SETTINGS:
        db.execute(setting)
    db.execute("PRAGMA query_only = ON")
