"""The end of connections, and of what is kept for a time only."""

from __future__ import annotations

import sqlite3

from agent.duplex.events import Deleted
from agent.duplex.outgoing import end_deliveries
from agent.duplex.store import Strand, Tx
from agent.duplex.tables import add_command, connection, send_queues, set_connection

DELETE = "delete"
KEPT = 21 * 86400
"Seconds for which hashes, and sent messages without a receipt, are remembered."
PENDING_TIME = 2 * 86400
"Seconds for which a deletion waits for messages that are still to be sent."


def start_deletion(tx: Tx, connection_id: int, *, wait: bool) -> None:
    """From now on the connection is not there for the application; with `wait` its messages still go out."""
    connection(tx.db, connection_id)
    set_connection(tx, connection_id, deleted=True)
    tx.db.execute("UPDATE receive_queues SET deleting = 1 WHERE connection_id = ?", (connection_id,))
    _end_commands(tx, connection_id)
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


def is_pending(db: sqlite3.Connection, connection_id: int) -> bool:
    sql = "SELECT 1 FROM deliveries WHERE connection_id = ? LIMIT 1"
    return db.execute(sql, (connection_id,)).fetchone() is not None


def forget(tx: Tx, connection_id: int) -> None:
    tx.db.execute("DELETE FROM connections WHERE connection_id = ?", (connection_id,))
    tx.events.append(Deleted(connection_id))


def clean_up(tx: Tx) -> None:
    before = tx.now - KEPT
    tx.db.execute("DELETE FROM seen_hashes WHERE seen_at < ?", (before,))
    tx.db.execute("DELETE FROM sent_messages WHERE plaintext IS NULL AND queued_at < ?", (before,))
