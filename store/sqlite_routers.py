"""SQL of routers: their queues, the outcomes of subscribing, service credentials and associations."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple

from protocol.encoding import EntityId
from protocol.statuses import SUBSCRIBABLE, BulkMove, SubInput, SubState, bulk_move
from store.interface import StoreError
from store.policy import Standing, standing_after
from store.records import (
    Moved,
    QueueEvent,
    QueueRow,
    ServerKey,
    ServerRecord,
    ServiceCredentials,
    StoredRouter,
    SubKey,
)
from store.rows import (
    QUEUE_COLUMNS,
    SERVER_COLUMNS,
    encoded_chain,
    queue_row,
    server_record,
    standing,
    stored_router,
)
from store.sqlite_transaction import Transaction, select_in, update_in

_SOK = bulk_move(SubInput.SUBSCRIBED)
_SOKS = bulk_move(SubInput.SUBSCRIBED, SUBSCRIBABLE)
_DROP = bulk_move(SubInput.DISCONNECTED)
_RETRY = bulk_move(SubInput.RETRIED)
_CLEAR = bulk_move(SubInput.SERVICE_CLEARED)
_EVER_SUBSCRIBED = frozenset({_SOK.target, _DROP.target})
"States that no queue reaches without an answer of its router."


def _listed(states: frozenset[SubState]) -> str:
    return ", ".join(f"'{state}'" for state in sorted(states))


_SERVERS = f"""
SELECT server_key, hosts, port, key_hash, EXISTS (
        SELECT 1 FROM subscriptions s INDEXED BY subscriptions_of_server
        WHERE s.server_key = v.server_key AND s.state IN ({_listed(_EVER_SUBSCRIBED)})
    ) AS was_there
FROM smp_servers v
WHERE EXISTS (
        SELECT 1 FROM subscriptions s
        WHERE s.server_key = v.server_key AND s.retry_at IS NOT NULL
    ) OR EXISTS (
        SELECT 1 FROM subscriptions s INDEXED BY subscriptions_of_server
        WHERE s.server_key = v.server_key AND s.state IN ({_listed(SUBSCRIBABLE)})
    )
ORDER BY was_there DESC, server_key
"""
_SERVER = f"SELECT {SERVER_COLUMNS} FROM smp_servers WHERE server_key = ?"

_UNUSED_SERVER = """
NOT EXISTS (SELECT 1 FROM subscriptions s WHERE s.server_key = v.server_key)
    AND NOT EXISTS (SELECT 1 FROM token_routers r WHERE r.server_key = v.server_key)
"""
_UNUSED_SERVERS = f"SELECT server_key FROM smp_servers v WHERE {_UNUSED_SERVER} LIMIT {{}}"
_DELETE_SERVERS = f"DELETE FROM smp_servers AS v WHERE server_key IN ({{}}) AND {_UNUSED_SERVER}"

_OF_SERVER = "SELECT count(*) FROM subscriptions INDEXED BY subscriptions_of_server WHERE server_key = ?"
_SUBSCRIBABLE = f"""
SELECT subscriptions - (
    SELECT count(*) FROM subscriptions INDEXED BY subscriptions_dead
    WHERE state IN ({_listed(frozenset(SubState) - SUBSCRIBABLE)})
)
FROM totals
"""
_PAGE = f"""
SELECT {QUEUE_COLUMNS} FROM subscriptions INDEXED BY subscriptions_of_server
WHERE server_key = ?1 AND associated = {{}} AND sub_key > ?2 AND state IN ({_listed(SUBSCRIBABLE)})
"""
_PAGES = {
    False: f"{_PAGE.format(0)} ORDER BY sub_key LIMIT ?3",
    True: f"{_PAGE.format(1)} ORDER BY sub_key LIMIT ?3",
    None: f"{_PAGE.format(0)} UNION ALL {_PAGE.format(1)} ORDER BY sub_key LIMIT ?3",
}
_QUEUES_BY_ID = f"""
SELECT {QUEUE_COLUMNS} FROM subscriptions WHERE server_key = ? AND notifier_id IN ({{}})
"""
_DUE = f"""
SELECT {QUEUE_COLUMNS} FROM subscriptions
WHERE server_key = ? AND retry_at IS NOT NULL AND retry_at <= ? AND state IN ({_listed(_RETRY.sources)})
ORDER BY retry_at LIMIT ?
"""
_RETRIED = "UPDATE subscriptions SET state = ?, detail = '', retry_at = NULL WHERE sub_key IN ({})"
_SUBSCRIBED_ROWS = """
SELECT s.sub_key, s.notifier_id, s.subscription_id, t.token_id, s.state, s.associated
FROM subscriptions s CROSS JOIN tokens t USING (token_key)
WHERE s.server_key = ? AND s.notifier_id IN ({})
"""
_SUBSCRIBED = """
UPDATE subscriptions SET state = ?, detail = '', associated = ?, retry_count = 0, retry_at = NULL
WHERE sub_key IN ({})
"""
_CHANGED_ROWS = """
SELECT s.sub_key, s.notifier_id, s.subscription_id, t.token_id,
    s.state, s.detail, s.associated, s.retry_count, s.retry_at
