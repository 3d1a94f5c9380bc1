"""Deletions: a token is gone at once, its rows go in pages, so that no other write waits for them all.

A deleted token with rows left is marked and stripped of its keys. Nothing finds it any more, and its queues
can be subscribed by another token. `more` finds it again, also after a restart.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from protocol.device_token import decode_device_token
from protocol.encoding import EntityId
from protocol.statuses import SubState
from store.records import DeletedSubscription, DeletedToken, Deletion, ServerKey, SubKey, TokenKey
from store.rows import DELETED, DELETED_PAGE, deleted_subscription
from store.sql_store import Row, Sql, Transaction, shared
from store.sums import QueueChange, StoredState

_TOKENS_AT_ONCE = 256
"Whose rows one statement looks for."

_TOKENS = shared(f"""
SELECT token_key, token_id, device_token, status, (
    SELECT CAST(coalesce(sum(subscriptions), 0) AS bigint) FROM token_routers r
    WHERE r.token_key = tokens.token_key
)
FROM tokens
WHERE token_key = ANY($1::bigint[]) AND status <> '{DELETED}' ORDER BY token_key FOR UPDATE
""")
_MARK = Sql(
    sqlite=f"""
UPDATE tokens SET status = '{DELETED}', device_token = x'', verify_key = CAST(token_key AS BLOB),
    dh_private = x'', dh_secret = x'', code = x'', cron_minutes = 0, cron_due = NULL
WHERE token_key IN ({{}})
""",
    postgres=f"""
UPDATE tokens SET status = '{DELETED}', device_token = '', verify_key = int8send(token_key),
    dh_private = '', dh_secret = '', code = '', cron_minutes = 0, cron_due = NULL
WHERE token_key = ANY($1::bigint[])
""",
)
_MARKED = shared(f"""
SELECT token_key FROM tokens WHERE status = '{DELETED}' ORDER BY token_key LIMIT $1 FOR UPDATE SKIP LOCKED
""")
_LEFT = shared(f"SELECT EXISTS (SELECT 1 FROM tokens WHERE status = '{DELETED}')")
_ROW = """
SELECT s.server_key, s.notifier_id, s.associated, s.subscription_id, t.token_id, v.hosts, v.port, v.key_hash,
    s.sub_key, s.token_key, s.state, s.as_of
FROM subscriptions s JOIN tokens t USING (token_key) JOIN smp_servers v USING (server_key)
"""
_ROWS_OF_TOKENS = shared(f"""
{_ROW} WHERE s.token_key = ANY($2::bigint[]) ORDER BY s.token_key, s.sub_key LIMIT $1 FOR UPDATE OF s
""")
_ROWS = shared(f"{_ROW} WHERE s.sub_key = ANY($1::bigint[]) FOR UPDATE OF s")
_DELETE_ROWS = shared("DELETE FROM subscriptions WHERE sub_key = ANY($1::bigint[])")
_DELETE_EMPTY = shared("""
DELETE FROM tokens AS t WHERE token_key = ANY($1::bigint[])
    AND NOT EXISTS (SELECT 1 FROM subscriptions s WHERE s.token_key = t.token_key)
""")
_RELEASE = Sql(
    sqlite="""
UPDATE token_routers SET subscriptions = subscriptions - 1 WHERE token_key = ? AND server_key = ?
""",
    postgres="""
UPDATE token_routers r SET subscriptions = r.subscriptions - i.count
FROM (SELECT key, server, count(*) FROM unnest($1::bigint[], $2::bigint[]) u(key, server) GROUP BY 1, 2) i
WHERE r.token_key = i.key AND r.server_key = i.server
""",
)


async def tokens(tx: Transaction, keys: Collection[TokenKey]) -> Deletion:
    """Delete tokens and a first page of what they have."""
    if not keys:
        return Deletion()
    rows = await tx.fetch(_TOKENS, list(keys))
    marked = [TokenKey(row[0]) for row in rows]
    await tx.execute(_MARK, marked)
    for row in rows:
        tx.token_deleted(row[3])
    subscriptions, more = await _page(tx, marked)
    gone = [DeletedToken(EntityId(row[1]), decode_device_token(row[2]).provider, row[4]) for row in rows]
    return Deletion(gone, subscriptions, more)


async def more(tx: Transaction) -> Deletion:
    keys = [TokenKey(row[0]) for row in await tx.fetch(_MARKED, DELETED_PAGE)]
    subscriptions, _ = await _page(tx, keys)
    return Deletion(subscriptions=subscriptions, more=bool(await tx.fetchval(_LEFT)))


async def subscriptions(tx: Transaction, keys: Sequence[SubKey]) -> list[DeletedSubscription]:
    """Delete single ones of tokens that live on."""
    rows = await tx.fetch(_ROWS, keys)
    await tx.execute_rows(_RELEASE, [(row[9], row[0]) for row in rows])
    return await _delete(tx, rows)


async def _page(tx: Transaction, keys: Sequence[TokenKey]) -> tuple[list[DeletedSubscription], bool]:
    """One page of the rows of marked tokens, and whether any are left."""
    if not keys:
        return [], False
    rows = await tx.fetch(_ROWS_OF_TOKENS, DELETED_PAGE, keys[:_TOKENS_AT_ONCE])
    deleted = await _delete(tx, rows)
    return deleted, await tx.execute(_DELETE_EMPTY, keys) < len(keys)


async def _delete(tx: Transaction, rows: Sequence[Row]) -> list[DeletedSubscription]:
    changes: dict[ServerKey, list[QueueChange]] = {}
    for server_key, notifier_id, associated, *_, state, as_of in rows:
        tx.deleted(server_key, notifier_id, associated=bool(associated))
        before = StoredState(SubState(state), bool(associated), as_of)
        changes.setdefault(server_key, []).append(QueueChange(notifier_id, before, None))
    for server_key, gone in changes.items():
        tx.queues_changed(server_key, gone)
    tx.subscriptions -= len(rows)
    await tx.execute(_DELETE_ROWS, [row[8] for row in rows])
    return [deleted_subscription(row) for row in rows]
