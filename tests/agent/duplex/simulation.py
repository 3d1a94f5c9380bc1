"""Two agents without network, clock or tasks: their transitions and commands over databases in memory.

Routers are a dictionary of queues. Whatever an agent does to its file or to a router, it can be killed before
and after it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, TypeVar

from agent.duplex import deletion, handshake, rotation, synchronisation
from agent.duplex.commands import CommandRunner, start_joining
from agent.duplex.creation import start_creation
from agent.duplex.delivery import after_attempt, attempt
from agent.duplex.events import (
    Confirmed,
    Connected,
    ContactRequested,
    Deleted,
    Event,
    Failed,
    MessageFailed,
    MessageReceived,
    MessageSent,
    ReceiptsReceived,
)
from agent.duplex.incoming import acknowledge, receive, unacknowledged
from agent.duplex.links import PreparedLink, own_request, prepare_link
from agent.duplex.outgoing import next_delivery, queue_message
from agent.duplex.queue_maker import QueueMaker
from agent.duplex.records import ReceiveQueue
from agent.duplex.replies import RouterRefused, TemporaryFailure
from agent.duplex.schema import prepare
from agent.duplex.secrets import Secrets
from agent.duplex.store import Tx
from agent.duplex.tables import (
    connection,
    connections,
    next_command,
    receive_queues,
    send_queues,
    unfinished,
)
from agent.duplex.workers import Wait
from agent.errors import NoConnection, Prohibited
from protocol.addresses import SmpServer
from protocol.agent.connection_requests import request_text
from protocol.agent.integrity import Integrity, IntegrityOk, Skipped
from protocol.agent.messages import UserMessage
from protocol.agent.ratchet_sync import SyncState
from protocol.crypto import X25519PrivateKey
from protocol.encoding import CorrId, EntityId
from protocol.errors import AUTH
from protocol.messages_crypto import RcvMessage, seal_message
from protocol.smp_messages import (
    Del,
    Ids,
    Info,
    Key,
    Msg,
    New,
    Ok,
    Que,
    QueueMode,
    Send,
    Skey,
    SmpCommand,
    SmpMessage,
)
from smp_client.requests import Request

T = TypeVar("T")

MAX_ROUNDS = 1000
"Many more than two parties need until nothing is left to do."
SERVERS = tuple(SmpServer((f"router{number}.example",), "", bytes(32)) for number in range(3))


class Killed(BaseException):
    pass


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Nothing here waits, so that one step is all it takes."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("something waits")


class NoWait(Wait):
    def __init__(self) -> None:
        super().__init__(lambda _resting: None)

    async def sleep(self, seconds: float) -> None:
        pass


@dataclass
class RouterQueue:
    secret: bytes
    messages: list[Msg] = field(default_factory=list)


class Routers:
    """All routers; they never forget anything."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        "Of all that is random in what the parties do."
        self._numbers = count(1)
        self.queues: dict[EntityId, RouterQueue] = {}
        self._recipients: dict[EntityId, EntityId] = {}
        self._linked: dict[EntityId, Ids] = {}
        self.repeat_answers = True
        "To a NEW that is sent again; those of the deployed implementation refuse it."
        self.next_recipient_id: EntityId | None = None
        "Of the next queue, instead of an id that no other queue has."

    def _id(self) -> EntityId:
        return EntityId(next(self._numbers).to_bytes(24, "big"))

    def has(self, sender_id: EntityId) -> bool:
        return self._recipients.get(sender_id) in self.queues

    def _new(self, command: New) -> Ids:
        link = command.link
        ids = None if link is None else self._linked.get(link.sender_id)
        if ids is not None:
            if not self.repeat_answers:
                raise RouterRefused(AUTH)
            return ids
        own, sender_id = X25519PrivateKey(self._id() + bytes(8)), self._id()
        recipient_id, self.next_recipient_id = self.next_recipient_id or self._id(), None
        if link is not None:
            sender_id = link.sender_id
        self.queues[recipient_id] = RouterQueue(own.exchange(command.dh_key))
        self._recipients[sender_id] = recipient_id
        ids = Ids(
            recipient_id=recipient_id,
            sender_id=sender_id,
            dh_key=own.public,
            mode=command.mode,
            link_id=None if link is None else link.link_id or self._id(),
        )
        if link is not None:
            self._linked[sender_id] = ids
        return ids

    def answer(self, entity_id: EntityId, command: SmpCommand) -> SmpMessage:
        if isinstance(command, New):
            return self._new(command)
        queue = self.queues.get(self._recipients.get(entity_id, entity_id))
        if queue is None:
            raise RouterRefused(AUTH)
        match command:
            case Send():
                message_id = self._id()
                body = seal_message(queue.secret, message_id, RcvMessage(0, False, command.body))
                queue.messages.append(Msg(message_id, body))
            case Que():
                return Info(json.dumps({"qiSize": len(queue.messages)}).encode())
            case Del():
                del self.queues[entity_id]
            case _:
                assert isinstance(command, Skey | Key)
        return Ok()


