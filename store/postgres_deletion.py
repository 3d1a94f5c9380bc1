"""SQL of deletions, for PostgreSQL: a token is gone at once, its rows go in pages, as with SQLite."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from protocol.device_token import decode_device_token
from protocol.encoding import EntityId
from protocol.statuses import SubState
from store.postgres_engine import Transaction
from store.records import DeletedSubscription, DeletedToken, Deletion, SubKey, TokenKey
from store.router_sums import StoredState
from store.rows import DELETED, DELETED_PAGE, deleted_subscription

_TOKENS = f"""
SELECT token_key, token_id, device_token, status,
    (SELECT coalesce(sum(subscriptions), 0)::bigint FROM token_routers r WHERE r.token_key = tokens.token_key)
FROM tokens
WHERE token_key = ANY($1::bigint[]) AND status <> '{DELETED}' ORDER BY token_key FOR UPDATE
"""
_MARK = f"""
UPDATE tokens SET status = '{DELETED}', device_token = '', verify_key = int8send(token_key),
    dh_private = '', dh_secret = '', code = '', cron_minutes = 0, cron_due = NULL
WHERE token_key = ANY($1::bigint[])
"""
_MARKED = f"""
SELECT token_key FROM tokens WHERE status = '{DELETED}' ORDER BY token_key LIMIT $1 FOR UPDATE SKIP LOCKED
"""
_LEFT = f"SELECT EXISTS (SELECT 1 FROM tokens WHERE status = '{DELETED}')"
_COLUMNS = """
s.server_key, s.notifier_id, s.associated, s.subscription_id, t.token_id, v.hosts, v.port, v.key_hash,
s.sub_key, s.token_key, s.state, s.as_of
"""
_ROWS_OF_TOKENS = f"""
SELECT {_COLUMNS} FROM subscriptions s JOIN tokens t USING (token_key) JOIN smp_servers v USING (server_key)
WHERE s.token_key = ANY($1::bigint[]) ORDER BY s.token_key, s.sub_key LIMIT $2 FOR UPDATE OF s
"""
_ROWS = f"""
SELECT {_COLUMNS} FROM subscriptions s JOIN tokens t USING (token_key) JOIN smp_servers v USING (server_key)
WHERE s.sub_key = ANY($1::bigint[]) FOR UPDATE OF s
"""
_DELETE_ROWS = "DELETE FROM subscriptions WHERE sub_key = ANY($1::bigint[])"
_DELETE_EMPTY = """
DELETE FROM tokens t WHERE token_key = ANY($1::bigint[])
    AND NOT EXISTS (SELECT 1 FROM subscriptions s WHERE s.token_key = t.token_key)
"""
_RELEASE = """
UPDATE token_routers r SET subscriptions = r.subscriptions - i.count
FROM (SELECT key, server, count(*) FROM unnest($1::bigint[], $2::bigint[]) u(key, server) GROUP BY 1, 2) i
WHERE r.token_key = i.key AND r.server_key = i.server
"""


async def tokens(tx: Transaction, keys: Collection[TokenKey]) -> Deletion:
    """Delete tokens and a first page of what they have."""
    if not keys:
        return Deletion()
    rows = await tx.db.fetch(_TOKENS, list(keys))
    marked = [TokenKey(row[0]) for row in rows]
    await tx.db.execute(_MARK, marked)
    for row in rows:
        tx.token_deleted(row[3])
    subscriptions, more = await _page(tx, marked)
    gone = [DeletedToken(EntityId(row[1]), decode_device_token(row[2]).provider, row[4]) for row in rows]
    return Deletion(gone, subscriptions, more)


async def more(tx: Transaction) -> Deletion:
    keys = [TokenKey(row[0]) for row in await tx.db.fetch(_MARKED, DELETED_PAGE)]
    subscriptions, _ = await _page(tx, keys)
    return Deletion(subscriptions=subscriptions, more=await tx.db.fetchval(_LEFT))


async def subscriptions(tx: Transaction, keys: Sequence[SubKey]) -> list[DeletedSubscription]:
    """Delete single ones of tokens that live on."""
    rows = await tx.db.fetch(_ROWS, keys)
    await tx.db.execute(_RELEASE, [row[9] for row in rows], [row[0] for row in rows])
    return await _delete(tx, rows)


async def _page(tx: Transaction, keys: Sequence[TokenKey]) -> tuple[list[DeletedSubscription], bool]:
    """One page of the rows of marked tokens, and whether any are left."""
    if not keys:
        return [], False
    rows = await tx.db.fetch(_ROWS_OF_TOKENS, keys, DELETED_PAGE)
    deleted = await _delete(tx, rows)
    done = await tx.db.execute(_DELETE_EMPTY, keys)
    return deleted, done != f"DELETE {len(keys)}"


async def _delete(tx: Transaction, rows: Sequence[Sequence[Any]]) -> list[DeletedSubscription]:
    deleted = [deleted_subscription(row) for row in rows]
    for row in deleted:
        tx.deleted(row.server_key, row.notifier_id)
    states = [StoredState(SubState(row[10]), bool(row[2]), row[11]) for row in rows]
    tx.subscriptions_deleted(deleted, states)
    await tx.db.execute(_DELETE_ROWS, [row[8] for row in rows])
    return deleted
