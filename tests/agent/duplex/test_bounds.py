"""What a peer or a router can make an agent keep or do is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agent.duplex import handshake, incoming, outgoing, router_links
from agent.duplex.agent import open_duplex
from agent.duplex.commands import waiting_messages
from agent.duplex.inbox import Delivered
from agent.duplex.outgoing import queue_message
from agent.duplex.records import ReceiveQueue
from agent.duplex.router_links import Purpose
from agent.duplex.routers import RouterLink
from agent.duplex.secrets import Secrets
from agent.duplex.store import Tx
from agent.duplex.tables import connection, receive_queues, send_queues, set_connection
from protocol.addresses import SmpServer
from protocol.agent.envelopes import InvitationEnvelope
from protocol.agent.integrity import IntegrityOk
from protocol.agent.messages import NewQueue, QueueAdd
from protocol.connection import Received
from protocol.encoding import NO_CORR, EntityId
from protocol.messages_crypto import QuotaExceeded, seal_message
from protocol.queue_uri import SMP_CLIENT_VERSIONS, QueueUri
from protocol.smp_messages import Info, Msg, QueueMode
from smp_client.dialer import Dialer
from smp_client.session import SmpEvents, SmpSession, connect_smp
from tests.agent.duplex.simulation import SERVERS, Party, Routers, connected_parties, finish, settle
from tests.agent.duplex.world import config
from tests.smp_client.peer import PeerSession, scripted_router

LIMIT = 3
FAR_LATER = 3000.0


class FarLater(Exception):
    pass


@pytest.fixture
def few_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (outgoing, incoming):
        monkeypatch.setattr(module, "MAX_ANSWERS", LIMIT)


def waiting(party: Party) -> int:
    return party.run(lambda tx: outgoing.waiting_answers(tx, party.connection_id))


@pytest.mark.usefixtures("few_answers")
def test_offers_of_queues_that_nobody_answers_in_time() -> None:
    alice, bob = connected_parties()
    old = receive_queues(alice.db, alice.connection_id)[0]
    key = Secrets().x25519().public
    for number in range(LIMIT + 2):
        new = EntityId(bytes([number]) * 24)
        uri = QueueUri(SMP_CLIENT_VERSIONS, SERVERS[1], new, key, QueueMode.MESSAGING)
        offer = QueueAdd((NewQueue(uri, old.address),))
        alice.run(
            lambda tx, offer=offer: queue_message(tx, connection(tx.db, alice.connection_id), offer)  # type: ignore[misc]
        )
        alice.deliver()
        bob.receive()
    assert waiting(bob) == LIMIT
    alice.send(b"hello")
    alice.deliver()
    bob.receive()
    assert bob.read == [b"hello"]


def test_an_offer_whose_answer_does_not_fit_into_a_message() -> None:
    """It is read once, and what follows is read too: it must not come again and again."""
    alice, bob = connected_parties()
    bob.run(lambda tx: set_connection(tx, bob.connection_id, pq_support=1))  # his messages are shorter
    old = receive_queues(alice.db, alice.connection_id)[0]
    far = SmpServer(tuple(f"{'h' * 200}{number}.example" for number in range(66)), "", bytes(32))
    key = Secrets().x25519().public
    offered = QueueUri(SMP_CLIENT_VERSIONS, far, EntityId(bytes(24)), key, QueueMode.MESSAGING)
    offer = QueueAdd((NewQueue(offered, old.address),))
    alice.run(lambda tx: queue_message(tx, connection(tx.db, alice.connection_id), offer))
    alice.send(b"hello")
    settle(alice, bob)
    assert bob.errors == ["A_PROHIBITED the message is too long"]
    assert (bob.read, bob.integrity, bob.sends_to()) == ([b"hello"], [IntegrityOk()], 1)


@pytest.mark.usefixtures("few_answers")
def test_a_router_that_says_again_and_again_that_there_is_room() -> None:
    _, bob = connected_parties()
    queue = receive_queues(bob.db, bob.connection_id)[0]
    for number in range(LIMIT + 2):
        message_id = bytes([number]) * 24
        msg = Msg(message_id, seal_message(queue.router_secret, message_id, QuotaExceeded(0)))
        assert bob.run(
            lambda tx, msg=msg: incoming.receive(tx, queue.server, queue.recipient_id, msg)  # type: ignore[misc]
        )
    assert waiting(bob) == LIMIT


def test_a_queue_that_is_drained_wakes_those_in_the_other_direction() -> None:
    """When both are full, each side's QCONT waits behind messages that the other side has no room for."""
    _, bob = connected_parties()
    queue = receive_queues(bob.db, bob.connection_id)[0]
    msg = Msg(bytes(24), seal_message(queue.router_secret, bytes(24), QuotaExceeded(0)))

    def drained(tx: Tx) -> set[object]:
        incoming.receive(tx, queue.server, queue.recipient_id, msg)
        return {*tx.hurried}

    assert bob.run(drained) == {send_queues(bob.db, bob.connection_id)[0].queue_id}


