"""Routers: their queues, the outcomes of subscribing, service credentials and associations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from protocol.encoding import EntityId
from protocol.statuses import SUBSCRIBABLE, SubState
from store.interface import RouterGone
from store.leases import CHORES, of_router
from store.policy import CLEAR, MOVED_COLUMNS, RETRY, SOK, SUBSCRIBED_COLUMNS, plan_moves, plan_subscribed
from store.records import (
    Counts,
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
from store.sql_store import (
    Database,
    Sql,
    SqlStore,
    Transaction,
    reading,
    shared,
    writing,
)
from store.sums import DROP, RouterSums

UNUSED_PAGE = 500
"Routers deleted in one transaction."


def _listed(states: Iterable[SubState]) -> str:
    """For an IN list."""
    return ", ".join(f"'{state}'" for state in sorted(states))


_EVER_SUBSCRIBED = _listed({SOK.target, DROP.target})
"States that no queue reaches without an answer of its router."
_SUBSCRIBABLE_STATES = _listed(SUBSCRIBABLE)
_ENDED_STATES = _listed(frozenset(SubState) - SUBSCRIBABLE)

_ROUTERS = f"""
SELECT server_key, hosts, port, key_hash, served > 0 OR EXISTS (
        SELECT 1 FROM subscriptions s /* INDEXED BY subscriptions_of_server */
        WHERE s.server_key = v.server_key AND s.state IN ({_EVER_SUBSCRIBED})
    ) AS was_there
FROM smp_servers v
WHERE {{}} (
    EXISTS (SELECT 1 FROM subscriptions s WHERE s.server_key = v.server_key AND s.retry_at IS NOT NULL)
    OR EXISTS (
        SELECT 1 FROM subscriptions s /* INDEXED BY subscriptions_of_server */
        WHERE s.server_key = v.server_key AND s.state IN ({_SUBSCRIBABLE_STATES})
    )
)
ORDER BY was_there DESC, server_key
"""
_SERVERS = shared(_ROUTERS.format(""))
SERVERS_AMONG = _ROUTERS.format("server_key = ANY($1::bigint[]) AND")
"PostgreSQL's: of routers that are this daemon's."
_SERVER = shared(f"SELECT {SERVER_COLUMNS} FROM smp_servers WHERE server_key = $1")
_UNUSED = """
NOT EXISTS (SELECT 1 FROM subscriptions s WHERE s.server_key = v.server_key)
    AND NOT EXISTS (SELECT 1 FROM token_routers r WHERE r.server_key = v.server_key)
"""
_UNUSED_SERVERS = shared(f"SELECT server_key FROM smp_servers v WHERE {_UNUSED} LIMIT $1")
_DELETE_SERVERS = shared(f"""
DELETE FROM smp_servers AS v WHERE server_key = ANY($1::bigint[]) AND {_UNUSED}
""")
_OF_SERVER = shared("""
SELECT count(*) FROM subscriptions /* INDEXED BY subscriptions_of_server */ WHERE server_key = $1
""")
_SUBSCRIBABLE = shared(f"""
SELECT CAST(coalesce(sum(subscriptions), 0) AS bigint) - (
    SELECT count(*) FROM subscriptions /* INDEXED BY subscriptions_dead */ WHERE state IN ({_ENDED_STATES})
)
FROM totals
""")
_COUNTS = shared("""
SELECT CAST(coalesce(sum(tokens), 0) AS bigint), CAST(coalesce(sum(active_tokens), 0) AS bigint),
    CAST(coalesce(sum(subscriptions), 0) AS bigint), CAST(coalesce(sum(active_subscriptions), 0) AS bigint),
    (SELECT CAST(coalesce(sum(associated_count), 0) AS bigint) FROM smp_servers),
    (SELECT count(*) FROM smp_servers),
    (SELECT count(*) FROM unsent_notifications),
    (SELECT received_at FROM unsent_notifications ORDER BY seq LIMIT 1)
