"""How operations reach PostgreSQL: queues of groups, each group one transaction on a connection of the pool.

There are two pools. Commits of the first wait for the database's disk: what a client was promised. Commits
of the second do not: notifications and statuses, which a crash of a daemon does not touch, but perhaps one of
the database's machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import asyncpg

from store.interface import StoreError, StoreUnavailable
from store.postgres_database import PostgresDatabase, PostgresTransaction
from store.postgres_errors import CAUGHT, NO_SESSIONS, RETRIED, store_error, store_errors
from store.postgres_migrate import SCHEMA
from store.sql_store import CommitObserver, Failure, Operation, regrouped, runs

T = TypeVar("T")
Context = TypeVar("Context")

TRIES = 5
"Of an operation that collides with one of another daemon."

CONNECT_TIMEOUT = 10.0
SESSION_LOOKS = 3
"Others that use the same pooler may hide what one look would show."
RELAXED_CONNECTIONS = 2

_SESSION = "SELECT concat_ws(' of ', pg_backend_pid(), pg_postmaster_start_time())"
IDLE_IN_TRANSACTION = 5.0
"Seconds after which a daemon that hangs in a transaction loses it: others wait for its locks."


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


class GroupRunner:
    """Runs groups of batches that are one statement each or need no transaction: one trip for all. If a group
    fails, each operation is tried alone."""

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
            return [Failure(store_error(error))] * len(group)
        except Exception as error:
            if len(group) == 1:
                return [Failure(error)]
            return [(await self([operation]))[0] for operation in group]
        if self._on_commit is not None:
            self._on_commit(time.perf_counter() - started)
        return results

    async def _run(self, group: Sequence[Operation]) -> list[Any]:
        pool = self._pools.get(durable=self._durable)
        async with pool.acquire(timeout=CONNECT_TIMEOUT) as connection:
            return await _results(connection, group)


class GroupWriter(GroupRunner):
    """Runs groups of writes as transactions."""

    def __init__(
        self,
        pools: Pools,
        begin: Callable[[asyncpg.Connection], PostgresTransaction],
        on_commit: CommitObserver | None,
        *,
        durable: bool,
    ) -> None:
        super().__init__(pools, on_commit, durable=durable)
        self._begin = begin

    async def _run(self, group: Sequence[Operation]) -> list[Any]:
        async with self._pools.get(durable=self._durable).acquire() as connection, connection.transaction():
            transaction = self._begin(connection)
            results = await _results(transaction, group)
            await transaction.flush()
        return results


async def _results(context: Any, group: Sequence[Operation]) -> list[Any]:
    results: list[Any] = []
    for batch, arguments in runs(group):
        results += await batch(context, arguments)
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
            return [Failure(store_error(error))]
        except Exception as error:
            return [Failure(error)]
    return [Failure(store_error(failed))]


async def read_group(pools: Pools, group: Sequence[Operation]) -> list[Any]:
    """Reads of many callers at once: one query for all of a kind."""
    return await read(pools, lambda db: _results(db, group))


async def read(pools: Pools, call: Callable[[PostgresDatabase], Awaitable[T]]) -> T:
    """One read on a connection of its own."""
    with store_errors():
        async with pools.durable.acquire(timeout=CONNECT_TIMEOUT) as connection:
            return await call(PostgresDatabase(connection))


async def run_each(context: Context, calls: Sequence[Callable[[Context], Awaitable[T]]]) -> list[T]:
    """The batch of operations that gain nothing from being run together."""
    return [await call(context) for call in calls]


@cache
def flattened(batch: Callable[[Any, Sequence[Any]], Awaitable[list[Any]]]) -> Callable[[Any, Any], Any]:
    """A batch whose callers each bring a list: all lists run as one."""

    async def run(context: Any, lists: Sequence[Sequence[Any]]) -> list[list[Any]]:
        return regrouped(await batch(context, [item for one in lists for item in one]), lists)

    return run
