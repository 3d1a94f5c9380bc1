"""SQL of tokens, for PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from protocol.device_token import DeviceToken, encode_device_token
from protocol.encoding import EntityId
from protocol.statuses import TOKEN_MOVES, TokenInput, TokenStatus, move_token
from store import postgres_deletion
from store.leases import PUSH_PARTS, of_pushes
from store.postgres_engine import Transaction
from store.records import Deletion, NewToken, TokenKey, TokenMove, TokenRecord
from store.rows import DELETED, TOKEN_COLUMNS, token_or_none, token_record

_BY_ID = f"""
SELECT {TOKEN_COLUMNS} FROM unnest($1::bytea[]) WITH ORDINALITY asked(id, place)
LEFT JOIN tokens ON token_id = asked.id AND status <> '{DELETED}' ORDER BY place
"""
_BY_KEY = f"SELECT {TOKEN_COLUMNS} FROM tokens WHERE token_key = ANY($1::bigint[]) AND status <> '{DELETED}'"
_BY_DEVICE = f"SELECT {TOKEN_COLUMNS} FROM tokens WHERE device_token = $1 AND verify_key = $2"
_INSERT = f"""
INSERT INTO tokens (token_id, device_token, verify_key, dh_private, dh_secret, code, status, updated_on)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (device_token, verify_key) DO NOTHING
RETURNING {TOKEN_COLUMNS}
"""
_SEEN = f"""
SELECT status, device_token, code FROM tokens WHERE token_key = $1 AND status <> '{DELETED}' FOR UPDATE
"""
_MOVE = "UPDATE tokens SET status = $2, verified = verified OR $3, updated_on = $4 WHERE token_key = $1"
_OTHERS = "SELECT token_key FROM tokens WHERE device_token = $1 AND token_key <> $2 ORDER BY token_key"
_REPLACE = """
UPDATE tokens SET device_token = $2, code = $3, status = $4, updated_on = $5
WHERE token_key = $1 AND NOT EXISTS (
    SELECT 1 FROM tokens other
    WHERE other.device_token = $2 AND other.verify_key = tokens.verify_key AND other.token_key <> $1
)
"""
OWN_PUSHES = f"({{0}}::bigint[] IS NULL OR token_key % {PUSH_PARTS} = ANY({{0}}::bigint[]))"
_DUE = f"""
SELECT {TOKEN_COLUMNS} FROM tokens
WHERE status = '{TokenStatus.ACTIVE}' AND cron_due IS NOT NULL AND cron_due <= $1
    AND {OWN_PUSHES.format("$3")}
ORDER BY cron_due LIMIT $2
"""
_NEXT_DUE = f"""
SELECT min(cron_due) FROM tokens
WHERE status = '{TokenStatus.ACTIVE}' AND cron_due IS NOT NULL AND {OWN_PUSHES.format("$1")}
"""
_PURGED = f"""
SELECT token_key FROM tokens
WHERE status <> '{TokenStatus.ACTIVE}' AND status <> '{DELETED}'
    AND updated_on < greatest($1::bigint, $2::bigint)
    AND updated_on < CASE WHEN verified THEN $2::bigint ELSE $1::bigint END
