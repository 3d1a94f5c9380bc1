"""How operations reach PostgreSQL: queues of groups, each group one transaction on a connection of the pool.

There are two pools. Commits of the first wait for the database's disk: what a client was promised. Commits
of the second do not: notifications and statuses, which a crash of a daemon does not touch, but perhaps one of
the database's machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import asyncpg

from protocol.encoding import EntityId
from store.interface import LeaseLost, StoreError, StoreUnavailable
from store.leases import FORGET, Duty, Lease, of_router
from store.postgres_errors import CAUGHT, NO_SESSIONS, RETRIED, store_error, store_errors
from store.postgres_migrate import SCHEMA
from store.records import ServerKey
from store.router_sums import SUM_COLUMNS, RouterSums
from store.sums import Sums
from store.work_queue import CommitObserver, Failed, Operation, runs

T = TypeVar("T")

TRIES = 5
"Of an operation that collides with one of another daemon."

CONNECT_TIMEOUT = 10.0
SESSION_LOOKS = 3
"Others that use the same pooler may hide what one look would show."
RELAXED_CONNECTIONS = 2

_READ_ROUTERS = f"""
SELECT server_key, {SUM_COLUMNS} FROM smp_servers
WHERE server_key = ANY($1::bigint[]) ORDER BY server_key FOR NO KEY UPDATE
"""
_WRITE_ROUTERS = f"""
UPDATE smp_servers v SET ({SUM_COLUMNS})
    = (i.lost, i.served, i.associated, i.hash, i.active, i.active_associated)
FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bytea[], $6::bigint[], $7::bigint[])
    i(key, lost, served, associated, hash, active, active_associated)
WHERE v.server_key = i.key
"""
_WRITE_TOTALS = """
INSERT INTO totals AS t (daemon_id, tokens, active_tokens, subscriptions, active_subscriptions)
VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (daemon_id) DO UPDATE SET tokens = t.tokens + excluded.tokens,
    active_tokens = t.active_tokens + excluded.active_tokens,
    subscriptions = t.subscriptions + excluded.subscriptions,
    active_subscriptions = t.active_subscriptions + excluded.active_subscriptions
