"""SQL of subscriptions, as clients see them."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from protocol.statuses import SubInput, SubState, SubStatus, TokenStatus, move_sub
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
from store.sqlite_deletion import DELETED
from store.sqlite_engine import Batch
from store.sqlite_transaction import Transaction, insert_rows, select_each, select_in

_BY_ID = f"""
SELECT column1, s.sub_key, s.subscription_id, s.server_key, s.notifier_id, s.state, s.detail, s.associated,
    s.token_key, t.token_id, t.verify_key
FROM (VALUES {{}}) LEFT JOIN subscriptions s ON s.subscription_id = column1
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
    (sub_key, subscription_id, token_key, server_key, notifier_id, notifier_key, state, spelling)
VALUES {}
"""
_LAST_KEY = "SELECT ifnull(max(seq), 0) FROM sqlite_sequence WHERE name = 'subscriptions'"
_OWNERS = f"""
SELECT t.token_key, t.status, t.verified, group_concat(r.server_key), ifnull(sum(r.subscriptions), 0)
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

_BORN = move_sub(SubState.NEW, SubInput.HANDED_OVER)
"Whoever creates a row hands it over to its router's subscriber at once."
_BARE = {state: SubStatus(state) for state in SubState}


def status(state: str, detail: str) -> SubStatus:
    return SubStatus(SubState(state), detail) if detail else _BARE[SubState(state)]


def subscriptions(
    db: sqlite3.Connection, subscription_ids: Sequence[EntityId]
) -> list[SubscriptionRecord | None]:
    rows = select_each(db, _BY_ID, subscription_ids)
    return [_record_or_none(rows[subscription_id][1:]) for subscription_id in subscription_ids]


_DECOY = (0, b"", 0, b"", SubState.NEW, "", 0, 0, b"", b"")


def _record_or_none(row: Sequence[Any]) -> SubscriptionRecord | None:
    """Unknown ids cost what known ones do: see `select_each`."""
    exists = row[8] is not None  # also not if the row's token is being deleted
    found = _record(row if exists else _DECOY)
    return found if exists else None


def _record(row: Sequence[Any]) -> SubscriptionRecord:
    return SubscriptionRecord(
        key=SubKey(row[0]),
        subscription_id=EntityId(row[1]),
        server_key=ServerKey(row[2]),
        notifier_id=EntityId(row[3]),
        status=status(row[4], row[5]),
        associated=bool(row[6]),
        token_key=TokenKey(row[7]),
        token_id=EntityId(row[8]),
        verify_key=row[9],
    )


class _Existing:
    """A row of the queue that is to be subscribed."""

    __slots__ = ("abandoned", "queue", "state", "subscription_id", "token_key")

    def __init__(
        self,
        subscription_id: EntityId,
        token_key: TokenKey,
        queue: QueueRow,
        state: SubState,
        abandoned: bool = False,
    ) -> None:
        self.subscription_id = subscription_id
        self.token_key = token_key
        self.queue = queue
        self.state = state
        self.abandoned = abandoned
        "Its token is deleted, but the row is not yet."


class _Owner:
    """What decides whether a token may have another subscription."""

    __slots__ = ("may_subscribe", "routers", "subscriptions")

    def __init__(self, may_subscribe: bool, routers: set[ServerKey], subscriptions: int) -> None:
        self.may_subscribe = may_subscribe
        self.routers = routers
        self.subscriptions = subscriptions


