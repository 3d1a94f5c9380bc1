"""Subscriptions, as clients see them."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from protocol.statuses import SubState
from store import deletion
from store.policy import BORN, Existing, Insert, SnewPlan, results, revived
from store.records import (
    CreatedSubscription,
    DeletedSubscription,
    NewSubscription,
    QueueRow,
    ServerKey,
    SnewRefusal,
    SubKey,
    SubscriptionRecord,
)
from store.rows import DELETED, SUBSCRIPTION_COLUMNS, address_columns, smp_server, subscription_or_none
from store.sql_store import Database, Row, SqlStore, Statement, Transaction, for_each_id, shared, writing

_BY_ID = for_each_id(
    SUBSCRIPTION_COLUMNS,
    f"""
LEFT JOIN subscriptions s ON s.subscription_id = {{}}
LEFT JOIN smp_servers v ON v.server_key = s.server_key
LEFT JOIN tokens t ON t.token_key = s.token_key AND t.status <> '{DELETED}'
""",
)


def _found(queue: str) -> Statement:
    """A row for each queue whose router is known, with what is there of the queue."""
    return shared(f"""
SELECT v.hosts, v.port, v.key_hash, v.server_key, s.notifier_id, s.sub_key, s.subscription_id, s.token_key,
    s.notifier_key, s.state, s.associated, t.status = '{DELETED}'
FROM unnest($1::text[], $2::text[], $3::bytea[], $4::bytea[]) i(hosts, port, key_hash, notifier_id)
JOIN smp_servers v USING (hosts, port, key_hash)
LEFT JOIN {queue}
LEFT JOIN tokens t ON t.token_key = s.token_key
""")


_NAMED = "server_key = v.server_key AND {0}.notifier_id = i.notifier_id"
# With an empty table, PostgreSQL would plan to read all queues of a router, and keep to it: hence the lookup.
_FOUND = Statement(
    _found(f"subscriptions s ON s.{_NAMED.format('s')}").sqlite,
    _found(
        f"LATERAL (SELECT * FROM subscriptions q WHERE q.{_NAMED.format('q')} OFFSET 0) s ON true"
    ).postgres,
)
_REVIVE = shared("""
UPDATE subscriptions SET state = $1, detail = '', retry_count = 0, retry_at = NULL
WHERE sub_key = ANY($2::bigint[])
""")

Created = CreatedSubscription | SnewRefusal
Servers = dict[SmpServer, ServerKey | None]


class Subscriptions(SqlStore):
    async def subscriptions(self, subscription_ids: Sequence[EntityId]) -> list[SubscriptionRecord | None]:
        return await self._read_grouped(_by_id, subscription_ids)

    async def create_subscriptions(self, news: Sequence[NewSubscription]) -> list[Created]:
        return await self._write_grouped(_create, news)

    @writing()
    async def delete_subscription(self, tx: Transaction, key: SubKey) -> DeletedSubscription | None:
        deleted = await deletion.subscriptions(tx, [key])
        return deleted[0] if deleted else None


async def _by_id(db: Database, subscription_ids: Sequence[EntityId]) -> list[SubscriptionRecord | None]:
    return [subscription_or_none(row) for row in await db.fetch_each(_BY_ID, subscription_ids)]


async def _create(tx: Transaction, news: Sequence[NewSubscription]) -> list[Created]:
    """All SNEWs of a group in a few statements."""
    owners = await tx.owners(list({new.token_key for new in news}))
    servers: Servers = dict.fromkeys(new.server for new in news)
    existing: dict[tuple[SmpServer, EntityId], Existing] = {}
    for row in await tx.fetch_rows(_FOUND, [(*address_columns(new.server), new.notifier_id) for new in news]):
        server = smp_server(*row[:3])
        servers[server] = ServerKey(row[3])
        if row[5] is not None:
            existing[server, row[4]] = _existing(row[4:])
    steps = SnewPlan(owners, servers, existing, await tx.new_keys(len(news)), tx.caps).steps(news)
    if inserts := [step for step in steps if isinstance(step, Insert)]:
        await _insert(tx, inserts, servers)
    if again := revived(steps):
        await tx.execute(_REVIVE, BORN.value, again)
    created = results(steps, news, servers)
    await tx.hand_over(created)
    return created


def _existing(row: Row) -> Existing:
    notifier_id, sub_key, subscription_id, token_key, notifier_key, state, associated, is_abandoned = row
    queue = QueueRow(sub_key, notifier_id, notifier_key, bool(associated))
    return Existing(subscription_id, token_key, queue, SubState(state), bool(is_abandoned))


async def _insert(tx: Transaction, inserts: Sequence[Insert], servers: Servers) -> None:
    """A new router only with a subscription: one that is refused leaves nothing behind."""
    if replaced := [step.replaces for step in inserts if step.replaces is not None]:
        await deletion.subscriptions(tx, replaced)
    if missing := {step.new.server for step in inserts if servers[step.new.server] is None}:
        servers.update(await tx.new_servers(missing))
    keys = [key for step in inserts if (key := servers[step.new.server]) is not None]
    await tx.insert(inserts, keys, BORN.value)
    tx.subscriptions += len(inserts)
