"""SQL of subscriptions, as clients see them."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from protocol.statuses import SubInput, SubState, SubStatus, move_sub
from store.records import (
    CreatedSubscription,
    LiveQueue,
    NewSubscription,
    QueueRow,
    ServerKey,
    SubKey,
    SubscriptionRecord,
    TokenKey,
)
from store.sqlite_transaction import Transaction, insert_rows, select_each, select_in

_BY_ID = """
SELECT column1, s.sub_key, s.subscription_id, s.server_key, s.notifier_id, s.state, s.detail, s.associated,
    s.token_key, t.token_id, t.verify_key
FROM (VALUES {}) LEFT JOIN subscriptions s ON s.subscription_id = column1 LEFT JOIN tokens t USING (token_key)
"""
_EXISTING = """
SELECT notifier_id, sub_key, subscription_id, token_key, notifier_key, state, associated
FROM subscriptions WHERE server_key = ? AND notifier_id IN ({})
"""
_INSERT = """
INSERT INTO subscriptions
    (sub_key, subscription_id, token_key, server_key, notifier_id, notifier_key, state)
VALUES {}
"""
_LAST_KEY = "SELECT ifnull(max(seq), 0) FROM sqlite_sequence WHERE name = 'subscriptions'"
_LIVE_TOKENS = "SELECT group_concat(token_key) FROM tokens WHERE token_key IN ({})"
_REVIVE = """
UPDATE subscriptions SET state = ?, detail = '', retry_count = 0, retry_at = NULL WHERE sub_key = ?
"""
_SERVER_KEY = "SELECT server_key FROM smp_servers WHERE hosts = ? AND port = ? AND key_hash = ?"

_BORN = move_sub(SubState.NEW, SubInput.HANDED_OVER)
"Whoever creates a row hands it over to its router's subscriber at once."
_BARE = {state: SubStatus(state) for state in SubState}


def status(state: str, detail: str) -> SubStatus:
    return SubStatus(SubState(state), detail) if detail else _BARE[SubState(state)]


@lru_cache(maxsize=4096)
def smp_server(hosts: str, port: str, key_hash: bytes) -> SmpServer:
    """An address from its columns; many rows name few routers."""
    return SmpServer(tuple(hosts.split(",")), port, key_hash)


def subscriptions(
    db: sqlite3.Connection, subscription_ids: Sequence[EntityId]
) -> list[SubscriptionRecord | None]:
    rows = select_each(db, _BY_ID, subscription_ids)
    return [_record_or_none(rows[subscription_id][1:]) for subscription_id in subscription_ids]


_DECOY = (0, b"", 0, b"", SubState.NEW, "", 0, 0, b"", b"")


def _record_or_none(row: Sequence[Any]) -> SubscriptionRecord | None:
    """Unknown ids cost what known ones do: see `select_each`."""
    exists = row[0] is not None
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
    """What a repeated SNEW must agree with."""

    __slots__ = ("queue", "state", "subscription_id", "token_key")

    def __init__(
        self, subscription_id: EntityId, token_key: TokenKey, queue: QueueRow, state: SubState
    ) -> None:
        self.subscription_id = subscription_id
        self.token_key = token_key
        self.queue = queue
        self.state = state


def create(tx: Transaction, news: Sequence[NewSubscription]) -> list[CreatedSubscription | None]:
    """All SNEWs of a group: one query for each router, one insertion for all new rows."""
    by_server: dict[SmpServer, list[NewSubscription]] = {}
    for new in news:
        by_server.setdefault(new.server, []).append(new)
    server_keys = {server: _server_key(tx, server) for server in by_server}
    existing = {
        server: _existing(tx, server_keys[server], of_server) for server, of_server in by_server.items()
    }
    tokens = _live_tokens(tx, {new.token_key for new in news})
    (last_key,) = tx.db.execute(_LAST_KEY).fetchone()
    rows: list[tuple[Any, ...]] = []
    results = []
    for new in news:
        server_key, of_server = server_keys[new.server], existing[new.server]
        if (row := of_server.get(new.notifier_id)) is not None:
            results.append(_repeat(tx, server_key, row, new))
        elif new.token_key not in tokens:
            results.append(None)
        else:
            sub_key = SubKey(last_key + len(rows) + 1)
            rows.append(_new_row(sub_key, server_key, new))
            queue = QueueRow(sub_key, new.notifier_id, new.notifier_key, False)
            of_server[new.notifier_id] = _Existing(new.subscription_id, new.token_key, queue, _BORN)
            results.append(CreatedSubscription(new.subscription_id, server_key, queue, True, True))
    insert_rows(tx.db, _INSERT, rows)
    tx.subscriptions += len(rows)
    return results


def _new_row(sub_key: SubKey, server_key: ServerKey, new: NewSubscription) -> tuple[Any, ...]:
    return (
        sub_key,
        new.subscription_id,
        new.token_key,
        server_key,
        new.notifier_id,
        new.notifier_key,
        _BORN,
    )


def _live_tokens(tx: Transaction, keys: Collection[TokenKey]) -> set[TokenKey]:
    found: set[TokenKey] = set()
    for (answers,) in select_in(tx.db, _LIVE_TOKENS, list(keys)):
        found.update(TokenKey(int(key)) for key in (answers.split(",") if answers else ()))
    return found


def _server_key(tx: Transaction, server: SmpServer) -> ServerKey:
    address = (",".join(server.hosts), server.port, server.key_hash)
    row = tx.db.execute(_SERVER_KEY, address).fetchone()
    if row is not None:
        return ServerKey(row[0])
    cursor = tx.db.execute("INSERT INTO smp_servers (hosts, port, key_hash) VALUES (?, ?, ?)", address)
    assert cursor.lastrowid is not None
    return ServerKey(cursor.lastrowid)


def _existing(
    tx: Transaction, server_key: ServerKey, news: Sequence[NewSubscription]
) -> dict[EntityId, _Existing]:
    rows = select_in(tx.db, _EXISTING, [new.notifier_id for new in news], server_key)
    return {
        row[0]: _Existing(row[2], row[3], QueueRow(row[1], row[0], row[4], bool(row[6])), SubState(row[5]))
        for row in rows
    }


def _repeat(
    tx: Transaction, server_key: ServerKey, row: _Existing, new: NewSubscription
) -> CreatedSubscription | None:
    if row.token_key != new.token_key or row.queue.notifier_key != new.notifier_key:
        return None
    handed_over = move_sub(row.state, SubInput.CREATED_AGAIN) is SubState.NEW
    if handed_over:
        row.state = _BORN
        tx.db.execute(_REVIVE, (row.state, row.queue.key))
    return CreatedSubscription(row.subscription_id, server_key, row.queue, False, handed_over)


def delete(tx: Transaction, key: SubKey) -> LiveQueue | None:
    row = tx.db.execute(
        "DELETE FROM subscriptions WHERE sub_key = ? RETURNING server_key, notifier_id, associated, state",
        (key,),
    ).fetchone()
    if row is None:
        return None
    server_key, notifier_id, associated, state = row
    tx.subscriptions -= 1
    tx.active_subscriptions -= state == SubState.ACTIVE
    if associated:
        tx.remove_associated(server_key, [notifier_id])
    return LiveQueue(server_key, notifier_id)
