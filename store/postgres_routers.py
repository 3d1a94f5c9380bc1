"""SQL of routers: their queues, the outcomes of subscribing, service credentials and associations."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from protocol.encoding import EntityId
from store.interface import StoreError
from store.postgres_engine import Transaction
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

_OF_ROUTERS = f"""
SELECT server_key, hosts, port, key_hash, served > 0 OR EXISTS (
        SELECT 1 FROM subscriptions s
        WHERE s.server_key = v.server_key AND s.state IN ({EVER_SUBSCRIBED})
    ) AS was_there
FROM smp_servers v
WHERE {{}} (
    EXISTS (SELECT 1 FROM subscriptions s WHERE s.server_key = v.server_key AND s.retry_at IS NOT NULL)
    OR EXISTS (
        SELECT 1 FROM subscriptions s
        WHERE s.server_key = v.server_key AND s.state IN ({SUBSCRIBABLE_STATES})
    )
)
ORDER BY was_there DESC, server_key
"""
_SERVERS = _OF_ROUTERS.format("")
SERVERS_AMONG = _OF_ROUTERS.format("server_key = ANY($1::bigint[]) AND")
_SERVER = f"SELECT {SERVER_COLUMNS} FROM smp_servers WHERE server_key = $1"
_UNUSED_SERVERS = f"SELECT server_key FROM smp_servers v WHERE {UNUSED_SERVER} LIMIT $1"
_DELETE_SERVERS = f"DELETE FROM smp_servers v WHERE server_key = ANY($1::bigint[]) AND {UNUSED_SERVER}"
_OF_SERVER = "SELECT count(*) FROM subscriptions WHERE server_key = $1"
_SUBSCRIBABLE = f"""
SELECT coalesce(sum(subscriptions), 0)::bigint - (
    SELECT count(*) FROM subscriptions WHERE state IN ({ENDED_STATES})
)
FROM totals
"""
_PAGE = f"""
(
    SELECT {QUEUE_COLUMNS} FROM subscriptions
    WHERE server_key = $1 AND associated = {{}} AND sub_key > $2 AND state IN ({SUBSCRIBABLE_STATES})
    ORDER BY sub_key LIMIT $3
)
"""
_PAGES = {
    False: _PAGE.format("false"),
    True: _PAGE.format("true"),
    None: f"{_PAGE.format('false')} UNION ALL {_PAGE.format('true')} ORDER BY sub_key LIMIT $3",
}
_QUEUES_BY_ID = f"""
SELECT {QUEUE_COLUMNS} FROM subscriptions WHERE server_key = $1 AND notifier_id = ANY($2::bytea[])
"""
_RETRIED = f"""
UPDATE subscriptions SET state = $4, detail = '', retry_at = NULL WHERE sub_key IN (
    SELECT sub_key FROM subscriptions
    WHERE server_key = $1 AND retry_at IS NOT NULL AND retry_at <= $2 AND state IN ({listed(RETRY.sources)})
    ORDER BY retry_at LIMIT $3 FOR UPDATE
)
RETURNING {QUEUE_COLUMNS}
"""
_NEXT_RETRY = "SELECT min(retry_at) FROM subscriptions WHERE server_key = $1 AND retry_at IS NOT NULL"
_LOCKED_ROWS = """
SELECT {} FROM subscriptions s JOIN tokens t USING (token_key) JOIN smp_servers v USING (server_key)
WHERE s.server_key = $1 AND s.notifier_id = ANY($2::bytea[]) ORDER BY s.sub_key FOR NO KEY UPDATE OF s
"""
_SUBSCRIBED_ROWS = _LOCKED_ROWS.format(SUBSCRIBED_COLUMNS)
_CHANGED_ROWS = _LOCKED_ROWS.format(MOVED_COLUMNS)
_SUBSCRIBED = """
UPDATE subscriptions
SET state = $2, associated = $3, as_of = $4, detail = '', retry_count = 0, retry_at = NULL
WHERE sub_key = ANY($1::bigint[])
"""
_CHANGE = """
UPDATE subscriptions s
SET state = i.state, detail = i.detail, associated = i.associated, retry_count = i.retries, retry_at = i.at,
    as_of = i.as_of
FROM unnest($1::bigint[], $2::text[], $3::text[], $4::boolean[], $5::bigint[], $6::bigint[], $7::bigint[])
    i(sub_key, state, detail, associated, retries, at, as_of)
