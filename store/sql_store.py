"""What the stores in SQL share: statements as each database spells them, transactions, and how an operation
reaches one, together with all that wait.

An operation is written once, as a coroutine. On PostgreSQL it waits for the network. On SQLite it runs on the
thread of its connection from the first line to the last, and never waits.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from itertools import groupby, islice
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from protocol.addresses import SmpServer
from protocol.encoding import EntityId, new_tuple
from protocol.hiding import hides_bytes
from protocol.ids_hash import ids_hash, xor
from protocol.statuses import SubState, TokenStatus
from store.interface import StoreUnavailable
from store.leases import SOLE_OWNER, Lease, Leases, Ownership
from store.policy import Owner, RowCaps
from store.records import CreatedSubscription, Notification, ServerKey, SnewRefusal, SubKey, TokenKey
from store.rule_filter import SenderTopic
from store.sums import SUM_COLUMNS, QueueChange, RouterChanges, RouterSums, StoredState

Row = Sequence[Any]
T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
Context = TypeVar("Context")
StoreT = TypeVar("StoreT", bound="SqlStore")

_LIST = re.compile(r"= ANY\(\$\d+::\w+\[\]\)")
_LOCK = re.compile(r"\s+FOR (?:NO KEY UPDATE|UPDATE|KEY SHARE|SHARE)(?: OF \w+)?(?: SKIP LOCKED)?")
_JOIN = re.compile(r"(?<!LEFT )\bJOIN\b")
_NEW_ROWS = re.compile(r"SELECT \* FROM unnest\([^)]*\)")
_ROWS = re.compile(r"unnest\([^)]*\) (\w+)(\([\w, ]+\))")
_INDEX = re.compile(r"/\* (INDEXED BY \w+) \*/")
_PARAMETER = re.compile(r"\$(\d+)")


@dataclass(frozen=True, slots=True)
class Sql:
    """One question or change, as each database has it. `{}` in SQLite's is for a list of values or rows."""

    sqlite: str
    postgres: str
    has_list: bool = field(init=False)
    "SQLite's; it is the last parameter."

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_list", "IN ({})" in self.sqlite)


def shared(text: str) -> Sql:
    """For both, as PostgreSQL spells parameters, lists, and rows by arrays of their columns. Locks are left
    out for SQLite, where nobody else writes meanwhile. It reads joined tables in the order in which they are
    named, and by the index that a comment names."""
    spelled = _LOCK.sub("", _JOIN.sub("CROSS JOIN", _LIST.sub("IN ({})", text)))
    spelled = _NEW_ROWS.sub("VALUES {}", _INDEX.sub(r"\1", spelled))
    if rows := _ROWS.search(spelled):
        spelled = f"WITH {rows[1]}{rows[2]} AS (VALUES {{}}) {_ROWS.sub(rows[1], spelled)}"
    return Sql(_PARAMETER.sub(r"?\1", spelled), text)


def for_each_id(columns: str, joins: str) -> Sql:
    """Of `fetch_each`: `joins` are outer joins, with `{}` for the id.

    A client must not learn from the time taken whether an id exists: unknown ids have rows, too.
    """
    return Sql(
        sqlite=f"SELECT column1, {columns} FROM (VALUES {{}}) {joins.format('column1')}",
        postgres=f"""
SELECT {columns} FROM unnest($1::bytea[]) WITH ORDINALITY asked(id, place) {joins.format("asked.id")}
ORDER BY place
""",
    )


@lru_cache(maxsize=4096)
def smp_server(hosts: str, port: str, key_hash: bytes) -> SmpServer:
    """A router's address from its columns; many rows name few routers."""
    return SmpServer(tuple(hosts.split(",")), port, key_hash)


def address_columns(server: SmpServer) -> tuple[str, str, bytes]:
    return ",".join(server.hosts), server.port, server.key_hash


