"""SQL of routers: their queues, the outcomes of subscribing, service credentials and associations."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from protocol.encoding import EntityId
from store.interface import StoreError
from store.queue_plan import (
    CLEAR,
    ENDED_STATES,
    EVER_SUBSCRIBED,
    MOVED_COLUMNS,
    RETRY,
    SOK,
    SUBSCRIBABLE_STATES,
    SUBSCRIBED_COLUMNS,
    UNUSED_PAGE,
    UNUSED_SERVER,
    listed,
    plan_moves,
    plan_subscribed,
)
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
    stored_router,
)
from store.sqlite_transaction import Transaction, select_in, update_in

_SERVERS = f"""
SELECT server_key, hosts, port, key_hash, served > 0 OR EXISTS (
        SELECT 1 FROM subscriptions s INDEXED BY subscriptions_of_server
        WHERE s.server_key = v.server_key AND s.state IN ({EVER_SUBSCRIBED})
    ) AS was_there
FROM smp_servers v
WHERE EXISTS (
        SELECT 1 FROM subscriptions s
        WHERE s.server_key = v.server_key AND s.retry_at IS NOT NULL
    ) OR EXISTS (
        SELECT 1 FROM subscriptions s INDEXED BY subscriptions_of_server
        WHERE s.server_key = v.server_key AND s.state IN ({SUBSCRIBABLE_STATES})
    )
ORDER BY was_there DESC, server_key
"""
_SERVER = f"SELECT {SERVER_COLUMNS} FROM smp_servers WHERE server_key = ?"

_UNUSED_SERVERS = f"SELECT server_key FROM smp_servers v WHERE {UNUSED_SERVER} LIMIT {{}}"
_DELETE_SERVERS = f"DELETE FROM smp_servers AS v WHERE server_key IN ({{}}) AND {UNUSED_SERVER}"

_OF_SERVER = "SELECT count(*) FROM subscriptions INDEXED BY subscriptions_of_server WHERE server_key = ?"
_SUBSCRIBABLE = f"""
SELECT subscriptions - (
    SELECT count(*) FROM subscriptions INDEXED BY subscriptions_dead
    WHERE state IN ({ENDED_STATES})
)
FROM totals
"""
_PAGE = f"""
SELECT {QUEUE_COLUMNS} FROM subscriptions INDEXED BY subscriptions_of_server
WHERE server_key = ?1 AND associated = {{}} AND sub_key > ?2 AND state IN ({SUBSCRIBABLE_STATES})
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
WHERE server_key = ? AND retry_at IS NOT NULL AND retry_at <= ? AND state IN ({listed(RETRY.sources)})
ORDER BY retry_at LIMIT ?
"""
_RETRIED = "UPDATE subscriptions SET state = ?, detail = '', retry_at = NULL WHERE sub_key IN ({})"
_SUBSCRIBED_ROWS = f"""
SELECT {SUBSCRIBED_COLUMNS}
FROM subscriptions s CROSS JOIN tokens t USING (token_key) CROSS JOIN smp_servers v USING (server_key)
WHERE s.server_key = ? AND s.notifier_id IN ({{}})
"""
_SUBSCRIBED = """
UPDATE subscriptions SET state = ?, associated = ?, as_of = ?, detail = '', retry_count = 0, retry_at = NULL
WHERE sub_key IN ({})
"""
_CHANGED_ROWS = f"""
SELECT {MOVED_COLUMNS}
FROM subscriptions s CROSS JOIN tokens t USING (token_key) CROSS JOIN smp_servers v USING (server_key)
WHERE s.server_key = ? AND s.notifier_id IN ({{}})
"""
_CHANGE = """
UPDATE subscriptions SET state = ?, detail = ?, associated = ?, retry_count = ?, retry_at = ?, as_of = ?
WHERE sub_key = ?
"""
_CLEAR_ASSOCIATIONS = """
UPDATE subscriptions INDEXED BY subscriptions_of_server SET associated = 0, state = ?
WHERE server_key = ? AND associated = 1
"""


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
    tx.settle_routers()  # while their rows are there
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
    update_in(tx.db, _RETRIED, [row.key for row in due], RETRY.target)
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
    rows = _rows_once(tx, _SUBSCRIBED_ROWS, key, notifier_ids)
    changed, as_of, moved = plan_subscribed(tx, key, rows, associated)
    update_in(tx.db, _SUBSCRIBED, changed, SOK.target, associated, as_of)
    return moved


def _service_id(tx: Transaction, key: ServerKey) -> bytes | None:
    row = tx.db.execute("SELECT service_id FROM smp_servers WHERE server_key = ?", (key,)).fetchone()
    return None if row is None else row[0]


def _rows_once(
    tx: Transaction, sql: str, key: ServerKey, notifier_ids: Sequence[EntityId]
) -> list[tuple[Any, ...]]:
    """Each row once, however often its id is named; rows start with their key."""
    return list({row[0]: row for row in select_in(tx.db, sql, notifier_ids, key)}.values())


def move_queues(tx: Transaction, key: ServerKey, events: Sequence[QueueEvent], now: int) -> list[Moved]:
    rows = _rows_once(tx, _CHANGED_ROWS, key, [event.notifier_id for event in events])
    changed, moved = plan_moves(tx, key, rows, events, now)
    tx.db.executemany(_CHANGE, [(*after, as_of, sub_key) for sub_key, after, as_of in changed])
    return moved


def set_disconnected(tx: Transaction, key: ServerKey) -> int:
    before = tx.router(key)
    if before is None:
        return 0
    after = tx.change_router(key, before, before.disconnected())
    return before.active_count - after.active_count


def set_service_subscribed(tx: Transaction, key: ServerKey) -> int:
    before = tx.router(key)
    if before is None:
        return 0
    after = tx.change_router(key, before, before.service_subscribed())
    return after.active_count - before.active_count


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
    before = tx.router(key)
    if before is None:
        return 0
    tx.db.execute(_CLEAR_ASSOCIATIONS, (CLEAR.target, key))
    after = tx.change_router(key, before, before.without_associations())
    return before.active_count - after.active_count
