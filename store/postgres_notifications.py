"""SQL of last notifications, for PostgreSQL. One statement for a whole group of NMSGs, never one for each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import asyncpg

from protocol.device_token import Provider
from protocol.encoding import EntityId
from protocol.statuses import TokenStatus
from store.interface import KEPT_NOTIFICATIONS, UNSENT_LOADED
from store.leases import Duty, of_router
from store.postgres_engine import Fences
from store.postgres_tokens import OWN_PUSHES
from store.records import (
    Counts,
    LastNotification,
    Notification,
    SentEntry,
    ServerKey,
    Stored,
    SubKey,
    TokenKey,
    TokenPush,
)
from store.rows import TOKEN_COLUMNS, last_notification, token_record
from store.work_queue import Failed

# Of several notifications of one queue the last one stays. Rows are locked in the order of their keys, as by
# everyone who locks more than one of them.
_ADD = f"""
WITH held AS MATERIALIZED (
    {{}}
), input AS (
    SELECT * FROM unnest($1::bigint[], $2::bytea[], $3::bigint[], $4::bytea[], $5::bytea[])
        WITH ORDINALITY i(server_key, notifier_id, received_at, nonce, meta, place)
), target AS (
    SELECT i.*, s.sub_key, s.token_key, s.subscription_id, t.token_id, substr(t.device_token, 1, 2) AS tag
    FROM input i JOIN held USING (server_key)
    JOIN subscriptions s USING (server_key, notifier_id) JOIN tokens t USING (token_key)
    WHERE t.status = '{TokenStatus.ACTIVE}'
), newest AS (
    SELECT DISTINCT ON (sub_key) * FROM target ORDER BY sub_key, place DESC
), numbered AS (
    SELECT *, nextval(pg_get_serial_sequence('unsent_notifications', 'seq')) AS seq
    FROM (SELECT * FROM newest ORDER BY place) in_order
), added AS (
    INSERT INTO unsent_notifications (seq, token_key, sub_key, received_at, nonce, meta)
    SELECT seq, token_key, sub_key, received_at, nonce, meta FROM numbered ORDER BY sub_key
    ON CONFLICT (token_key, sub_key) {{}}
)
SELECT place, token_key, sub_key, token_id, subscription_id, tag FROM target
UNION ALL SELECT 0, server_key, 0, '', '', '' FROM held
"""
_REPLACE = """
    DO UPDATE SET seq = excluded.seq, received_at = excluded.received_at, nonce = excluded.nonce,
        meta = excluded.meta
"""
_ANYBODY = "SELECT DISTINCT server_key FROM unnest($1::bigint[]) i(server_key)"
_ADD_ALONE = _ADD.format(_ANYBODY, _REPLACE)
_ADD_LATE = _ADD.format(_ANYBODY, "DO NOTHING")
# Locked until the commit: no other daemon becomes owner in between.
_ADD_AS_OWNER = _ADD.format(
    f"""
    SELECT l.id AS server_key FROM unnest($6::bigint[], $7::bigint[]) i(server_key, fence)
    JOIN leases l ON l.duty = '{Duty.ROUTER}' AND l.id = i.server_key AND l.owner = $8 AND l.fence = i.fence
    FOR SHARE OF l
    """,
    _REPLACE,
)
_ENTRY = """
n.sub_key, n.seq, v.hosts, v.port, v.key_hash, s.notifier_id, n.received_at, n.nonce, n.meta, s.spelling
"""
_ENTRIES = f"""
SELECT true, t.token_key, {_ENTRY}
FROM unnest($1::bigint[]) t(token_key)
CROSS JOIN LATERAL (
    SELECT * FROM unsent_notifications u WHERE u.token_key = t.token_key ORDER BY u.seq LIMIT {UNSENT_LOADED}
) n
JOIN subscriptions s ON s.sub_key = n.sub_key JOIN smp_servers v USING (server_key)
UNION ALL
SELECT false, n.token_key, {_ENTRY}
FROM sent_notifications n JOIN subscriptions s ON s.sub_key = n.sub_key JOIN smp_servers v USING (server_key)
WHERE n.token_key = ANY($1::bigint[])
ORDER BY 4
"""
_ACTIVE_TOKENS = f"""
SELECT {TOKEN_COLUMNS} FROM tokens WHERE token_key = ANY($1::bigint[]) AND status = '{TokenStatus.ACTIVE}'
"""
_SET_SENT = """
WITH marked AS (
    SELECT seq FROM unsent_notifications WHERE seq = ANY($1::bigint[]) ORDER BY sub_key FOR UPDATE
), moved AS (
    DELETE FROM unsent_notifications u USING marked m WHERE u.seq = m.seq
    RETURNING u.token_key, u.sub_key, u.seq, u.received_at, u.nonce, u.meta
)
INSERT INTO sent_notifications (token_key, sub_key, seq, received_at, nonce, meta)
SELECT * FROM moved ORDER BY token_key, sub_key
ON CONFLICT (token_key, sub_key) DO UPDATE SET
    seq = excluded.seq, received_at = excluded.received_at, nonce = excluded.nonce, meta = excluded.meta
