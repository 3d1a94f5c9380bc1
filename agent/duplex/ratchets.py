"""Ratchets, their skipped keys, and hashes of what was seen: rows, and the ratchet's work on them."""

from __future__ import annotations

import sqlite3

from agent.duplex.store import Tx, insert
from protocol.agent.e2e_params import E2eKeys
from protocol.agent.forms import LARGE, record
from protocol.agent.ratchet import Decrypted, Sealer, decrypt, next_sealer
from protocol.agent.ratchet_state import (
    E2E_KEYS,
    MESSAGE_KEY,
    MessageKey,
    Ratchet,
    decode_ratchet,
    encode_ratchet,
)
from protocol.agent.versions import E2E_VERSIONS

SEALER = record(Sealer, key=MESSAGE_KEY, associated_data=LARGE, header=LARGE)
MAX_SKIPPED_KEYS = 4096
"Kept of one connection, of messages that have not come; the oldest are given up."
MAX_HASHES = 20_000
"The same of what was seen."
HASHES_COUNTED = 256
"Every so many new rows: looking costs more than a row."

_PUT = "INSERT INTO ratchets (connection_id, {0}) VALUES (?, ?) ON CONFLICT DO UPDATE SET {0} = excluded.{0}"


def put_keys(tx: Tx, connection_id: int, keys: E2eKeys | None) -> None:
    """The keys of a ratchet that is not there yet; the one in use stays beside them."""
    tx.db.execute(_PUT.format("keys"), (connection_id, None if keys is None else E2E_KEYS.encode(keys)))


def keys_of(db: sqlite3.Connection, connection_id: int) -> E2eKeys | None:
    row = db.execute("SELECT keys FROM ratchets WHERE connection_id = ?", (connection_id,)).fetchone()
    return None if row is None or row["keys"] is None else E2E_KEYS.decode(row["keys"])


def put_ratchet(tx: Tx, connection_id: int, ratchet: Ratchet) -> None:
    tx.db.execute(_PUT.format("state"), (connection_id, encode_ratchet(ratchet)))


def replace_ratchet(tx: Tx, connection_id: int, ratchet: Ratchet) -> None:
    """Another ratchet: the keys that made it and those of the old one's missing messages go."""
    put_ratchet(tx, connection_id, ratchet)
    put_keys(tx, connection_id, None)
    tx.db.execute("DELETE FROM skipped_keys WHERE connection_id = ?", (connection_id,))


def ratchet_of(db: sqlite3.Connection, connection_id: int) -> Ratchet | None:
    row = db.execute("SELECT state FROM ratchets WHERE connection_id = ?", (connection_id,)).fetchone()
    return None if row is None or row["state"] is None else decode_ratchet(row["state"])


def seal_next(tx: Tx, connection_id: int, pq: bool | None) -> Sealer:
    """RatchetError if the ratchet cannot send yet."""
    ratchet = ratchet_of(tx.db, connection_id)
    assert ratchet is not None
    following, sealer = next_sealer(ratchet, E2E_VERSIONS.max, pq)
    put_ratchet(tx, connection_id, following)
    return sealer


def unseal(tx: Tx, connection_id: int, ratchet: Ratchet, message: bytes) -> Decrypted:
    """Decrypt, and keep what the ratchet became. A RatchetError that is raised means that nothing changed."""
    done = decrypt(ratchet, _skipped_keys(tx.db, connection_id), message, tx.secrets)
    put_ratchet(tx, connection_id, done.ratchet)
    if done.used:
        sql = "DELETE FROM skipped_keys WHERE connection_id = ? AND header_key = ? AND number = ?"
        tx.db.execute(sql, (connection_id, done.used.header_key, done.used.number))
    for added in done.added:
        insert(
            tx.db,
            "skipped_keys",
            connection_id=connection_id,
            header_key=added.header_key,
            number=added.number,
            key=added.key.key,
            iv=added.key.iv,
        )
    if done.added:
        _forget_oldest(tx, "skipped_keys", connection_id, MAX_SKIPPED_KEYS)
    return done


def _forget_oldest(tx: Tx, table: str, connection_id: int, limit: int) -> None:
    """A peer can make us keep only so many rows."""
    tx.db.execute(
        f"DELETE FROM {table} WHERE connection_id = ? AND rowid NOT IN"
        f" (SELECT rowid FROM {table} WHERE connection_id = ? ORDER BY rowid DESC LIMIT ?)",
        (connection_id, connection_id, limit),
    )


def _skipped_keys(db: sqlite3.Connection, connection_id: int) -> dict[bytes, dict[int, MessageKey]]:
    sql = "SELECT header_key, number, key, iv FROM skipped_keys WHERE connection_id = ?"
    found: dict[bytes, dict[int, MessageKey]] = {}
    for header_key, number, key, iv in db.execute(sql, (connection_id,)):
        found.setdefault(header_key, {})[number] = MessageKey(key, iv)
    return found


# Hashes: of encrypted messages, and of ratchet keys


def seen_before(tx: Tx, connection_id: int, kind: str, digest: bytes) -> bool:
    """Whether it was seen before; from now on it was."""
    sql = "INSERT INTO seen_hashes VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
    done = tx.db.execute(sql, (connection_id, kind, digest, tx.now))
    if done.rowcount and done.lastrowid is not None and done.lastrowid % HASHES_COUNTED == 0:
        _forget_oldest(tx, "seen_hashes", connection_id, MAX_HASHES)
    return not done.rowcount


def is_seen(tx: Tx, connection_id: int, kind: str, digest: bytes) -> bool:
    sql = "SELECT 1 FROM seen_hashes WHERE connection_id = ? AND kind = ? AND hash = ?"
    return tx.db.execute(sql, (connection_id, kind, digest)).fetchone() is not None
