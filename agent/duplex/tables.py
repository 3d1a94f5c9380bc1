"""Rows of connections, queues and commands."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from agent.duplex.records import (
    Connection,
    ConnectionKind,
    QueueStatus,
    RcvSwitch,
    ReceiveQueue,
    SendQueue,
    SndSwitch,
)
from agent.duplex.store import Strand, Tx, insert, update
from agent.errors import AgentError
from agent.notifications.rows import follow_wishes
from protocol.addresses import SmpServer, parse_smp_server
from protocol.agent.integrity import LastMessage
from protocol.agent.messages import QueueAddress
from protocol.agent.ratchet_sync import SyncState
from protocol.agent.retry import FAST, Retry
from protocol.agent.versions import AGENT_VERSIONS
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey, decode_public_key
from protocol.encoding import EntityId
from protocol.smp_messages import QueueMode


class NoConnection(AgentError):
    """There is no such connection, or it is being deleted."""

    def __init__(self) -> None:
        super().__init__("there is no such connection")


_server = lru_cache(1024)(parse_smp_server)


def _mode(text: str | None) -> QueueMode | None:
    return None if text is None else QueueMode(text.encode())


def mode_text(mode: QueueMode | None) -> str | None:
    return None if mode is None else mode.value.decode()


# Connections


def new_connection(tx: Tx, kind: ConnectionKind, *, pq_support: bool) -> int:
    return insert(
        tx.db, "connections", kind=kind, agent_version=AGENT_VERSIONS.max, pq_support=int(pq_support)
    )


def connection(db: sqlite3.Connection, connection_id: int) -> Connection:
    row = db.execute("SELECT * FROM connections WHERE connection_id = ?", (connection_id,)).fetchone()
    if row is None or row["deleted"]:
        raise NoConnection
    return _connection(row)


def connections(db: sqlite3.Connection) -> list[Connection]:
    return [_connection(row) for row in db.execute("SELECT * FROM connections ORDER BY connection_id")]


def _connection(row: Any) -> Connection:
    return Connection(
        connection_id=row["connection_id"],
        kind=ConnectionKind(row["kind"]),
        agent_version=row["agent_version"],
        pq_support=bool(row["pq_support"]),
        sync_state=SyncState(row["sync_state"]),
        last_received=LastMessage(row["last_rcv_id"], row["last_rcv_hash"]),
        last_sent=LastMessage(row["last_snd_id"], row["last_snd_hash"]),
        deleted=bool(row["deleted"]),
        wants_notifications=bool(row["wants_notifications"]),
    )


def set_connection(tx: Tx, connection_id: int, **values: Any) -> None:
    update(tx.db, "connections", "connection_id", connection_id, **values)


def next_local_id(tx: Tx, connection_id: int) -> int:
    tx.db.execute(
        "UPDATE connections SET last_local_id = last_local_id + 1 WHERE connection_id = ?", (connection_id,)
    )
    sql = "SELECT last_local_id FROM connections WHERE connection_id = ?"
    (local_id,) = tx.db.execute(sql, (connection_id,)).fetchone()
    return int(local_id)


# Queues: the primary one first, and among those the one that replaces nothing

_ORDER = "ORDER BY is_primary DESC, replaces IS NOT NULL, queue_id"


def add_receive_queue(tx: Tx, queue: ReceiveQueue) -> int:
    tx.subscriptions.add(str(queue.server))
    queue_id = insert(
        tx.db,
        "receive_queues",
        connection_id=queue.connection_id,
        server=str(queue.server),
        recipient_id=queue.recipient_id,
        recipient_key=queue.recipient_key.seed,
        router_secret=queue.router_secret,
        e2e_key=queue.e2e_key.raw,
        sender_id=queue.sender_id,
        status=queue.status,
        client_version=queue.client_version,
        mode=mode_text(queue.mode),
        is_primary=int(queue.primary),
        replaces=queue.replaces,
        service_id=queue.service_id,
    )
    follow_wishes(tx, queue_id)
    return queue_id


def set_receive_queue(tx: Tx, queue_id: int, **values: Any) -> None:
    update(tx.db, "receive_queues", "queue_id", queue_id, **values)


def receive_queues(db: sqlite3.Connection, connection_id: int) -> list[ReceiveQueue]:
    found = db.execute(f"SELECT * FROM receive_queues WHERE connection_id = ? {_ORDER}", (connection_id,))
    return [_receive_queue(row) for row in found]


def receive_queue(db: sqlite3.Connection, queue_id: int) -> ReceiveQueue | None:
    row = db.execute("SELECT * FROM receive_queues WHERE queue_id = ?", (queue_id,)).fetchone()
    return None if row is None else _receive_queue(row)


def receive_queue_of(
    db: sqlite3.Connection, server: SmpServer, recipient_id: EntityId
) -> ReceiveQueue | None:
    sql = "SELECT * FROM receive_queues WHERE server = ? AND recipient_id = ?"
    row = db.execute(sql, (str(server), recipient_id)).fetchone()
    return None if row is None else _receive_queue(row)


_ONE_BY_ONE = "server = ?1 AND NOT deleting AND (?2 IS NULL OR service_id IS NOT ?2)"
"Queues that are subscribed by themselves: all, or those that do not belong to a service."


def queues_at(
    db: sqlite3.Connection, server: SmpServer, service_id: EntityId | None, after: int, limit: int
) -> list[ReceiveQueue]:
    """The next queues to be subscribed one by one at a server."""
    sql = f"SELECT * FROM receive_queues WHERE {_ONE_BY_ONE} AND queue_id > ?3 ORDER BY queue_id LIMIT ?4"
    return [_receive_queue(row) for row in db.execute(sql, (str(server), service_id, after, limit))]


def connections_at(db: sqlite3.Connection, server: SmpServer, service_id: EntityId | None) -> tuple[int, ...]:
    sql = f"SELECT DISTINCT connection_id FROM receive_queues WHERE {_ONE_BY_ONE} ORDER BY connection_id"
    return tuple(connection_id for (connection_id,) in db.execute(sql, (str(server), service_id)))


def receiving_servers(db: sqlite3.Connection) -> list[SmpServer]:
    sql = "SELECT DISTINCT server FROM receive_queues WHERE NOT deleting"
    return [_server(server) for (server,) in db.execute(sql)]


def drop_receive_queue(tx: Tx, queue_id: int) -> None:
    tx.db.execute("DELETE FROM receive_queues WHERE queue_id = ?", (queue_id,))


def _receive_queue(row: Any) -> ReceiveQueue:
    return ReceiveQueue(
        queue_id=row["queue_id"],
        connection_id=row["connection_id"],
        server=_server(row["server"]),
        recipient_id=row["recipient_id"],
        recipient_key=Ed25519PrivateKey(row["recipient_key"]),
        router_secret=row["router_secret"],
        e2e_key=X25519PrivateKey(row["e2e_key"]),
        e2e_secret=row["e2e_secret"],
        sender_id=row["sender_id"],
        sender_key=None if row["sender_key"] is None else decode_public_key(row["sender_key"]),
        status=QueueStatus(row["status"]),
        client_version=row["client_version"],
        mode=_mode(row["mode"]),
        primary=bool(row["is_primary"]),
        replaces=row["replaces"],
        switch=None if row["switch"] is None else RcvSwitch(row["switch"]),
        deleting=bool(row["deleting"]),
        service_id=row["service_id"],
    )


def add_send_queue(tx: Tx, queue: SendQueue) -> int:
    return insert(
        tx.db,
        "send_queues",
        connection_id=queue.connection_id,
        server=str(queue.server),
        sender_id=queue.sender_id,
        auth_key=queue.auth_key.raw,
        e2e_key=queue.e2e_key.raw,
        e2e_secret=queue.e2e_secret,
        status=queue.status,
        client_version=queue.client_version,
        mode=mode_text(queue.mode),
        is_primary=int(queue.primary),
        replaces=queue.replaces,
    )


def set_send_queue(tx: Tx, queue_id: int, **values: Any) -> None:
    update(tx.db, "send_queues", "queue_id", queue_id, **values)


def send_queues(db: sqlite3.Connection, connection_id: int) -> list[SendQueue]:
    found = db.execute(f"SELECT * FROM send_queues WHERE connection_id = ? {_ORDER}", (connection_id,))
    return [_send_queue(row) for row in found]


def send_queue(db: sqlite3.Connection, queue_id: int) -> SendQueue | None:
    row = db.execute("SELECT * FROM send_queues WHERE queue_id = ?", (queue_id,)).fetchone()
    return None if row is None else _send_queue(row)


def drop_send_queue(tx: Tx, queue_id: int) -> None:
    tx.db.execute("DELETE FROM send_queues WHERE queue_id = ?", (queue_id,))


def find_address(queues: list[Any], address: QueueAddress) -> Any:
    """The queue at this address; a router is the same in any spelling."""
    wanted = (address.server.canonical, address.sender_id)
    return next((queue for queue in queues if (queue.server.canonical, queue.sender_id) == wanted), None)


def _send_queue(row: Any) -> SendQueue:
    return SendQueue(
        queue_id=row["queue_id"],
        connection_id=row["connection_id"],
        server=_server(row["server"]),
        sender_id=row["sender_id"],
        auth_key=X25519PrivateKey(row["auth_key"]),
        e2e_key=X25519PrivateKey(row["e2e_key"]),
        e2e_secret=row["e2e_secret"],
        status=QueueStatus(row["status"]),
        client_version=row["client_version"],
        mode=_mode(row["mode"]),
        primary=bool(row["is_primary"]),
        replaces=row["replaces"],
        switch=None if row["switch"] is None else SndSwitch(row["switch"]),
    )


# Commands: what has to be done over the network, in order per connection


@dataclass(frozen=True, slots=True)
class Command:
    command_id: int
    connection_id: int
    kind: str
    arguments: bytes = field(repr=False)
    retry: Retry
    attempts: int


def add_command(tx: Tx, connection_id: int, kind: str, arguments: bytes = b"", *, queue_id: int = 0) -> None:
    """With a `queue_id` it waits for no other command of the connection, and none waits for it."""
    insert(
        tx.db,
        "commands",
        connection_id=connection_id,
        queue_id=queue_id,
        kind=kind,
        arguments=arguments,
        delay=FAST.initial,
    )
    tx.commands.add(Strand(connection_id, queue_id))


def next_command(db: sqlite3.Connection, strand: Strand) -> Command | None:
    sql = "SELECT * FROM commands WHERE connection_id = ? AND queue_id = ? ORDER BY command_id LIMIT 1"
    row = db.execute(sql, strand).fetchone()
    if row is None:
        return None
    retry = Retry(row["delay"], row["elapsed"])
    return Command(
        row["command_id"], row["connection_id"], row["kind"], row["arguments"], retry, row["attempts"]
    )


def command_delayed(tx: Tx, command: Command) -> None:
    retry = command.retry.next(FAST)
    values = {"delay": retry.delay, "elapsed": retry.elapsed, "attempts": command.attempts + 1}
    update(tx.db, "commands", "command_id", command.command_id, **values)


def drop_command(tx: Tx, command_id: int) -> None:
    tx.db.execute("DELETE FROM commands WHERE command_id = ?", (command_id,))


def unfinished(db: sqlite3.Connection) -> tuple[set[Strand], set[int]]:
    """Strands with commands, and send queues with deliveries: what a start goes on with."""
    commands = {Strand(*row) for row in db.execute("SELECT DISTINCT connection_id, queue_id FROM commands")}
    deliveries = {row[0] for row in db.execute("SELECT DISTINCT queue_id FROM deliveries")}
    return commands, deliveries