class Database(ABC):
    """A connection."""

    @abstractmethod
    async def fetch(self, statement: Sql, *parameters: Any) -> Sequence[Row]:
        """All rows. Of those that a list asks for, each once."""

    @abstractmethod
    async def fetch_each(self, statement: Sql, ids: Sequence[bytes]) -> Iterable[Row]:
        """One row for each id, in order; see `for_each_id`."""

    @abstractmethod
    async def fetch_rows(self, statement: Sql, rows: Sequence[Row]) -> Sequence[Row]:
        """All rows of a statement that takes many; PostgreSQL's has an array for each column."""

    @abstractmethod
    async def execute(self, statement: Sql, *parameters: Any) -> int:
        """How many rows it changed."""

    @abstractmethod
    async def execute_rows(self, statement: Sql, rows: Sequence[Row]) -> int:
        """Likewise; see `fetch_rows`. None: nothing is done."""

    async def fetchrow(self, statement: Sql, *parameters: Any) -> Row | None:
        rows = await self.fetch(statement, *parameters)
        return rows[0] if rows else None

    async def fetchval(self, statement: Sql, *parameters: Any) -> Any:
        """The first column of the first row; None if there is none."""
        rows = await self.fetch(statement, *parameters)
        return rows[0][0] if rows else None


_READ_ROUTERS = shared(f"""
SELECT server_key, {SUM_COLUMNS} FROM smp_servers
WHERE server_key = ANY($1::bigint[]) ORDER BY server_key FOR NO KEY UPDATE
""")
_WRITE_ROUTERS = Sql(
    sqlite=f"UPDATE smp_servers SET ({SUM_COLUMNS}) = (?2, ?3, ?4, ?5, ?6, ?7) WHERE server_key = ?1",
    postgres=f"""
UPDATE smp_servers v SET ({SUM_COLUMNS})
    = (i.lost, i.served, i.associated, i.hash, i.active, i.active_associated)
FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bytea[], $6::bigint[], $7::bigint[])
    i(key, lost, served, associated, hash, active, active_associated)
WHERE v.server_key = i.key
""",
)


class Transaction(Database):
    """A write transaction, and the sums that must change together with its rows: they are written at its end,
    once for each group of operations."""

    def __init__(self, caps: RowCaps) -> None:
        self.caps = caps
        self.tokens = 0
        self.active_tokens = 0
        self.subscriptions = 0
        self.active_subscriptions = 0
        "Follows from the routers' sums, when these are written."
        self.routers: dict[ServerKey, RouterChanges] = {}

    def queues_changed(self, key: ServerKey, changes: Iterable[QueueChange]) -> None:
        """Rows of a router."""
        flipped = []
        for notifier_id, before, after in changes:
            self._count(key, before, -1)
            if after is not None:
                self._count(key, after, 1)
            if before.associated != (after is not None and after.associated):
                flipped.append(notifier_id)
        if flipped:
            # Associated, or no longer so: a hash is its own inverse.
            sums = self._of_router(key)
            sums.digest = xor(sums.digest, ids_hash(flipped))

    def _count(self, key: ServerKey, stored: StoredState, rows: int) -> None:
        if stored.associated or stored.state is SubState.ACTIVE:  # no other counts, now or later
            self._of_router(key).states[stored] += rows

    def _of_router(self, key: ServerKey) -> RouterChanges:
        return self.routers.setdefault(key, RouterChanges())

    def token_moved(self, before: TokenStatus, after: TokenStatus) -> None:
        self.active_tokens += (after is TokenStatus.ACTIVE) - (before is TokenStatus.ACTIVE)

    def token_deleted(self, status: str) -> None:
        self.tokens -= 1
        self.active_tokens -= status == TokenStatus.ACTIVE

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
        rows = await self.fetch(_READ_ROUTERS, keys)
        before = {ServerKey(key): RouterSums(*sums) for key, *sums in rows}
        changes = {key: self.routers.pop(key) for key in keys if key in self.routers}
        after = {key: s.changed(changes[key]) if key in changes else s for key, s in before.items()}
        await self._change_routers(before, after)
        return after

    async def _change_routers(
        self, before: Mapping[ServerKey, RouterSums], after: Mapping[ServerKey, RouterSums]
    ) -> None:
        changed = [(key, *sums) for key, sums in after.items() if sums != before[key]]
        await self.execute_rows(_WRITE_ROUTERS, changed)
        self.active_subscriptions += sum(after[key].active_count - before[key].active_count for key in after)

    # What only a database with several writers has to do

    async def lock(self, name: bytes) -> None:
        """Nobody else passes here with this name until the end of the transaction."""

    async def kept(self, statement: Sql, keys: Iterable[int]) -> set[int]:
        """Those of the rows just read that are still there, and stay so until the end."""
        return set(keys)

    async def held(self, leases: Iterable[Lease]) -> set[Lease]:
        """Those of them that this daemon owns, and then until the end."""
        return set(leases)

    def deleted(self, key: ServerKey, notifier_id: EntityId, *, associated: bool) -> None:
        """Notify the daemon that owns the router, if it is another one."""

    async def hand_over(self, created: Sequence[CreatedSubscription | SnewRefusal]) -> None:
        """Queues of routers that other daemons own, or nobody yet."""

    # What one writer alone can know

    def possible_rules(self, rules: Sequence[SenderTopic]) -> Sequence[SenderTopic]:
        """Without those of which it is known that nobody has them."""
        return rules

    def rules_added(self, rules: Iterable[SenderTopic]) -> None:
        """These are in the database from now on."""

    # Of SNEW

    @abstractmethod
    async def owners(self, keys: Sequence[TokenKey]) -> dict[TokenKey, Owner]:
        """Those that exist. Their caps are counted by nobody else meanwhile."""

    @abstractmethod
    async def new_keys(self, count: int) -> Iterator[SubKey]:
        """At least so many; after `owners`."""

    @abstractmethod
    async def new_servers(self, servers: Collection[SmpServer]) -> dict[SmpServer, ServerKey]:
        """The keys of routers that had none."""

    @abstractmethod
    async def insert(self, rows: Sequence[Row]) -> None:
        """Of sub key, subscription id, token key, notifier id and key, spelling, server key, state."""


