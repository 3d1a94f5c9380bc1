"""SQLite's side of the operations, on the thread of its connection: how a statement is run, what a
transaction keeps, and notifications on their way."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import count
from typing import Any, NamedTuple, TypeVar

from protocol.device_token import Provider
from protocol.encoding import EntityId
from protocol.statuses import TokenStatus
from store.interface import KEPT_NOTIFICATIONS, UNSENT_LOADED
from store.policy import Insert, Owner, RowCaps
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
from store.rows import DELETED, TOKEN_COLUMNS, last_notification, newest_entries, token_record
from store.rule_filter import RuleFilter, SenderTopic
from store.sql_store import Batch, Database, Row, Statement, Transaction

T = TypeVar("T")

_SIZES = (256, 64, 16, 4, 1)
"A list in a statement has one of these lengths, so that few different statements stay prepared."

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


@cache
def at_once(batch: Batch[Any]) -> Callable[[Any, Sequence[Any]], Sequence[Any]]:
    return lambda context, arguments: finished(batch(context, arguments))


class SqliteDatabase(Database):
    def __init__(self, db: sqlite3.Connection) -> None:
        super().__init__()
        self.db = db

    async def fetch(self, statement: Statement, *parameters: Any) -> Sequence[Row]:
        if not statement.has_list:
            return self.db.execute(statement.sqlite, parameters).fetchall()
        *before, values = parameters
        return list(select_in(self.db, statement.sqlite, _once(values), *before))

    async def fetch_each(self, statement: Statement, ids: Sequence[bytes]) -> Sequence[Row]:
        rows = select_each(self.db, statement.sqlite, ids)
        return [rows[one][1:] for one in ids]

    async def fetch_rows(self, statement: Statement, rows: Sequence[Row]) -> Sequence[Row]:
        return list(select_rows(self.db, statement.sqlite, rows))

    async def execute(self, statement: Statement, *parameters: Any) -> int:
        if not statement.has_list:
            return self.db.execute(statement.sqlite, parameters).rowcount
        *before, values = parameters
        return update_in(self.db, statement.sqlite, _once(values), *before)

    async def execute_rows(self, statement: Statement, rows: Sequence[Row]) -> int:
        if "{}" in statement.sqlite:
            insert_rows(self.db, statement.sqlite, rows)
            return len(rows)
        return max(self.db.executemany(statement.sqlite, rows).rowcount, 0)


def _once(values: Sequence[Any]) -> Sequence[Any]:
    """A value that stands in two pieces of a long list would give its rows twice."""
    return list(dict.fromkeys(values))


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
                bool(verified) and TokenStatus(status).allows_subscriptions,
                {ServerKey(int(router)) for router in routers.split(",")} if routers else set(),
                subscriptions,
            )
            self._last_key = last or 0
        return owners

    async def new_keys(self, number: int) -> Iterator[SubKey]:
        """Without an owner nobody needs one."""
        return map(SubKey, count(self._last_key + 1))

    async def new_servers(self, addresses: Sequence[tuple[str, str, bytes]]) -> None:
        for address in addresses:
            ((key,),) = self.db.execute(_NEXT_SERVER).fetchall()
            self.db.execute(_NEW_SERVER, (key, *address))

    async def insert(self, inserts: Sequence[Insert], keys: Sequence[ServerKey], state: str) -> None:
        rows = [(*step.columns, key, state) for step, key in zip(inserts, keys, strict=True)]
        insert_rows(self.db, _INSERT, rows)
        used = Counter((step.new.token_key, key) for step, key in zip(inserts, keys, strict=True))
        insert_rows(self.db, _USE, [(*pair, number) for pair, number in used.items()])


# Lists in statements


def chunks(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Cut a list into pieces of the sizes that statements exist for."""
    start, left = 0, len(values)
    for size in _SIZES:
        while left >= size:
            yield values[start : start + size]
            start += size
            left -= size


def padded(values: Sequence[Any]) -> Iterator[list[Any]]:
    """Like `chunks`, in fewer pieces: short ones are filled up by repeating a value. For IN lists."""
    for start in range(0, len(values), _SIZES[0]):
        piece = list(values[start : start + _SIZES[0]])
        size = next(size for size in reversed(_SIZES) if size >= len(piece))
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


def select_rows(db: sqlite3.Connection, sql: str, rows: Sequence[Row]) -> Iterator[tuple[Any, ...]]:
    """What is returned by a statement that has `{}` where its VALUES go."""
    for piece in chunks(rows):
        flat = [value for row in piece for value in row]
        yield from db.execute(_with_rows(sql, len(piece), len(piece[0])), flat)


def update_in(db: sqlite3.Connection, sql: str, values: Sequence[Any], *before: Any) -> int:
    """Rows changed by a statement that has `{}` where its IN list goes."""
    return sum(
        db.execute(_with_list(sql, len(before), len(piece)), (*before, *piece)).rowcount
        for piece in padded(values)
    )


