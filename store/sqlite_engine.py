"""How operations reach SQLite: many callers, one hop to the connection's thread, one transaction.

A hop between the event loop and the thread costs more than most statements, and a commit that waits for the
disk costs more than both: see `store.sql_store`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import aiosqlite

from store.database_files import beside
from store.interface import StoreDamaged, StoreError, StoreVanished
from store.sql_store import CommitObserver, Failure, Operation, WorkQueue, runs
from store.sqlite_errors import store_error

Context = TypeVar("Context")
Result = TypeVar("Result")
T = TypeVar("T")

STATEMENT_CACHE = 512
"All our statements, in all their sizes, stay prepared."
FOLDED_PAGES = 3_000
"About so many pages are in the log when it is folded."
COMMIT_PAGES = 3
"Pages that a commit changes beside those of its rows."
ITERATION = 64
"Of aiosqlite, which wants it; whole transactions run on its thread."


def connect_options(busy_timeout: float) -> dict[str, Any]:
    """Options of SQLite connections: we begin transactions ourselves, and wait for a file that is locked."""
    return {"timeout": busy_timeout, "isolation_level": None, "cached_statements": STATEMENT_CACHE}


async def connected(connect: Callable[[], sqlite3.Connection]) -> aiosqlite.Connection:
    """A connection on a thread of its own.

    The thread ends with the process. aiosqlite's would be waited for: a process that fails before it closes
    its store would neither run nor end, and nothing would start it anew.
    """
    connection = aiosqlite.Connection(connect, ITERATION)
    connection._thread.daemon = True
    connecting = asyncio.get_running_loop().create_task(_connected(connection), name="connecting to SQLite")
    try:
        return await asyncio.shield(connecting)
    except asyncio.CancelledError:
        # aiosqlite loses, and so leaves open, a connection that is made after its caller was cancelled.
        await asyncio.wait([connecting])
        if connecting.exception() is None:
            await connection.close()
        raise


async def _connected(connection: aiosqlite.Connection) -> aiosqlite.Connection:
    try:
        return await connection
    except Exception:
        connection._thread.join()  # only its end is left to do; it would report that to a loop that is closed
        raise


async def run_in_thread(connection: aiosqlite.Connection, run: Callable[[sqlite3.Connection], T]) -> T:
    """Run a function on the connection's own thread.

    aiosqlite offers this for its single statements only; a whole transaction in one hop needs its private
    `_execute`. The function must be a closure: aiosqlite writes the arguments of a call to its debug log.
    """
    return cast("T", await connection._execute(lambda: run(connection._conn)))  # type: ignore[no-untyped-call]


class DatabaseFile:
    """The files that were opened: the database, its log and the index of that. Once one of them is removed or
    replaced, or the database emptied, they take writes that nobody will find."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: StoreDamaged | None = None
        "What the first one found who found it damaged."
        self._opened: dict[Path, os.stat_result] = {}

    def remember(self) -> None:
        """Called when the database is open; a program that shares it with nobody has no index."""
        _, *others = beside(self.path)
        self._opened = {self.path: self.path.stat()}  # also if it is a link that comes to name another
        self._opened |= {file: file.stat() for file in others if file.exists()}

    def check(self) -> None:
        for file, opened in self._opened.items():
            try:
                now = file.stat()
                is_there = os.path.samestat(opened, now) and (now.st_size > 0 or file != self.path)
            except OSError:
                is_there = False
            if not is_there:
                raise StoreVanished(f"{file} was removed, emptied or replaced while the server ran")

    def for_caller(self, error: Exception) -> Exception:
        """An error of SQLite in the words of the store."""
        if not isinstance(error, sqlite3.Error):
            return error
        told = store_error(error, self.path)
        if isinstance(told, StoreDamaged) and self.damage is None:
            self.damage = told
        return told


class WriteContext(Protocol):
    """What a group's operations share."""

    def flush(self) -> None: ...