FROM totals
""")
_QUEUES = f"""
SELECT {QUEUE_COLUMNS} FROM subscriptions /* INDEXED BY subscriptions_of_server */
WHERE server_key = $1 AND associated = {{}} AND sub_key > $2 AND state IN ({_SUBSCRIBABLE_STATES})
"""
_SINGLE, _ASSOCIATED = _QUEUES.format("false"), _QUEUES.format("true")
_IN_ORDER = "ORDER BY sub_key LIMIT $3"
_PAGES = {
    False: shared(f"{_SINGLE} {_IN_ORDER}"),
    True: shared(f"{_ASSOCIATED} {_IN_ORDER}"),
    None: Sql(
        sqlite=shared(f"{_SINGLE} UNION ALL {_ASSOCIATED} {_IN_ORDER}").sqlite,
        postgres=f"({_SINGLE} {_IN_ORDER}) UNION ALL ({_ASSOCIATED} {_IN_ORDER}) {_IN_ORDER}",
    ),
}
_RETRIED = shared(f"""
UPDATE subscriptions SET state = $4, detail = '', retry_at = NULL WHERE sub_key IN (
    SELECT sub_key FROM subscriptions
    WHERE server_key = $1 AND retry_at IS NOT NULL AND retry_at <= $2 AND state IN ({_listed(RETRY.sources)})
    ORDER BY retry_at LIMIT $3 FOR UPDATE
)
RETURNING {QUEUE_COLUMNS}
""")
_NEXT_RETRY = shared("""
SELECT min(retry_at) FROM subscriptions WHERE server_key = $1 AND retry_at IS NOT NULL
""")
_OF_IDS = """
SELECT {} FROM subscriptions s JOIN tokens t USING (token_key) JOIN smp_servers v USING (server_key)
WHERE s.server_key = $1 AND s.notifier_id = ANY($2::bytea[]) ORDER BY s.sub_key FOR NO KEY UPDATE OF s
"""
_SUBSCRIBED_ROWS = shared(_OF_IDS.format(SUBSCRIBED_COLUMNS))
_CHANGED_ROWS = shared(_OF_IDS.format(MOVED_COLUMNS))
_SUBSCRIBED = shared("""
UPDATE subscriptions
SET state = $1, associated = $2, as_of = $3, detail = '', retry_count = 0, retry_at = NULL
WHERE sub_key = ANY($4::bigint[])
""")
_CHANGE = Sql(
    sqlite="""
UPDATE subscriptions
SET state = ?2, detail = ?3, associated = ?4, retry_count = ?5, retry_at = ?6, as_of = ?7 WHERE sub_key = ?1
""",
    postgres="""
UPDATE subscriptions s
SET state = i.state, detail = i.detail, associated = i.associated, retry_count = i.retries, retry_at = i.at,
    as_of = i.as_of
FROM unnest($1::bigint[], $2::text[], $3::text[], $4::boolean[], $5::bigint[], $6::bigint[], $7::bigint[])
    i(sub_key, state, detail, associated, retries, at, as_of)
WHERE s.sub_key = i.sub_key
""",
)
_SERVICE_ID = shared("SELECT service_id FROM smp_servers WHERE server_key = $1 FOR NO KEY UPDATE")
_SET_CREDENTIALS = shared("UPDATE smp_servers SET chain = $2, private_key = $3 WHERE server_key = $1")
_SET_SERVICE_ID = shared("UPDATE smp_servers SET service_id = $2 WHERE server_key = $1")
_CLEAR_SERVICE = shared("""
UPDATE smp_servers SET chain = NULL, private_key = NULL, service_id = NULL WHERE server_key = $1
""")
_CLEAR_ASSOCIATIONS = Sql(
    sqlite="""
UPDATE subscriptions INDEXED BY subscriptions_of_server SET associated = 0, state = ?2
WHERE server_key = ?1 AND associated = 1
""",
    postgres="""
