"""Queues of prepared links: stored before NEW, because the link may be known to others already.

If the answer is lost, the same NEW is sent again. A router that has the queue answers with its ids; one that
does not repeat an answer refuses, and then the link can never work.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field

from agent.duplex.events import LinkReady
from agent.duplex.links import OwnLink, PreparedLink, keep_link, own_link_of, set_link
from agent.duplex.mapping import Table
from agent.duplex.ratchets import put_keys
from agent.duplex.records import ConnectionKind, ReceiveQueue
from agent.duplex.store import Tx
from agent.duplex.tables import (
    add_command,
    add_receive_queue,
    commands_of,
    connection,
    drop_command,
    new_connection,
    set_connection,
)
from protocol.addresses import SmpServer, parse_smp_server
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey
from protocol.encoding import CorrId, EntityId
from protocol.link_crypto import contact_link_keys, sender_id_of
from protocol.smp_messages import LinkData, NewLink, QueueMode

CREATE = "create"
"Kind of command."
CANNOT_CREATE = "the queue of the link cannot be created; prepare another link"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewQueue:
    """All that NEW needs beside the link."""

    connection_id: int
    server: SmpServer
    mode: QueueMode
    recipient_key: Ed25519PrivateKey
    dh_key: X25519PrivateKey
    e2e_key: X25519PrivateKey
    corr_id: CorrId = field(repr=False)
    "Gives the sender's id."
    user_data: bytes = field(repr=False)
    "Sealed."

    def new_link(self, link: OwnLink) -> NewLink:
        link_id = contact_link_keys(link.link_key).link_id if link.is_address else None
        return NewLink(link_id, sender_id_of(self.corr_id), LinkData(link.fixed, self.user_data))


_NEW_QUEUES = Table("new_queues", NewQueue, "connection_id")


def start_creation(tx: Tx, prepared: PreparedLink, user_data: bytes) -> int:
    """Return the connection of a prepared link, always the same one. The caller carries out the command."""
    sql = "SELECT connection_id FROM links WHERE link_key = ?"
    row = tx.db.execute(sql, (prepared.link_key,)).fetchone()
    if row is not None:
        connection(tx.db, row["connection_id"])
        return int(row["connection_id"])
    pq = prepared.keys is not None and prepared.keys.kem is not None
    connection_id = new_connection(tx, ConnectionKind.NEW, pq_support=pq)
    if prepared.keys is not None:
        put_keys(tx, connection_id, prepared.keys)
    keep_link(tx, connection_id, prepared)
    new = NewQueue(
        connection_id=connection_id,
        server=prepared.server,
        mode=prepared.mode,
        recipient_key=tx.secrets.ed25519(),
        dh_key=tx.secrets.x25519(),
        e2e_key=prepared.e2e_key,
        corr_id=prepared.corr_id,
        user_data=prepared.new_link(tx.secrets, user_data).data.user,
    )
    _NEW_QUEUES.add(tx, new)
    add_command(tx, connection_id, CREATE)
    tx.commands.clear()
    return connection_id


def new_queue(db: sqlite3.Connection, connection_id: int) -> tuple[NewQueue, OwnLink] | None:
    """What is still to be created, also if the connection is being deleted."""
    new, link = _NEW_QUEUES.get(db, connection_id), own_link_of(db, connection_id)
    return None if new is None or link is None else (new, link)


def chosen_servers(db: sqlite3.Connection) -> list[SmpServer]:
    """Where we have queues, or are making them."""
    sql = "SELECT server FROM receive_queues UNION SELECT server FROM new_queues"
    return [parse_smp_server(server).canonical for (server,) in db.execute(sql)]


def queue_created(tx: Tx, connection_id: int, queue: ReceiveQueue, link_id: EntityId) -> None:
    """Raise RouterRefused if its id is that of another queue."""
    _NEW_QUEUES.drop(tx, connection_id)
    for command in commands_of(tx.db, connection_id, CREATE):
        drop_command(tx, command.command_id)
    add_receive_queue(tx, connection_id, queue)
    kind = ConnectionKind.CONTACT if queue.mode is QueueMode.CONTACT else ConnectionKind.RCV
    set_connection(tx, connection_id, kind=kind)
    set_link(tx, connection_id, link_id=link_id)
    sql = "SELECT 1 FROM connections WHERE connection_id = ? AND NOT deleted"
    if tx.db.execute(sql, (connection_id,)).fetchone() is not None:
        tx.events.append(LinkReady(connection_id))


def give_up_creation(tx: Tx, connection_id: int) -> None:
    """The router refuses: there is no queue, or none that we can ever use."""
    tx.db.execute("DELETE FROM connections WHERE connection_id = ?", (connection_id,))