"""


_HELD = """
SELECT l.duty, l.id FROM unnest($1::text[], $2::bigint[], $3::bigint[]) i(duty, id, fence)
JOIN leases l ON l.duty = i.duty AND l.id = i.id AND l.owner = $4 AND l.fence = i.fence
ORDER BY l.duty, l.id FOR SHARE OF l
"""
_SESSION = "SELECT concat_ws(' of ', pg_backend_pid(), pg_postmaster_start_time())"
CHANNEL = "ntf"
"On which daemons talk."
SAY = f"SELECT pg_notify('{CHANNEL}', words) FROM unnest($1::text[]) words"

IDLE_IN_TRANSACTION = 5.0
"Seconds after which a daemon that hangs in a transaction loses it: others wait for its locks."


class Fences(Protocol):
    """What a transaction asks of the leases of its daemon."""

    has_joined: bool

    def owns(self, lease: Lease) -> bool: ...

    def fence(self, lease: Lease) -> int | None: ...

    def shown(self, lease: Lease) -> int | None: ...

    def refused(self, lease: Lease) -> LeaseLost: ...

    def words_about(self, verb: str, words: Iterable[str], first: str) -> list[str]: ...


class Transaction(Sums):
    """Sums are written by `flush`, once for each group of operations."""

    def __init__(self, db: asyncpg.Connection, daemon_id: int, leases: Fences) -> None:
        super().__init__()
        self.db = db
        self.daemon_id = daemon_id
        self.leases = leases
        self._checked: set[Lease] = set()
        self._deleted: dict[ServerKey, list[EntityId]] = {}

    async def check_owner(self, lease: Lease) -> None:
        """LeaseLost unless this daemon owns it, and then until the end of the transaction."""
        fence = self.leases.fence(lease)
        if fence is None or lease in self._checked:
            return
        if not await self._held({lease: fence}):
            raise self.leases.refused(lease)
        self._checked.add(lease)

    async def held(self, leases: Iterable[Lease]) -> set[Lease]:
        """Those of them that this daemon owns, and then until the end of the transaction."""
        asked = set(leases)
        if not self.leases.has_joined:
            return asked
        held = await self._held(
            {lease: fence for lease in asked if (fence := self.leases.shown(lease)) is not None}
        )
        for lease in asked - held:
            self.leases.refused(lease)
        return held

    async def _held(self, fences: Mapping[Lease, int]) -> set[Lease]:
        duties, ids = [lease.duty.value for lease in fences], [lease.id for lease in fences]
        rows = await self.db.fetch(_HELD, duties, ids, list(fences.values()), self.daemon_id)
        return {Lease(Duty(duty), id) for duty, id in rows}

    def deleted(self, key: ServerKey, notifier_id: EntityId) -> None:
        """If another daemon owns the router, it is told."""
        if self.leases.has_joined and not self.leases.owns(of_router(key)):
            self._deleted.setdefault(key, []).append(notifier_id)

    async def router(self, key: ServerKey) -> RouterSums | None:
        """The sums of a router, with what this transaction did so far; None if it is gone. Nobody else
        changes them until its end."""
        return (await self._settled([key])).get(key)

    async def change_router(self, key: ServerKey, before: RouterSums, after: RouterSums) -> RouterSums:
        await self._change_routers({key: before}, {key: after})
        return after

    async def settle_routers(self) -> None:
        if self.routers:
            await self._settled(list(self.routers))

    async def _settled(self, keys: Sequence[ServerKey]) -> dict[ServerKey, RouterSums]:
        rows = await self.db.fetch(_READ_ROUTERS, keys)
        before = {ServerKey(key): RouterSums(*sums) for key, *sums in rows}
        changes = {key: self.routers.pop(key) for key in keys if key in self.routers}
        after = {key: s.changed(changes[key]) if key in changes else s for key, s in before.items()}
        await self._change_routers(before, after)
        return after

    async def _change_routers(
        self, before: Mapping[ServerKey, RouterSums], after: Mapping[ServerKey, RouterSums]
    ) -> None:
        changed = [(key, *sums) for key, sums in after.items() if sums != before[key]]
        if changed:
            await self.db.execute(_WRITE_ROUTERS, *map(list, zip(*changed, strict=True)))
            self.active_subscriptions += sum(
                after[key].active_count - before[key].active_count for key in after
            )

    async def flush(self) -> None:
        await self.settle_routers()
        changes = (self.tokens, self.active_tokens, self.subscriptions, self.active_subscriptions)
        if any(changes):
            await self.db.execute(_WRITE_TOTALS, self.daemon_id, *changes)
        words = [
            notice
            for key, ids in self._deleted.items()
            for notice in self.leases.words_about(FORGET, [id.hex() for id in ids], str(key))
        ]
        if words:
            await self.db.execute(SAY, words)


class Pools:
    """The connections of one daemon. Both pools replace connections that were lost."""

    def __init__(self, url: str, *, name: str = "", size: int, statement_timeout: float) -> None:
        """`name`: as what the connections show in the database's list of them."""
        self._url = url
        self._name = name
        self._size = size
        self._statement_timeout = statement_timeout
        self._durable: asyncpg.Pool | None = None
        self._relaxed: asyncpg.Pool | None = None

    async def open(self) -> None:
        self._durable = await self._pool(self._size, "on")
        self._relaxed = await self._pool(RELAXED_CONNECTIONS, "off")

    async def close(self) -> None:
        for pool in (self._durable, self._relaxed):
            if pool is not None:
                pool.terminate()
        self._durable = self._relaxed = None

    @property
    def durable(self) -> asyncpg.Pool:
        return _opened(self._durable)

    @property
    def relaxed(self) -> asyncpg.Pool:
        return _opened(self._relaxed)

    def get(self, *, durable: bool) -> asyncpg.Pool:
        return self.durable if durable else self.relaxed

    @property
    def own_settings(self) -> str:
        """Of every connection that a daemon keeps."""
        quoted = self._name.replace("'", "''")
        return f"SET search_path = {SCHEMA}; SET application_name = '{quoted}'"

    async def connect(self) -> asyncpg.Connection:
        """One more connection, of the caller's own."""
        with store_errors(ValueError):
            return await asyncpg.connect(self._url, timeout=CONNECT_TIMEOUT)

    async def check_sessions(self, db: asyncpg.Connection) -> None:
        """StoreError if a pooler in between deals sessions of the database out anew for every transaction.

        Settings, prepared statements and LISTEN would then be whoever's comes next, and a commit that a
        client was promised might not wait for the disk.
        """
        other = await self.connect()
        try:
            for _ in range(SESSION_LOOKS):
                if await db.fetchval(_SESSION) == await other.fetchval(_SESSION):
                    raise StoreError(f"PostgreSQL {NO_SESSIONS}")
        finally:
            await other.close()

    async def _pool(self, size: int, synchronous_commit: str) -> asyncpg.Pool:
        milliseconds = int(self._statement_timeout * 1000)
        settings = "; ".join(
            (
                self.own_settings,
                f"SET synchronous_commit = {synchronous_commit}",
                f"SET statement_timeout = {milliseconds}",
                f"SET lock_timeout = {milliseconds}",
                f"SET idle_in_transaction_session_timeout = {int(IDLE_IN_TRANSACTION * 1000)}",
            )
        )

        async def prepare(connection: asyncpg.Connection) -> None:
            # Not as parameters of the connection: a pooler in between would refuse them.
            await connection.execute(settings)

        with store_errors(ValueError):
            return await asyncpg.create_pool(
                self._url,
                min_size=0,  # whoever needs a connection makes it, and is told if that fails
                max_size=size,
                timeout=CONNECT_TIMEOUT,
                # Beyond the server's own limit: for a server that does not answer at all.
                command_timeout=self._statement_timeout + CONNECT_TIMEOUT,
                init=prepare,
                reset=_leave_as_it_is,
            )