WITH cleared AS (
    SELECT sub_key FROM subscriptions WHERE server_key = $1 AND associated ORDER BY sub_key FOR UPDATE
)
UPDATE subscriptions s SET associated = false, state = $2 FROM cleared c WHERE s.sub_key = c.sub_key
""",
)


class Routers(SqlStore):
    @reading
    async def servers(self, db: Database) -> list[StoredRouter]:
        return [stored_router(row) for row in await db.fetch(_SERVERS)]

    @reading
    async def server(self, db: Database, key: ServerKey) -> ServerRecord:
        row = await db.fetchrow(_SERVER, key)
        if row is None:
            raise RouterGone("no such router in the store")
        return server_record(row)

    @reading
    async def subscription_count(self, db: Database, key: ServerKey) -> int:
        return int(await db.fetchval(_OF_SERVER, key))

    @reading
    async def subscribable_count(self, db: Database) -> int:
        return int(await db.fetchval(_SUBSCRIBABLE))

    @reading
    async def counts(self, db: Database) -> Counts:
        (row,) = await db.fetch(_COUNTS)
        return Counts(
            tokens=row[0],
            active_tokens=row[1],
            subscriptions=row[2],
            active_subscriptions=row[3],
            associated_subscriptions=row[4],
            servers=row[5],
            unsent_notifications=row[6],
            oldest_unsent=row[7],
        )

    async def delete_unused_servers(self) -> int:
        """Looked for on a connection that reads: a scan of all routers holds up no write."""
        unused = await self._unused_servers()
        return await self._delete_servers(unused) if unused else 0

    @reading
    async def _unused_servers(self, db: Database) -> list[ServerKey]:
        return [ServerKey(row[0]) for row in await db.fetch(_UNUSED_SERVERS, UNUSED_PAGE)]

    @writing(durable=False, as_owner_of=CHORES)
    async def _delete_servers(self, tx: Transaction, keys: Sequence[ServerKey]) -> int:
        await tx.settle_routers()  # while their rows are there
        return await tx.execute(_DELETE_SERVERS, keys)

    @reading
    async def queues(
        self, db: Database, key: ServerKey, *, after: SubKey, limit: int, associated: bool | None = None
    ) -> list[QueueRow]:
        return [queue_row(row) for row in await db.fetch(_PAGES[associated], key, after, limit)]

    @writing(durable=False, as_owner_of=of_router)
    async def due_retries(self, tx: Transaction, key: ServerKey, now: int, limit: int) -> list[QueueRow]:
        return [queue_row(row) for row in await tx.fetch(_RETRIED, key, now, limit, RETRY.target.value)]

    @reading
    async def next_retry(self, db: Database, key: ServerKey) -> int | None:
        at: int | None = await db.fetchval(_NEXT_RETRY, key)
        return at

    @writing(durable=False, as_owner_of=of_router)
    async def set_subscribed(
        self,
        tx: Transaction,
        key: ServerKey,
        notifier_ids: Sequence[EntityId],
        *,
        service_id: EntityId | None,
    ) -> list[Moved]:
        associated = service_id is not None and service_id == await tx.fetchval(_SERVICE_ID, key)
        rows = await tx.fetch(_SUBSCRIBED_ROWS, key, notifier_ids)
        plan = plan_subscribed(rows, associated)
        tx.queues_changed(key, plan.changes)
        if plan.keys:
            await tx.execute(_SUBSCRIBED, SOK.target.value, associated, plan.as_of, plan.keys)
        return plan.moved

    @writing(durable=False, as_owner_of=of_router)
    async def move_queues(
        self, tx: Transaction, key: ServerKey, events: Sequence[QueueEvent], *, now: int
    ) -> list[Moved]:
        rows = await tx.fetch(_CHANGED_ROWS, key, list({event.notifier_id for event in events}))
        plan = plan_moves(rows, events, now)
        tx.queues_changed(key, plan.changes)
        await tx.execute_rows(_CHANGE, [(key, *after, as_of) for key, after, as_of in plan.standings])
        return plan.moved

    @writing(durable=False, as_owner_of=of_router)
    async def set_disconnected(self, tx: Transaction, key: ServerKey) -> int:
        return -await _change(tx, key, RouterSums.disconnected)

    @writing(durable=False, as_owner_of=of_router)
    async def set_service_subscribed(self, tx: Transaction, key: ServerKey) -> int:
        return await _change(tx, key, RouterSums.service_subscribed)

    @writing(as_owner_of=of_router)
    async def set_credentials(self, tx: Transaction, key: ServerKey, credentials: ServiceCredentials) -> None:
        await tx.execute(_SET_CREDENTIALS, key, encoded_chain(credentials), credentials.private_key)

    @writing(as_owner_of=of_router)
    async def set_service_id(self, tx: Transaction, key: ServerKey, service_id: EntityId) -> bool:
        before = await tx.fetchval(_SERVICE_ID, key)
        if before == service_id:
            return False
        await tx.execute(_SET_SERVICE_ID, key, service_id)
        await _clear_associations(tx, key)
        return before is not None

    @writing(as_owner_of=of_router)
    async def clear_service(self, tx: Transaction, key: ServerKey) -> int:
        await tx.execute(_CLEAR_SERVICE, key)
        return await _clear_associations(tx, key)


async def _clear_associations(tx: Transaction, key: ServerKey) -> int:
    """How many became INACTIVE."""
    more = await _change(tx, key, RouterSums.without_associations)
    await tx.execute(_CLEAR_ASSOCIATIONS, key, CLEAR.target.value)
    return -more


async def _change(tx: Transaction, key: ServerKey, change: Callable[[RouterSums], RouterSums]) -> int:
    """What happens to all queues of a router at once; how many more are active then."""
    before = await tx.router(key)
    if before is None:
        return 0
    after = await tx.change_router(key, before, change(before))
    return after.active_count - before.active_count
