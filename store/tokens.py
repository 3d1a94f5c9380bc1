"""Tokens: what clients, pushes and housekeeping do with them."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.device_token import DeviceToken, encode_device_token
from protocol.encoding import EntityId
from protocol.statuses import TOKEN_MOVES, TokenInput, TokenStatus, move_token
from store import deletion
from store.leases import CHORES, PUSH_PARTS, of_pushes
from store.records import Deletion, NewToken, TokenKey, TokenMove, TokenRecord
from store.rows import DELETED, TOKEN_COLUMNS, token_or_none, token_record
from store.sql_store import (
    Collision,
    Database,
    Sql,
    SqlStore,
    Transaction,
    for_each_id,
    reading,
    shared,
    writing,
)

_BY_ID = for_each_id(TOKEN_COLUMNS, f"LEFT JOIN tokens ON token_id = {{}} AND status <> '{DELETED}'")
_BY_KEY = shared(f"""
SELECT {TOKEN_COLUMNS} FROM tokens WHERE token_key = ANY($1::bigint[]) AND status <> '{DELETED}'
""")
_BY_DEVICE = shared(f"SELECT {TOKEN_COLUMNS} FROM tokens WHERE device_token = $1 AND verify_key = $2")
_INSERT = shared(f"""
INSERT INTO tokens (token_id, device_token, verify_key, dh_private, dh_secret, code, status, updated_on)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (device_token, verify_key) DO NOTHING
RETURNING {TOKEN_COLUMNS}
""")
_SEEN = shared(f"""
SELECT status, device_token, code FROM tokens WHERE token_key = $1 AND status <> '{DELETED}' FOR UPDATE
""")
_MOVE = shared("""
UPDATE tokens SET status = $2, verified = verified OR $3, updated_on = $4 WHERE token_key = $1
""")
_OTHERS = shared("""
SELECT token_key FROM tokens WHERE device_token = $1 AND token_key <> $2 ORDER BY token_key
""")
_REPLACE = shared("""
UPDATE tokens SET device_token = $2, code = $3, status = $4, updated_on = $5
WHERE token_key = $1 AND NOT EXISTS (
    SELECT 1 FROM tokens other
    WHERE other.device_token = $2 AND other.verify_key = tokens.verify_key AND other.token_key <> $1
)
""")
_OWN_PUSHES = f"({{0}}::bigint[] IS NULL OR token_key % {PUSH_PARTS} = ANY({{0}}::bigint[]))"
_ALL_PUSHES = "{0} IS NULL"


def _whose_pushes_are_ours(text: str, parts: str) -> Sql:
    """`{}` is for the condition, `parts` its parameter. With SQLite there is one daemon."""
    alone = shared(text.format(_ALL_PUSHES.format(parts)))
    return Sql(alone.sqlite, text.format(_OWN_PUSHES.format(parts)))


_DUE = _whose_pushes_are_ours(
    f"""
SELECT {TOKEN_COLUMNS} FROM tokens
WHERE status = '{TokenStatus.ACTIVE}' AND cron_due IS NOT NULL AND cron_due <= $1 AND {{}}
ORDER BY cron_due LIMIT $2
""",
    "$3",
)
_NEXT_DUE = _whose_pushes_are_ours(
    f"""
SELECT min(cron_due) FROM tokens
WHERE status = '{TokenStatus.ACTIVE}' AND cron_due IS NOT NULL AND {{}}
""",
    "$1",
)
_UNSENT = Sql(
    sqlite=f"""
SELECT DISTINCT n.token_key FROM unsent_notifications n CROSS JOIN tokens t USING (token_key)
WHERE n.token_key > ?1 AND t.status = '{TokenStatus.ACTIVE}' AND ?3 IS NULL ORDER BY n.token_key LIMIT ?2
""",
    # One step of an index for each token, however many entries it has.
    postgres=f"""
WITH RECURSIVE found(token_key) AS (
    (SELECT min(token_key) FROM unsent_notifications WHERE token_key > $1)
    UNION ALL
    SELECT (SELECT min(n.token_key) FROM unsent_notifications n WHERE n.token_key > found.token_key)
    FROM found WHERE found.token_key IS NOT NULL
)
SELECT token_key FROM found JOIN tokens USING (token_key)
WHERE status = '{TokenStatus.ACTIVE}' AND {_OWN_PUSHES.format("$3")} LIMIT $2
""",
)
_PURGED = shared(f"""
SELECT token_key FROM tokens
WHERE status <> '{TokenStatus.ACTIVE}' AND status <> '{DELETED}' AND updated_on < $3
    AND updated_on < CASE WHEN verified THEN CAST($2 AS bigint) ELSE CAST($1 AS bigint) END
ORDER BY updated_on LIMIT $4 FOR UPDATE SKIP LOCKED
""")
_SET_CRON = shared(f"""
UPDATE tokens SET cron_minutes = $2, cron_due = $3 WHERE token_key = $1 AND status <> '{DELETED}'
""")
# A cron that was disabled meanwhile stays so.
_SET_CRON_DUE = Sql(
    sqlite="UPDATE tokens SET cron_due = ?2 WHERE token_key = ?1 AND cron_minutes > 0",
    postgres="""
