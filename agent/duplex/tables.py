"""Rows of connections, queues and commands."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from agent.duplex.mapping import Table
from agent.duplex.records import Connection, ConnectionKind, Queue, QueueStatus, ReceiveQueue, SendQueue
from agent.duplex.replies import RouterRefused
from agent.duplex.store import Strand, Tx, insert
from agent.errors import NoConnection
from agent.notifications.rows import follow_wishes
from protocol.addresses import SmpServer
from protocol.agent.messages import QueueAddress
from protocol.agent.retry import FAST, SECOND, Retry, RetryInterval
from protocol.agent.versions import AGENT_VERSIONS
from protocol.encoding import EntityId
from protocol.errors import INTERNAL

AnyQueue = TypeVar("AnyQueue", bound=Queue)


# Connections

_CONNECTIONS = Table("connections", Connection, "connection_id")
set_connection = _CONNECTIONS.set


def new_connection(tx: Tx, kind: ConnectionKind, *, pq_support: bool) -> int:
    return insert(
        tx.db, "connections", kind=kind, agent_version=AGENT_VERSIONS.max, pq_support=int(pq_support)
    )


def connection(db: sqlite3.Connection, connection_id: int) -> Connection:
    found = _CONNECTIONS.get(db, connection_id)
    if found is None or found.deleted:
        raise NoConnection
    return found


def connections(db: sqlite3.Connection) -> list[Connection]:
    return _CONNECTIONS.all(db, "TRUE ORDER BY connection_id")


def next_local_id(tx: Tx, connection_id: int) -> int:
    change = "UPDATE connections SET last_local_id = last_local_id + 1 WHERE connection_id = ?"
    (local_id,) = tx.db.execute(f"{change} RETURNING last_local_id", (connection_id,)).fetchone()
    return int(local_id)


# Queues

_RECEIVE_QUEUES = Table("receive_queues", ReceiveQueue, "queue_id", numbered=True)
receive_queue = _RECEIVE_QUEUES.get
set_receive_queue = _RECEIVE_QUEUES.set
drop_receive_queue = _RECEIVE_QUEUES.drop
_SEND_QUEUES = Table("send_queues", SendQueue, "queue_id", numbered=True)
send_queue = _SEND_QUEUES.get
add_send_queue = _SEND_QUEUES.add
set_send_queue = _SEND_QUEUES.set
drop_send_queue = _SEND_QUEUES.drop
_OF_CONNECTION = "connection_id = ? ORDER BY is_primary DESC, replaces IS NOT NULL, queue_id"
"The primary one first, and among those the one that replaces nothing."


def add_receive_queue(tx: Tx, connection_id: int, queue: ReceiveQueue) -> ReceiveQueue:
    """Store a queue that was just made and return it as stored.

    Raise RouterRefused if its id is that of another queue.
    """
    if receive_queue_of(tx.db, queue.server, queue.recipient_id) is not None:
        raise RouterRefused(INTERNAL)
    added = replace(queue, connection_id=connection_id)
    added = replace(added, queue_id=_RECEIVE_QUEUES.add(tx, added))
    tx.subscriptions.append(added)
    follow_wishes(tx, added.queue_id)
    return added


def receive_queues(db: sqlite3.Connection, connection_id: int) -> list[ReceiveQueue]:
    return _RECEIVE_QUEUES.all(db, _OF_CONNECTION, connection_id)


def set_secured(tx: Tx, queue: ReceiveQueue) -> None:
    """The router has the sender's key: nobody who takes our file is to learn it."""
    set_receive_queue(tx, queue.queue_id, status=QueueStatus.SECURED, sender_key=None)


def send_queues(db: sqlite3.Connection, connection_id: int) -> list[SendQueue]:
    return _SEND_QUEUES.all(db, _OF_CONNECTION, connection_id)


def receive_queue_of(
    db: sqlite3.Connection, server: SmpServer, recipient_id: EntityId
) -> ReceiveQueue | None:
    return _RECEIVE_QUEUES.one(db, "server = ? AND recipient_id = ?", str(server), recipient_id)


_ONE_BY_ONE = (
    "server = ?1 AND NOT deleting AND (?2 IS NULL OR service_id IS NOT ?2)"
    " AND recipient_id = ifnull(?3, recipient_id)"
)
"Queues that are subscribed by themselves: all, those that do not belong to a service, or only one."


