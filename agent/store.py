"""The agent's memory: one SQLite file that only its owner can read.

`write` is the only way in: a list of changes, one transaction, on the disk when it returns. Everything the
agent is about to do stands in here first, so that a killed agent goes on where it was.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import aiosqlite

from agent import rows
from agent.errors import StoreFailed
from agent.records import (
    NTF_ACTIONS,
    SMP_ACTIONS,
    Connection,
    DeletedToken,
    Message,
    OutgoingMessage,
    ReceiveQueue,
    SendQueue,
    SubAction,
    Subscription,
    Token,
)
from agent.rows import Change
from agent.schema import SCHEMA, SCHEMA_VERSION
from protocol.addresses import NtfServer, SmpServer
from protocol.encoding import EntityId

STATE_FILE = "agent.db"
LOCK_FILE = "agent.lock"
BUSY_TIMEOUT = 5.0

T = TypeVar("T")


class AgentStore:
    """Use `AgentStore.open`."""

    def __init__(self, db: aiosqlite.Connection) -> None:
        self._db = db
        self._writing = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def open(cls, folder: Path) -> AsyncIterator[AgentStore]:
        """The store of this folder, made if it is not there. Raises `StoreFailed`, also if it is in use."""
        path = folder / STATE_FILE
        with _locked(folder):
            try:
                _private_file(path).close()
                db = await aiosqlite.connect(path, timeout=BUSY_TIMEOUT, isolation_level=None)
            except (OSError, sqlite3.Error) as error:
                raise StoreFailed(f"{path}: {error}") from None
            try:
                await _prepare(db, path)
                yield cls(db)
            finally:
                await db.close()

    async def write(self, changes: Iterable[Change]) -> None:
        """All changes or none."""
        async with self._writing:
            try:
                await self._transact(list(changes))
            except sqlite3.Error as error:
                raise StoreFailed(f"the state cannot be written: {error}") from None

    async def _transact(self, changes: Sequence[Change]) -> None:
        try:
            await self._db.execute("BEGIN IMMEDIATE")
            for sql, parameters in changes:
                await self._db.execute(sql, parameters)
            await self._db.execute("COMMIT")
        except BaseException:
            # A cancelled caller cannot know how far the database's thread got: maybe there is nothing open.
            with suppress(sqlite3.OperationalError):
                await self._db.execute("ROLLBACK")
            raise

    async def _all(self, make: Callable[[Any], T], sql: str, *parameters: object) -> list[T]:
        async with self._writing:
            try:
                found = await self._db.execute_fetchall(sql, parameters)
            except sqlite3.Error as error:
                raise StoreFailed(f"the state cannot be read: {error}") from None
        return [make(row) for row in found]

    async def _one(self, make: Callable[[Any], T], sql: str, *parameters: object) -> T | None:
        found = await self._all(make, sql, *parameters)
        return found[0] if found else None

    # Tokens

    async def token(self) -> Token | None:
        return await self._one(rows.token, "SELECT * FROM token")

    async def deleted_tokens(self) -> list[DeletedToken]:
        return await self._all(rows.deleted_token, "SELECT * FROM deleted_tokens ORDER BY key")

    # Connections

    async def new_connection_id(self) -> int:
        """An id that no connection has had."""
        sql = (
            "SELECT max(ifnull((SELECT seq FROM sqlite_sequence WHERE name = 'connections'), 0), 0) + 1 AS id"
        )
        return await self._one(lambda row: int(row["id"]), sql) or 1

    async def connections(self) -> list[Connection]:
        return await self._all(
            rows.connection,
            "SELECT c.*, r.recipient_id IS NOT NULL AS can_receive, s.sender_id IS NOT NULL AS can_send"
            " FROM connections c LEFT JOIN receive_queues r USING (connection_id)"
            " LEFT JOIN send_queues s USING (connection_id) ORDER BY c.connection_id",
        )

    async def receive_queue(self, connection_id: int) -> ReceiveQueue | None:
        sql = "SELECT * FROM receive_queues WHERE connection_id = ?"
        return await self._one(rows.receive_queue, sql, connection_id)

    async def receive_queues(self) -> list[ReceiveQueue]:
        return await self._all(rows.receive_queue, "SELECT * FROM receive_queues ORDER BY connection_id")

    async def send_queue(self, connection_id: int) -> SendQueue | None:
        sql = "SELECT * FROM send_queues WHERE connection_id = ?"
        return await self._one(rows.send_queue, sql, connection_id)

    async def outbox(self, connection_id: int) -> list[OutgoingMessage]:
        """Oldest first."""
        sql = "SELECT * FROM outbox WHERE connection_id = ? ORDER BY key"
        return await self._all(rows.outgoing_message, sql, connection_id)

    async def messages(self, connection_id: int) -> list[Message]:
        sql = "SELECT * FROM messages WHERE connection_id = ? ORDER BY rowid"
        return await self._all(rows.message, sql, connection_id)

    async def has_message(self, connection_id: int, message_id: bytes) -> bool:
        sql = "SELECT 1 FROM messages WHERE connection_id = ? AND message_id = ?"
        return await self._one(lambda _row: True, sql, connection_id, message_id) or False

    # Subscriptions

    async def subscriptions(self) -> list[Subscription]:
        return await self._all(rows.subscription, "SELECT * FROM subscriptions ORDER BY connection_id")

    async def smp_actions(self, server: SmpServer, now: float, limit: int) -> list[Subscription]:
        """What is to be done at a router now."""
        return await self._actions("smp_server", str(server), SMP_ACTIONS, now, limit)

    async def ntf_actions(self, server: NtfServer, now: float, limit: int) -> list[Subscription]:
        return await self._actions("ntf_server", str(server), NTF_ACTIONS, now, limit)

    async def _actions(
        self, column: str, server: str, actions: Sequence[SubAction], now: float, limit: int
    ) -> list[Subscription]:
        return await self._all(
            rows.subscription,
            f"SELECT * FROM subscriptions WHERE {column} = ? AND action IN (?, ?) AND due <= ?"
            " ORDER BY due, connection_id LIMIT ?",
            server,
            *actions,
            now,
            limit,
        )

    async def next_due(self, server: SmpServer | NtfServer) -> float | None:
        """When the next action at this server is due, if there is any."""
        smp = isinstance(server, SmpServer)
        column, actions = ("smp_server", SMP_ACTIONS) if smp else ("ntf_server", NTF_ACTIONS)
        sql = f"SELECT min(due) AS due FROM subscriptions WHERE {column} = ? AND action IN (?, ?)"
        return await self._one(lambda row: row["due"], sql, str(server), *actions)

    async def queue_of_notifier(
        self, server: SmpServer, notifier_id: EntityId
    ) -> tuple[Subscription, ReceiveQueue] | None:
        """The subscription and the queue that a notification is about."""
        sql = "SELECT * FROM subscriptions WHERE smp_server = ? AND notifier_id = ?"
        subscription = await self._one(rows.subscription, sql, str(server), notifier_id)
        queue = None if subscription is None else await self.receive_queue(subscription.connection_id)
        return None if subscription is None or queue is None else (subscription, queue)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One agent at a time: two would send the same things twice. The lock dies with the process."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _private_file(folder / LOCK_FILE)
    except OSError as error:
        raise StoreFailed(f"{folder}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreFailed(f"{folder} is in use by another agent") from None
        yield


def _private_file(path: Path) -> IO[bytes]:
    """The file, made readable for its owner alone if it is not there; SQLite's other files follow it."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "rb+")


async def _prepare(db: aiosqlite.Connection, path: Path) -> None:
    db.row_factory = aiosqlite.Row
    try:
        await db.execute("PRAGMA journal_mode = WAL")
        await db.execute("PRAGMA synchronous = FULL")
        await db.execute("PRAGMA foreign_keys = ON")
        ((version,),) = await db.execute_fetchall("PRAGMA user_version")
        if version > SCHEMA_VERSION:
            raise StoreFailed(f"{path} was made by a newer version of this program")
        if version < SCHEMA_VERSION:
            await db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    except sqlite3.Error as error:
        raise StoreFailed(f"{path}: {error}") from None