"""
_FORGET = f"""
DELETE FROM sent_notifications n USING (
    SELECT token_key, sub_key, row_number() OVER (PARTITION BY token_key ORDER BY seq DESC) AS place
    FROM sent_notifications WHERE token_key = ANY($1::bigint[])
) o
WHERE n.token_key = o.token_key AND n.sub_key = o.sub_key AND o.place > {KEPT_NOTIFICATIONS}
"""
# One step of an index for each token, however many entries it has.
_UNSENT_TOKENS = f"""
WITH RECURSIVE found(token_key) AS (
    (SELECT min(token_key) FROM unsent_notifications WHERE token_key > $1)
    UNION ALL
    SELECT (SELECT min(n.token_key) FROM unsent_notifications n WHERE n.token_key > found.token_key)
    FROM found WHERE found.token_key IS NOT NULL
)
SELECT token_key FROM found JOIN tokens USING (token_key)
WHERE status = '{TokenStatus.ACTIVE}' AND {OWN_PUSHES.format("$3")} LIMIT $2
"""
_COUNTS = """
SELECT coalesce(sum(tokens), 0)::bigint, coalesce(sum(active_tokens), 0)::bigint,
    coalesce(sum(subscriptions), 0)::bigint, coalesce(sum(active_subscriptions), 0)::bigint,
    (SELECT coalesce(sum(associated_count), 0)::bigint FROM smp_servers),
    (SELECT count(*) FROM smp_servers),
    (SELECT count(*) FROM unsent_notifications),
    (SELECT received_at FROM unsent_notifications ORDER BY seq LIMIT 1)
