"""SQL of subscriptions, as clients see them, for PostgreSQL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import asyncpg

from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from protocol.statuses import SubState, TokenStatus
from store import postgres_deletion
from store.leases import HANDED_OVER, Duty
from store.policy import RowCaps
from store.postgres_engine import CHANNEL, Transaction
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
from store.snew_plan import BORN, Existing, Insert, Owner, SnewPlan, results, revived
from store.work_queue import regrouped

_BY_ID = f"""
SELECT {SUBSCRIPTION_COLUMNS} FROM unnest($1::bytea[]) WITH ORDINALITY asked(id, place)
LEFT JOIN subscriptions s ON s.subscription_id = asked.id
LEFT JOIN smp_servers v ON v.server_key = s.server_key
LEFT JOIN tokens t ON t.token_key = s.token_key AND t.status <> '{DELETED}'
ORDER BY place
"""
# Locked, so that the caps of a token are counted by one daemon at a time.
_LOCK_OWNERS = f"""
SELECT token_key, status, verified FROM tokens
WHERE token_key = ANY($1::bigint[]) AND status <> '{DELETED}' ORDER BY token_key FOR NO KEY UPDATE
"""
_USED = "SELECT token_key, server_key, subscriptions FROM token_routers WHERE token_key = ANY($1::bigint[])"
_SERVERS = """
SELECT v.hosts, v.port, v.key_hash, v.server_key
FROM unnest($1::text[], $2::text[], $3::bytea[]) i(hosts, port, key_hash)
JOIN smp_servers v USING (hosts, port, key_hash)
"""
_NEW_SERVERS = """
INSERT INTO smp_servers (hosts, port, key_hash)
SELECT hosts, port, key_hash FROM unnest($1::text[], $2::text[], $3::bytea[]) i(hosts, port, key_hash)
ORDER BY 1, 2, 3 ON CONFLICT DO NOTHING
"""
_EXISTING = f"""
SELECT v.hosts, v.port, v.key_hash, s.notifier_id, s.sub_key, s.subscription_id, s.token_key, s.notifier_key,
    s.state, s.associated, t.status = '{DELETED}'
