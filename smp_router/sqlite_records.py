"""The router's state in SQLite: every change is committed before anything that depends on it is answered.

Changes are collected while a commit is under way and written by the next one, the last state of each key
only. What is deleted is overwritten, also in the log, so that messages do not outlive their delivery.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiosqlite

from protocol.blocking import parse_blocking_info
from protocol.crypto import decode_public_key, pull_public_key, push_key
from protocol.encoding import EntityId, Reader, Writer
from protocol.errors import DecodeError
from protocol.ids_hash import ids_hash
from protocol.messages_crypto import decode_message
from protocol.smp_handshake import ServiceRole
from protocol.smp_messages import LinkData, QueueMode
from smp_router.queues import Link, Notifier, Prepared, Queue, StoredMessage
from smp_router.services import Service
from smp_router.state import RecordKind, Records, RouterState
from store.database_files import open_to_write
from store.interface import SchemaError, StoreError
from store.policy import BUSY_TIMEOUT
from store.sqlite_engine import DatabaseFile, connect_options, connected, run_in_thread
from store.sqlite_errors import store_errors
from transport.cancellation import raise_if_cancelled
from transport.certificates import Credentials

logger = logging.getLogger(__name__)

APPLICATION_ID = 0x534D5052
"'SMPR': a file with another id is not touched."
SCHEMA_VERSION = 2
RETRY_AFTER = 1.0
"Seconds between attempts while nothing can be written."

_SCHEMA = """
CREATE TABLE queues (
    recipient_id BLOB PRIMARY KEY, recipient_keys BLOB NOT NULL, secret BLOB NOT NULL,
    sender_id BLOB NOT NULL, sender_key BLOB, mode TEXT,
    notifier_id BLOB, notifier_key BLOB, notifier_secret BLOB,
    link_id BLOB, link_fixed BLOB, link_user BLOB, suspended_at INTEGER, blocked TEXT,
    unused_since INTEGER
) WITHOUT ROWID;
CREATE TABLE messages (
    number INTEGER PRIMARY KEY, recipient_id BLOB NOT NULL, message_id BLOB NOT NULL, content BLOB NOT NULL,
    corr_id BLOB NOT NULL
);
CREATE TABLE nmsgs (notifier_id BLOB PRIMARY KEY, pending BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE services (
    fingerprint BLOB, role TEXT, service_id BLOB NOT NULL, PRIMARY KEY (fingerprint, role)
) WITHOUT ROWID;
CREATE TABLE associations (
    queue_id BLOB PRIMARY KEY, fingerprint BLOB NOT NULL, role TEXT NOT NULL
) WITHOUT ROWID;
"""
_SETTINGS = (
    "PRAGMA locking_mode = EXCLUSIVE",  # one router per file
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",  # a commit waits for the disk
    "PRAGMA secure_delete = ON",
    "PRAGMA journal_size_limit = 0",
)

_GONE = object()
Rows = dict[RecordKind, list[tuple[Any, ...]]]


class SqliteRecords(Records):
    """`open` it before the router starts, `close` it after it has stopped."""

    place = "disk"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = DatabaseFile(path)
        self._connection: aiosqlite.Connection | None = None
        self._changes: dict[tuple[RecordKind, Any], Any] = {}
        self._changed = asyncio.Event()
        self._kept = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Raises StoreError."""
        with store_errors(self._path):
            options = connect_options(BUSY_TIMEOUT)
            self._connection = await connected(lambda: open_to_write(self._path, **options))
            try:
                await run_in_thread(self._connection, _prepare)
                self._file.remember()
            except BaseException:
                await self._connection.close()
                raise
        self._task = asyncio.get_running_loop().create_task(self._keep_changes(), name="router's records")

    async def close(self) -> None:
        """Everything that was put is written, if it can be."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._connection is not None:
            if self._changes:
                await self._commit()
            await self._connection.close()

    def put(self, kind: RecordKind, key: Any, thing: Any) -> None:
        self._changes[kind, key] = thing
        self.made += 1
        self._changed.set()

    def delete(self, kind: RecordKind, key: Any) -> None:
        self.put(kind, key, _GONE)

    async def durable(self, made: int) -> None:
        if self._kept < made:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((made, future))
            await future

    async def maintain(self) -> None:
        """Fold the log into the database, and leave nothing of it."""
        if self._connection is not None:
            try:
                await run_in_thread(
                    self._connection, lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
                )
            except sqlite3.Error as error:
                logger.warning("the log of %s cannot be folded: %s", self._path, error)

    async def _keep_changes(self) -> None:
        while True:
            await self._changed.wait()
            if not await self._commit():
                await asyncio.sleep(RETRY_AFTER)

    async def _commit(self) -> bool:
        """Write what has changed; what cannot be written is kept for the next attempt."""
        self._changed.clear()
        changes, self._changes, made = self._changes, {}, self.made
        puts, deletes = _rows(changes)
        assert self._connection is not None
        try:
            await run_in_thread(self._connection, lambda db: self._write(db, puts, deletes))
        except Exception as error:  # else the router would wait for ever for changes that nobody writes
            raise_if_cancelled()
            if not self.failing:
                known = isinstance(error, StoreError)
                logger.error("nothing can be stored: %s", error if known else type(error).__name__)
            self.failing = True
            self._changes = changes | self._changes
            self._changed.set()
            return False
        self.failing = False
        self._kept = made
        waiting, self._waiting = self._waiting, []
        for needed, future in waiting:
            if needed > made:
                self._waiting.append((needed, future))
            elif not future.done():
                future.set_result(None)
        return True

    def _write(self, db: sqlite3.Connection, puts: Rows, deletes: Rows) -> None:
        """One transaction, which waits for the disk."""
        self._file.check()
        with store_errors(self._path), db:
            db.execute("BEGIN IMMEDIATE")
            for kind, rows in puts.items():
                places = ", ".join("?" * len(rows[0]))
                db.executemany(f"REPLACE INTO {kind.value} VALUES ({places})", rows)
            for kind, keys in deletes.items():
                db.executemany(_DELETES[kind], keys)


_DELETES = {
    RecordKind.QUEUE: "DELETE FROM queues WHERE recipient_id = ?",
    RecordKind.MESSAGE: "DELETE FROM messages WHERE number = ?",
    RecordKind.NMSGS: "DELETE FROM nmsgs WHERE notifier_id = ?",
    RecordKind.SERVICE: "DELETE FROM services WHERE fingerprint = ? AND role = ?",
    RecordKind.ASSOCIATION: "DELETE FROM associations WHERE queue_id = ?",
}


def _prepare(db: sqlite3.Connection) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    empty = version == application_id == tables == 0
    if not empty and application_id != APPLICATION_ID:
        raise SchemaError("the database file belongs to another program")
    if version > SCHEMA_VERSION:
        raise SchemaError("the database is of a later router")
    for setting in _SETTINGS:
        db.execute(setting)
    if empty:
        db.executescript(
            f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION};"
            f" PRAGMA application_id = {APPLICATION_ID}; COMMIT;"
        )
    elif version == 1:
        db.executescript(
            f"BEGIN; ALTER TABLE queues ADD COLUMN unused_since INTEGER;"
            f" PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )
    db.execute("BEGIN IMMEDIATE")  # a lock shows now
    db.execute("ROLLBACK")


# What is written


def _rows(changes: Mapping[tuple[RecordKind, Any], Any]) -> tuple[Rows, Rows]:
    """Rows to put and keys to delete, by kind."""
    puts: Rows = {}
    deletes: Rows = {}
    for (kind, key), thing in changes.items():
        columns = _key(kind, key)
        if thing is _GONE:
            deletes.setdefault(kind, []).append(columns)
        else:
            puts.setdefault(kind, []).append((*columns, *_WRITERS[kind](thing)))
    return puts, deletes


def _key(kind: RecordKind, key: Any) -> tuple[Any, ...]:
    if kind is RecordKind.SERVICE:
        fingerprint, role = key
        return fingerprint, role.value.decode()
    return (key,)


def _queue_row(queue: Queue) -> Iterable[Any]:
    w = Writer()
    w.push_nonempty(queue.recipient_keys, push_key)
    notifier, link = queue.notifier, queue.link
    return (
        w.value(),
        queue.secret,
        queue.sender_id,
        None if queue.sender_key is None else queue.sender_key.der,
        None if queue.mode is None else queue.mode.value.decode(),
        *((None,) * 3 if notifier is None else (notifier.notifier_id, notifier.key.der, notifier.secret)),
        *((None,) * 3 if link is None else (link.link_id, link.data.fixed, link.data.user)),
        queue.suspended_at,
        None if queue.blocked is None else queue.blocked.text,
        queue.unused_since,
    )


def _message_row(thing: tuple[EntityId, StoredMessage, bytes]) -> Iterable[Any]:
    recipient_id, message, corr_id = thing
    return recipient_id, message.message_id, message.content.encode(), corr_id


def _nmsgs_row(notifier: Notifier) -> Iterable[Any]:
    w = Writer()
    for nmsg in notifier.pending:
        w.push_large(nmsg)
    return (w.value(),)


_WRITERS: Mapping[RecordKind, Callable[[Any], Iterable[Any]]] = {
    RecordKind.QUEUE: _queue_row,
    RecordKind.MESSAGE: _message_row,
    RecordKind.NMSGS: _nmsgs_row,
    RecordKind.SERVICE: lambda service: (service.service_id,),
    RecordKind.ASSOCIATION: lambda service: (service.fingerprint, service.role.value.decode()),
}


# What is read


@asynccontextmanager
async def stored_state(
    path: Path, credentials: Credentials, *, restore_messages: bool = True
) -> AsyncIterator[RouterState]:
    """A router's state as it was left, kept in the file while the block runs. Raises StoreError.

    Without `restore_messages` all messages and NMSGs in the file are deleted first.
    """
    state = RouterState(credentials)
    load_records(path, state, restore_messages=restore_messages)
    records = SqliteRecords(path)
    await records.open()
    state.records = records
    try:
        yield state
    finally:
        await records.close()


def load_records(path: Path, state: RouterState, *, restore_messages: bool = True) -> None:
    """Add what is stored to `state`; nothing if there is no file yet. Raises StoreError."""
    if not path.exists():
        return
    with store_errors(path), closing(open_to_write(path, **connect_options(BUSY_TIMEOUT))) as db:
        _prepare(db)
        if not restore_messages:
            db.execute("DELETE FROM messages")
            db.execute("DELETE FROM nmsgs")
            db.commit()
        try:
            _load_queues(db, state)
            _load_services(db, state)
        except (DecodeError, ValueError):
            # the cause is dropped: its text may quote keys
            raise StoreError(f"{path} holds something that is no queue or service") from None


def _load_queues(db: sqlite3.Connection, state: RouterState) -> None:
    messages: dict[bytes, deque[StoredMessage]] = {}
    corr_ids: dict[bytes, bytes] = {}
    for number, recipient_id, message_id, content, corr_id in db.execute(
        "SELECT number, recipient_id, message_id, content, corr_id FROM messages ORDER BY number"
    ):
        message = StoredMessage(number, message_id, decode_message(content))
        messages.setdefault(recipient_id, deque()).append(message)
        corr_ids[recipient_id] = corr_id
    pending = dict(db.execute("SELECT notifier_id, pending FROM nmsgs"))
    for row in db.execute("SELECT * FROM queues"):
        queue = _read_queue(row)
        queue.messages = messages.get(queue.recipient_id, deque())
        queue.last_corr_id = corr_ids.get(queue.recipient_id, b"")
        if queue.notifier is not None:
            queue.notifier.pending = _read_nmsgs(pending.get(queue.notifier.notifier_id, b""))
        state.restore_queue(queue)


def _read_queue(row: Sequence[Any]) -> Queue:
    recipient_id, keys, secret, sender_id, sender_key, mode, *rest = row
    (
        notifier_id,
        notifier_key,
        notifier_secret,
        link_id,
        link_fixed,
        link_user,
        suspended_at,
        blocked,
        unused_since,
    ) = rest
    notifier = None
    if notifier_id is not None:
        notifier = Notifier(EntityId(notifier_id), decode_public_key(notifier_key), notifier_secret)
    return Queue(
        recipient_id=EntityId(recipient_id),
        recipient_keys=tuple(Reader(keys).pull_nonempty(pull_public_key)),
        secret=secret,
        sender_id=EntityId(sender_id),
        sender_key=None if sender_key is None else decode_public_key(sender_key),
        mode=None if mode is None else QueueMode(mode.encode()),
        notifier=notifier,
        link=None if link_id is None else Link(EntityId(link_id), LinkData(link_fixed, link_user)),
        suspended_at=suspended_at,
        blocked=None if blocked is None else parse_blocking_info(blocked),
        unused_since=unused_since,
    )


def _read_nmsgs(data: bytes) -> deque[Prepared]:
    r = Reader(data)
    pending: deque[Prepared] = deque()
    while not r.at_end:
        pending.append(Prepared(r.pull_large()))
    return pending


def _load_services(db: sqlite3.Connection, state: RouterState) -> None:
    queue_ids: dict[tuple[bytes, str], set[EntityId]] = {}
    for queue_id, fingerprint, role in db.execute("SELECT queue_id, fingerprint, role FROM associations"):
        queue_ids.setdefault((fingerprint, role), set()).add(EntityId(queue_id))
    for fingerprint, role, service_id in db.execute("SELECT fingerprint, role, service_id FROM services"):
        ids = queue_ids.get((fingerprint, role), set())
        state.services.add(
            Service(EntityId(service_id), fingerprint, ServiceRole(role.encode()), ids, ids_hash(ids))
        )