UPDATE tokens t SET cron_due = i.due FROM unnest($1::bigint[], $2::bigint[]) i(key, due)
WHERE t.token_key = i.key AND t.cron_minutes > 0
""",
)

_BORN = move_token(TokenStatus.NEW, TokenInput.REGISTERED)


class Tokens(SqlStore):
    async def tokens(self, token_ids: Sequence[EntityId]) -> list[TokenRecord | None]:
        return await self._read_grouped(_by_id, token_ids)

    @reading
    async def tokens_by_key(self, db: Database, keys: Sequence[TokenKey]) -> list[TokenRecord]:
        return [token_record(row) for row in await db.fetch(_BY_KEY, keys)]

    @reading
    async def token_by_device(
        self, db: Database, device_token: DeviceToken, verify_key: bytes
    ) -> TokenRecord | None:
        row = await db.fetchrow(_BY_DEVICE, encode_device_token(device_token), verify_key)
        return None if row is None else token_record(row)

    @writing()
    async def create_token(self, tx: Transaction, token: NewToken) -> TokenRecord:
        device_token = encode_device_token(token.device_token)
        keys = token.verify_key, token.dh_private, token.dh_secret, token.code
        row = await tx.fetchrow(_INSERT, token.token_id, device_token, *keys, _BORN.value, token.updated_on)
        if row is not None:
            tx.tokens += 1
        else:
            row = await tx.fetchrow(_BY_DEVICE, device_token, token.verify_key)
        if row is None:  # another daemon is just deleting it
            raise Collision
        return token_record(row)

    @writing()
    async def move_token(
        self, tx: Transaction, seen: TokenRecord, event: TokenInput, updated_on: int
    ) -> TokenMove | None:
        row = await tx.fetchrow(_SEEN, seen.key)
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
        await tx.execute(_MOVE, seen.key, after.value, becomes_active, updated_on)
        tx.token_moved(before, after)
        if not becomes_active:
            return TokenMove(before, after)
        others = [TokenKey(row[0]) for row in await tx.fetch(_OTHERS, device_token, seen.key)]
        return TokenMove(before, after, await deletion.tokens(tx, others))

    @writing()
    async def replace_device_token(
        self, tx: Transaction, key: TokenKey, device_token: DeviceToken, code: bytes, updated_on: int
    ) -> bool:
        row = await tx.fetchrow(_SEEN, key)
        if row is None:
            return False
        before = TokenStatus(row[0])
        after = move_token(before, TokenInput.REPLACED)
        device = encode_device_token(device_token)
        if not await tx.execute(_REPLACE, key, device, code, after.value, updated_on):
            return False
        tx.token_moved(before, after)
        return True

    @writing()
    async def delete_token(self, tx: Transaction, key: TokenKey) -> Deletion | None:
        deleted = await deletion.tokens(tx, [key])
        return deleted if deleted.tokens else None

    @writing(durable=False, as_owner_of=CHORES)
    async def purge_tokens(
        self, tx: Transaction, *, unverified_before: int, invalid_before: int, limit: int
    ) -> Deletion:
        latest = max(unverified_before, invalid_before)
        rows = await tx.fetch(_PURGED, unverified_before, invalid_before, latest, limit)
        return await deletion.tokens(tx, [TokenKey(row[0]) for row in rows])

    @writing(durable=False)
    async def delete_more(self, tx: Transaction) -> Deletion:
        return await deletion.more(tx)

    @writing()
    async def set_cron(self, tx: Transaction, key: TokenKey, minutes: int, due: int | None) -> bool:
        return await tx.execute(_SET_CRON, key, minutes, due) > 0

    @reading
    async def due_crons(self, db: Database, now: int, limit: int) -> list[TokenRecord]:
        return [token_record(row) for row in await db.fetch(_DUE, now, limit, self._push_parts())]

    @writing(durable=False)
    async def set_cron_due(self, tx: Transaction, due: Sequence[tuple[TokenKey, int]]) -> None:
        """Of tokens whose pushes another daemon sends by now, that one has done so."""
        held = await tx.held(of_pushes(key) for key, _ in due)
        await tx.execute_rows(_SET_CRON_DUE, [(key, at) for key, at in due if of_pushes(key) in held])

    @reading
    async def next_cron_due(self, db: Database) -> int | None:
        due: int | None = await db.fetchval(_NEXT_DUE, self._push_parts())
        return due

    @reading
    async def unsent_tokens(self, db: Database, *, after: TokenKey, limit: int) -> list[TokenKey]:
        return [TokenKey(row[0]) for row in await db.fetch(_UNSENT, after, limit, self._push_parts())]


async def _by_id(db: Database, token_ids: Sequence[EntityId]) -> list[TokenRecord | None]:
    return [token_or_none(row) for row in await db.fetch_each(_BY_ID, token_ids)]