ORDER BY updated_on LIMIT $3 FOR UPDATE SKIP LOCKED
"""
_SET_CRON = f"""
UPDATE tokens SET cron_minutes = $2, cron_due = $3 WHERE token_key = $1 AND status <> '{DELETED}'
"""
# A cron that was disabled meanwhile stays so.
_SET_CRON_DUE = """
UPDATE tokens t SET cron_due = i.due FROM unnest($1::bigint[], $2::bigint[]) i(key, due)
WHERE t.token_key = i.key AND t.cron_minutes > 0
"""

_BORN = move_token(TokenStatus.NEW, TokenInput.REGISTERED)


async def tokens(db: asyncpg.Connection, token_ids: Sequence[EntityId]) -> list[TokenRecord | None]:
    return [token_or_none(row) for row in await db.fetch(_BY_ID, token_ids)]


async def by_key(db: asyncpg.Connection, keys: Sequence[TokenKey]) -> list[TokenRecord]:
    return [token_record(row) for row in await db.fetch(_BY_KEY, keys)]


async def by_device(
    db: asyncpg.Connection, device_token: DeviceToken, verify_key: bytes
) -> TokenRecord | None:
    row = await db.fetchrow(_BY_DEVICE, encode_device_token(device_token), verify_key)
    return None if row is None else token_record(row)


async def due_crons(
    db: asyncpg.Connection, now: int, limit: int, parts: Sequence[int] | None
) -> list[TokenRecord]:
    return [token_record(row) for row in await db.fetch(_DUE, now, limit, parts)]


async def next_cron_due(db: asyncpg.Connection, parts: Sequence[int] | None) -> int | None:
    due: int | None = await db.fetchval(_NEXT_DUE, parts)
    return due


async def create(tx: Transaction, new: NewToken) -> TokenRecord:
    device_token = encode_device_token(new.device_token)
    row = await tx.db.fetchrow(
        _INSERT,
        new.token_id,
        device_token,
        new.verify_key,
        new.dh_private,
        new.dh_secret,
        new.code,
        _BORN.value,
        new.updated_on,
    )
    if row is not None:
        tx.tokens += 1
        return token_record(row)
    existing = await by_device(tx.db, new.device_token, new.verify_key)
    if existing is None:  # another daemon is just deleting it
        raise asyncpg.SerializationError
    return existing


async def move(tx: Transaction, seen: TokenRecord, event: TokenInput, updated_on: int) -> TokenMove | None:
    row = await tx.db.fetchrow(_SEEN, seen.key)
    device_token = encode_device_token(seen.device_token)
    if row is None or (row[1], row[2]) != (device_token, seen.code):
        return None
    before = TokenStatus(row[0])
    after = TOKEN_MOVES.get((before, event))
    if after is None:
        return None
    if after is before:
        return TokenMove(before, after)
    becomes_active = after is TokenStatus.ACTIVE
    await tx.db.execute(_MOVE, seen.key, after.value, becomes_active, updated_on)
    tx.token_moved(before, after)
    if not becomes_active:
        return TokenMove(before, after)
    others = [TokenKey(row[0]) for row in await tx.db.fetch(_OTHERS, device_token, seen.key)]
    return TokenMove(before, after, await postgres_deletion.tokens(tx, others))


async def replace_device(
    tx: Transaction, key: TokenKey, device_token: DeviceToken, code: bytes, updated_on: int
) -> bool:
    row = await tx.db.fetchrow(_SEEN, key)
    if row is None:
        return False
    before = TokenStatus(row[0])
    after = move_token(before, TokenInput.REPLACED)
    done = await tx.db.execute(
        _REPLACE, key, encode_device_token(device_token), code, after.value, updated_on
    )
    if done != "UPDATE 1":
        return False
    tx.token_moved(before, after)
    return True


async def delete(tx: Transaction, key: TokenKey) -> Deletion | None:
    deletion = await postgres_deletion.tokens(tx, [key])
    return deletion if deletion.tokens else None


async def purge(tx: Transaction, unverified_before: int, invalid_before: int, limit: int) -> Deletion:
    rows = await tx.db.fetch(_PURGED, unverified_before, invalid_before, limit)
    return await postgres_deletion.tokens(tx, [TokenKey(row[0]) for row in rows])


async def set_cron(tx: Transaction, key: TokenKey, minutes: int, due: int | None) -> bool:
    done: str = await tx.db.execute(_SET_CRON, key, minutes, due)
    return done == "UPDATE 1"


async def set_cron_due(tx: Transaction, due: Sequence[tuple[TokenKey, int]]) -> None:
    """Of tokens whose pushes another daemon sends by now, that one has done so."""
    held = await tx.held(of_pushes(key) for key, _ in due)
    own = [(key, at) for key, at in due if of_pushes(key) in held]
    await tx.db.execute(_SET_CRON_DUE, [key for key, _ in own], [at for _, at in own])
