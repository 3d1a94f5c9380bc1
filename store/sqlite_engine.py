"""How operations reach SQLite: many callers, one hop to the connection's thread, one transaction.

A hop between the event loop and the thread costs more than most statements, and a commit that waits for the
disk costs more than both. So each connection has a queue: operations gather while a group is running, then
all that wait run as the next group.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import aiosqlite

from store.interface import StoreError, StoreUnavailable, StoreVanished
from store.sqlite_errors import store_error
from store.sqlite_transaction import Transaction

Context = TypeVar("Context")
Argument = TypeVar("Argument")
Result = TypeVar("Result")
T = TypeVar("T")

Batch = Callable[[Context, Sequence[Argument]], Sequence[Result]]
"Runs one kind of operation for several callers; one result for each, in order."

QUEUED_OPERATIONS = 8192
"Per connection; callers wait when so many are queued."

GROUP_SIZE = 2048
"Operations in one transaction: bounds how long the first of them waits for the last."

STATEMENT_CACHE = 256
"All our statements, in all their sizes, stay prepared."

CommitObserver = Callable[[float, int], None]
"Told the seconds and the number of operations of each committed group, on the writer's thread."


async def run_in_thread(connection: aiosqlite.Connection, run: Callable[[sqlite3.Connection], T]) -> T:
    """Run a function on the connection's own thread.

    aiosqlite offers this for its single statements only; a whole transaction in one hop needs its private
    `_execute`. The function must be a closure: aiosqlite writes the arguments of a call to its debug log.
    """
    return cast("T", await connection._execute(lambda: run(connection._conn)))  # type: ignore[no-untyped-call]


class Operation(NamedTuple):
    batch: Batch[Any, Any, Any]
    argument: Any
    durable: bool
    future: asyncio.Future[Any]


class _Failed(NamedTuple):
    error: Exception


GroupRunner = Callable[[sqlite3.Connection, Sequence[Operation]], list[Any]]
"Results of the operations, in order; a `_Failed` for one that failed."


class WorkQueue(Generic[Context]):
    """Operations of one connection. `start` and `stop` own the task that runs them."""

    def __init__(self, name: str, connection: aiosqlite.Connection, run_group: GroupRunner) -> None:
        self._name = name
        self._connection = connection
        self._run_group = run_group
        self._queue: asyncio.Queue[Operation | None] = asyncio.Queue(QUEUED_OPERATIONS)
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._ended = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._serve(), name=self._name)

    async def stop(self) -> None:
        """Finish what is queued, then end."""
        self._closing = True
        if self._task is not None:
            await self._queue.put(None)
            await self._task
            self._task = None

    async def run(
        self, batch: Batch[Context, Argument, Result], argument: Argument, *, durable: bool = False
    ) -> Result:
        """The operation is carried out even if the caller is cancelled while it waits for the result."""
        if self._closing:
            raise StoreUnavailable("the store is closed")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        await self._queue.put(Operation(batch, argument, durable, future))
        if self._ended:
            # There was room only after the last group: nobody will look at the queue again.
            raise StoreUnavailable("the store is closed")
        return await future

    async def _serve(self) -> None:
        while (first := await self._queue.get()) is not None:
            group = [first]
            last = self._collect(group)
            await self._run(group)
            if last:
                break
        self._ended = True
        self._refuse_the_rest()

    def _collect(self, group: list[Operation]) -> bool:
        """Add what waits; True if this is to stop after this group."""
        while len(group) < GROUP_SIZE and not self._queue.empty():
            operation = self._queue.get_nowait()
            if operation is None:
                return True
            group.append(operation)
        return False

    async def _run(self, group: list[Operation]) -> None:
        try:
            results = await run_in_thread(self._connection, lambda db: self._run_group(db, group))
        except Exception as error:
            results = [_Failed(error)] * len(group)
        for operation, result in zip(group, results, strict=True):
            if operation.future.done():
                continue
            if isinstance(result, _Failed):
                operation.future.set_exception(result.error)
            else:
                operation.future.set_result(result)

    def _refuse_the_rest(self) -> None:
        """Operations that came behind the end."""
        while not self._queue.empty():
            operation = self._queue.get_nowait()
            if operation is not None and not operation.future.done():
                operation.future.set_exception(StoreUnavailable("the store is closed"))


def _runs(group: Sequence[Operation]) -> Iterator[tuple[Batch[Any, Any, Any], list[Any]]]:
    """Neighbours of one kind together: operations take effect in the order they were queued."""
    for batch, run in groupby(group, key=lambda operation: operation.batch):
        yield batch, [operation.argument for operation in run]


class DatabaseFile:
    """The file that was opened. Once removed or replaced, it still takes writes that nobody will find."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: os.stat_result | None = None

    def remember(self) -> None:
        self._opened = self.path.stat()

    def check(self) -> None:
        try:
            is_same = self._opened is not None and os.path.samestat(self._opened, self.path.stat())
        except OSError:
            is_same = False
        if not is_same:
            raise StoreVanished(f"{self.path} was removed or replaced while the server ran")