class Arrived(NamedTuple):
    """A block of NMSGs of one router. Do not print."""

    server_key: ServerKey
    notifications: Sequence[Notification]
    received_at: int


class Collision(Exception):
    """Another daemon was faster: the same call finds what it left and decides anew."""


# Many callers, few groups: operations queue up while a group runs, then all that wait run as the next group.
# A trip to the database costs more than most statements, and a commit that waits for the disk more than both.

QUEUED_OPERATIONS = 8192
"Per queue; callers wait when so many are in it."

GROUP_SIZE = 2048
"Operations in one group: bounds how long the first of them waits for the last."

Batch = Callable[[Context, Sequence[T]], Sequence[R] | Awaitable[Sequence[R]]]
"Runs one kind of operation for several callers; one result for each, in order."


@hides_bytes
class Operation(NamedTuple):
    batch: Batch[Any, Any, Any]
    argument: Any
    durable: bool
    future: asyncio.Future[Any]


class Failure(NamedTuple):
    """In the place of a result."""

    error: Exception


CommitObserver = Callable[[float], None]
"Told the seconds that each committed group took, perhaps on another thread."

GroupRunner = Callable[[Sequence[Operation]], Awaitable[list[Any]]]
"Results of the operations, in order; a `Failure` for one that failed."


class WorkQueue(Generic[Context]):
    """Operations that run one group after the other. `start` and `stop` own the task that runs them."""

    def __init__(self, name: str, run_group: GroupRunner) -> None:
        self._name = name
        self._run_group = run_group
        self._waiting: deque[Operation] = deque()
        self._work = asyncio.Event()
        "Something waits, or it is time to end."
        self._taken = asyncio.Event()
        "Shortly, when a group has left room for others."
        self._door = asyncio.Lock()
        "Those who find no room come in one after the other."
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._serve(), name=self._name)

    async def stop(self) -> None:
        """Finish what is queued, then end."""
        self._closing = True
        self._work.set()
        if self._task is not None:
            await self._task
            self._task = None

    async def run(self, batch: Batch[Context, T, R], argument: T, *, durable: bool = False) -> R:
        """The operation is carried out even if the caller is cancelled while it waits for the result."""
        if len(self._waiting) >= QUEUED_OPERATIONS:
            async with self._door:
                while len(self._waiting) >= QUEUED_OPERATIONS and not self._closing:
                    await self._taken.wait()
        if self._closing:
            raise StoreUnavailable("the store is closed")
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append(new_tuple(Operation, (batch, argument, durable, future)))
        self._work.set()
        return await future

    async def _serve(self) -> None:
        while self._waiting or not self._closing:
            await self._work.wait()
            self._work.clear()
            while self._waiting:
                size = min(len(self._waiting), GROUP_SIZE)
                group = [self._waiting.popleft() for _ in range(size)]
                self._taken.set()
                self._taken.clear()
                await self._run(group)

    async def _run(self, group: list[Operation]) -> None:
        try:
            results = await self._run_group(group)
        except Exception as error:
            results = [Failure(error)] * len(group)
        for operation, result in zip(group, results, strict=True):
            if operation.future.done():
                continue
            if isinstance(result, Failure):
                operation.future.set_exception(result.error)
            else:
                operation.future.set_result(result)


