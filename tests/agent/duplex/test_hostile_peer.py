"""Whatever a peer sends, in whatever state: an event may tell of it, and the agent goes on."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.duplex import ratchets
from agent.duplex.message_kinds import MessageKind
from agent.duplex.outgoing import next_delivery
from agent.duplex.records import SendQueue
from agent.duplex.secrets import Secrets
from agent.duplex.store import Tx
from agent.duplex.tables import connection, receive_queues, send_queues
from agent.errors import Prohibited
from protocol.addresses import SmpServer
from protocol.agent.e2e_params import E2eParams
from protocol.agent.envelopes import (
    AgentEnvelope,
    ClientMessage,
    ConfirmationEnvelope,
    InvitationEnvelope,
    MessageEnvelope,
    RatchetKeyEnvelope,
    encode_agent_envelope,
    seal_body,
)
from protocol.agent.errors import RatchetError
from protocol.agent.messages import (
    AGENT_MESSAGE,
    AgentMessage,
    AMessage,
    ConnectionInfo,
    ConnectionReply,
    Hello,
    NewQueue,
    Numbered,
    QueueAdd,
    QueueAddress,
    QueueContinue,
    QueueKey,
    QueueKeys,
    QueuesUse,
    QueueTest,
    QueueUse,
    RatchetInfo,
    RatchetReady,
    Receipt,
    Receipts,
    UserMessage,
)
from protocol.agent.ratchet_sync import SyncState
from protocol.agent.x448 import X448PublicKey
from protocol.crypto import X25519PublicKey
from protocol.encoding import EntityId
from protocol.queue_uri import QueueInfo, QueueUri
from protocol.smp_messages import QueueMode, Send
from protocol.versions import VersionRange
from tests.agent.duplex.simulation import SERVERS, Party, Routers, connected_parties

STRANGE = SmpServer(("nowhere.example", "b.example"), "5223", bytes(32))
NUMBERS = (-(2**63), -1, 0, 1, 2, 3, 4, 5, 2**63 - 1)
SECRETS = Secrets()


class Peer:
    """Knows all keys of its side, and keeps to no rule."""

    def __init__(self, own: Party, victim: Party, chance: random.Random) -> None:
        self._own, self._victim, self._chance = own, victim, chance

    def body(self) -> tuple[SendQueue, bytes] | None:
        """Of a SEND to a queue of the victim."""
        queues = send_queues(self._own.db, self._own.connection_id)
        if not queues:
            return None
        queue = self._pick(*queues)
        envelope = encode_agent_envelope(self._own.run(self._envelope))
        if self._chance.random() < 0.05:
            envelope = envelope[: self._chance.randrange(len(envelope))]
        key = self._pick(None, None, None, queue.e2e_key.public, self._dh())
        message = ClientMessage(envelope, self._pick(None, None, SECRETS.x25519().public))
        version = self._pick(0, 1, 4, 4, 4, 99)
        return queue, seal_body(version, key, queue.e2e_secret, SECRETS.nonce(), message)

    def _pick(self, *choices: Any) -> Any:
        return self._chance.choice(choices)

    def _envelope(self, tx: Tx) -> AgentEnvelope:
        version, sealed = self._pick(0, 1, 2, 6, 7, 7, 7, 99), self._sealed(tx)
        params = self._params()
        envelope: AgentEnvelope = self._pick(
            *(MessageEnvelope(version, sealed),) * 4,
            ConfirmationEnvelope(version, self._pick(None, params), sealed),
            InvitationEnvelope(version, "simplex:/contact#/?v=2-7&smp=zz", b"Mallory"),
            RatchetKeyEnvelope(version, params, b"R"),
        )
        return envelope

    def _params(self) -> E2eParams:
        params = SECRETS.e2e_keys(pq=False).params(self._pick(2, 3))
        k1, version = self._pick(params.k1, params.k1, X448PublicKey(bytes(56))), params.version
        return E2eParams(self._pick(version, version, 1, 99), k1, params.k2)

    def _sealed(self, tx: Tx) -> bytes:
        plain = self._pick(b"", b"M", *(AGENT_MESSAGE.encode(self._agent_message()),) * 8)
        try:
            sealer = ratchets.seal_next(tx, self._own.connection_id, self._pick(None, False))
        except RatchetError:
            return bytes(200)
        sealed = sealer.seal(plain, self._pick(1000, 13618))
        result: bytes = self._pick(sealed, sealed, sealed, sealed[:-1] + b"\0")
        return result

    def _agent_message(self) -> AgentMessage:
        number, digest = self._pick(*NUMBERS), self._pick(b"", bytes(32), b"short")
        message: AgentMessage = self._pick(
            *(Numbered(number, digest, self._message()),) * 5,
            ConnectionInfo(b"Mallory"),
            ConnectionReply((self._info(),), b"Mallory"),
            RatchetInfo(b""),
        )
        return message

    def _message(self) -> AMessage:
        receipts = tuple(Receipt(number, self._pick(b"", bytes(32))) for number in NUMBERS)
        offer = NewQueue(self._uri(), self._pick(None, self._address()))
        message: AMessage = self._pick(
            Hello(),
            UserMessage(b"hello"),
            Receipts(receipts),
            QueueContinue(self._address()),
            QueueAdd((offer,)),
            QueueKeys((QueueKey(self._info(), SECRETS.ed25519().public),)),
            QueuesUse((QueueUse(self._address(), True),)),
            QueueTest((self._address(),)),
            RatchetReady(self._pick(*NUMBERS)),
        )
        return message

    def _address(self) -> QueueAddress:
        known = [
            queue.address
            for party in (self._own, self._victim)
            for queue in receive_queues(party.db, party.connection_id)
        ]
        address: QueueAddress = self._pick(*known, *known, QueueAddress(STRANGE, EntityId(b"")))
        return address

    def _dh(self) -> X25519PublicKey:
        key: X25519PublicKey = self._pick(SECRETS.x25519().public, X25519PublicKey(bytes(32)))
        return key

    def _uri(self) -> QueueUri:
        versions = self._pick(VersionRange(1, 4), VersionRange(1, 1), VersionRange(9, 9))
        sender_id = self._pick(EntityId(SECRETS.nonce()), self._address().sender_id)
        server, mode = self._pick(STRANGE, *SERVERS), self._pick(None, *QueueMode)
        return QueueUri(versions, server, sender_id, self._dh(), mode)

    def _info(self) -> QueueInfo:
        address, mode = self._address(), self._pick(None, *QueueMode)
        return QueueInfo(self._pick(2, 3, 4, 99), address.server, address.sender_id, self._dh(), mode)


def go_on(who: Party, peer: Party) -> None:
    for choice in (0, 1):
        who.command(choice)
        who.receive(choice)
        who.ack()
        who.deliver(choice)
        peer.receive(choice)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.integers(0, 12))
def test_any_message_in_any_state(seed: int, handshake: int) -> None:
    chance, routers = random.Random(seed), Routers()
    alice, bob = Party("alice", routers), Party("bob", routers)
    bob.join(alice.create())
    for _ in range(handshake):
        go_on(bob, alice)
        go_on(alice, bob)
    for _ in range(25):
        victim, other = chance.choice(((alice, bob), (bob, alice)))
        sent = Peer(other, victim, chance).body()
        if sent is not None and routers.has(sent[0].sender_id):
            routers.answer(sent[0].sender_id, Send(False, sent[1]))
        what = chance.choice((victim.switch, victim.abort_switch, victim.sync, None, None, None))
        if what is not None and send_queues(victim.db, victim.connection_id):
            with suppress(Prohibited):
                what()
        go_on(victim, other)


def test_a_ratchet_that_only_the_peer_can_begin_to_use() -> None:
    """Keys, other keys, and something unreadable: one might write again, but has nothing to write with."""
    alice, bob = connected_parties()

    def left_without_a_chain(tx: Tx) -> None:
        ratchet = ratchets.ratchet_of(tx.db, bob.connection_id)
        assert ratchet is not None
        ratchets.put_ratchet(tx, bob.connection_id, replace(ratchet, snd=None))

    bob.run(left_without_a_chain)
    assert connection(bob.db, bob.connection_id).sync_state is SyncState.OK
    with pytest.raises(Prohibited, match="write first"):
        bob.send(b"hello")
    assert bob.switch()
    bob.command()
    assert bob.errors == ["the other side has to write first"]
    assert alice.errors == []


def test_a_message_that_does_not_fit_is_given_up() -> None:
    alice, _ = connected_parties()
    alice.send(b"hello")
    alice.db.execute("UPDATE sent_messages SET size = 17000 WHERE kind = ?", (MessageKind.USER,))
    alice.deliver()
    assert [failed.error for failed in alice.failures] == ["SMP LARGE_MSG"]
    (queue,) = send_queues(alice.db, alice.connection_id)
    assert next_delivery(alice.db, queue.queue_id) is None