def test_a_request_that_is_repeated_is_one() -> None:
    alice = Party("alice", Routers())
    queue = finish(alice._maker.make(SERVERS[0], QueueMode.CONTACT))
    address = alice.run(lambda tx: handshake.created(tx, queue, None, pq=False))
    for link in ("one", "two", "one"):
        envelope = InvitationEnvelope(7, link, b"Bob")
        alice.run(
            lambda tx, envelope=envelope: handshake.request_received(  # type: ignore[misc]
                tx, connection(tx.db, address), envelope
            )
        )
    assert [request.info for request in handshake.waiting(alice.db)] == [b"Bob", b"Bob"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (b'{"qiSize":3}', 3),
        (b'{"qiSize":1e999}', 0),
        (b'{"qiSize":"3"}', 0),
        (b"[" * 15_000, 0),
        (b"3", 0),
        (b"{}", 0),
        (b"", 0),
    ],
)
def test_what_a_router_says_of_a_queue(text: bytes, size: int) -> None:
    assert waiting_messages(Info(text)) == size


class Queues:
    def __init__(self) -> None:
        self.messages: list[Delivered] = []

    async def received(
        self, server: SmpServer, messages: Sequence[Delivered], _acknowledge: object
    ) -> list[EntityId]:
        self.messages += messages
        return []

    async def queues(self, *_which: object) -> list[ReceiveQueue]:
        return []

    async def lost(self, server: SmpServer, service_id: EntityId | None) -> None:
        pass


async def test_a_router_that_does_not_wait_for_acks() -> None:
    inbox: Any = Queues()
    raw: Any = None
    link = RouterLink(SERVERS[0], None, inbox)  # type: ignore[arg-type]
    for number in range(5):
        await link._on_events(
            [
                Received(NO_CORR, EntityId(name), Msg(bytes([number]) * 24, b""), raw)
                for name in (b"one", b"two")
            ]
        )
    assert [message.recipient_id for message in inbox.messages] == [b"one", b"two"]


class Hours(ModuleType):
    """asyncio whose waiting takes no time."""

    def __init__(self) -> None:
        super().__init__("asyncio")
        self.waits: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        if sum(self.waits) > FAR_LATER:
            raise FarLater


async def test_a_router_that_drops_every_session_is_left_alone_for_longer_and_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hang_up(_peer: PeerSession) -> None:
        pass

    async def connect(server: SmpServer, on_events: SmpEvents) -> SmpSession:
        return await connect_smp(server, Dialer(), on_events=on_events)

    inbox: Any = Queues()
    hours = Hours()
    monkeypatch.setattr("agent.duplex.routers.asyncio", hours)
    async with scripted_router(hang_up) as server:
        with pytest.raises(FarLater):
            await RouterLink(server, connect, inbox).keep()
    assert (hours.waits[0], hours.waits[-1]) == (2.0, 180.0)


async def test_routers_that_were_only_visited_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_links, "MAX_VISITED", LIMIT)
    async with open_duplex(config(tmp_path / "alice.db", *SERVERS)) as alice:
        servers = [SmpServer((f"router{number}.example",), "", bytes(32)) for number in range(9)]
        for server in (*servers, servers[7]):
            alice._links.link(Purpose(server.canonical))
        assert [purpose.server for purpose in alice._links._links] == [servers[6], servers[8], servers[7]]