async def _leave_as_it_is(connection: asyncpg.Connection) -> None:
    """No statement of ours changes a session, so there is nothing to reset: one trip less."""


def _opened(pool: asyncpg.Pool | None) -> asyncpg.Pool:
    if pool is None:
        raise StoreUnavailable("the store is not open")
    return pool


Batch = Callable[[Transaction, Sequence[Any]], Awaitable[Sequence[Any]]]
"Runs one kind of operation for several callers; one result for each, in order."


class GroupWriter:
    """Runs groups of writes as transactions. If a group fails, each operation is tried alone."""

    def __init__(
        self,
        pools: Pools,
        daemon_id: Callable[[], int],
        leases: Fences,
        on_commit: CommitObserver | None,
        *,
        durable: bool,
    ) -> None:
        self._pools = pools
        self._daemon_id = daemon_id
        self._leases = leases
        self._on_commit = on_commit
        self._durable = durable

    async def __call__(self, group: Sequence[Operation]) -> list[Any]:
        started = time.perf_counter()
        try:
            results = await self._transact(group)
        except RETRIED:
            return [(await _retried(partial(self._transact, [operation])))[0] for operation in group]
        except CAUGHT as error:
            return [Failed(store_error(error))] * len(group)
        except Exception as error:
            if len(group) == 1:
                return [Failed(error)]
            return [(await self([operation]))[0] for operation in group]
        if self._on_commit is not None:
            self._on_commit(time.perf_counter() - started, len(group))
        return results

    async def _transact(self, group: Sequence[Operation]) -> list[Any]:
        results: list[Any] = []
        async with self._pools.get(durable=self._durable).acquire() as connection, connection.transaction():
            transaction = Transaction(connection, self._daemon_id(), self._leases)
            for batch, arguments in runs(group):
                results += await batch(transaction, arguments)
            await transaction.flush()
        return results


class StatementRunner:
    """Runs groups of batches that are one statement each or need no transaction: one trip for all."""

    def __init__(self, pools: Pools, on_commit: CommitObserver | None, *, durable: bool) -> None:
        self._pools = pools
        self._on_commit = on_commit
        self._durable = durable

    async def __call__(self, group: Sequence[Operation]) -> list[Any]:
        started = time.perf_counter()
        try:
            results = await self._run(group)
        except RETRIED:
            return [(await _retried(partial(self._run, [operation])))[0] for operation in group]
        except CAUGHT as error:
            return [Failed(store_error(error))] * len(group)
        if self._on_commit is not None:
            self._on_commit(time.perf_counter() - started, len(group))
        return results

    async def _run(self, group: Sequence[Operation]) -> list[Any]:
        results: list[Any] = []
        pool = self._pools.get(durable=self._durable)
        async with pool.acquire(timeout=CONNECT_TIMEOUT) as connection:
            for batch, arguments in runs(group):
                results += await batch(connection, arguments)
        return results


async def _retried(call: Callable[[], Awaitable[list[Any]]]) -> list[Any]:
    """One operation that collided with others, by itself."""
    for attempt in range(TRIES):
        try:
            return await call()
        except RETRIED as error:
            failed: Exception = error
            await asyncio.sleep(0.01 * 2**attempt)
        except CAUGHT as error:
            return [Failed(store_error(error))]
        except Exception as error:
            return [Failed(error)]
    return [Failed(store_error(failed))]


async def read(pools: Pools, call: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
    """One read on a connection of its own."""
    with store_errors():
        async with pools.durable.acquire(timeout=CONNECT_TIMEOUT) as connection:
            return await call(connection)


async def run_each(
    transaction: Transaction, calls: Sequence[Callable[[Transaction], Awaitable[T]]]
) -> list[T]:
    """The batch of operations that gain nothing from being run together."""
    return [await call(transaction) for call in calls]