FROM unnest($1::bigint[], $2::bytea[]) i(server_key, notifier_id)
JOIN subscriptions s USING (server_key, notifier_id) JOIN smp_servers v USING (server_key)
JOIN tokens t USING (token_key)
"""
_NEW_KEYS = """
SELECT nextval(pg_get_serial_sequence('subscriptions', 'sub_key')) FROM generate_series(1, $1)
"""
_INSERT = """
WITH inserted AS (
    INSERT INTO subscriptions
        (sub_key, subscription_id, token_key, notifier_id, notifier_key, spelling, server_key, state)
    OVERRIDING SYSTEM VALUE
    SELECT *, $8 FROM unnest(
        $1::bigint[], $2::bytea[], $3::bigint[], $4::bytea[], $5::bytea[], $6::text[], $7::bigint[]
    )
    RETURNING token_key, server_key
)
INSERT INTO token_routers AS r (token_key, server_key, subscriptions)
SELECT token_key, server_key, count(*) FROM inserted GROUP BY 1, 2 ORDER BY 1, 2
ON CONFLICT (token_key, server_key) DO UPDATE SET subscriptions = r.subscriptions + excluded.subscriptions
"""
_REVIVE = """
UPDATE subscriptions SET state = $2, detail = '', retry_count = 0, retry_at = NULL
WHERE sub_key = ANY($1::bigint[])
"""

# Locked until the rows are committed: whoever becomes owner of a router finds them there, or handed over.
_HAND_OVER = f"""
WITH locked AS MATERIALIZED (
    SELECT id, owner FROM leases WHERE duty = '{Duty.ROUTER}' AND id = ANY($1::bigint[]) ORDER BY id FOR SHARE
), foreigners AS (
    SELECT i.server_key, i.sub_key, coalesce(l.owner, 0) AS owner
    FROM unnest($1::bigint[], $2::bigint[]) i(server_key, sub_key) JOIN locked l ON l.id = i.server_key
    WHERE l.owner IS DISTINCT FROM $3
), added AS (
    INSERT INTO handovers (server_key, sub_key) SELECT DISTINCT server_key, sub_key FROM foreigners
    ON CONFLICT (server_key, sub_key) DO UPDATE SET sub_key = excluded.sub_key -- a new version of the row
)
SELECT pg_notify('{CHANNEL}', concat_ws(' ', '{HANDED_OVER}', '0', owner))
FROM (SELECT DISTINCT owner FROM foreigners) o
"""

Created = CreatedSubscription | SnewRefusal


async def subscriptions(
    db: asyncpg.Connection, subscription_ids: Sequence[EntityId]
) -> list[SubscriptionRecord | None]:
    return [subscription_or_none(row) for row in await db.fetch(_BY_ID, subscription_ids)]


def creator(
    caps: RowCaps,
) -> Callable[[Transaction, Sequence[Sequence[NewSubscription]]], Awaitable[list[list[Created]]]]:
    """The batch of `create_subscriptions`: all SNEWs of a group in a few statements."""

    async def create(tx: Transaction, lists: Sequence[Sequence[NewSubscription]]) -> list[list[Created]]:
        news = [new for one in lists for new in one]
        return regrouped(await _create(tx, news, caps), lists)

    return create


async def _create(tx: Transaction, news: Sequence[NewSubscription], caps: RowCaps) -> list[Created]:
    addresses = list({new.server for new in news})
    owners = await _owners(tx, [new.token_key for new in news])
    servers: dict[SmpServer, ServerKey | None] = dict.fromkeys(addresses)
    servers.update(await _server_keys(tx, addresses))
    existing = await _existing(tx, servers, news)
    keys = iter([SubKey(row[0]) for row in await tx.db.fetch(_NEW_KEYS, len(news))])
    steps = SnewPlan(owners, servers, existing, keys, caps).steps(news)
    inserts = [step for step in steps if isinstance(step, Insert)]
    await _make_room(tx, inserts)
    servers.update(await _new_servers(tx, [step.new.server for step in inserts], servers))
    await _insert(tx, inserts, servers)
    if again := revived(steps):
        await tx.db.execute(_REVIVE, again, BORN.value)
    created = results(steps, news, servers)
    await _hand_over(tx, created)
    return created


async def _hand_over(tx: Transaction, created: Sequence[Created]) -> None:
    """Queues of routers that other daemons own, or nobody yet."""
    new = [one for one in created if isinstance(one, CreatedSubscription) and one.handed_over]
    if new and tx.leases.has_joined:
        keys, queues = [one.server_key for one in new], [one.queue.key for one in new]
        await tx.db.execute(_HAND_OVER, keys, queues, tx.daemon_id)


async def _owners(tx: Transaction, keys: Sequence[TokenKey]) -> dict[TokenKey, Owner]:
    rows = await tx.db.fetch(_LOCK_OWNERS, list(set(keys)))
    owners = {
        TokenKey(key): Owner(verified and TokenStatus(status).allows_subscriptions, set(), 0)
        for key, status, verified in rows
    }
    for key, server_key, count in await tx.db.fetch(_USED, list(owners)):
        owners[TokenKey(key)].routers.add(ServerKey(server_key))
        owners[TokenKey(key)].subscriptions += count
    return owners


async def _server_keys(tx: Transaction, servers: Sequence[SmpServer]) -> dict[SmpServer, ServerKey | None]:
    rows = await tx.db.fetch(_SERVERS, *_address_arrays(servers))
    return {smp_server(*row[:3]): ServerKey(row[3]) for row in rows}


async def _new_servers(
    tx: Transaction, wanted: Sequence[SmpServer], known: dict[SmpServer, ServerKey | None]
) -> dict[SmpServer, ServerKey | None]:
    """Only with a subscription: one that is refused leaves nothing behind."""
    missing = list({server for server in wanted if known[server] is None})
    if not missing:
        return {}
    await tx.db.execute(_NEW_SERVERS, *_address_arrays(missing))
    return await _server_keys(tx, missing)


def _address_arrays(servers: Sequence[SmpServer]) -> tuple[list[str], list[str], list[bytes]]:
    columns = [address_columns(server) for server in servers]
    return [c[0] for c in columns], [c[1] for c in columns], [c[2] for c in columns]


async def _existing(
    tx: Transaction, servers: dict[SmpServer, ServerKey | None], news: Sequence[NewSubscription]
) -> dict[tuple[SmpServer, EntityId], Existing]:
    asked = [(key, new.notifier_id) for new in news if (key := servers[new.server]) is not None]
    rows = await tx.db.fetch(_EXISTING, [key for key, _ in asked], [notifier_id for _, notifier_id in asked])
    return {
        (smp_server(*row[:3]), EntityId(row[3])): Existing(
            EntityId(row[5]),
            TokenKey(row[6]),
            QueueRow(SubKey(row[4]), EntityId(row[3]), row[7], row[9]),
            SubState(row[8]),
            row[10],
        )
        for row in rows
    }


async def _make_room(tx: Transaction, inserts: Sequence[Insert]) -> None:
    if keys := [step.replaces for step in inserts if step.replaces is not None]:
        await postgres_deletion.subscriptions(tx, keys)


async def _insert(
    tx: Transaction, inserts: Sequence[Insert], servers: dict[SmpServer, ServerKey | None]
) -> None:
    if not inserts:
        return
    keys = [servers[step.new.server] for step in inserts]
    columns = zip(*(step.columns for step in inserts), strict=True)
    await tx.db.execute(_INSERT, *map(list, columns), keys, BORN.value)
    tx.subscriptions += len(inserts)


async def delete(tx: Transaction, key: SubKey) -> DeletedSubscription | None:
    deleted = await postgres_deletion.subscriptions(tx, [key])
    return deleted[0] if deleted else None