def queues_at(
    db: sqlite3.Connection,
    server: SmpServer,
    service_id: EntityId | None,
    after: int,
    limit: int,
    only: EntityId | None,
) -> list[ReceiveQueue]:
    """The next queues to be subscribed one by one at a server."""
    condition = f"{_ONE_BY_ONE} AND queue_id > ?4 ORDER BY queue_id LIMIT ?5"
    return _RECEIVE_QUEUES.all(db, condition, str(server), service_id, only, after, limit)


def connections_at(
    db: sqlite3.Connection, server: SmpServer, service_id: EntityId | None, only: EntityId | None
) -> tuple[int, ...]:
    sql = f"SELECT DISTINCT connection_id FROM receive_queues WHERE {_ONE_BY_ONE} ORDER BY connection_id"
    return tuple(connection_id for (connection_id,) in db.execute(sql, (str(server), service_id, only)))


def receiving(db: sqlite3.Connection, *, each: bool) -> list[ReceiveQueue]:
    """One queue of every server where we have any; or `each` of them."""
    first = "SELECT min(queue_id) FROM receive_queues WHERE NOT deleting GROUP BY server"
    return _RECEIVE_QUEUES.all(db, "NOT deleting" if each else f"queue_id IN ({first})")


def find_address(queues: Sequence[AnyQueue], address: QueueAddress) -> AnyQueue | None:
    """The queue at this address; a router is the same in any spelling."""
    wanted = (address.server.canonical, address.sender_id)
    return next((queue for queue in queues if (queue.server.canonical, queue.sender_id) == wanted), None)


# Commands: what has to be done over the network, in order per connection


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCommand:
    command_id: int = 0
    connection_id: int
    queue_id: int
    kind: str
    arguments: bytes = field(repr=False)
    delay: int = FAST.initial
    elapsed: int = 0

    @property
    def retry(self) -> Retry:
        return Retry(self.delay, self.elapsed)

    @property
    def number(self) -> int:
        """Of a command whose arguments are one."""
        return int.from_bytes(self.arguments, "big")


DELETE_QUEUE = "delete_queue"
_INTERVALS = {DELETE_QUEUE: RetryInterval(FAST.initial, FAST.grows_after, 3600 * SECOND)}
"Of kinds that are tried for as long as it takes: a router may never come back."
_COMMANDS = Table("commands", StoredCommand, "command_id", numbered=True)
drop_command = _COMMANDS.drop


def add_command(
    tx: Tx, connection_id: int, kind: str, arguments: bytes | int = b"", *, queue_id: int = 0
) -> None:
    """With a `queue_id` it waits for no other command of the connection, and none waits for it."""
    data = arguments.to_bytes(8, "big") if isinstance(arguments, int) else arguments
    command = StoredCommand(connection_id=connection_id, queue_id=queue_id, kind=kind, arguments=data)
    _COMMANDS.add(tx, command)
    tx.commands.add(Strand(connection_id, queue_id))


def next_command(db: sqlite3.Connection, strand: Strand) -> StoredCommand | None:
    return _COMMANDS.one(db, "connection_id = ? AND queue_id = ? ORDER BY command_id LIMIT 1", *strand)


def commands_of(db: sqlite3.Connection, connection_id: int, kind: str) -> list[StoredCommand]:
    return _COMMANDS.all(db, "connection_id = ? AND kind = ? ORDER BY command_id", connection_id, kind)


def command_delayed(tx: Tx, command: StoredCommand) -> None:
    retry = command.retry.next(_INTERVALS.get(command.kind, FAST))
    _COMMANDS.set(tx, command.command_id, delay=retry.delay, elapsed=retry.elapsed)


def unfinished(db: sqlite3.Connection) -> tuple[set[Strand], set[int]]:
    """Strands with commands, and send queues with deliveries: what a start goes on with."""
    commands = {Strand(*row) for row in db.execute("SELECT DISTINCT connection_id, queue_id FROM commands")}
    deliveries = {row[0] for row in db.execute("SELECT DISTINCT queue_id FROM deliveries")}
    return commands, deliveries