class WriteContext(Protocol):
    """What a group's operations share."""

    def flush(self) -> None: ...


class GroupWriter:
    """Runs groups of writes as transactions. If a group fails, each operation is tried alone."""

    def __init__(
        self,
        file: DatabaseFile,
        on_commit: CommitObserver | None,
        begin: Callable[[sqlite3.Connection], WriteContext] = Transaction,
    ) -> None:
        """`begin` makes what the operations of a group are given; its `flush` is called before the commit."""
        self._file = file
        self._on_commit = on_commit
        self._make_context = begin
        self._synchronous = ""

    def __call__(self, db: sqlite3.Connection, group: Sequence[Operation]) -> list[Any]:
        started = time.perf_counter()
        try:
            self._file.check()
            self._begin(db, durable=any(operation.durable for operation in group))
        except (sqlite3.Error, StoreError) as error:
            return [_Failed(_for_caller(error, self._file.path))] * len(group)
        try:
            results = self._transact(db, group)
        except Exception as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            if len(group) > 1:
                return [self(db, [operation])[0] for operation in group]
            return [_Failed(_for_caller(error, self._file.path))]
        if self._on_commit is not None:
            self._on_commit(time.perf_counter() - started, len(group))
        return results

    def _begin(self, db: sqlite3.Connection, *, durable: bool) -> None:
        # In WAL mode FULL waits for the disk at each commit, NORMAL only at checkpoints.
        synchronous = "FULL" if durable else "NORMAL"
        if synchronous != self._synchronous:
            db.execute(f"PRAGMA synchronous = {synchronous}")
            self._synchronous = synchronous
        db.execute("BEGIN IMMEDIATE")

    def _transact(self, db: sqlite3.Connection, group: Sequence[Operation]) -> list[Any]:
        results: list[Any] = []
        context = self._make_context(db)
        for batch, arguments in _runs(group):
            results += batch(context, arguments)
        context.flush()
        db.execute("COMMIT")
        return results


class GroupReader:
    """Runs groups of reads, all on one state of the database: that of the last commit or a later one."""

    def __init__(self, file: DatabaseFile) -> None:
        self._file = file

    def __call__(self, db: sqlite3.Connection, group: Sequence[Operation]) -> list[Any]:
        results: list[Any] = []
        try:
            self._file.check()
            db.execute("BEGIN")
            for batch, arguments in _runs(group):
                results += batch(db, arguments)
        except Exception as error:
            if len(group) == 1:
                return [_Failed(_for_caller(error, self._file.path))]
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
        if len(results) == len(group):
            return results
        return [self(db, [operation])[0] for operation in group]


def _for_caller(error: Exception, path: Path) -> Exception:
    return store_error(error, path) if isinstance(error, sqlite3.Error) else error


def run_each(context: Context, calls: Sequence[Callable[[Context], Result]]) -> list[Result]:
    """The batch of operations that gain nothing from being run together."""
    return [call(context) for call in calls]


def flattened(batch: Batch[Context, Argument, Result]) -> Batch[Context, Sequence[Argument], list[Result]]:
    """A batch whose callers each bring a list: all lists run as one."""

    def run(context: Context, lists: Sequence[Sequence[Argument]]) -> list[list[Result]]:
        results = iter(batch(context, [argument for arguments in lists for argument in arguments]))
        return [list(islice(results, len(arguments))) for arguments in lists]

    return run


class NoSuchRow(StoreError):
    """The caller's key names nothing."""
