"""SQL of tokens."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from protocol.device_token import DeviceToken, decode_device_token, encode_device_token
from protocol.encoding import EntityId
from protocol.statuses import TOKEN_MOVES, SubState, TokenInput, TokenStatus
from store.records import LiveQueue, NewToken, ServerKey, TokenKey, TokenRecord
from store.sqlite_transaction import Transaction, select_each, select_in

COLUMNS = """
token_key, token_id, device_token, verify_key, dh_private, dh_secret, code, status, cron_minutes, cron_due,
updated_on
"""

_BY_ID = f"SELECT column1, {COLUMNS} FROM (VALUES {{}}) LEFT JOIN tokens ON token_id = column1"
_BY_KEY = f"SELECT {COLUMNS} FROM tokens WHERE token_key IN ({{}})"
_BY_DEVICE = f"SELECT {COLUMNS} FROM tokens WHERE device_token = ? AND verify_key = ?"
_INSERT = """
INSERT INTO tokens (token_id, device_token, verify_key, dh_private, dh_secret, code, status, updated_on)
VALUES (?, ?, ?, ?, ?, ?, 'REGISTERED', ?)
"""
_DUE = f"""
SELECT {COLUMNS} FROM tokens
WHERE status = 'ACTIVE' AND cron_due IS NOT NULL AND cron_due <= ? ORDER BY cron_due LIMIT ?
"""
_NEXT_DUE = "SELECT min(cron_due) FROM tokens WHERE status = 'ACTIVE' AND cron_due IS NOT NULL"
_PURGED = """
SELECT token_key FROM tokens
WHERE status <> 'ACTIVE' AND updated_on < max(:unverified_before, :invalid_before)
    AND updated_on < iif(
        status IN ('NEW', 'REGISTERED', 'CONFIRMED'), :unverified_before, :invalid_before
    )