DATABASES = ExitStack()
"All that were opened; closed after each test."


def database_in_memory() -> sqlite3.Connection:
    return DATABASES.enter_context(closing(sqlite3.connect(":memory:", isolation_level=None)))


class Party:
    """One side. What it remembers is in its database; the rest could be lost at any time."""

    def __init__(self, name: str, routers: Routers) -> None:
        self.name = name
        self.db = database_in_memory()
        self.db.row_factory = sqlite3.Row
        self.db.execute("PRAGMA foreign_keys = ON")
        prepare(self.db)
        self.connection_id = 0
        self.read: list[bytes] = []
        self.integrity: list[Integrity] = []
        self.sent_ids: dict[bytes, int] = {}
        "As the integrity chain counts."
        self.bodies: dict[int, bytes] = {}
        self.sent: list[bytes] = []
        "As told by events."
        self.receipts: list[tuple[int, bool]] = []
        self.failures: list[MessageFailed] = []
        self.errors: list[str] = []
        self.connected = False
        self.deleted = False
        self.requests: list[int] = []
        self.steps = 0
        "How often it could have been killed."
        self.dies_at: int | None = None
        self.answer_lost = False
        "Of the next command, which the router carries out."
        self.before_answer: Callable[[], object] | None = None
        "What happens while the router answers the next command."
        self.away = False
        "From all routers."
        self.loses: type[SmpCommand] | None = None
        "Commands whose answers get lost."
        self.nameless_queues = 0
        "Which it does not know, because the answer to NEW was lost."
        self.routers = routers
        self._known: set[int] = set()
        self._unacked: list[int] = []
        self._now = 0
        self._secrets = Secrets(Random(f"{routers.seed} {name}").randbytes)
        self._maker = QueueMaker(SERVERS, self._secrets, self._ask, subscribe=True)
        self._commands = CommandRunner(self._transact, self._ask, self._maker, self._secrets)

    # Where it can die

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self.dies_at:
            raise Killed

    def run(self, change: Callable[[Tx], T]) -> T:
        self._now += 1
        tx = Tx(self.db, self._now, self._secrets)
        self._step()
        self.db.execute("BEGIN")
        try:
            result = change(tx)
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")
        self._step()
        for event in tx.events:
            self._take(event)
        return result

    async def _transact(self, change: Callable[[Tx], T]) -> T:
        return self.run(change)

    async def _ask(
        self, server: SmpServer, request: Request[SmpCommand], corr_id: CorrId | None = None
    ) -> SmpMessage:
        self._step()
        if self.away:
            raise TemporaryFailure("the router cannot be reached")
        answer = self.routers.answer(request.entity_id, request.message)
        self._step()
        if self.before_answer is not None:
            meanwhile, self.before_answer = self.before_answer, None
            meanwhile()
        if self.answer_lost or type(request.message) is self.loses:
            self.answer_lost = False
            self.nameless_queues += isinstance(request.message, New)
            raise TemporaryFailure("the answer was lost")
        return answer

    # The application: it knows by their ids which messages it has dealt with

    def _take(self, event: Event) -> None:
        match event:
            case MessageReceived():
                if event.message_id not in self._known:
                    self._known.add(event.message_id)
                    self.read.append(event.body)
                    self.integrity.append(event.integrity)
                if event.message_id not in self._unacked:
                    self._unacked.append(event.message_id)
            case MessageFailed():
                self.failures.append(event)
            case Failed():
                self.errors.append(event.error)
            case Connected():
                self.connected = True
            case Deleted():
                self.deleted = True
            case ContactRequested():
                self.requests.append(event.invitation_id)
            case MessageSent():
                if event.message_id in self.bodies:  # unknown if it died in the call that stored the message
                    self.sent.append(self.bodies[event.message_id])
            case ReceiptsReceived():
                self.receipts += event.receipts
                self._unacked.append(event.message_id)
            case Confirmed():
                self.run(lambda tx: handshake.allow(tx, event.connection_id, b"me"))

    def has_connection(self) -> bool:
        return bool(connections(self.db))

    def queues(self) -> int:
        """How many it receives from."""
        return len(receive_queues(self.db, self.connection_id))

    def sends_to(self) -> int:
        """How many queues of the peer it has."""
        return len(send_queues(self.db, self.connection_id))

    @property
    def wants_sync(self) -> bool:
        return connection(self.db, self.connection_id).sync_state.may_start

    # What can happen

    def create(self) -> str:
        """The link."""
        queue = finish(self._maker.make(SERVERS[0], QueueMode.MESSAGING))
        keys = self._secrets.e2e_keys(pq=False)
        self.connection_id = self.run(lambda tx: handshake.created(tx, queue, keys, pq=False))
        return request_text(own_request(queue.uri, keys))

    def prepare(self) -> PreparedLink:
        """The link of an address, which others may know already."""
        return prepare_link(self._secrets, SERVERS[0], None, self._secrets.ed25519(), None)

    def create_prepared(self, prepared: PreparedLink) -> None:
        self.connection_id = self.run(lambda tx: start_creation(tx, prepared, b"profile"))

    def create_address(self) -> str:
        queue = finish(self._maker.make(SERVERS[0], QueueMode.CONTACT))
        self.connection_id = self.run(lambda tx: handshake.created(tx, queue, None, pq=False))
        return request_text(own_request(queue.uri, None))

    def join(self, link: str) -> None:
        self.connection_id = self.run(lambda tx: _start_join(tx, link))

    def accept(self) -> None:
        """The oldest request; from now on it is this connection that is talked about."""
        request = self.requests.pop(0)
        self.connection_id = self.run(
            lambda tx: _start_join(tx, handshake.take_invitation(tx, request), request)
        )

    def send(self, body: bytes) -> None:
        local_id = self.run(
            lambda tx: queue_message(tx, connection(tx.db, self.connection_id), UserMessage(body))
        )
        self.bodies[local_id] = body
        self.sent_ids[body] = connection(self.db, self.connection_id).last_snd_id

    def told_lost(self) -> set[int]:
        """Numbers of messages that others, which came, have said to be missing."""
        gaps = [told for told in self.integrity if isinstance(told, Skipped)]
        return {number for gap in gaps for number in range(gap.first, gap.last + 1)}

    def switch(self) -> bool:
        """False while another switch goes on, and after a deletion."""
        try:
            self.run(lambda tx: rotation.start_switch(tx, self.connection_id, SERVERS))
        except (Prohibited, NoConnection):
            return False
        return True

    def abort_switch(self) -> bool:
        try:
            self.run(lambda tx: rotation.abort_switch(tx, self.connection_id))
        except (Prohibited, NoConnection):
            return False
        return True

    def sync(self) -> None:
        self.run(lambda tx: synchronisation.start_sync(tx, self.connection_id, force=True))

    def synchronise_again(self) -> None:
        """When the next round is due."""
        with suppress(NoConnection):
            self._now = max(self._now, connection(self.db, self.connection_id).sync_due or 0)
        self.run(synchronisation.start_due_rounds)

    def delete(self, *, wait: bool = False) -> bool:
        """False if it was done before."""
        try:
            self.run(lambda tx: deletion.start_deletion(tx, self.connection_id, wait=wait))
        except NoConnection:
            return False
        self._unacked.clear()
        return True

    @property
    def sync_state(self) -> SyncState:
        return connection(self.db, self.connection_id).sync_state

    def deliver(self, choice: int = 0) -> bool:
        """The next message of a send queue to its router."""
        queues = [
            queue.queue_id
            for queue in send_queues(self.db, self.connection_id)
            if next_delivery(self.db, queue.queue_id) is not None
        ]
        if queues:
            finish(self._deliver(queues[choice % len(queues)]))
        return bool(queues)

    async def _deliver(self, queue_id: int) -> None:
        delivery = next_delivery(self.db, queue_id)
        assert delivery is not None
        failure = await attempt(self._ask, delivery, self._secrets.nonce())
        await after_attempt(self._transact, NoWait(), delivery, failure, self._now)

    def command(self, choice: int = 0) -> bool:
        """One command; False if none was finished."""
        lanes = sorted(unfinished(self.db)[0])
        if not lanes:
            return False
        lane = lanes[choice % len(lanes)]
        command = next_command(self.db, lane)
        assert command is not None
        finish(self._commands.run(command, NoWait()))
        following = next_command(self.db, lane)
        return following is None or following.command_id != command.command_id

    def all_commands(self) -> bool:
        """One of each strand."""
        finished = [self.command(choice) for choice in range(len(unfinished(self.db)[0]))]
        return any(finished)

    def _waiting(self) -> list[tuple[ReceiveQueue, RouterQueue]]:
        known = [
            (queue, self.routers.queues.get(queue.recipient_id))
            for queue in receive_queues(self.db, self.connection_id)
        ]
        return [(queue, found) for queue, found in known if found is not None and found.messages]

    def receive(self, choice: int = 0, *, ack_lost: bool = False) -> bool:
        """The oldest message of a queue; it stays there until it is acknowledged."""
        waiting = self._waiting()
        if not waiting:
            return False
        queue, found = waiting[choice % len(waiting)]
        message = found.messages[0]
        if self.run(lambda tx: receive(tx, queue.server, queue.recipient_id, message)) and not ack_lost:
            self._step()
            found.messages.remove(message)
        return True

    def disturb(self, how: str, choice: int) -> None:
        """What bad routers do to the messages that wait for this side."""
        for _, queue in self._waiting():
            place = choice % len(queue.messages)
            message = queue.messages[place] if how == "duplicate" else queue.messages.pop(place)
            if how != "lose":
                queue.messages.append(message)

    def ack(self, receipt: bytes | None = None) -> bool:
        if not self._unacked:
            return False
        local_id = self._unacked[0]
        queue, broker_id = self.run(lambda tx: acknowledge(tx, self.connection_id, local_id, receipt))
        self._unacked.pop(0)
        found = None if queue is None else self.routers.queues.get(queue.recipient_id)
        self._step()
        if found is not None:
            found.messages = [message for message in found.messages if message.message_id != broker_id]
        return True

    # Its end, and what comes after it

    def restart(self) -> None:
        """Only the file is left."""
        self.dies_at = None
        self._unacked.clear()
        if self.db.in_transaction:
            self.db.execute("ROLLBACK")
        for waiting in handshake.waiting(self.db):
            self._take(waiting)
        for message in unacknowledged(self.db):
            self._take(message)

    def backup(self) -> sqlite3.Connection:
        copy = database_in_memory()
        self.db.backup(copy)
        return copy

    def restore(self, backup: sqlite3.Connection) -> None:
        backup.backup(self.db)
        self._unacked.clear()
        self._known.clear()


