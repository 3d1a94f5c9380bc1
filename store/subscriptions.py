"""Subscriptions, as clients see them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
    TokenKey,
)
from store.rows import DELETED, SUBSCRIPTION_COLUMNS, address_columns, smp_server, subscription_or_none
from store.sql_store import Database, SqlStore, Statement, Transaction, shared, writing

_JOINED = f"""
LEFT JOIN smp_servers v ON v.server_key = s.server_key
LEFT JOIN tokens t ON t.token_key = s.token_key AND t.status <> '{DELETED}'
"""
_BY_ID = Statement(
    sqlite=f"""
SELECT column1, {SUBSCRIPTION_COLUMNS}
FROM (VALUES {{}}) LEFT JOIN subscriptions s ON s.subscription_id = column1 {_JOINED}
""",
    postgres=f"""
SELECT {SUBSCRIPTION_COLUMNS} FROM unnest($1::bytea[]) WITH ORDINALITY asked(id, place)
LEFT JOIN subscriptions s ON s.subscription_id = asked.id {_JOINED}
ORDER BY place
""",
)
_SERVERS = Statement(
    sqlite="""
SELECT hosts, port, key_hash, server_key
FROM (VALUES {}) CROSS JOIN smp_servers ON hosts = column1 AND port = column2 AND key_hash = column3
""",
    postgres="""
SELECT v.hosts, v.port, v.key_hash, v.server_key
FROM unnest($1::text[], $2::text[], $3::bytea[]) i(hosts, port, key_hash)
JOIN smp_servers v USING (hosts, port, key_hash)
""",
)
_QUEUE = f"""
SELECT s.server_key, s.notifier_id, s.sub_key, s.subscription_id, s.token_key, s.notifier_key, s.state,
    s.associated, t.status = '{DELETED}'
"""
_EXISTING = Statement(
    sqlite=f"""
{_QUEUE} FROM (VALUES {{}}) CROSS JOIN subscriptions s ON s.server_key = column1 AND s.notifier_id = column2
CROSS JOIN tokens t USING (token_key)
""",
    postgres=f"""
{_QUEUE} FROM unnest($1::bigint[], $2::bytea[]) i(server_key, notifier_id)
JOIN subscriptions s USING (server_key, notifier_id) JOIN tokens t USING (token_key)
""",
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
    servers.update(await _server_keys(tx, servers))
    existing = await _existing(tx, servers, news)
    steps = SnewPlan(owners, servers, existing, await tx.new_keys(len(news)), tx.caps).steps(news)
    if inserts := [step for step in steps if isinstance(step, Insert)]:
        await _insert(tx, inserts, servers)
    if again := revived(steps):
        await tx.execute(_REVIVE, BORN.value, again)
    created = results(steps, news, servers)
    await tx.hand_over(created)
    return created


async def _server_keys(tx: Transaction, servers: Iterable[SmpServer]) -> dict[SmpServer, ServerKey]:
    rows = await tx.fetch_rows(_SERVERS, [address_columns(server) for server in servers])
    return {smp_server(*row[:3]): ServerKey(row[3]) for row in rows}


async def _existing(
    tx: Transaction, servers: Mapping[SmpServer, ServerKey | None], news: Sequence[NewSubscription]
) -> dict[tuple[SmpServer, EntityId], Existing]:
    by_key = {key: server for server, key in servers.items() if key is not None}
    asked = [(key, new.notifier_id) for new in news if (key := servers[new.server]) is not None]
    return {
        (by_key[row[0]], EntityId(row[1])): Existing(
            EntityId(row[3]),
            TokenKey(row[4]),
            QueueRow(SubKey(row[2]), EntityId(row[1]), row[5], bool(row[7])),
            SubState(row[6]),
            bool(row[8]),
        )
        for row in await tx.fetch_rows(_EXISTING, asked)
    }


async def _insert(tx: Transaction, inserts: Sequence[Insert], servers: Servers) -> None:
    """A new router only with a subscription: one that is refused leaves nothing behind."""
    if replaced := [step.replaces for step in inserts if step.replaces is not None]:
        await deletion.subscriptions(tx, replaced)
    if missing := {step.new.server for step in inserts if servers[step.new.server] is None}:
        await tx.new_servers([address_columns(server) for server in missing])
        servers.update(await _server_keys(tx, missing))
    keys = [key for step in inserts if (key := servers[step.new.server]) is not None]
    await tx.insert(inserts, keys, BORN.value)
    tx.subscriptions += len(inserts)