WHERE s.sub_key = i.sub_key
"""
_SERVICE_ID = "SELECT service_id FROM smp_servers WHERE server_key = $1 FOR NO KEY UPDATE"
_SET_CREDENTIALS = "UPDATE smp_servers SET chain = $2, private_key = $3 WHERE server_key = $1"
_SET_SERVICE_ID = "UPDATE smp_servers SET service_id = $2 WHERE server_key = $1"
_CLEAR_SERVICE = """
UPDATE smp_servers SET chain = NULL, private_key = NULL, service_id = NULL WHERE server_key = $1
"""
_CLEAR_ASSOCIATIONS = """
WITH cleared AS (
    SELECT sub_key FROM subscriptions WHERE server_key = $1 AND associated ORDER BY sub_key FOR UPDATE
)
UPDATE subscriptions s SET associated = false, state = $2 FROM cleared c WHERE s.sub_key = c.sub_key
"""


async def servers(db: asyncpg.Connection) -> list[StoredRouter]:
    return [stored_router(row) for row in await db.fetch(_SERVERS)]


async def server(db: asyncpg.Connection, key: ServerKey) -> ServerRecord:
    row = await db.fetchrow(_SERVER, key)
    if row is None:
        raise StoreError("no such router in the store")
    return server_record(row)


async def subscription_count(db: asyncpg.Connection, key: ServerKey) -> int:
    return int(await db.fetchval(_OF_SERVER, key))


async def subscribable_count(db: asyncpg.Connection) -> int:
    return int(await db.fetchval(_SUBSCRIBABLE))


async def unused_servers(db: asyncpg.Connection) -> list[ServerKey]:
    return [ServerKey(row[0]) for row in await db.fetch(_UNUSED_SERVERS, UNUSED_PAGE)]


async def delete_unused(tx: Transaction, keys: Sequence[ServerKey]) -> int:
    await tx.settle_routers()  # while their rows are there
    done = await tx.db.execute(_DELETE_SERVERS, keys)
    return int(done.removeprefix("DELETE "))


async def queues(
    db: asyncpg.Connection, key: ServerKey, after: SubKey, limit: int, associated: bool | None
) -> list[QueueRow]:
    return [queue_row(row) for row in await db.fetch(_PAGES[associated], key, after, limit)]


async def queues_by_id(
    db: asyncpg.Connection, key: ServerKey, notifier_ids: Sequence[EntityId]
) -> list[QueueRow]:
    return [queue_row(row) for row in await db.fetch(_QUEUES_BY_ID, key, notifier_ids)]


async def due_retries(tx: Transaction, key: ServerKey, now: int, limit: int) -> list[QueueRow]:
    return [queue_row(row) for row in await tx.db.fetch(_RETRIED, key, now, limit, RETRY.target.value)]


async def next_retry(db: asyncpg.Connection, key: ServerKey) -> int | None:
    at: int | None = await db.fetchval(_NEXT_RETRY, key)
    return at


async def set_subscribed(
    tx: Transaction, key: ServerKey, notifier_ids: Sequence[EntityId], service_id: EntityId | None
) -> list[Moved]:
    associated = service_id is not None and service_id == await tx.db.fetchval(_SERVICE_ID, key)
    rows = await tx.db.fetch(_SUBSCRIBED_ROWS, key, notifier_ids)
    changed, as_of, moved = plan_subscribed(tx, key, rows, associated)
    if changed:
        await tx.db.execute(_SUBSCRIBED, changed, SOK.target.value, associated, as_of)
    return moved


async def move_queues(tx: Transaction, key: ServerKey, events: Sequence[QueueEvent], now: int) -> list[Moved]:
    rows = await tx.db.fetch(_CHANGED_ROWS, key, list({event.notifier_id for event in events}))
    changed, moved = plan_moves(tx, key, rows, events, now)
    if changed:
        columns = zip(*((sub_key, *after, as_of) for sub_key, after, as_of in changed), strict=True)
        await tx.db.execute(_CHANGE, *map(list, columns))
    return moved


async def set_disconnected(tx: Transaction, key: ServerKey) -> int:
    before = await tx.router(key)
    if before is None:
        return 0
    after = await tx.change_router(key, before, before.disconnected())
    return before.active_count - after.active_count


async def set_service_subscribed(tx: Transaction, key: ServerKey) -> int:
    before = await tx.router(key)
    if before is None:
        return 0
    after = await tx.change_router(key, before, before.service_subscribed())
    return after.active_count - before.active_count


async def set_credentials(tx: Transaction, key: ServerKey, credentials: ServiceCredentials) -> None:
    await tx.db.execute(_SET_CREDENTIALS, key, encoded_chain(credentials), credentials.private_key)


async def set_service_id(tx: Transaction, key: ServerKey, service_id: EntityId) -> bool:
    before = await tx.db.fetchval(_SERVICE_ID, key)
    if before == service_id:
        return False
    await tx.db.execute(_SET_SERVICE_ID, key, service_id)
    await _clear_associations(tx, key)
    return before is not None


async def clear_service(tx: Transaction, key: ServerKey) -> int:
    await tx.db.execute(_CLEAR_SERVICE, key)
    return await _clear_associations(tx, key)


async def _clear_associations(tx: Transaction, key: ServerKey) -> int:
    before = await tx.router(key)
    if before is None:
        return 0
    await tx.db.execute(_CLEAR_ASSOCIATIONS, key, CLEAR.target.value)
    after = await tx.change_router(key, before, before.without_associations())
    return before.active_count - after.active_count
