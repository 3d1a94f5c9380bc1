"""Messages that a router took for a queue which is being replaced, kept until the peer has surely read them.

A peer may delete its old queue without reading what is in it. So what was sent there since our keys for the
new queue (QKEY) is sent to the new queue as well, as the same bytes: the peer recognises by their hashes
those that it has read.
"""

from __future__ import annotations

from agent.duplex.message_kinds import SWITCHING, MessageKind
from agent.duplex.records import SendQueue, SndSwitch
from agent.duplex.store import Tx

MAX_UNREAD = 500
"Messages kept of a connection; a ratchet skips no more than 512."
UNREAD_TIME = 2 * 86400
"Seconds for which they are kept."

_IDLE = (
    "connection_id = ?1 AND plaintext IS NOT NULL AND NOT EXISTS (SELECT 1 FROM deliveries d"
    " WHERE d.connection_id = sent_messages.connection_id AND d.local_id = sent_messages.local_id)"
)
"Messages with content that are on their way to no queue."


def mark_taken(tx: Tx, connection_id: int, local_id: int) -> bool:
    """A router took the message; False if another one had done so before."""
    sql = (
        "UPDATE sent_messages SET taken_at = ? WHERE connection_id = ? AND local_id = ? AND taken_at IS NULL"
    )
    return bool(tx.db.execute(sql, (tx.now, connection_id, local_id)).rowcount)


def is_taken(tx: Tx, connection_id: int, local_id: int) -> bool:
    sql = "SELECT 1 FROM sent_messages WHERE connection_id = ? AND local_id = ? AND taken_at IS NOT NULL"
    return tx.db.execute(sql, (connection_id, local_id)).fetchone() is not None


def keep_unread(tx: Tx, queue: SendQueue, connection_id: int, local_id: int) -> bool:
    """Whether the message stays complete: its queue is being replaced, and the peer may not read it there."""
    sql = (
        "SELECT q.switch, m.kind, (SELECT min(d.local_id) FROM deliveries d JOIN sent_messages k"
        " USING (connection_id, local_id) WHERE d.queue_id = q.queue_id AND k.kind = ?4) AS key_id"
        " FROM send_queues q JOIN sent_messages m USING (connection_id)"
        " WHERE q.queue_id = ?1 AND m.connection_id = ?2 AND m.local_id = ?3"
    )
    row = tx.db.execute(sql, (queue.queue_id, connection_id, local_id, MessageKind.KEY)).fetchone()
    if row is None or row["switch"] != SndSwitch.SENDING_QKEY or row["kind"] in SWITCHING:
        return False
    if row["key_id"] is not None:  # QKEY comes later in the same queue: the peer reads all before it
        return False
    sql = f"SELECT local_id FROM sent_messages WHERE {_IDLE} ORDER BY local_id DESC LIMIT 1 OFFSET ?2"
    oldest = tx.db.execute(sql, (connection_id, MAX_UNREAD)).fetchone()
    if oldest is not None:
        _forget(tx, connection_id, f"{_IDLE} AND local_id <= ?2", oldest["local_id"])
    return True


def send_unread(tx: Tx, new: SendQueue) -> None:
    """What the peer has not confirmed goes to its new queue; it has read all before what it confirmed."""
    tx.db.execute(
        "INSERT OR IGNORE INTO deliveries (queue_id, local_id, connection_id)"
        f" SELECT ?2, local_id, connection_id FROM sent_messages WHERE {_IDLE} AND taken_at IS NOT NULL"
        " AND message_id > (SELECT ifnull(max(message_id), 0) FROM sent_messages"
        " WHERE connection_id = ?1 AND receipt IS NOT NULL)",
        (new.connection_id, new.queue_id),
    )


def forget_unread(tx: Tx, connection_id: int) -> None:
    """They are of no use to the peer any more."""
    _forget(tx, connection_id, f"{_IDLE} AND taken_at IS NOT NULL")


def forget_undeliverable(tx: Tx, connection_id: int) -> None:
    """Messages whose last delivery went with its queue; those that wait for a new queue stay."""
    tx.db.execute(f"DELETE FROM sent_messages WHERE {_IDLE} AND taken_at IS NULL", (connection_id,))
    sql = "SELECT 1 FROM send_queues WHERE connection_id = ? AND switch = ?"
    if tx.db.execute(sql, (connection_id, SndSwitch.SENDING_QKEY)).fetchone() is None:
        forget_unread(tx, connection_id)


def clean_up_unread(tx: Tx) -> None:
    """The peer did not go on with the replacement of its queue."""
    sql = "SELECT DISTINCT connection_id FROM sent_messages WHERE plaintext IS NOT NULL AND taken_at < ?"
    before = tx.now - UNREAD_TIME
    for (connection_id,) in tx.db.execute(sql, (before,)).fetchall():
        _forget(tx, connection_id, f"{_IDLE} AND taken_at < ?2", before)


def _forget(tx: Tx, connection_id: int, condition: str, *values: int) -> None:
    """Users' messages keep their hashes, for receipts."""
    where, given = f"WHERE {condition}", (connection_id, *values)
    tx.db.execute(f"DELETE FROM sent_messages {where} AND kind != '{MessageKind.USER}'", given)
    tx.db.execute(f"UPDATE sent_messages SET plaintext = NULL, seal = NULL {where}", given)