ORDER BY updated_on LIMIT :limit
"""
_QUEUES = "SELECT server_key, notifier_id, associated, state FROM subscriptions WHERE token_key = ?"


def record(row: Sequence[Any]) -> TokenRecord:
    """From a row of `COLUMNS`."""
    return TokenRecord(
        key=TokenKey(row[0]),
        token_id=EntityId(row[1]),
        device_token=decode_device_token(row[2]),
        verify_key=row[3],
        dh_private=row[4],
        dh_secret=row[5],
        code=row[6],
        status=TokenStatus(row[7]),
        cron_minutes=row[8],
        cron_due=row[9],
        updated_on=row[10],
    )


def tokens(db: sqlite3.Connection, token_ids: Sequence[EntityId]) -> list[TokenRecord | None]:
    rows = select_each(db, _BY_ID, token_ids)
    return [_record_or_none(rows[token_id][1:]) for token_id in token_ids]


_DECOY = (0, b"", b"AN\0", b"", b"", b"", b"", "ACTIVE", 0, None, 0)


def _record_or_none(row: Sequence[Any]) -> TokenRecord | None:
    """Unknown ids cost what known ones do: see `select_each`."""
    exists = row[0] is not None
    found = record(row if exists else _DECOY)
    return found if exists else None


def by_key(db: sqlite3.Connection, keys: Sequence[TokenKey]) -> list[TokenRecord]:
    return [record(row) for row in select_in(db, _BY_KEY, keys)]


def by_device(db: sqlite3.Connection, device_token: DeviceToken, verify_key: bytes) -> TokenRecord | None:
    row = db.execute(_BY_DEVICE, (encode_device_token(device_token), verify_key)).fetchone()
    return None if row is None else record(row)


def due_crons(db: sqlite3.Connection, now: int, limit: int) -> list[TokenRecord]:
    return [record(row) for row in db.execute(_DUE, (now, limit))]


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
        status=TokenStatus.REGISTERED,
        updated_on=new.updated_on,
    )


def _status(tx: Transaction, key: TokenKey) -> TokenStatus | None:
    row = tx.db.execute("SELECT status FROM tokens WHERE token_key = ?", (key,)).fetchone()
    return None if row is None else TokenStatus(row[0])


def _count_move(tx: Transaction, before: TokenStatus, after: TokenStatus) -> None:
    tx.active_tokens += (after is TokenStatus.ACTIVE) - (before is TokenStatus.ACTIVE)


def activate(tx: Transaction, key: TokenKey, updated_on: int) -> list[LiveQueue]:
    before = _status(tx, key)
    if before is None or (before, TokenInput.CODE_MATCHED) not in TOKEN_MOVES:
        return []
    tx.db.execute(
        "UPDATE tokens SET status = 'ACTIVE', updated_on = ? WHERE token_key = ?", (updated_on, key)
    )
    _count_move(tx, before, TokenStatus.ACTIVE)
    others = tx.db.execute(
        "SELECT token_key FROM tokens WHERE token_key <> ?1"
        " AND device_token = (SELECT device_token FROM tokens WHERE token_key = ?1)",
        (key,),
    ).fetchall()
    return [queue for (other,) in others for queue in delete(tx, other)]


def set_status(
    tx: Transaction,
    key: TokenKey,
    status: TokenStatus,
    only_from: Sequence[TokenStatus] | None,
    updated_on: int | None,
) -> bool:
    before = _status(tx, key)
    if before is None or (only_from is not None and before not in only_from):
        return False
    tx.db.execute(
        "UPDATE tokens SET status = ?, updated_on = ifnull(?, updated_on) WHERE token_key = ?",
        (status, updated_on, key),
    )
    _count_move(tx, before, status)
    return True


def replace_device(
    tx: Transaction, key: TokenKey, device_token: DeviceToken, code: bytes, updated_on: int
) -> bool:
    before = _status(tx, key)
    if before is None:
        return False
    cursor = tx.db.execute(
        "UPDATE OR IGNORE tokens SET device_token = ?, code = ?, status = 'REGISTERED', updated_on = ?"
        " WHERE token_key = ?",
        (encode_device_token(device_token), code, updated_on, key),
    )
    if cursor.rowcount == 0:
        return False
    _count_move(tx, before, TokenStatus.REGISTERED)
    return True


def delete(tx: Transaction, key: TokenKey) -> list[LiveQueue]:
    status = _status(tx, key)
    if status is None:
        return []
    rows = tx.db.execute(_QUEUES, (key,)).fetchall()
    associated: dict[ServerKey, list[EntityId]] = {}
    for server_key, notifier_id, is_associated, state in rows:
        tx.active_subscriptions -= state == SubState.ACTIVE
        if is_associated:
            associated.setdefault(server_key, []).append(notifier_id)
    for server_key, notifier_ids in associated.items():
        tx.remove_associated(server_key, notifier_ids)
    tx.subscriptions -= len(rows)
    tx.tokens -= 1
    tx.active_tokens -= status is TokenStatus.ACTIVE
    tx.db.execute("DELETE FROM tokens WHERE token_key = ?", (key,))
    return [LiveQueue(row[0], row[1]) for row in rows]


def purge(tx: Transaction, unverified_before: int, invalid_before: int, limit: int) -> list[LiveQueue]:
    parameters = {
        "unverified_before": unverified_before,
        "invalid_before": invalid_before,
        "limit": limit,
    }
    keys = tx.db.execute(_PURGED, parameters).fetchall()
    return [queue for (key,) in keys for queue in delete(tx, key)]


def set_cron(tx: Transaction, key: TokenKey, minutes: int, due: int | None) -> None:
    tx.db.execute("UPDATE tokens SET cron_minutes = ?, cron_due = ? WHERE token_key = ?", (minutes, due, key))


def set_cron_due(tx: Transaction, due: Sequence[tuple[TokenKey, int]]) -> None:
    # A cron that was disabled meanwhile stays so.
    tx.db.executemany(
        "UPDATE tokens SET cron_due = ?2 WHERE token_key = ?1 AND cron_minutes > 0",
        due,
    )
