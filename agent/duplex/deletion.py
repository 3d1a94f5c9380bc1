"""The end of connections, and of what is kept for a time only."""

from __future__ import annotations

from agent.duplex import rotation
from agent.duplex.events import Deleted
from agent.duplex.outgoing import end_deliveries
from agent.duplex.resending import clean_up_unread
from agent.duplex.store import Strand, Tx
from agent.duplex.tables import add_command, connection, receive_queues, send_queues, set_connection
from agent.notifications.rows import delete_subscription

DELETE = "delete"
KEPT = 21 * 86400
"Seconds for which hashes, and sent messages without a receipt, are remembered."
PENDING_TIME = 2 * 86400
"Seconds for which a deletion waits for messages that are still to be sent."


def start_deletion(tx: Tx, connection_id: int, *, wait: bool) -> None:
    """From now on the connection is not there for the application; with `wait` its messages still go out.

    Its receive queues and notifications end at once in either case.
    """
    connection(tx.db, connection_id)
    set_connection(tx, connection_id, deleted=True)
    _end_commands(tx, connection_id)
    for receiving in receive_queues(tx.db, connection_id):
        delete_subscription(tx, receiving.queue_id)
        rotation.delete_queue(tx, receiving, at_once=True)
    if not wait:
        for queue in send_queues(tx.db, connection_id):
            end_deliveries(tx, queue)
    add_command(tx, connection_id, DELETE, tx.now + PENDING_TIME if wait else 0)


def _end_commands(tx: Tx, connection_id: int) -> None:
    """What one waits to try again is not wanted any more, and the deletion does not wait for it."""
    sql = "SELECT DISTINCT connection_id, queue_id FROM commands WHERE connection_id = ?"
    strands = {Strand(*row) for row in tx.db.execute(sql, (connection_id,))}
    tx.db.execute("DELETE FROM commands WHERE connection_id = ?", (connection_id,))
    tx.commands |= strands
    tx.hurried |= strands


def finish(tx: Tx, connection_id: int, until: int) -> bool:
    """Forget the connection when its messages are sent and its queues deleted; False if it is too early."""
    sql = "SELECT 1 FROM deliveries WHERE connection_id = ? LIMIT 1"
    is_pending = tx.db.execute(sql, (connection_id,)).fetchone() is not None
    queues = receive_queues(tx.db, connection_id)
    for queue in queues:
        if not queue.deleting:  # it was being made when the deletion began
            rotation.delete_queue(tx, queue, at_once=True)
    if queues or (is_pending and tx.now < until):
        return False
    tx.db.execute("DELETE FROM connections WHERE connection_id = ?", (connection_id,))
    tx.events.append(Deleted(connection_id))
    return True


def clean_up(tx: Tx) -> None:
    clean_up_unread(tx)
    before = tx.now - KEPT
    tx.db.execute("DELETE FROM seen_hashes WHERE seen_at < ?", (before,))
    tx.db.execute("DELETE FROM sent_messages WHERE plaintext IS NULL AND queued_at < ?", (before,))
