"""Two agents without network, clock or tasks: their transitions over databases in memory, a tiny router."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from agent.duplex import handshake, synchronisation
from agent.duplex.acknowledging import acknowledge
from agent.duplex.events import Confirmed, Event, MessageReceived, RatchetSync, ReceiptsReceived
from agent.duplex.incoming import receive
from agent.duplex.outgoing import Delivery, delivered, next_delivery, queue_message
from agent.duplex.records import ConnectionKind, QueueStatus, ReceiveQueue
from agent.duplex.schema import prepare
from agent.duplex.secrets import Secrets
from agent.duplex.store import Tx
from agent.duplex.tables import connection, new_connection, send_queues, set_send_queue
from protocol.addresses import SmpServer
from protocol.agent.messages import UserMessage
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey
from protocol.encoding import EntityId
from protocol.messages_crypto import RcvMessage, seal_message
from protocol.queue_uri import SMP_CLIENT_VERSIONS
from protocol.smp_messages import Msg, QueueMode

T = TypeVar("T")

SERVER = SmpServer(("router.example",), "", bytes(32))


@dataclass
class RouterQueue:
    secret: bytes
    messages: list[Msg] = field(default_factory=list)
    count: int = 0

    def push(self, body: bytes) -> None:
        self.count += 1
        message_id = self.count.to_bytes(24, "big")
        self.messages.append(
            Msg(message_id, seal_message(self.secret, message_id, RcvMessage(0, False, body)))
        )


class Party:
    """One side. What it remembers is in its database; the rest could be lost at any time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.db = sqlite3.connect(":memory:", isolation_level=None)
        self.db.row_factory = sqlite3.Row
        self.db.execute("PRAGMA foreign_keys = ON")
        prepare(self.db)
        self.connection_id = 0
        self.inbox = RouterQueue(name.encode().ljust(32, b"-"))
        self.read: list[bytes] = []
        self.unacked: list[int] = []
        self.wants_sync = False
        self.now = 0

    def run(self, change: Callable[[Tx], T]) -> T:
        self.now += 1
        tx = Tx(self.db, self.now, Secrets())
        self.db.execute("BEGIN")
        try:
            result = change(tx)
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")
        for event in tx.events:
            self._take(event)
        return result

    def _take(self, event: Event) -> None:
        match event:
            case MessageReceived():
                if event.message_id not in self.unacked:
                    self.read.append(event.body)
                    self.unacked.append(event.message_id)
            case ReceiptsReceived():
                self.unacked.append(event.message_id)
            case Confirmed():
                self.run(lambda tx: handshake.allow(tx, event.connection_id, b"me"))
                self.run(lambda tx: handshake.start_answer(tx, event.connection_id))
                self.secured()
                self.run(lambda tx: handshake.answer(tx, event.connection_id, b"me"))
            case RatchetSync():
                self.wants_sync = event.state.may_start

    def queue(self) -> ReceiveQueue:
        return ReceiveQueue(
            queue_id=0,
            connection_id=0,
            server=SERVER,
            recipient_id=EntityId(self.name.encode()),
            recipient_key=Ed25519PrivateKey(bytes(32)),
            router_secret=self.inbox.secret,
            e2e_key=X25519PrivateKey(Secrets().nonce() + bytes(8)),
            e2e_secret=None,
            sender_id=EntityId(b"to " + self.name.encode()),
            sender_key=None,
            status=QueueStatus.NEW,
            client_version=SMP_CLIENT_VERSIONS.max,
            mode=QueueMode.MESSAGING,
            primary=True,
            replaces=None,
            switch=None,
            deleting=False,
        )

    def secured(self) -> None:
        [queue] = send_queues(self.db, self.connection_id)
        self.run(lambda tx: set_send_queue(tx, queue.queue_id, status=QueueStatus.SECURED))

    # What can happen

    def send(self, body: bytes) -> None:
        self.run(lambda tx: queue_message(tx, connection(tx.db, self.connection_id), UserMessage(body)))

    def deliver(self, peer: Party, *, answer_lost: bool = False) -> bool:
        """The next message to the router; if its answer is lost, it will be sent again."""
        for queue in send_queues(self.db, self.connection_id):
            delivery = next_delivery(self.db, queue.queue_id)
            if delivery is not None:
                peer.inbox.push(delivery.command(Secrets().nonce()).body)
                if not answer_lost:
                    self._delivered(delivery)
                return True
        return False

    def _delivered(self, delivery: Delivery) -> None:
        self.run(lambda tx: delivered(tx, delivery))

    def receive(self, *, ack_lost: bool = False) -> bool:
        """The oldest message of the router; it stays there until it is acknowledged."""
        if not self.inbox.messages:
            return False
        message = self.inbox.messages[0]
        if self.run(lambda tx: receive(tx, SERVER, EntityId(self.name.encode()), message)) and not ack_lost:
            self.inbox.messages.pop(0)
        return True

    def ack(self) -> bool:
        if not self.unacked:
            return False
        local_id = self.unacked.pop(0)
        _, broker_id = self.run(lambda tx: acknowledge(tx, self.connection_id, local_id, None))
        self.inbox.messages = [m for m in self.inbox.messages if m.message_id != broker_id]
        return True

    def sync(self) -> None:
        self.wants_sync = False
        self.run(lambda tx: synchronisation.start_sync(tx, self.connection_id, force=True))

    def backup(self) -> sqlite3.Connection:
        copy = sqlite3.connect(":memory:", isolation_level=None)
        self.db.backup(copy)
        return copy

    def restore(self, backup: sqlite3.Connection) -> None:
        backup.backup(self.db)
        self.unacked.clear()


def connected_parties() -> tuple[Party, Party]:
    alice, bob = Party("alice"), Party("bob")
    keys, hers = Secrets().e2e_keys(pq=False), alice.queue()
    alice.connection_id = alice.run(lambda tx: handshake.created(tx, hers, keys, pq=False))
    link = handshake.invitation_of(hers, keys)
    bob.connection_id = bob.run(lambda tx: new_connection(tx, ConnectionKind.NEW, pq_support=False))
    bob.run(lambda tx: handshake.start_join(tx, bob.connection_id, link, pq=False))
    bob.secured()
    bob.run(lambda tx: handshake.reply_queue_made(tx, bob.connection_id, replace(bob.queue())))
    bob.run(lambda tx: handshake.confirm_join(tx, bob.connection_id, b"me"))
    settle(alice, bob)
    return alice, bob


def settle(alice: Party, bob: Party) -> None:
    """Let everything arrive."""
    while any(
        [
            alice.deliver(bob),
            bob.deliver(alice),
            alice.receive(),
            bob.receive(),
            alice.ack(),
            bob.ack(),
        ]
    ):
        pass
