"""The store in an SQLite file: one connection writes, one reads, each with a queue of its own; a third folds
the log."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite

from protocol.addresses import SmpServer
from protocol.device_token import Provider
from protocol.encoding import EntityId, new_tuple
from protocol.statuses import SUBSCRIBING, TokenStatus
from store import migrate
from store.database_files import open_to_read, open_to_write
from store.interface import KEPT_NOTIFICATIONS, UNSENT_LOADED, SchemaOld, StoreUnavailable
from store.policy import BUSY_TIMEOUT, DEFAULT_CAPS, Durability, Owner, RowCaps
from store.records import (
    LastNotification,
    Notification,
    SentEntry,
    ServerKey,
    Stored,
    SubKey,
    TokenKey,
    TokenPush,
)
from store.routers import Routers
from store.rows import DELETED, TOKEN_COLUMNS, newest_entries, spelled_server, token_record
from store.rule_filter import RuleFilter, SenderTopic
from store.sql_store import (
    Arrived,
    CommitObserver,
    Database,
    Operation,
    Row,
    Sql,
    Transaction,
    WorkQueue,
    address_columns,
    regrouped,
    shared,
)
from store.sqlite_engine import (
    LONGEST_LIST,
    Checkpoints,
    DatabaseFile,
    GroupReader,
    GroupWriter,
    connect_options,
    connected,
    insert_rows,
    run_in_thread,
    select_each,
    select_in,
    select_rows,
    thread_queue,
    update_in,
)
from store.sqlite_errors import store_errors
from store.statements import Statements
from store.subscriptions import Subscriptions
from store.tokens import Tokens

T = TypeVar("T")
R = TypeVar("R")

_READER_SETTINGS = (
    "PRAGMA temp_store = MEMORY",
    "PRAGMA cache_size = -16384",  # KiB
)
_SETTINGS = (
    *_READER_SETTINGS,
    "PRAGMA journal_mode = WAL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA secure_delete = ON",  # what is deleted is overwritten: keys and codes
    "PRAGMA wal_autocheckpoint = 12000",  # pages: much more than `Checkpoints` leaves there
    "PRAGMA journal_size_limit = 67108864",  # bytes: the log shrinks again after a burst
)

# With the highest key of a subscription ever given: one statement less.
_OWNERS = f"""
SELECT t.token_key, t.status, t.verified, group_concat(r.server_key), ifnull(sum(r.subscriptions), 0),
    (SELECT seq FROM sqlite_sequence WHERE name = 'subscriptions')
FROM tokens t LEFT JOIN token_routers r USING (token_key)
WHERE t.token_key IN ({{}}) AND t.status <> '{DELETED}' GROUP BY t.token_key
"""
_NEXT_SERVER = "UPDATE totals SET last_server = last_server + 1 RETURNING last_server"
_NEW_SERVER = "INSERT INTO smp_servers (server_key, hosts, port, key_hash) VALUES (?, ?, ?, ?)"
_INSERT = """
INSERT INTO subscriptions
    (sub_key, subscription_id, token_key, notifier_id, notifier_key, spelling, server_key, state)
VALUES {}
"""
_USE = """
INSERT INTO token_routers (token_key, server_key, subscriptions) VALUES {}
ON CONFLICT DO UPDATE SET subscriptions = subscriptions + excluded.subscriptions
"""
_WRITE_TOTALS = """
UPDATE totals SET tokens = tokens + ?, active_tokens = active_tokens + ?, subscriptions = subscriptions + ?,
    active_subscriptions = active_subscriptions + ?, last_seq = last_seq + ?
