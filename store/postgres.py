"""The store in a PostgreSQL database, which several daemons may share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, TypeVar

import asyncpg

from protocol.encoding import EntityId
from store import (
    postgres_deletion,
    postgres_notifications,
    postgres_routers,
    postgres_statements,
    postgres_subscriptions,
    postgres_tokens,
)
from store.interface import SchemaOld, StoreUnavailable, StoreVanished
from store.leases import LEASE_SECONDS, Duty, Lease
from store.policy import DEFAULT_CAPS, POOL_SIZE, STATEMENT_TIMEOUT, Durability, RowCaps
from store.postgres_engine import (
    GroupWriter,
    Pools,
    StatementRunner,
    Transaction,
    read,
    run_each,
)
from store.postgres_errors import store_errors
from store.postgres_leases import PostgresLeases
from store.postgres_migrate import STEPS, migrate, schema_version
from store.postgres_notifications import Arrived
from store.records import (
    CreatedSubscription,
    NewSubscription,
    Notification,
    SentEntry,
    ServerKey,
    SnewRefusal,
    Stored,
    TokenKey,
    TokenRecord,
)
from store.sql_store import SqlModules, SqlStore
from store.work_queue import CommitObserver, Operation, WorkQueue, regrouped, runs

R = TypeVar("R")

_NEW_ID = "SELECT nextval(pg_get_serial_sequence('daemons', 'daemon_id'))"


class PostgresStore(SqlStore):
    """NtfStore in the database at `url`."""

    _sql = SqlModules(
        postgres_tokens,
        postgres_subscriptions,
        postgres_routers,
        postgres_notifications,
        postgres_deletion,
        postgres_statements,
    )

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
        self._add = postgres_notifications.adder(lambda: self._daemon_id, self.leases)
        self._add_late = postgres_notifications.late_adder(self.leases)
        self._create_subscriptions = postgres_subscriptions.creator(caps)
        self._queues = {
            "durable": WorkQueue[Transaction]("store writer", self._writer(on_commit, durable=True)),
            "relaxed": WorkQueue[Transaction]("store statuses", self._writer(on_commit, durable=False)),
            "notifications": WorkQueue[asyncpg.Connection](
                "store notifications", StatementRunner(self._pools, on_commit, durable=self._syncs_arrivals)
            ),
            "reads": WorkQueue[asyncpg.Connection]("store reader", self._read_group),
        }
        self._is_open = False

    def _writer(self, on_commit: CommitObserver | None, *, durable: bool) -> GroupWriter:
        return GroupWriter(self._pools, lambda: self._daemon_id, self.leases, on_commit, durable=durable)

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

    async def _write(self, call: Callable[[Transaction], Awaitable[R]], *, durable: bool = True) -> R:
        result: R = await self._queue("durable" if durable else "relaxed").run(run_each, call)
        return result

    async def _write_as_owner(
        self, lease: Lease, call: Callable[[Transaction], Awaitable[R]], *, durable: bool = False
    ) -> R:
        async def checked(tx: Transaction) -> R:
            await tx.check_owner(lease)
            return await call(tx)

        return await self._write(checked, durable=durable)

    async def _read(self, call: Callable[[asyncpg.Connection], Awaitable[R]]) -> R:
        return await read(self._pools, call)

    async def _read_grouped(self, read: Callable[[Any, Any], Any], ids: Sequence[EntityId]) -> Any:
        return await self._queue("reads").run(read, ids)

    async def _create(self, news: Sequence[NewSubscription]) -> list[CreatedSubscription | SnewRefusal]:
        created: list[CreatedSubscription | SnewRefusal]
        created = await self._queue("durable").run(self._create_subscriptions, news)
        return created

    def _queue(self, name: str) -> WorkQueue[Any]:
        if not self._is_open:
            raise StoreUnavailable("the store is not open")
        return self._queues[name]

    async def _read_group(self, group: Sequence[Operation]) -> list[Any]:
        """Reads of many callers at once: one query for all of a kind."""

        async def run(db: asyncpg.Connection) -> list[Any]:
            results: list[Any] = []
            for batch, lists in runs(group):
                results += regrouped(await batch(db, [item for one in lists for item in one]), lists)
            return results

        return await read(self._pools, run)

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

    # Of pushes, those that this daemon sends

    async def unsent_tokens(self, *, after: TokenKey, limit: int) -> list[TokenKey]:
        parts = self.leases.push_parts()
        return await self._read(lambda db: postgres_notifications.unsent_tokens(db, after, limit, parts))

    async def due_crons(self, now: int, limit: int) -> list[TokenRecord]:
        parts = self.leases.push_parts()
        return await self._read(lambda db: postgres_tokens.due_crons(db, now, limit, parts))

    async def next_cron_due(self) -> int | None:
        parts = self.leases.push_parts()
        return await self._read(lambda db: postgres_tokens.next_cron_due(db, parts))

    async def set_sent(self, entries: Sequence[SentEntry]) -> None:
        await self._queue("notifications").run(postgres_notifications.set_sent, entries)

    async def check(self) -> None:
        await self._write(
            lambda tx: tx.db.fetchval("SELECT pg_current_xact_id()::text")
        )  # it has to be logged
