"""SQL of subscriptions, as clients see them."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import count

from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from protocol.statuses import SubState, TokenStatus
from store import sqlite_deletion
from store.policy import RowCaps
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
from store.rows import DELETED, SUBSCRIPTION_COLUMNS, address_columns, subscription_or_none
from store.snew_plan import BORN, Existing, Insert, Owner, SnewPlan, Step, results, revived
from store.sqlite_engine import Batch
from store.sqlite_transaction import Transaction, insert_rows, select_each, select_in

_BY_ID = f"""
SELECT column1, {SUBSCRIPTION_COLUMNS}
FROM (VALUES {{}}) LEFT JOIN subscriptions s ON s.subscription_id = column1
LEFT JOIN smp_servers v ON v.server_key = s.server_key
LEFT JOIN tokens t ON t.token_key = s.token_key AND t.status <> '{DELETED}'
"""
_EXISTING = f"""
SELECT s.notifier_id, s.sub_key, s.subscription_id, s.token_key, s.notifier_key, s.state, s.associated,
    t.status = '{DELETED}'
FROM subscriptions s CROSS JOIN tokens t USING (token_key)
WHERE s.server_key = ? AND s.notifier_id IN ({{}})
"""
_INSERT = """
INSERT INTO subscriptions
    (sub_key, subscription_id, token_key, notifier_id, notifier_key, spelling, server_key, state)
VALUES {}
"""
# With the highest key of a subscription ever given: one statement less.
_OWNERS = f"""
SELECT t.token_key, t.status, t.verified, group_concat(r.server_key), ifnull(sum(r.subscriptions), 0),
    (SELECT seq FROM sqlite_sequence WHERE name = 'subscriptions')
FROM tokens t LEFT JOIN token_routers r USING (token_key)
WHERE t.token_key IN ({{}}) AND t.status <> '{DELETED}' GROUP BY t.token_key
"""
_USE = """
INSERT INTO token_routers (token_key, server_key, subscriptions) VALUES {}
ON CONFLICT DO UPDATE SET subscriptions = subscriptions + excluded.subscriptions
"""
_REVIVE = """
UPDATE subscriptions SET state = ?, detail = '', retry_count = 0, retry_at = NULL WHERE sub_key = ?
"""
_NEXT_SERVER = "UPDATE totals SET last_server = last_server + 1 RETURNING last_server"
_SERVER_KEY = "SELECT server_key FROM smp_servers WHERE hosts = ? AND port = ? AND key_hash = ?"


def subscriptions(
    db: sqlite3.Connection, subscription_ids: Sequence[EntityId]
) -> list[SubscriptionRecord | None]:
    rows = select_each(db, _BY_ID, subscription_ids)
    return [subscription_or_none(rows[subscription_id][1:]) for subscription_id in subscription_ids]


def creator(caps: RowCaps) -> Batch[Transaction, NewSubscription, CreatedSubscription | SnewRefusal]:
    """The batch of `create_subscriptions`: one query for each router, one insertion for all new rows."""

    def create(tx: Transaction, news: Sequence[NewSubscription]) -> list[CreatedSubscription | SnewRefusal]:
        servers = {server: _server_key(tx, server) for server in {new.server for new in news}}
        owners, last_key = _owners(tx, {new.token_key for new in news})
        new_keys = map(SubKey, count(last_key + 1))
        steps = SnewPlan(owners, servers, _existing(tx, servers, news), new_keys, caps).steps(news)
        _write(tx, steps, servers)
        return results(steps, news, servers)

    return create


def _write(tx: Transaction, steps: Sequence[Step], servers: dict[SmpServer, ServerKey | None]) -> None:
    inserts = [step for step in steps if isinstance(step, Insert)]
    if replaced := [step.replaces for step in inserts if step.replaces is not None]:
        sqlite_deletion.subscriptions(tx, replaced)
    for server in {step.new.server for step in inserts if servers[step.new.server] is None}:
        servers[server] = _new_server(tx, server)
    rows = [(*step.columns, servers[step.new.server], BORN) for step in inserts]
    insert_rows(tx.db, _INSERT, rows)
    used = Counter((step.new.token_key, servers[step.new.server]) for step in inserts)
    insert_rows(tx.db, _USE, [(*pair, number) for pair, number in used.items()])
    tx.db.executemany(_REVIVE, [(BORN, key) for key in revived(steps)])
    tx.subscriptions += len(inserts)


def _owners(tx: Transaction, keys: Collection[TokenKey]) -> tuple[dict[TokenKey, Owner], int]:
    """Those that exist, and the highest key of a subscription: without an owner nobody needs it."""
    owners, last_key = {}, 0
    for key, status, verified, routers, subscriptions, last in select_in(tx.db, _OWNERS, list(keys)):
        owners[TokenKey(key)] = Owner(
            bool(verified) and TokenStatus(status).allows_subscriptions,
            {ServerKey(int(router)) for router in routers.split(",")} if routers else set(),
            subscriptions,
        )
        last_key = last or 0
    return owners, last_key


def _server_key(tx: Transaction, server: SmpServer) -> ServerKey | None:
    row = tx.db.execute(_SERVER_KEY, address_columns(server)).fetchone()
    return None if row is None else ServerKey(row[0])


def _new_server(tx: Transaction, server: SmpServer) -> ServerKey:
    """Only with a subscription: one that is refused leaves nothing behind."""
    ((key,),) = tx.db.execute(_NEXT_SERVER).fetchall()
    tx.db.execute(
        "INSERT INTO smp_servers (server_key, hosts, port, key_hash) VALUES (?, ?, ?, ?)",
        (key, *address_columns(server)),
    )
    return ServerKey(key)


def _existing(
    tx: Transaction, servers: dict[SmpServer, ServerKey | None], news: Sequence[NewSubscription]
) -> dict[tuple[SmpServer, EntityId], Existing]:
    asked: dict[SmpServer, list[EntityId]] = {}
    for new in news:
        asked.setdefault(new.server, []).append(new.notifier_id)
    return {
        (server, row[0]): Existing(
            row[2], row[3], QueueRow(row[1], row[0], row[4], bool(row[6])), SubState(row[5]), bool(row[7])
        )
        for server, notifier_ids in asked.items()
        if (key := servers[server]) is not None
        for row in select_in(tx.db, _EXISTING, notifier_ids, key)
    }


def delete(tx: Transaction, key: SubKey) -> DeletedSubscription | None:
    deleted = sqlite_deletion.subscriptions(tx, [key])
    return deleted[0] if deleted else None