"""


def finished(operation: Awaitable[T]) -> T:
    """The result of an operation on SQLite, which never waits."""
    try:
        next(operation.__await__())
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("an operation waits for something other than its database")


def _run_each(context: Any, calls: Sequence[Callable[[Any], Awaitable[T]]]) -> list[T]:
    """The batch of operations that gain nothing from being run together."""
    return [finished(call(context)) for call in calls]


@cache
def _flattened(batch: Callable[[Any, Sequence[Any]], Awaitable[list[Any]]]) -> Callable[[Any, Any], Any]:
    """A batch whose callers each bring a list: all lists run as one."""

    def run(context: Any, lists: Sequence[Sequence[Any]]) -> list[list[Any]]:
        return regrouped(finished(batch(context, [item for one in lists for item in one])), lists)

    return run


class SqliteDatabase(Database):
    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    async def fetch(self, statement: Sql, *parameters: Any) -> Sequence[Row]:
        if not statement.has_list:
            return self.db.execute(statement.sqlite, parameters).fetchall()
        *before, values = parameters
        return list(select_in(self.db, statement.sqlite, _once(values), *before))

    async def fetch_each(self, statement: Sql, ids: Sequence[bytes]) -> Sequence[Row]:
        rows = select_each(self.db, statement.sqlite, ids)
        return [rows[one][1:] for one in ids]

    async def fetch_rows(self, statement: Sql, rows: Sequence[Row]) -> Sequence[Row]:
        return select_rows(self.db, statement.sqlite, rows)

    async def execute(self, statement: Sql, *parameters: Any) -> int:
        if not statement.has_list:
            return self.db.execute(statement.sqlite, parameters).rowcount
        *before, values = parameters
        return update_in(self.db, statement.sqlite, _once(values), *before)

    async def execute_rows(self, statement: Sql, rows: Sequence[Row]) -> int:
        if "{}" in statement.sqlite:
            return insert_rows(self.db, statement.sqlite, rows)
        return max(self.db.executemany(statement.sqlite, rows).rowcount, 0)


def _once(values: Sequence[Any]) -> Sequence[Any]:
    """A value that stands in two pieces of a long list would give its rows twice."""
    return values if len(values) <= LONGEST_LIST else list(dict.fromkeys(values))


class SqliteTransaction(SqliteDatabase, Transaction):
    def __init__(self, db: sqlite3.Connection, rule_filter: RuleFilter, caps: RowCaps) -> None:
        Transaction.__init__(self, caps)
        self.db = db
        self._rule_filter = rule_filter
        self._last_seq: int | None = None
        self._new_seqs = 0
        self._last_key = 0

    def take_seqs(self, number: int) -> range:
        """The next numbers of last notifications."""
        if self._last_seq is None:
            (self._last_seq,) = self.db.execute("SELECT last_seq FROM totals").fetchone()
        first = self._last_seq + self._new_seqs + 1
        self._new_seqs += number
        return range(first, first + number)

    def flush(self) -> None:
        if self.routers:
            finished(self.settle_routers())
        totals = self.tokens, self.active_tokens, self.subscriptions, self.active_subscriptions
        if any(totals) or self._new_seqs:
            self.db.execute(_WRITE_TOTALS, (*totals, self._new_seqs))

    def possible_rules(self, rules: Sequence[SenderTopic]) -> Sequence[SenderTopic]:
        return self._rule_filter.possible(self.db, rules)

    def rules_added(self, rules: Iterable[SenderTopic]) -> None:
        self._rule_filter.add(rules)

    async def owners(self, keys: Sequence[TokenKey]) -> dict[TokenKey, Owner]:
        owners = {}
        for key, status, verified, routers, subscriptions, last in select_in(self.db, _OWNERS, keys):
            owners[TokenKey(key)] = Owner(
                bool(verified) and status in SUBSCRIBING,
                {ServerKey(int(router)) for router in routers.split(",")} if routers else set(),
                subscriptions,
            )
            self._last_key = last or 0
        return owners

    async def new_keys(self, number: int) -> Iterator[SubKey]:
        """Without an owner nobody needs one."""
        return map(SubKey, count(self._last_key + 1))

    async def new_servers(self, servers: Collection[SmpServer]) -> dict[SmpServer, ServerKey]:
        keys = {server: self.db.execute(_NEXT_SERVER).fetchall()[0][0] for server in servers}
        self.db.executemany(_NEW_SERVER, [(key, *address_columns(server)) for server, key in keys.items()])
        return keys

    async def insert(self, rows: Sequence[Row]) -> None:
        insert_rows(self.db, _INSERT, rows)
        used = Counter((row[2], row[6]) for row in rows)
        insert_rows(self.db, _USE, [(*pair, number) for pair, number in used.items()])


# Notifications

# One row with all answers: each row that SQLite hands over gives up the interpreter lock, and gets it back
# only when the event loop pauses.
_TARGETS = f"""
SELECT group_concat(printf(
    '%s %d %d %s %s %s', hex(s.notifier_id), s.token_key, s.sub_key, hex(t.token_id), hex(s.subscription_id),
    substr(t.device_token, 1, 2)
))
FROM subscriptions s CROSS JOIN tokens t USING (token_key)
WHERE s.server_key = ? AND s.notifier_id IN ({{}}) AND t.status = '{TokenStatus.ACTIVE}'
"""
_PROVIDERS = {provider.tag: provider for provider in Provider}
_ADD = "REPLACE INTO unsent_notifications (token_key, sub_key, seq, received_at, nonce, meta) VALUES {}"
_ENTRIES = """
SELECT group_concat(entry, ';') FROM (
    SELECT printf(
        '%d %d %s %d %s %s %s %s %s %s', n.sub_key, n.seq, hex(s.notifier_id), n.received_at, hex(n.nonce),
        hex(n.meta), v.hosts, v.port, hex(v.key_hash), s.spelling
    ) AS entry
    FROM {} n CROSS JOIN subscriptions s USING (sub_key) CROSS JOIN smp_servers v USING (server_key)
    WHERE n.token_key = t.token_key{}
)
"""
# Each token is one row with all its entries, for the same reason. No field has a space or a semicolon.
_PUSHES = f"""
SELECT {TOKEN_COLUMNS},
    ({_ENTRIES.format("unsent_notifications", f" ORDER BY n.seq LIMIT {UNSENT_LOADED}")}),
    ({_ENTRIES.format("sent_notifications", "")})