class Creation:
    """All SNEWs of a group: one query for each router, one insertion for all new rows."""

    def __init__(self, tx: Transaction, news: Sequence[NewSubscription], caps: RowCaps) -> None:
        self._tx = tx
        self._caps = caps
        self._owners = _owners(tx, {new.token_key for new in news})
        by_server: dict[SmpServer, list[EntityId]] = {}
        for new in news:
            by_server.setdefault(new.server, []).append(new.notifier_id)
        self._servers = {server: _server_key(tx, server) for server in by_server}
        self._existing = {
            server: _existing(tx, self._servers[server], notifier_ids)
            for server, notifier_ids in by_server.items()
        }
        (self._last_key,) = tx.db.execute(_LAST_KEY).fetchone()
        self._rows: list[tuple[Any, ...]] = []
        self._used: Counter[tuple[TokenKey, ServerKey]] = Counter()

    def create(self, new: NewSubscription) -> CreatedSubscription | SnewRefusal:
        owner = self._owners.get(new.token_key)
        if owner is None or not owner.may_subscribe:
            return SnewRefusal.AUTH
        row = self._existing[new.server].get(new.notifier_id)
        if row is not None and not row.abandoned:
            return self._repeat(row, new)
        server_key = self._servers[new.server]
        routers = len(owner.routers) + (server_key not in owner.routers)
        if not self._caps.admits(owner.subscriptions + 1, routers):
            return SnewRefusal.QUOTA
        if row is not None:
            sqlite_deletion.subscriptions(self._tx, [row.queue.key])
        return self._insert(owner, new)

    def _insert(self, owner: _Owner, new: NewSubscription) -> CreatedSubscription:
        server_key = self._servers[new.server]
        if server_key is None:
            server_key = self._servers[new.server] = _new_server(self._tx, new.server)
        owner.routers.add(server_key)
        owner.subscriptions += 1
        self._used[new.token_key, server_key] += 1
        queue = QueueRow(
            SubKey(self._last_key + len(self._rows) + 1), new.notifier_id, new.notifier_key, False
        )
        self._rows.append(
            (
                queue.key,
                new.subscription_id,
                new.token_key,
                server_key,
                new.notifier_id,
                new.notifier_key,
                _BORN,
                new.spelling,
            )
        )
        self._existing[new.server][new.notifier_id] = _Existing(
            new.subscription_id, new.token_key, queue, _BORN
        )
        return CreatedSubscription(new.subscription_id, server_key, queue, created=True, handed_over=True)

    def _repeat(self, row: _Existing, new: NewSubscription) -> CreatedSubscription | SnewRefusal:
        if row.token_key != new.token_key or row.queue.notifier_key != new.notifier_key:
            return SnewRefusal.AUTH
        server_key = self._servers[new.server]
        assert server_key is not None, "a queue has a row, so its router has one"
        handed_over = move_sub(row.state, SubInput.CREATED_AGAIN) is SubState.NEW
        if handed_over:
            row.state = _BORN
            self._tx.db.execute(_REVIVE, (row.state, row.queue.key))
        return CreatedSubscription(row.subscription_id, server_key, row.queue, False, handed_over)

    def write(self) -> None:
        insert_rows(self._tx.db, _INSERT, self._rows)
        insert_rows(self._tx.db, _USE, [(*pair, count) for pair, count in self._used.items()])
        self._tx.subscriptions += len(self._rows)


def creator(caps: RowCaps) -> Batch[Transaction, NewSubscription, CreatedSubscription | SnewRefusal]:
    def create(tx: Transaction, news: Sequence[NewSubscription]) -> list[CreatedSubscription | SnewRefusal]:
        creation = Creation(tx, news, caps)
        results = [creation.create(new) for new in news]
        creation.write()
        return results

    return create


def _owners(tx: Transaction, keys: Collection[TokenKey]) -> dict[TokenKey, _Owner]:
    return {
        TokenKey(key): _Owner(
            bool(verified) and TokenStatus(status).allows_subscriptions,
            {ServerKey(int(router)) for router in routers.split(",")} if routers else set(),
            subscriptions,
        )
        for key, status, verified, routers, subscriptions in select_in(tx.db, _OWNERS, list(keys))
    }


def _server_key(tx: Transaction, server: SmpServer) -> ServerKey | None:
    row = tx.db.execute(_SERVER_KEY, _address(server)).fetchone()
    return None if row is None else ServerKey(row[0])


def _new_server(tx: Transaction, server: SmpServer) -> ServerKey:
    """Only with a subscription: one that is refused leaves nothing behind."""
    ((key,),) = tx.db.execute(_NEXT_SERVER).fetchall()
    tx.db.execute(
        "INSERT INTO smp_servers (server_key, hosts, port, key_hash) VALUES (?, ?, ?, ?)",
        (key, *_address(server)),
    )
    return ServerKey(key)


def _address(server: SmpServer) -> tuple[str, str, bytes]:
    return ",".join(server.hosts), server.port, server.key_hash


def _existing(
    tx: Transaction, server_key: ServerKey | None, notifier_ids: Sequence[EntityId]
) -> dict[EntityId, _Existing]:
    if server_key is None:
        return {}
    rows = select_in(tx.db, _EXISTING, notifier_ids, server_key)
    return {
        row[0]: _Existing(
            row[2], row[3], QueueRow(row[1], row[0], row[4], bool(row[6])), SubState(row[5]), bool(row[7])
        )
        for row in rows
    }


def delete(tx: Transaction, key: SubKey) -> DeletedSubscription | None:
    deleted = sqlite_deletion.subscriptions(tx, [key])
    return deleted[0] if deleted else None