FROM subscriptions s CROSS JOIN tokens t USING (token_key)
WHERE s.server_key = ? AND s.notifier_id IN ({})
"""
_CHANGE = """
UPDATE subscriptions SET state = ?, detail = ?, associated = ?, retry_count = ?, retry_at = ?
WHERE sub_key = ?
"""
_MOVE_PAGE = """
UPDATE subscriptions INDEXED BY subscriptions_of_server SET state = ?
WHERE server_key = ? AND associated = ? AND sub_key > ? AND sub_key <= ? AND state IN ({})
"""
_PAGE_END = """
SELECT max(sub_key) FROM (
    SELECT sub_key FROM subscriptions INDEXED BY subscriptions_of_server
    WHERE server_key = ? AND associated = ? AND sub_key > ? ORDER BY sub_key LIMIT ?
)
"""
UNUSED_PAGE = 500
"Routers deleted in one transaction."
STATE_PAGE = 10_000
"Rows that change state in one transaction: bounds how long other writes wait for those of a large router."


def servers(db: sqlite3.Connection) -> list[StoredRouter]:
    return [stored_router(row) for row in db.execute(_SERVERS)]


def server(db: sqlite3.Connection, key: ServerKey) -> ServerRecord:
    row = db.execute(_SERVER, (key,)).fetchone()
    if row is None:
        raise StoreError("no such router in the store")
    return server_record(row)


def unused_servers(db: sqlite3.Connection) -> list[ServerKey]:
    return [ServerKey(key) for (key,) in db.execute(_UNUSED_SERVERS.format(UNUSED_PAGE))]


def delete_unused(tx: Transaction, keys: Sequence[ServerKey]) -> int:
    return update_in(tx.db, _DELETE_SERVERS, keys)


def queues(
    db: sqlite3.Connection, key: ServerKey, after: SubKey, limit: int, associated: bool | None
) -> list[QueueRow]:
    return [queue_row(row) for row in db.execute(_PAGES[associated], (key, after, limit))]


def subscription_count(db: sqlite3.Connection, key: ServerKey) -> int:
    (count,) = db.execute(_OF_SERVER, (key,)).fetchone()
    return int(count)


def subscribable_count(db: sqlite3.Connection) -> int:
    (count,) = db.execute(_SUBSCRIBABLE).fetchone()
    return int(count)


def queues_by_id(db: sqlite3.Connection, key: ServerKey, notifier_ids: Sequence[EntityId]) -> list[QueueRow]:
    found = {row[0]: queue_row(row) for row in select_in(db, _QUEUES_BY_ID, notifier_ids, key)}
    return list(found.values())


def due_retries(tx: Transaction, key: ServerKey, now: int, limit: int) -> list[QueueRow]:
    due = [queue_row(row) for row in tx.db.execute(_DUE, (key, now, limit))]
    update_in(tx.db, _RETRIED, [row.key for row in due], _RETRY.target)
    return due


def next_retry(db: sqlite3.Connection, key: ServerKey) -> int | None:
    (at,) = db.execute(
        "SELECT min(retry_at) FROM subscriptions WHERE server_key = ? AND retry_at IS NOT NULL", (key,)
    ).fetchone()
    return None if at is None else int(at)


def set_subscribed(
    tx: Transaction, key: ServerKey, notifier_ids: Sequence[EntityId], service_id: EntityId | None
) -> list[Moved]:
    associated = service_id is not None and service_id == _service_id(tx, key)
    changed: list[SubKey] = []
    flipped: list[EntityId] = []
    moved: list[Moved] = []
    rows = _rows_once(tx, _SUBSCRIBED_ROWS, key, notifier_ids)
    for sub_key, notifier_id, subscription_id, token_id, state, was_associated in rows:
        if state in _SOK.sources or was_associated != associated:
            changed.append(sub_key)
        if state in _SOK.sources:
            moved.append(Moved(subscription_id, token_id, SubState(state), _SOK.target))
        if was_associated != associated:
            flipped.append(notifier_id)
    tx.active_subscriptions += len(moved)
    update_in(tx.db, _SUBSCRIBED, changed, _SOK.target, associated)
    if associated:
        tx.add_associated(key, flipped)
    else:
        tx.remove_associated(key, flipped)
    return moved


def _service_id(tx: Transaction, key: ServerKey) -> bytes | None:
    row = tx.db.execute("SELECT service_id FROM smp_servers WHERE server_key = ?", (key,)).fetchone()
    return None if row is None else row[0]


def _rows_once(
    tx: Transaction, sql: str, key: ServerKey, notifier_ids: Sequence[EntityId]
) -> list[tuple[Any, ...]]:
    """Each row once, however often its id is named; rows start with their key."""
    return list({row[0]: row for row in select_in(tx.db, sql, notifier_ids, key)}.values())


class _Row(NamedTuple):
    sub_key: SubKey
    notifier_id: EntityId
    subscription_id: EntityId
    token_id: EntityId
    standing: Standing


def _row(columns: Sequence[Any]) -> _Row:
    return _Row(columns[0], columns[1], columns[2], columns[3], standing(columns[4:]))


def move_queues(tx: Transaction, key: ServerKey, events: Sequence[QueueEvent], now: int) -> list[Moved]:
    found = _rows_once(tx, _CHANGED_ROWS, key, [event.notifier_id for event in events])
    rows = {row.notifier_id: row for row in map(_row, found)}
    standings = {notifier_id: row.standing for notifier_id, row in rows.items()}
    for notifier_id, event in events:
        if notifier_id in standings:
            standings[notifier_id] = standing_after(standings[notifier_id], event, now)
    changed = [(row, standings[row.notifier_id]) for row in rows.values()]
    changed = [(row, after) for row, after in changed if after != row.standing]
    tx.db.executemany(_CHANGE, [(*after, row.sub_key) for row, after in changed])
    moved = [
        Moved(row.subscription_id, row.token_id, row.standing.state, after.state) for row, after in changed
    ]
    tx.active_subscriptions += sum(
        (move.after is SubState.ACTIVE) - (move.before is SubState.ACTIVE) for move in moved
    )
    tx.remove_associated(
        key, [row.notifier_id for row, after in changed if row.standing.associated and not after.associated]
    )
    return [move for move in moved if move.before is not move.after]


class Page(NamedTuple):
    """Rows changed, and the last one looked at; None at the end."""

    changed: int
    last: SubKey | None


def set_disconnected(tx: Transaction, key: ServerKey, associated: bool, after: SubKey) -> Page:
    page = _move_page(tx, _DROP, key, associated, after)
    tx.active_subscriptions -= page.changed
    return page


def set_service_subscribed(tx: Transaction, key: ServerKey, associated: bool, after: SubKey) -> Page:
    page = _move_page(tx, _SOKS, key, associated, after)
    tx.active_subscriptions += page.changed
    return page


def _move_page(tx: Transaction, move: BulkMove, key: ServerKey, associated: bool, after: SubKey) -> Page:
    (last,) = tx.db.execute(_PAGE_END, (key, associated, after, STATE_PAGE)).fetchone()
    if last is None:
        return Page(0, None)
    sql = _MOVE_PAGE.format(_listed(move.sources))
    changed = tx.db.execute(sql, (move.target, key, associated, after, last)).rowcount
    return Page(changed, SubKey(last))


def set_credentials(tx: Transaction, key: ServerKey, credentials: ServiceCredentials) -> None:
    tx.db.execute(
        "UPDATE smp_servers SET chain = ?, private_key = ? WHERE server_key = ?",
        (encoded_chain(credentials), credentials.private_key, key),
    )


def set_service_id(tx: Transaction, key: ServerKey, service_id: EntityId) -> bool:
    before = _service_id(tx, key)
    if before == service_id:
        return False
    tx.db.execute("UPDATE smp_servers SET service_id = ? WHERE server_key = ?", (service_id, key))
    _clear_associations(tx, key)
    return before is not None


def clear_service(tx: Transaction, key: ServerKey) -> int:
    tx.db.execute(
        "UPDATE smp_servers SET chain = NULL, private_key = NULL, service_id = NULL WHERE server_key = ?",
        (key,),
    )
    return _clear_associations(tx, key)


def _clear_associations(tx: Transaction, key: ServerKey) -> int:
    active: int
    (active,) = tx.db.execute(
        "SELECT count(*) FROM subscriptions INDEXED BY subscriptions_of_server"
        " WHERE server_key = ? AND associated = 1 AND state = ?",
        (key, SubState.ACTIVE),
    ).fetchone()
    tx.db.execute(
        "UPDATE subscriptions INDEXED BY subscriptions_of_server SET associated = 0, state = ?"
        " WHERE server_key = ? AND associated = 1",
        (_CLEAR.target, key),
    )
    tx.active_subscriptions -= active
    tx.clear_associated(key)
    return active