def runs(group: Sequence[Operation]) -> Iterator[tuple[Any, list[Any]]]:
    """Neighbours of one kind together: operations take effect in the order they were queued."""
    for batch, run in groupby(group, key=lambda operation: operation.batch):
        yield batch, [operation.argument for operation in run]


def regrouped(results: Sequence[R], lists: Sequence[Sequence[Any]]) -> list[list[R]]:
    """The results of all lists run as one, for the callers who brought one list each."""
    left = iter(results)
    return [list(islice(left, len(items))) for items in lists]


class SqlStore(ABC):
    """How the operations of a store reach its database."""

    _syncs_arrivals: bool
    "Whether what peers send waits for the disk, as what clients are promised does."
    leases: Leases | None = None

    @property
    def ownership(self) -> Ownership:
        return SOLE_OWNER if self.leases is None else self.leases

    def _push_parts(self) -> Sequence[int] | None:
        """Parts of the tokens whose pushes this daemon sends; None: all."""
        return None

    @abstractmethod
    async def _write(self, call: Callable[[Transaction], Awaitable[T]], *, durable: bool) -> T:
        """Run a call on a transaction; those that wait share one."""

    async def _write_as_owner(
        self, lease: Lease, call: Callable[[Transaction], Awaitable[T]], *, durable: bool
    ) -> T:
        """Like `_write`; LeaseLost if another daemon owns it."""
        return await self._write(call, durable=durable)

    @abstractmethod
    async def _write_grouped(
        self, write: Callable[[Transaction, Sequence[T]], Awaitable[list[R]]], items: Sequence[T]
    ) -> list[R]:
        """Durable; the items of all callers that wait share a few statements."""

    @abstractmethod
    async def _read(self, call: Callable[[Database], Awaitable[T]]) -> T:
        """Run a call on a connection."""

    @abstractmethod
    async def _read_grouped(
        self, read: Callable[[Database, Sequence[T]], Awaitable[list[R]]], items: Sequence[T]
    ) -> list[R]:
        """Like `_read`; the items of all callers that wait share one query."""


# How an operation is run. Callers do not see the database that it is given.


def reading(
    operation: Callable[Concatenate[StoreT, Database, P], Awaitable[R]],
) -> Callable[Concatenate[StoreT, P], Coroutine[Any, Any, R]]:
    @wraps(operation)
    async def call(store: StoreT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await store._read(lambda db: operation(store, db, *args, **kwargs))

    return call


def writing(
    *, durable: bool = True, as_owner_of: Lease | Callable[[Any], Lease] | None = None
) -> Callable[
    [Callable[Concatenate[StoreT, Transaction, P], Awaitable[R]]],
    Callable[Concatenate[StoreT, P], Coroutine[Any, Any, R]],
]:
    """Durable: its commit waits for the disk. LeaseLost if another daemon owns the lease, or that of what the
    first argument names."""

    def decorated(
        operation: Callable[Concatenate[StoreT, Transaction, P], Awaitable[R]],
    ) -> Callable[Concatenate[StoreT, P], Coroutine[Any, Any, R]]:
        @wraps(operation)
        async def call(store: StoreT, /, *args: P.args, **kwargs: P.kwargs) -> R:
            def run(tx: Transaction) -> Awaitable[R]:
                return operation(store, tx, *args, **kwargs)

            if as_owner_of is None:
                return await store._write(run, durable=durable)
            lease = as_owner_of(args[0]) if callable(as_owner_of) else as_owner_of
            return await store._write_as_owner(lease, run, durable=durable)

        return call

    return decorated