FROM tokens t WHERE token_key IN ({{}}) AND status = '{TokenStatus.ACTIVE}'
"""
_MOVE = """
REPLACE INTO sent_notifications (token_key, sub_key, seq, received_at, nonce, meta)
SELECT token_key, sub_key, seq, received_at, nonce, meta FROM unsent_notifications WHERE seq IN ({})
"""
_MOVED = "DELETE FROM unsent_notifications WHERE seq IN ({})"
_FORGET = f"""
DELETE FROM sent_notifications WHERE (token_key, sub_key) IN (
    SELECT token_key, sub_key FROM (
        SELECT token_key, sub_key, row_number() OVER (PARTITION BY token_key ORDER BY seq DESC) AS place
        FROM sent_notifications WHERE token_key IN ({{}})
    )
    WHERE place > {KEPT_NOTIFICATIONS}
)
"""


def _add(tx: SqliteTransaction, blocks: Sequence[Arrived]) -> list[list[Stored | None]]:
    return [_added(tx, *block) for block in blocks]


def _added(
    tx: SqliteTransaction, key: ServerKey, notifications: Sequence[Notification], received_at: int
) -> list[Stored | None]:
    notifier_ids = [notification.notifier_id for notification in notifications]
    targets = _targets(tx, key, notifier_ids)
    newest: dict[EntityId, tuple[Any, ...]] = {}
    for seq, (notifier_id, nonce, meta) in zip(tx.take_seqs(len(notifications)), notifications, strict=True):
        if (target := targets.get(notifier_id)) is not None:
            newest[notifier_id] = (target.token_key, target.sub_key, seq, received_at, nonce, meta)
    insert_rows(tx.db, _ADD, list(newest.values()))
    return [targets.get(notifier_id) for notifier_id in notifier_ids]


def _targets(tx: SqliteTransaction, key: ServerKey, notifier_ids: Sequence[EntityId]) -> dict[bytes, Stored]:
    targets, unhex = {}, bytes.fromhex
    for (answers,) in select_in(tx.db, _TARGETS, notifier_ids, key):
        for answer in answers.split(",") if answers else ():
            notifier_id, token_key, sub_key, token_id, subscription_id, tag = answer.split(" ")
            ids = unhex(token_id), unhex(subscription_id)
            stored = new_tuple(Stored, (int(token_key), int(sub_key), *ids, _PROVIDERS[tag]))
            targets[unhex(notifier_id)] = stored
    return targets


def _pushes(db: SqliteDatabase, calls: Sequence[Sequence[TokenKey]]) -> list[list[TokenPush]]:
    return [_pushed(db, keys) for keys in calls]


def _pushed(db: SqliteDatabase, keys: Sequence[TokenKey]) -> list[TokenPush]:
    found = []
    for *token, unsent, sent in select_in(db.db, _PUSHES, keys):
        if unsent or sent:
            entries = newest_entries(list(_parsed(unsent, sent=False)), _parsed(sent, sent=True))
            found.append(TokenPush(token_record(token), entries))
    return found


def _parsed(entries: str | None, *, sent: bool) -> Iterator[LastNotification]:
    unhex = bytes.fromhex
    for entry in entries.split(";") if entries else ():
        sub_key, seq, notifier_id, received_at, nonce, meta, router = entry.split(" ", 6)
        ids = int(sub_key), int(seq), _router(router), unhex(notifier_id)
        yield new_tuple(LastNotification, (*ids, int(received_at), unhex(nonce), unhex(meta), sent))


@lru_cache(maxsize=4096)
def _router(columns: str) -> SmpServer:
    """Many entries name few routers."""
    hosts, port, key_hash, spelling = columns.split(" ")
    return spelled_server(hosts, port, bytes.fromhex(key_hash), spelling)


def _set_sent(tx: SqliteTransaction, calls: Sequence[Sequence[SentEntry]]) -> list[None]:
    """A number is given once and goes with its entry, so it alone tells if the entry is still the same."""
    entries = [entry for call in calls for entry in call]
    seqs = [entry.seq for entry in entries]
    update_in(tx.db, _MOVE, seqs)
    update_in(tx.db, _MOVED, seqs)
    update_in(tx.db, _FORGET, list({entry.token_key for entry in entries}))
    return [None] * len(calls)


class SqliteStore(Tokens, Subscriptions, Routers, Statements):
    """NtfStore in the file `path`."""

    def __init__(
        self,
        path: Path,
        *,
        busy_timeout: float = BUSY_TIMEOUT,
        read_only: bool = False,
        caps: RowCaps = DEFAULT_CAPS,
        durability: Durability = Durability.PROCESS,
        on_commit: CommitObserver | None = None,
    ) -> None:
        self._path = path
        self._syncs_arrivals = durability is Durability.MACHINE
        self._busy_timeout = busy_timeout
        self._read_only = read_only
        self._connections: list[aiosqlite.Connection] = []
        self._writer: WorkQueue[SqliteTransaction] | None = None
        self._reader: WorkQueue[SqliteDatabase] | None = None
        self._checkpoints: Checkpoints | None = None
        self._file = DatabaseFile(path)
        self._rule_filter = RuleFilter()
        self._run_writes = GroupWriter(
            self._file,
            on_commit,
            lambda db: SqliteTransaction(db, self._rule_filter, caps),
            on_rollback=self._rule_filter.forget,
        )
        self._run_reads = GroupReader(self._file, SqliteDatabase)

    async def open(self) -> None:
        """Create or upgrade the database, unless it is opened for reading only. StoreUnavailable or
        SchemaError, and nothing changed, if it cannot be used."""
        try:
            with store_errors(self._path):
                if not self._read_only:
                    await self._open_to_write()
                reading = await self._connect(open_to_read, self._prepare_reader)
                self._file.remember()
        except BaseException:
            await self._disconnect()
            raise
        self._reader = thread_queue("store reader", reading, self._run_reads)
        self._reader.start()
        for part in (self._checkpoints, self._writer):
            if part is not None:
                part.start()

    async def _open_to_write(self) -> None:
        writing = await self._connect(open_to_write, self._prepare)
        self._checkpoints = Checkpoints(await self._connect(open_to_write, _set_up))
        self._writer = WorkQueue("store writer", partial(self._write_group, writing, self._checkpoints))
        self._rule_filter.forget()

    async def close(self) -> None:
        for part in (self._writer, self._reader, self._checkpoints):
            if part is not None:
                await part.stop()
        await self._disconnect()

    async def _connect(
        self, opened: Callable[..., sqlite3.Connection], prepare: Callable[[sqlite3.Connection], None]
    ) -> aiosqlite.Connection:
        options = connect_options(self._busy_timeout)
        connection = await connected(lambda: opened(self._path, **options))
        self._connections.append(connection)
        await run_in_thread(connection, prepare)
        return connection

    async def _disconnect(self) -> None:
        """The writer last: it can fold the log into the database when it is alone."""
        while self._connections:
            await self._connections.pop().close()
        self._writer = self._checkpoints = None

    def _prepare(self, db: sqlite3.Connection) -> None:
        # First of all: nothing may be written to a file that is not ours.
        steps = migrate.STEPS.plan(migrate.schema_version(db), migrate.STEPS.latest)
        _set_up(db)
        migrate.apply(db, steps)
        # A lock or a missing permission shows now, not at the first command.
        db.execute("BEGIN IMMEDIATE")
        db.execute("ROLLBACK")

    def _prepare_reader(self, db: sqlite3.Connection) -> None:
        for setting in _READER_SETTINGS:
            db.execute(setting)
        if migrate.schema_version(db) != migrate.STEPS.latest:
            raise SchemaOld(f"{self._path} has an old schema: start, or `ntf-server migrate`, upgrades it")

    async def _write_group(
        self, connection: aiosqlite.Connection, checkpoints: Checkpoints, group: Sequence[Operation]
    ) -> list[Any]:
        results, rows = await run_in_thread(
            connection, lambda db: (self._run_writes(db, group), db.total_changes)
        )
        checkpoints.committed(rows)
        return results

    async def _write(self, call: Callable[[Transaction], Awaitable[T]], *, durable: bool) -> T:
        result: T = await self._writing.run(_run_each, call, durable=durable)
        return result

    async def _write_grouped(
        self, write: Callable[[Transaction, Sequence[T]], Awaitable[list[R]]], items: Sequence[T]
    ) -> list[R]:
        results: list[R] = await self._writing.run(_flattened(write), items, durable=True)
        return results

    async def _read(self, call: Callable[[Database], Awaitable[T]]) -> T:
        result: T = await self._reading.run(_run_each, call)
        return result

    async def _read_grouped(
        self, read: Callable[[Database, Sequence[T]], Awaitable[list[R]]], items: Sequence[T]
    ) -> list[R]:
        results: list[R] = await self._reading.run(_flattened(read), items)
        return results

    @property
    def _writing(self) -> WorkQueue[SqliteTransaction]:
        if self._writer is None:
            raise StoreUnavailable("the store is not open for writing")
        return self._writer

    @property
    def _reading(self) -> WorkQueue[SqliteDatabase]:
        if self._reader is None:
            raise StoreUnavailable("the store is not open")
        return self._reader

    async def add_notifications(
        self, key: ServerKey, notifications: Sequence[Notification], *, received_at: int
    ) -> list[Stored | None]:
        return await self._writing.run(
            _add, Arrived(key, notifications, received_at), durable=self._syncs_arrivals
        )

    add_late_notifications = add_notifications  # there is no other daemon

    async def pushes(self, keys: Sequence[TokenKey]) -> list[TokenPush]:
        return await self._reading.run(_pushes, keys)

    async def set_sent(self, entries: Sequence[SentEntry]) -> None:
        await self._writing.run(_set_sent, entries)

    async def check(self) -> None:
        if self._file.damage is not None:
            raise self._file.damage
        await self._write(_write_the_same, durable=True)


def _set_up(db: sqlite3.Connection) -> None:
    for setting in _SETTINGS:
        db.execute(setting)


async def _write_the_same(tx: Transaction) -> None:
    """SQLite leaves out updates of rows that change nothing, but not this one."""
    version = await tx.fetchval(shared("PRAGMA user_version"))
    await tx.execute(shared(f"PRAGMA user_version = {version}"))