class PlainTransaction:
    """The plainest of them."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def flush(self) -> None:
        """Nothing is left to be written."""


class GroupWriter:
    """Runs groups of writes as transactions. If a group fails, each operation is tried alone."""

    def __init__(
        self,
        file: DatabaseFile,
        on_commit: CommitObserver | None,
        begin: Callable[[sqlite3.Connection], WriteContext] = PlainTransaction,
        on_rollback: Callable[[], None] | None = None,
    ) -> None:
        """`begin` makes what the operations of a group are given; its `flush` is called before the commit.
        `on_rollback`: what the operations of a group did and saw is no longer so."""
        self._file = file
        self._on_commit = on_commit
        self._make_context = begin
        self._on_rollback = on_rollback
        self._synchronous = ""

    def __call__(self, db: sqlite3.Connection, group: Sequence[Operation]) -> list[Any]:
        started = time.perf_counter()
        try:
            self._file.check()
            self._begin(db, durable=any(operation.durable for operation in group))
        except (sqlite3.Error, StoreError) as error:
            return [Failure(self._file.for_caller(error))] * len(group)
        try:
            results = self._transact(db, group)
        except Exception as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            if self._on_rollback is not None:
                self._on_rollback()
            if len(group) > 1:
                return [self(db, [operation])[0] for operation in group]
            return [Failure(self._file.for_caller(error))]
        if self._on_commit is not None:
            self._on_commit(time.perf_counter() - started)
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
        for batch, arguments in runs(group):
            results += batch(context, arguments)
        context.flush()
        db.execute("COMMIT")
        return results


class GroupReader:
    """Runs groups of reads, all on one state of the database: that of the last commit or a later one."""

    def __init__(self, file: DatabaseFile, begin: Callable[[sqlite3.Connection], Any]) -> None:
        """`begin` makes what the operations are given."""
        self._file = file
        self._make_context = begin

    def __call__(self, db: sqlite3.Connection, group: Sequence[Operation]) -> list[Any]:
        results: list[Any] = []
        try:
            self._file.check()
            db.execute("BEGIN")
            context = self._make_context(db)
            for batch, arguments in runs(group):
                results += batch(context, arguments)
        except Exception as error:
            if len(group) == 1:
                return [Failure(self._file.for_caller(error))]
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
        if len(results) == len(group):
            return results
        return [self(db, [operation])[0] for operation in group]


def run_each(context: Context, calls: Sequence[Callable[[Context], Result]]) -> list[Result]:
    """The batch of operations that gain nothing from being run together."""
    return [call(context) for call in calls]


def thread_queue(
    name: str,
    connection: aiosqlite.Connection,
    run: Callable[[sqlite3.Connection, Sequence[Operation]], list[Any]],
) -> WorkQueue[Any]:
    """Groups run on the thread of the connection."""
    return WorkQueue(name, lambda group: run_in_thread(connection, lambda db: run(db, group)))


class Checkpoints:
    """Folds SQLite's log into the database beside the writes, on a connection of its own. `start` and `stop`
    own the task that does.

    SQLite itself does that in the commit that makes the log long enough, and all writes wait for it: 20 to
    60 ms. It remains the last resort, for a log that grows faster than it is folded here.
    """

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection
        self._task: asyncio.Task[None] | None = None
        self._due = asyncio.Event()
        self._ending = False
        self._rows = 0
        self._pages = 0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._serve(), name="store checkpoints")

    async def stop(self) -> None:
        self._ending = True
        self._due.set()
        if self._task is not None:
            await self._task

    def committed(self, rows: int) -> None:
        """The writer has changed so many rows since it was opened; with this commit, those that are new."""
        self._pages += rows - self._rows + COMMIT_PAGES
        self._rows = rows
        if self._pages >= FOLDED_PAGES:
            self._pages = 0
            self._due.set()

    async def _serve(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            if self._ending:
                return
            with contextlib.suppress(sqlite3.Error):  # the writer meets the same fault, and tells
                await run_in_thread(self._connection, _fold)


def _fold(db: sqlite3.Connection) -> None:
    """Waits for nobody: what others still read, or write now, is left for the next time."""
    db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()


# Lists in statements

LONGEST_LIST = 256
"A list in a statement has this length or a smaller power of two: few different statements stay prepared."


def padded(values: Sequence[Any]) -> Iterator[list[Any]]:
    """Pieces of an IN list: short ones are filled up by repeating a value."""
    for start in range(0, len(values), LONGEST_LIST):
        piece = list(values[start : start + LONGEST_LIST])
        size = 1 << (len(piece) - 1).bit_length()
        yield piece + piece[-1:] * (size - len(piece))


def select_in(
    db: sqlite3.Connection, sql: str, values: Sequence[Any], *before: Any
) -> Iterator[tuple[Any, ...]]:
    """Rows of a query that has `{}` where its IN list goes; `before` are its other parameters."""
    for piece in padded(values):
        yield from db.execute(_with_list(sql, len(before), len(piece)), (*before, *piece))


def select_each(db: sqlite3.Connection, sql: str, ids: Sequence[bytes]) -> dict[bytes, tuple[Any, ...]]:
    """Rows by their first column, one for every id: of an outer join with the table that `{}` stands for.

    A client must not learn from the time taken whether an id exists. Each row costs a step, and each step
    a wait for the interpreter's lock; so unknown ids have rows too.
    """
    found: dict[bytes, tuple[Any, ...]] = {}
    for piece in padded(ids):
        for row in db.execute(_with_rows(sql, len(piece), 1), piece):
            found[row[0]] = row
    return found


def select_rows(db: sqlite3.Connection, sql: str, rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """What is returned by a statement that has `{}` where its VALUES go."""
    return [row for statement, values in _with_values(sql, rows) for row in db.execute(statement, values)]


def update_in(db: sqlite3.Connection, sql: str, values: Sequence[Any], *before: Any) -> int:
    """Rows changed by a statement that has `{}` where its IN list goes."""
    return sum(
        db.execute(_with_list(sql, len(before), len(piece)), (*before, *piece)).rowcount
        for piece in padded(values)
    )


def insert_rows(db: sqlite3.Connection, sql: str, rows: Sequence[Sequence[Any]]) -> int:
    """Rows inserted by a statement that has `{}` where its VALUES go.

    Several rows in one step: each step gives up the interpreter lock and has to get it back.
    """
    return sum(db.execute(statement, values).rowcount for statement, values in _with_values(sql, rows))


def _with_values(sql: str, rows: Sequence[Sequence[Any]]) -> Iterator[tuple[str, list[Any]]]:
    """A statement for each piece, and what is in it: no row may be there twice."""
    start = 0
    while left := len(rows) - start:
        size = min(LONGEST_LIST, 1 << (left.bit_length() - 1))
        piece = rows[start : start + size]
        yield _with_rows(sql, size, len(piece[0])), list(chain.from_iterable(piece))
        start += size


@cache
def _with_list(sql: str, before: int, size: int) -> str:
    return sql.format(",".join(f"?{before + place}" for place in range(1, size + 1)))


@cache
def _with_rows(sql: str, rows: int, columns: int) -> str:
    row = ",".join("?" * columns)
    return sql.format(",".join([f"({row})"] * rows))
