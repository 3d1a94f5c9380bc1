"""The application has dealt with a message."""

from __future__ import annotations

from agent.duplex.outgoing import queue_message
from agent.duplex.records import ReceiveQueue
from agent.duplex.store import Tx
from agent.duplex.tables import connection, receive_queue
from agent.errors import Prohibited
from protocol.agent.messages import Receipt, Receipts
from protocol.agent.versions import AGENT_RECEIPTS

_USER_MESSAGES = (b"M", b"P")


def acknowledge(
    tx: Tx, connection_id: int, local_id: int, receipt: bytes | None
) -> tuple[ReceiveQueue | None, bytes]:
    """Mark it, queue the receipt if one is wanted, and say what to tell the router.

    The queue that brought it may be gone: it was replaced in the meantime.
    """
    conn = connection(tx.db, connection_id)
    sql = "SELECT * FROM received_messages WHERE connection_id = ? AND local_id = ? AND NOT is_acked"
    row = tx.db.execute(sql, (connection_id, local_id)).fetchone()
    if row is None:
        raise Prohibited("there is no such message")
    sql = "UPDATE received_messages SET is_acked = 1, content = x'' WHERE connection_id = ? AND local_id = ?"
    tx.db.execute(sql, (connection_id, local_id))
    is_message = row["content"][:1] in _USER_MESSAGES
    if receipt is not None and is_message and conn.agent_version >= AGENT_RECEIPTS:
        receipts = Receipts((Receipt(row["message_id"], row["message_hash"], receipt),))
        if conn.sync_state.may_send:
            queue_message(tx, conn, receipts)
    return receive_queue(tx.db, row["queue_id"]), row["broker_id"]