FROM totals
"""


class Arrived(NamedTuple):
    """A block of NMSGs of one router. Do not print."""

    server_key: ServerKey
    notifications: Sequence[Notification]
    received_at: int


def late_adder(
    leases: Fences,
) -> Callable[[asyncpg.Connection, Sequence[Arrived]], Awaitable[list[list[Stored | None] | Failed]]]:
    """The batch of `add_late_notifications`: it asks for no fence, and replaces nothing."""

    async def add(db: asyncpg.Connection, blocks: Sequence[Arrived]) -> list[list[Stored | None] | Failed]:
        return _results(blocks, await _add(db, _ADD_LATE, blocks), leases)

    return add


def adder(
    daemon_id: Callable[[], int], leases: Fences
) -> Callable[[asyncpg.Connection, Sequence[Arrived]], Awaitable[list[list[Stored | None] | Failed]]]:
    """The batch of `add_notifications`."""

    async def add(db: asyncpg.Connection, blocks: Sequence[Arrived]) -> list[list[Stored | None] | Failed]:
        keys = list({block.server_key for block in blocks})
        if not leases.has_joined:
            return _results(blocks, await _add(db, _ADD_ALONE, blocks), leases)
        fences = [leases.shown(of_router(key)) for key in keys]
        rows = await _add(db, _ADD_AS_OWNER, blocks, keys, fences, daemon_id())
        return _results(blocks, rows, leases)

    return add


async def _add(
    db: asyncpg.Connection, statement: str, blocks: Sequence[Arrived], *owner: Any
) -> list[asyncpg.Record]:
    all_of = [(block, notification) for block in blocks for notification in block.notifications]
    rows: list[asyncpg.Record] = await db.fetch(
        statement,
        [block.server_key for block, _ in all_of],
        [notification.notifier_id for _, notification in all_of],
        [block.received_at for block, _ in all_of],
        [notification.nonce for _, notification in all_of],
        [notification.meta for _, notification in all_of],
        *owner,
    )
    return rows


def _results(
    blocks: Sequence[Arrived], rows: Sequence[asyncpg.Record], leases: Fences
) -> list[list[Stored | None] | Failed]:
    stored: list[Stored | None] = [None] * sum(len(block.notifications) for block in blocks)
    held: set[ServerKey] = set()
    for place, key, sub_key, token_id, subscription_id, tag in rows:
        if place:
            ids = EntityId(token_id), EntityId(subscription_id)
            stored[place - 1] = Stored(TokenKey(key), SubKey(sub_key), *ids, Provider(tag))
        else:
            held.add(ServerKey(key))
    left = iter(stored)
    results: list[list[Stored | None] | Failed] = []
    for block in blocks:
        entries = [next(left) for _ in block.notifications]
        is_held = block.server_key in held or not entries
        results.append(entries if is_held else Failed(leases.refused(of_router(block.server_key))))
    return results


async def pushes(db: asyncpg.Connection, keys: Sequence[TokenKey]) -> list[TokenPush]:
    tokens = {TokenKey(row[0]): token_record(row) for row in await db.fetch(_ACTIVE_TOKENS, keys)}
    unsent: dict[TokenKey, list[LastNotification]] = {key: [] for key in tokens}
    sent: dict[TokenKey, list[LastNotification]] = {key: [] for key in tokens}
    for is_unsent, key, *entry in await db.fetch(_ENTRIES, list(tokens)):
        (unsent if is_unsent else sent)[key].append(last_notification(entry, sent=not is_unsent))
    found = ((token, _joined(unsent[key], sent[key])) for key, token in tokens.items())
    return [TokenPush(token, entries) for token, entries in found if entries]


def _joined(unsent: list[LastNotification], sent: list[LastNotification]) -> tuple[LastNotification, ...]:
    room = KEPT_NOTIFICATIONS - len(unsent)
    if room > 0:
        # So few are unsent that all of them were loaded: a sent one of the same queue shows as out of date.
        queues = {entry.sub_key for entry in unsent}
        unsent = unsent + [entry for entry in sent if entry.sub_key not in queues][-room:]
        unsent.sort(key=lambda entry: entry.seq)
    return tuple(unsent)


async def set_sent(db: asyncpg.Connection, calls: Sequence[Sequence[SentEntry]]) -> list[None]:
    """A number is given once and goes with its entry, so it alone tells if the entry is still the same.

    Two statements: what the second one forgets needs no transaction with the first.
    """
    entries = [entry for call in calls for entry in call]
    await db.execute(_SET_SENT, [entry.seq for entry in entries])
    await db.execute(_FORGET, list({entry.token_key for entry in entries}))
    return [None] * len(calls)


async def unsent_tokens(
    db: asyncpg.Connection, after: TokenKey, limit: int, parts: Sequence[int] | None
) -> list[TokenKey]:
    return [TokenKey(row[0]) for row in await db.fetch(_UNSENT_TOKENS, after, limit, parts)]


async def counts(db: asyncpg.Connection) -> Counts:
    row = await db.fetchrow(_COUNTS)
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
