"""SQL of deletions: a token is gone at once, its rows go in pages, so that no other write waits for them all.

A deleted token with rows left is marked and stripped of its keys. Nothing finds it any more, and its queues
can be subscribed by another token. `more` finds it again, also after a restart.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from protocol.device_token import decode_device_token
from protocol.encoding import EntityId
from protocol.statuses import SubState
from store.records import DeletedSubscription, DeletedToken, Deletion, SubKey, TokenKey
from store.router_sums import StoredState
from store.rows import DELETED, DELETED_PAGE, deleted_subscription
from store.sqlite_transaction import Transaction, select_in, update_in

_TOKEN = f"""
SELECT token_id, device_token, status,
    (SELECT ifnull(sum(subscriptions), 0) FROM token_routers r WHERE r.token_key = t.token_key)
FROM tokens t WHERE token_key = ? AND status <> '{DELETED}'
"""
_MARK = f"""
UPDATE tokens SET status = '{DELETED}', device_token = x'', verify_key = CAST(token_key AS BLOB),
    dh_private = x'', dh_secret = x'', code = x'', cron_minutes = 0, cron_due = NULL
WHERE token_key = ?
"""
_MARKED = f"SELECT token_key FROM tokens WHERE status = '{DELETED}' ORDER BY token_key LIMIT ?"
_ROW = """
SELECT s.server_key, s.notifier_id, s.associated, s.subscription_id, t.token_id, v.hosts, v.port, v.key_hash,
    s.sub_key, s.token_key, s.state, s.as_of
FROM subscriptions s CROSS JOIN tokens t USING (token_key) CROSS JOIN smp_servers v USING (server_key)
"""
_ROWS_OF_TOKEN = f"{_ROW} WHERE s.token_key = ? ORDER BY s.sub_key LIMIT ?"
_ROWS = f"{_ROW} WHERE s.sub_key IN ({{}})"
_DELETE_ROWS = "DELETE FROM subscriptions WHERE sub_key IN ({})"
_RELEASE = "UPDATE token_routers SET subscriptions = subscriptions - 1 WHERE token_key = ? AND server_key = ?"


def tokens(tx: Transaction, keys: Collection[TokenKey]) -> Deletion:
    """Delete tokens and a first page of what they have."""
    gone = {key: token for key in keys if (token := _mark(tx, key)) is not None}
    subscriptions, more = _page(tx, gone)
    return Deletion(list(gone.values()), subscriptions, more)


def more(tx: Transaction) -> Deletion:
    keys = [TokenKey(key) for (key,) in tx.db.execute(_MARKED, (DELETED_PAGE,))]
    subscriptions, _ = _page(tx, keys)
    (left,) = tx.db.execute(f"SELECT EXISTS ({_MARKED})", (1,)).fetchone()
    return Deletion(subscriptions=subscriptions, more=bool(left))


def subscriptions(tx: Transaction, keys: Sequence[SubKey]) -> list[DeletedSubscription]:
    """Delete single ones of tokens that live on."""
    rows = list(select_in(tx.db, _ROWS, keys))
    tx.db.executemany(_RELEASE, [(row[9], row[0]) for row in rows])
    return _delete(tx, rows)


def _mark(tx: Transaction, key: TokenKey) -> DeletedToken | None:
    row = tx.db.execute(_TOKEN, (key,)).fetchone()
    if row is None:
        return None
    token_id, device_token, status, count = row
    tx.token_deleted(status)
    tx.db.execute(_MARK, (key,))
    return DeletedToken(EntityId(token_id), decode_device_token(device_token).provider, count)


def _page(tx: Transaction, keys: Collection[TokenKey]) -> tuple[list[DeletedSubscription], bool]:
    """One page of the rows of marked tokens, and whether any are left."""
    deleted: list[DeletedSubscription] = []
    for key in keys:
        room = DELETED_PAGE - len(deleted)
        rows = tx.db.execute(_ROWS_OF_TOKEN, (key, room)).fetchall()
        deleted += _delete(tx, rows)
        if len(rows) == room:
            return deleted, True
        tx.db.execute("DELETE FROM tokens WHERE token_key = ?", (key,))
    return deleted, False


def _delete(tx: Transaction, rows: Sequence[Sequence[Any]]) -> list[DeletedSubscription]:
    deleted = [deleted_subscription(row) for row in rows]
    states = [StoredState(SubState(row[10]), bool(row[2]), row[11]) for row in rows]
    tx.subscriptions_deleted(deleted, states)
    update_in(tx.db, _DELETE_ROWS, [row[8] for row in rows])
    return deleted
