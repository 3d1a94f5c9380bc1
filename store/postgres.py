"""The store in a PostgreSQL database, which several daemons may share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

import asyncpg

from store import postgres_database
from store.interface import SchemaOld, StoreUnavailable, StoreVanished
from store.leases import LEASE_SECONDS, Duty, Lease
from store.policy import DEFAULT_CAPS, POOL_SIZE, STATEMENT_TIMEOUT, Durability, RowCaps
from store.postgres_database import PostgresTransaction
from store.postgres_engine import GroupRunner, GroupWriter, Pools, flattened, read, read_group, run_each
from store.postgres_errors import store_errors
from store.postgres_leases import PostgresLeases
from store.postgres_migrate import STEPS, migrate, schema_version
from store.records import Notification, SentEntry, ServerKey, Stored, TokenKey, TokenPush
from store.routers import Routers
from store.sql_store import Arrived, CommitObserver, Database, Sql, Transaction, WorkQueue
from store.statements import Statements
from store.subscriptions import Subscriptions
from store.tokens import Tokens

T = TypeVar("T")
R = TypeVar("R")

_NEW_ID = Sql("", "SELECT nextval(pg_get_serial_sequence('daemons', 'daemon_id'))")
_LOGGED = Sql("", "SELECT pg_current_xact_id()::text")


class PostgresStore(Tokens, Subscriptions, Routers, Statements):
    """NtfStore in the database at `url`."""

    def __init__(
        self,
        url: str,
        *,
        name: str = "",
        pool_size: int = POOL_SIZE,
        statement_timeout: float = STATEMENT_TIMEOUT,
        auto_migrate: bool = True,
        caps: RowCaps = DEFAULT_CAPS,
        lease_seconds: float = LEASE_SECONDS,
        durability: Durability = Durability.PROCESS,
        duties: Collection[Duty] = frozenset(Duty),
        on_commit: CommitObserver | None = None,
        vanished: str | None = None,
    ) -> None:
        """`vanished`: says that there was a database; one without anything of ours is refused in these
        words."""
        self._auto_migrate = auto_migrate
        self._vanished = vanished
        self._syncs_arrivals = durability is Durability.MACHINE
        self._pools = Pools(url, name=name, size=pool_size, statement_timeout=statement_timeout)
        self._daemon_id = 0
        self.leases: PostgresLeases = PostgresLeases(
            self._pools, lambda: self._daemon_id, name, seconds=lease_seconds, duties=duties
        )
        self._add = postgres_database.adder(lambda: self._daemon_id, self.leases)
        self._add_late = postgres_database.late_adder(self.leases)
        self._caps = caps
        self._queues: dict[str, WorkQueue[Any]] = {
            "durable": WorkQueue("store writer", self._writer(on_commit, durable=True)),
            "relaxed": WorkQueue("store statuses", self._writer(on_commit, durable=False)),
            "notifications": WorkQueue(
                "store notifications", GroupRunner(self._pools, on_commit, durable=self._syncs_arrivals)
            ),
            "reads": WorkQueue("store reader", partial(read_group, self._pools)),
        }
        self._is_open = False

    def _writer(self, on_commit: CommitObserver | None, *, durable: bool) -> GroupWriter:
        return GroupWriter(self._pools, self._begin, on_commit, durable=durable)

    def _begin(self, db: asyncpg.Connection) -> PostgresTransaction:
        return PostgresTransaction(db, self._daemon_id, self.leases, self._caps)

    async def open(self) -> None:
        """Create or upgrade the tables. StoreUnavailable or SchemaError, and nothing changed, if the database
        cannot be used."""
        db = await self._pools.connect()
        try:
            with store_errors():
                await self._pools.check_sessions(db)
                await self._prepare(db)
        finally:
            await db.close()
        await self._pools.open()
        self._daemon_id = await self._read(lambda db: db.fetchval(_NEW_ID))
        for queue in self._queues.values():
            queue.start()
        self._is_open = True

    async def _prepare(self, db: asyncpg.Connection) -> None:
        version = await schema_version(db)
        if version == 0 and self._vanished is not None:
            raise StoreVanished(self._vanished)
        if version != STEPS.latest and not self._auto_migrate:
            raise SchemaOld("the database has an old schema: start, or `ntf-server migrate`, upgrades it")
        await migrate(db)

    async def close(self) -> None:
        """Finish queued writes, then close."""
        self._is_open = False
        for queue in self._queues.values():
            await queue.stop()
        await self.leases.disconnect()
        await self._pools.close()

    def _push_parts(self) -> Sequence[int] | None:
        return self.leases.push_parts()

    async def _write(self, call: Callable[[PostgresTransaction], Awaitable[T]], *, durable: bool) -> T:
        result: T = await self._queue("durable" if durable else "relaxed").run(run_each, call)
        return result

    async def _write_as_owner(
        self, lease: Lease, call: Callable[[Transaction], Awaitable[T]], *, durable: bool
    ) -> T:
        async def checked(tx: PostgresTransaction) -> T:
            await tx.check_owner(lease)
            return await call(tx)

        return await self._write(checked, durable=durable)

    async def _write_grouped(
        self, write: Callable[[Transaction, Sequence[T]], Awaitable[list[R]]], items: Sequence[T]
    ) -> list[R]:
        results: list[R] = await self._queue("durable").run(flattened(write), items)
        return results

    async def _read(self, call: Callable[[Database], Awaitable[T]]) -> T:
        return await read(self._pools, call)

    async def _read_grouped(
        self, read: Callable[[Database, Sequence[T]], Awaitable[list[R]]], items: Sequence[T]
    ) -> list[R]:
        results: list[R] = await self._queue("reads").run(flattened(read), items)
        return results

    def _queue(self, name: str) -> WorkQueue[Any]:
        if not self._is_open:
            raise StoreUnavailable("the store is not open")
        return self._queues[name]

    async def add_notifications(
        self, key: ServerKey, notifications: Sequence[Notification], *, received_at: int
    ) -> list[Stored | None]:
        return await self._stored(self._add, Arrived(key, notifications, received_at))

    async def add_late_notifications(
        self, key: ServerKey, notifications: Sequence[Notification], *, received_at: int
    ) -> list[Stored | None]:
        return await self._stored(self._add_late, Arrived(key, notifications, received_at))

    async def _stored(self, add: Callable[[Any, Any], Any], block: Arrived) -> list[Stored | None]:
        stored: list[Stored | None] = await self._queue("notifications").run(add, block)
        return stored

    async def pushes(self, keys: Sequence[TokenKey]) -> list[TokenPush]:
        return await read(self._pools, lambda db: postgres_database.pushes(db.db, keys))

    async def set_sent(self, entries: Sequence[SentEntry]) -> None:
        await self._queue("notifications").run(postgres_database.set_sent, entries)

    async def check(self) -> None:
        await self._write(lambda tx: tx.fetchval(_LOGGED), durable=True)  # it has to be logged
