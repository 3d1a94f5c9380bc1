"""SQL of tokens."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from protocol.device_token import DeviceToken, encode_device_token
from protocol.encoding import EntityId
from protocol.statuses import TOKEN_MOVES, TokenInput, TokenStatus, move_token
from store import sqlite_deletion
from store.records import Deletion, NewToken, TokenKey, TokenMove, TokenRecord
from store.rows import DELETED, TOKEN_COLUMNS, token_or_none, token_record
from store.sqlite_transaction import Transaction, select_each, select_in

_BY_ID = f"""
SELECT column1, {TOKEN_COLUMNS} FROM (VALUES {{}})
LEFT JOIN tokens ON token_id = column1 AND status <> '{DELETED}'
"""
_BY_KEY = f"SELECT {TOKEN_COLUMNS} FROM tokens WHERE token_key IN ({{}}) AND status <> '{DELETED}'"
_BY_DEVICE = f"SELECT {TOKEN_COLUMNS} FROM tokens WHERE device_token = ? AND verify_key = ?"
_INSERT = """
INSERT INTO tokens (token_id, device_token, verify_key, dh_private, dh_secret, code, status, updated_on)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""
_SEEN = f"SELECT status, device_token, code FROM tokens WHERE token_key = ? AND status <> '{DELETED}'"
_MOVE = "UPDATE tokens SET status = ?, verified = max(verified, ?), updated_on = ? WHERE token_key = ?"
_OTHERS = "SELECT token_key FROM tokens WHERE device_token = ? AND token_key <> ?"
_REPLACE = """
UPDATE OR IGNORE tokens SET device_token = ?, code = ?, status = ?, updated_on = ? WHERE token_key = ?
"""
_DUE = f"""
SELECT {TOKEN_COLUMNS} FROM tokens
WHERE status = '{TokenStatus.ACTIVE}' AND cron_due IS NOT NULL AND cron_due <= ? ORDER BY cron_due LIMIT ?
"""
_NEXT_DUE = f"""
SELECT min(cron_due) FROM tokens WHERE status = '{TokenStatus.ACTIVE}' AND cron_due IS NOT NULL
"""
_PURGED = f"""
SELECT token_key FROM tokens
WHERE status <> '{TokenStatus.ACTIVE}' AND status <> '{DELETED}'
    AND updated_on < max(:unverified_before, :invalid_before)
    AND updated_on < iif(verified, :invalid_before, :unverified_before)
ORDER BY updated_on LIMIT :limit
"""
_SET_CRON = f"""
UPDATE tokens SET cron_minutes = ?, cron_due = ? WHERE token_key = ? AND status <> '{DELETED}'
"""


_BORN = move_token(TokenStatus.NEW, TokenInput.REGISTERED)


def tokens(db: sqlite3.Connection, token_ids: Sequence[EntityId]) -> list[TokenRecord | None]:
    rows = select_each(db, _BY_ID, token_ids)
    return [token_or_none(rows[token_id][1:]) for token_id in token_ids]


def by_key(db: sqlite3.Connection, keys: Sequence[TokenKey]) -> list[TokenRecord]:
    return [token_record(row) for row in select_in(db, _BY_KEY, keys)]


def by_device(db: sqlite3.Connection, device_token: DeviceToken, verify_key: bytes) -> TokenRecord | None:
    row = db.execute(_BY_DEVICE, (encode_device_token(device_token), verify_key)).fetchone()
    return None if row is None else token_record(row)


def due_crons(db: sqlite3.Connection, now: int, limit: int) -> list[TokenRecord]:
    return [token_record(row) for row in db.execute(_DUE, (now, limit))]


def next_cron_due(db: sqlite3.Connection) -> int | None:
    (due,) = db.execute(_NEXT_DUE).fetchone()
    return None if due is None else int(due)


def create(tx: Transaction, new: NewToken) -> TokenRecord:
    existing = by_device(tx.db, new.device_token, new.verify_key)
    if existing is not None:
        return existing
    device_token = encode_device_token(new.device_token)
    cursor = tx.db.execute(
        _INSERT,
        (
            new.token_id,
            device_token,
            new.verify_key,
            new.dh_private,
            new.dh_secret,
            new.code,
            _BORN,
            new.updated_on,
        ),
    )
    tx.tokens += 1
    assert cursor.lastrowid is not None
    return TokenRecord(
        key=TokenKey(cursor.lastrowid),
        token_id=new.token_id,
        device_token=new.device_token,
        verify_key=new.verify_key,
        dh_private=new.dh_private,
        dh_secret=new.dh_secret,
        code=new.code,
        status=_BORN,
        updated_on=new.updated_on,
    )


def move(tx: Transaction, seen: TokenRecord, event: TokenInput, updated_on: int) -> TokenMove | None:
    row = tx.db.execute(_SEEN, (seen.key,)).fetchone()
    device_token = encode_device_token(seen.device_token)
    if row is None or (row[1], row[2]) != (device_token, seen.code):
        return None
    before = TokenStatus(row[0])
    after = TOKEN_MOVES.get((before, event))
    if after is None:
        return None
    becomes_active = after is TokenStatus.ACTIVE
    if after is not before:
        tx.db.execute(_MOVE, (after, becomes_active, updated_on, seen.key))
        tx.token_moved(before, after)
    if not becomes_active or after is before:
        return TokenMove(before, after)
    others = [TokenKey(other) for (other,) in tx.db.execute(_OTHERS, (device_token, seen.key))]
    return TokenMove(before, after, sqlite_deletion.tokens(tx, others))


def replace_device(
    tx: Transaction, key: TokenKey, device_token: DeviceToken, code: bytes, updated_on: int
) -> bool:
    row = tx.db.execute(_SEEN, (key,)).fetchone()
    if row is None:
        return False
    before = TokenStatus(row[0])
    after = move_token(before, TokenInput.REPLACED)
    new = (encode_device_token(device_token), code, after, updated_on, key)
    if tx.db.execute(_REPLACE, new).rowcount == 0:
        return False
    tx.token_moved(before, after)
    return True


def delete(tx: Transaction, key: TokenKey) -> Deletion | None:
    deletion = sqlite_deletion.tokens(tx, [key])
    return deletion if deletion.tokens else None


def purge(tx: Transaction, unverified_before: int, invalid_before: int, limit: int) -> Deletion:
    parameters = {
        "unverified_before": unverified_before,
        "invalid_before": invalid_before,
        "limit": limit,
    }
    return sqlite_deletion.tokens(tx, [TokenKey(key) for (key,) in tx.db.execute(_PURGED, parameters)])


def set_cron(tx: Transaction, key: TokenKey, minutes: int, due: int | None) -> bool:
    return tx.db.execute(_SET_CRON, (minutes, due, key)).rowcount > 0


def set_cron_due(tx: Transaction, due: Sequence[tuple[TokenKey, int]]) -> None:
    # A cron that was disabled meanwhile stays so.
    tx.db.executemany(
        "UPDATE tokens SET cron_due = ?2 WHERE token_key = ?1 AND cron_minutes > 0",
        due,
    )
