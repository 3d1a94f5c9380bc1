"""The memory of connections: one SQLite file, and every change of state one function in one transaction.

A change gets a `Tx`: it reads and writes rows, and says what to tell the application and whom to wake. That
is done when the transaction is on the disk. So nothing is announced that a crash could take back, and no key
is used that was not stored before.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from agent.duplex.database_file import check_key, locked, reader, writer
from agent.duplex.events import Event
from agent.duplex.records import ReceiveQueue
from agent.duplex.schema import is_current, prepare
from agent.duplex.secrets import Secrets
from store.policy import BUSY_TIMEOUT
from store.sql_store import WorkQueue
from store.sqlite_engine import (
    DatabaseFile,
    GroupWriter,
    PlainTransaction,
    connect_options,
    connected,
    run_each,
    run_in_thread,
    thread_queue,
)
from store.sqlite_errors import store_errors

T = TypeVar("T")


class Strand(NamedTuple):
    """Commands of one strand are worked off in order; a dead router holds up its own strand only."""

    connection_id: int
    queue_id: int = 0


@dataclass(slots=True)
class Tx:
    """One transaction, and what follows from it."""

    db: sqlite3.Connection
    now: int
    "Seconds."
    secrets: Secrets
    events: list[Event] = field(default_factory=list)
    deliveries: set[int] = field(default_factory=set)
    "Send queues that have something to send."
    hurried: set[int | Strand] = field(default_factory=set)
    "Send queues and strands whose wait for the next attempt is over."
    commands: set[Strand] = field(default_factory=set)
    "Where there is something to do."
    subscriptions: list[ReceiveQueue] = field(default_factory=list)
    "New ones."
    notifications: set[str] = field(default_factory=set)
    "Workers that have something to do about notifications: of routers, notification servers, and deletions."

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """What is done inside is undone if it raises."""
        self.db.execute("SAVEPOINT attempt")
        before = len(self.events), set(self.deliveries), set(self.commands)
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK TO attempt")
            del self.events[before[0] :]
            self.deliveries, self.commands = before[1:]
            raise
        finally:
            self.db.execute("RELEASE attempt")


Change = Callable[[Tx], T]
Transact = Callable[[Change[Any]], Awaitable[Any]]
"Runs a change, and acts on what follows from it."


class DuplexStore:
    """Use `DuplexStore.open`."""

    def __init__(self, work: WorkQueue[PlainTransaction], secrets: Secrets, now: Callable[[], float]) -> None:
        self._work = work
        self._secrets = secrets
        self._now = now

    @classmethod
    @asynccontextmanager
    async def open(
        cls, path: Path, secrets: Secrets, now: Callable[[], float], key: str | None = None
    ) -> AsyncIterator[DuplexStore]:
        """Raises StoreError if the file cannot be used."""
        with store_errors(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path):
            with store_errors(path):
                db = await connected(writer(path, key, **connect_options(BUSY_TIMEOUT)))
            file = DatabaseFile(path)
            work: WorkQueue[PlainTransaction] = thread_queue("agent store", db, GroupWriter(file, None))
            try:
                with store_errors(path):
                    await run_in_thread(db, lambda db: check_key(db, path, key))
                    await run_in_thread(db, _prepare)
                    file.remember()
                work.start()
                try:
                    yield cls(work, secrets, now)
                finally:
                    await work.stop()
            finally:
                await db.close()

    async def run(self, change: Change[T]) -> tuple[T, Tx]:
        """On the disk when it returns."""

        def run(transaction: PlainTransaction) -> tuple[T, Tx]:
            tx = Tx(transaction.db, int(self._now()), self._secrets)
            return change(tx), tx

        return await self._work.run(run_each, run, durable=True)

    async def read(self, look: Callable[[sqlite3.Connection], T]) -> T:
        return await self._work.run(run_each, lambda transaction: look(transaction.db))


@contextmanager
def reading(path: Path, key: str | None = None) -> Iterator[sqlite3.Connection]:
    """The file as it is at one moment, also beside an agent that works with it. Raises StoreError."""
    options = {"timeout": BUSY_TIMEOUT, "isolation_level": None}
    with store_errors(path), ExitStack() as opened:
        db = opened.enter_context(closing(reader(path, key, **options)()))
        check_key(db, path, key)
        if not is_current(db):
            # The lock says that no agent is at work with it.
            with locked(path), closing(writer(path, key, **options)()) as upgraded:
                _prepare(upgraded)
        db.execute("BEGIN")
        yield db


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA secure_delete = ON")
    prepare(db)


def insert(db: sqlite3.Connection, table: str, **values: Any) -> int:
    """The row id."""
    marks = ", ".join("?" * len(values))
    found = db.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))
    return found.lastrowid or 0