def _start_join(tx: Tx, link: str, invitation_id: int = 0) -> int:
    return start_joining(tx, link, b"me", pq=False, invitation_id=invitation_id)


def connected_parties(seed: int = 0) -> tuple[Party, Party]:
    routers = Routers(seed)
    alice, bob = Party("alice", routers), Party("bob", routers)
    bob.join(alice.create())
    settle(alice, bob)
    return alice, bob


def settle(alice: Party, bob: Party) -> None:
    """Let everything arrive."""
    for _ in range(MAX_ROUNDS):
        moved = [
            alice.all_commands(),
            bob.all_commands(),
            alice.deliver(),
            bob.deliver(),
            alice.receive(),
            bob.receive(),
            alice.ack(),
            bob.ack(),
        ]
        if not any(moved):
            return
    raise AssertionError("it never ends")


def carry(who: Party, peer: Party, choice: int) -> None:
    """A rotation takes many steps in the right order: most of them at once."""
    who.command()
    who.deliver(choice)
    peer.receive(choice)


def in_order_or_told(reader: Party, sent: list[bytes]) -> bool:
    """Whether each message that does not come after the one read before it says so."""
    places = [sent.index(body) for body in reader.read]
    return all(
        later > earlier or not isinstance(integrity, IntegrityOk)
        for earlier, later, integrity in zip(places, places[1:], reader.integrity[1:], strict=False)
    )
