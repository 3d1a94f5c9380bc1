"""A whole handshake of the deployed implementation, from the link to the first message of both sides."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.agent.connection_requests import InvitationRequest, parse_request
from protocol.agent.envelopes import (
    ClientMessage,
    ConfirmationEnvelope,
    MessageEnvelope,
    decode_agent_envelope,
    decode_body,
    encode_agent_envelope,
    padded_sizes,
    seal_body,
)
from protocol.agent.kem import Accepted, Encapsulated, decapsulate
from protocol.agent.messages import AGENT_MESSAGE, ConnectionReply
from protocol.agent.ratchet import creator_ratchet, joiner_ratchet
from protocol.agent.versions import AGENT_VERSIONS, E2E_VERSIONS, pq_possible
from protocol.agent.x3dh import accept, joiner_params
from protocol.crypto import X25519PrivateKey
from protocol.queue_uri import SMP_CLIENT_VERSIONS
from tests.protocol.agent.captured import (
    Script,
    creator_keys,
    joiner_keys,
    label,
    queue_info,
    ratchet_kem,
    raw,
    vectors,
)
from tests.protocol.agent.conversation import Party

AGENT, E2E, CLIENT = AGENT_VERSIONS.max, E2E_VERSIONS.max, SMP_CLIENT_VERSIONS.max


class Side:
    """One party's keys for the queue that it sends to."""

    def __init__(self, own: str, peer: str, party: Party | None, pq: bool) -> None:
        self.own, self.peer = X25519PrivateKey(raw(own)), X25519PrivateKey(raw(peer))
        self.party, self.pq = party, pq

    def send(self, step: Any, params: Any) -> bytes:
        assert self.party is not None
        confirmation = step["what"] == "confirmation"
        sizes = padded_sizes(AGENT, self.pq)
        size = sizes.connection_info if confirmation else sizes.message
        sealed = self.party.encrypt(raw(step["agent_message"]), size, E2E, self.pq if confirmation else None)
        kind = ConfirmationEnvelope(AGENT, params, sealed) if confirmation else MessageEnvelope(AGENT, sealed)
        assert encode_agent_envelope(kind).hex() == step["agent_envelope"]
        key, secret = self.own.public if confirmation else None, self.own.exchange(self.peer.public)
        content = ClientMessage(raw(step["agent_envelope"]))
        return seal_body(CLIENT, key, secret, raw(step["nonce"]), content)


@pytest.mark.parametrize("vector", vectors("handshake"), ids=label)
def test_handshake(vector: Any) -> None:
    link = parse_request(vector["link"])
    assert isinstance(link, InvitationRequest)
    theirs = link.e2e.at(E2E)
    keys, kem = joiner_keys(vector), ratchet_kem(vector["b_kem"])
    if kem and theirs.kem:
        accepted = _accepted_by_joiner(vector)
        kem = accept(kem.pair, theirs.kem.public, accepted)
    params = joiner_params(keys, kem, E2E)
    a_pq, b_pq = (vector[f"{who}_pq_support"] and pq_possible(AGENT, E2E) for who in "ab")
    b = Side(
        vector["b_sender_private"],
        vector["a_queue_private"],
        Party(joiner_ratchet(keys, kem, theirs, E2E, Script(vector["b_dh_private"]))),
        b_pq,
    )
    a = Side(vector["a_sender_private"], vector["b_queue_private"], None, a_pq)
    for step in vector["steps"]:
        sender, receiver = (a, b) if step["by"] == "a" else (b, a)
        sent = sender.send(step, params if step["by"] == "b" else None)
        assert sent.hex() == step["send_body"]
        envelope = decode_agent_envelope(
            decode_body(sent).open(sender.peer.exchange(sender.own.public)).envelope
        )
        assert isinstance(envelope, ConfirmationEnvelope | MessageEnvelope)
        if receiver.party is None:
            assert isinstance(envelope, ConfirmationEnvelope)
            assert envelope.params is not None
            receiver.party = Party(creator_ratchet(creator_keys(vector), envelope.params, E2E, a_pq))
        fresh = Script(step["receiver_new_dh_private"], step["receiver_new_kem"])
        plain = receiver.party.decrypt(envelope.ratchet_message, fresh)
        assert plain.hex() == step["agent_message"]
        message = AGENT_MESSAGE.decode(plain)
        if isinstance(message, ConnectionReply):
            assert message.queues == (queue_info(vector["reply_queue"]),)


def _accepted_by_joiner(vector: Any) -> Any:
    """The encapsulation stands in the confirmation; its secret is what the creator gets out of it."""
    envelope = decode_agent_envelope(raw(vector["steps"][0]["agent_envelope"]))
    assert isinstance(envelope, ConfirmationEnvelope)
    assert envelope.params is not None
    kem = envelope.params.kem
    assert isinstance(kem, Accepted)
    return Encapsulated(kem.ciphertext, decapsulate(raw(vector["a_kem"]["secret"]), kem.ciphertext))