def insert_rows(db: sqlite3.Connection, sql: str, rows: Sequence[Row]) -> None:
    """Insert rows with a statement that has `{}` where its VALUES go.

    Several rows in one step: each step gives up the interpreter lock and has to get it back.
    """
    for _ in select_rows(db, sql, rows):
        pass


@cache
def _with_list(sql: str, before: int, size: int) -> str:
    return sql.format(",".join(f"?{before + place}" for place in range(1, size + 1)))


@cache
def _with_rows(sql: str, rows: int, columns: int) -> str:
    row = ",".join("?" * columns)
    return sql.format(",".join([f"({row})"] * rows))


# Notifications

# One row with all answers: each row that SQLite hands over gives up the interpreter lock, and gets it back
# only when the event loop pauses.
_TARGETS = f"""
SELECT group_concat(
    hex(s.notifier_id) || ' ' || s.token_key || ' ' || s.sub_key || ' ' || hex(t.token_id)
    || ' ' || hex(s.subscription_id) || ' ' || substr(t.device_token, 1, 2)
)
FROM subscriptions s CROSS JOIN tokens t USING (token_key)
WHERE s.server_key = ? AND s.notifier_id IN ({{}}) AND t.status = '{TokenStatus.ACTIVE}'
"""
_PROVIDERS = {provider.tag: provider for provider in Provider}
_ADD = "REPLACE INTO unsent_notifications (token_key, sub_key, seq, received_at, nonce, meta) VALUES {}"
_ENTRIES = """
SELECT group_concat(entry, ';') FROM (
    SELECT n.sub_key || ' ' || n.seq || ' ' || v.hosts || ' ' || v.port || ' ' || hex(v.key_hash) || ' '
        || hex(s.notifier_id) || ' ' || n.received_at || ' ' || hex(n.nonce) || ' ' || hex(n.meta) || ' '
        || s.spelling AS entry
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


class Arrived(NamedTuple):
    """A block of NMSGs of one router. Do not print."""

    server_key: ServerKey
    notifications: Sequence[Notification]
    received_at: int


def add(tx: SqliteTransaction, blocks: Sequence[Arrived]) -> list[list[Stored | None]]:
    return [_add(tx, *block) for block in blocks]


def _add(
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


def _targets(
    tx: SqliteTransaction, key: ServerKey, notifier_ids: Sequence[EntityId]
) -> dict[EntityId, Stored]:
    targets = {}
    for (answers,) in select_in(tx.db, _TARGETS, notifier_ids, key):
        for answer in answers.split(",") if answers else ():
            notifier_id, token_key, sub_key, token_id, subscription_id, tag = answer.split(" ")
            keys = TokenKey(int(token_key)), SubKey(int(sub_key))
            stored = Stored(*keys, _entity(token_id), _entity(subscription_id), _PROVIDERS[tag])
            targets[_entity(notifier_id)] = stored
    return targets


def _entity(text: str) -> EntityId:
    return EntityId(bytes.fromhex(text))


def pushes(db: SqliteDatabase, calls: Sequence[Sequence[TokenKey]]) -> list[list[TokenPush]]:
    return [_pushes(db, keys) for keys in calls]


def _pushes(db: SqliteDatabase, keys: Sequence[TokenKey]) -> list[TokenPush]:
    found = []
    for *token, unsent, sent in select_in(db.db, _PUSHES, keys):
        if entries := newest_entries(list(_parsed(unsent, sent=False)), _parsed(sent, sent=True)):
            found.append(TokenPush(token_record(token), entries))
    return found


def _parsed(entries: str | None, *, sent: bool) -> Iterator[LastNotification]:
    return (_entry(entry.split(" "), sent) for entry in entries.split(";")) if entries else iter(())


def _entry(columns: Sequence[str], sent: bool) -> LastNotification:
    sub_key, seq, hosts, port, key_hash, notifier_id, received_at, nonce, meta, spelling = columns
    unhex = bytes.fromhex
    ids = int(sub_key), int(seq), hosts, port, unhex(key_hash), unhex(notifier_id)
    return last_notification((*ids, int(received_at), unhex(nonce), unhex(meta), spelling), sent=sent)


def set_sent(tx: SqliteTransaction, calls: Sequence[Sequence[SentEntry]]) -> list[None]:
    """A number is given once and goes with its entry, so it alone tells if the entry is still the same."""
    entries = [entry for call in calls for entry in call]
    seqs = [entry.seq for entry in entries]
    update_in(tx.db, _MOVE, seqs)
    update_in(tx.db, _MOVED, seqs)
    update_in(tx.db, _FORGET, list({entry.token_key for entry in entries}))
    return [None] * len(calls)
