"""Messages, envelopes, links and small tables as the deployed implementation has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from protocol.agent.connection_requests import REQUEST, ContactRequest, parse_request, request_text
from protocol.agent.e2e_params import E2eKeys
from protocol.agent.envelopes import (
    AgentEnvelope,
    ClientMessage,
    ConfirmationEnvelope,
    InvitationEnvelope,
    MessageEnvelope,
    RatchetKeyEnvelope,
    decode_agent_envelope,
    decode_body,
    encode_agent_envelope,
    padded_sizes,
    seal_body,
)
from protocol.agent.errors import BodyNotOpened, EarlierMessage, TooManySkipped, UnknownHeader
from protocol.agent.kem import KEM_PARAMS
from protocol.agent.messages import (
    A_MESSAGE,
    AGENT_MESSAGE,
    AgentMessage,
    ConnectionInfo,
    ConnectionReply,
    Numbered,
    RatchetInfo,
    UserMessage,
    message_hash,
)
from protocol.agent.ratchet_sync import SYNC_STATES, sends_first
from protocol.agent.retry import FAST, RECONNECT, first
from protocol.agent.short_links import SHORT_LINK, parse_short_link
from protocol.blocks import PAD_LENGTH_SIZE
from protocol.crypto import BoxError, X25519PrivateKey, decode_public_key
from protocol.encoding import CorrId, Reader, Writer
from protocol.errors import DecodeError
from protocol.link_crypto import sender_id_of
from protocol.queue_uri import (
    parse_queue_uri,
    pull_queue_info,
    pull_queue_uri,
    push_queue_info,
    push_queue_uri,
)
from protocol.versions import VersionRange
from tests.protocol.agent import captured
from tests.protocol.agent.captured import label, pair, raw, vectors


def whole(pull: Any, data: bytes) -> Any:
    r = Reader(data)
    value = pull(r)
    r.check_end()
    return value


def pushed(push: Any, value: Any) -> bytes:
    w = Writer()
    push(w, value)
    return w.value()


@pytest.mark.parametrize("vector", vectors("queue_uri_text"), ids=label)
def test_queue_text(vector: Any) -> None:
    assert captured.queue_uri(vector["value"]).text() == vector["text"]
    assert parse_queue_uri(vector["text"]) == captured.queue_uri(vector["decoded"])


@pytest.mark.parametrize("vector", vectors("queue_uri_binary"), ids=label)
def test_queue_binary(vector: Any) -> None:
    assert pushed(push_queue_uri, captured.queue_uri(vector["value"])).hex() == vector["binary"]
    assert whole(pull_queue_uri, raw(vector["binary"])) == captured.queue_uri(vector["decoded"])


@pytest.mark.parametrize("vector", vectors("queue_info_binary"), ids=label)
def test_queue_info(vector: Any) -> None:
    assert pushed(push_queue_info, captured.queue_info(vector["value"])).hex() == vector["binary"]
    assert whole(pull_queue_info, raw(vector["binary"])) == captured.queue_info(vector["decoded"])


@pytest.mark.parametrize("vector", vectors("conn_req_text"), ids=label)
def test_request_text(vector: Any) -> None:
    request = captured.request(vector["value"])
    assert request_text(request) == vector["text"]
    assert parse_request(vector["text"]) == request


@pytest.mark.parametrize("vector", vectors("conn_req_text_decode"), ids=label)
def test_request_spelled_otherwise(vector: Any) -> None:
    request = parse_request(vector["text"])
    assert request == captured.request(vector["decoded"])
    assert request_text(request) == vector["reencoded"]


@pytest.mark.parametrize("vector", vectors("conn_req_binary"), ids=label)
def test_request_binary(vector: Any) -> None:
    assert pushed(REQUEST.push, captured.request(vector["value"])).hex() == vector["binary"]
    assert whole(REQUEST.pull, raw(vector["binary"])) == captured.request(vector["decoded"])


@pytest.mark.parametrize("vector", vectors("short_link"), ids=label)
def test_short_link(vector: Any) -> None:
    link = captured.short_link(vector["value"])
    assert link.text() == vector["text"]
    assert parse_short_link(vector["text"]) == link
    assert pushed(SHORT_LINK.push, link).hex() == vector["binary"]
    assert pushed(SHORT_LINK.push, whole(SHORT_LINK.pull, raw(vector["binary"]))).hex() == vector["binary"]


@pytest.mark.parametrize("vector", vectors("sender_id"), ids=label)
def test_sender_id(vector: Any) -> None:
    assert sender_id_of(CorrId(raw(vector["correlation_id"]))).hex() == vector["sender_id"]


def envelope(vector: Any) -> AgentEnvelope:
    version, tail = vector["agent_version"], raw(vector["tail"])
    match vector["type"]:
        case "C":
            e2e = vector["e2e"]
            return ConfirmationEnvelope(version, e2e and captured.e2e_params(e2e), tail)
        case "M":
            return MessageEnvelope(version, tail)
        case "I":
            return InvitationEnvelope(version, vector["request_text"], tail)
    return RatchetKeyEnvelope(version, captured.e2e_params(vector["e2e"]), tail)


@pytest.mark.parametrize("vector", vectors("agent_envelope"), ids=label)
def test_envelope(vector: Any) -> None:
    assert encode_agent_envelope(envelope(vector)).hex() == vector["binary"]
    assert decode_agent_envelope(raw(vector["binary"])) == envelope(vector)


def agent_message(vector: Any) -> AgentMessage:
    match vector["type"]:
        case "I":
            return ConnectionInfo(raw(vector["info"]))
        case "D":
            return ConnectionReply(tuple(map(captured.queue_info, vector["queues"])), raw(vector["info"]))
        case "R":
            return RatchetInfo(raw(vector["info"]))
    inner = whole(A_MESSAGE.pull, raw(vector["message"]))
    return Numbered(vector["id"], raw(vector["previous_hash"]), inner)


@pytest.mark.parametrize("vector", vectors("agent_message"), ids=label)
def test_agent_message(vector: Any) -> None:
    encoded = AGENT_MESSAGE.encode(agent_message(vector))
    assert encoded.hex() == vector["binary"]
    assert AGENT_MESSAGE.decode(encoded) == agent_message(vector)
    assert message_hash(encoded).hex() == vector["hash"]


@pytest.mark.parametrize("vector", vectors("a_message"), ids=label)
def test_a_message(vector: Any) -> None:
    message = captured.a_message(vector)
    assert pushed(A_MESSAGE.push, message).hex() == vector["binary"]
    assert whole(A_MESSAGE.pull, raw(vector["binary"])) == message


REFUSED: dict[str, Callable[[bytes], Any]] = {
    "agent_envelope": decode_agent_envelope,
    "agent_message": AGENT_MESSAGE.decode,
    "a_message": lambda data: whole(A_MESSAGE.pull, data),
    "kem_params": lambda data: whole(KEM_PARAMS.pull, data),
}


@pytest.mark.parametrize("vector", vectors("refused"), ids=label)
def test_refused(vector: Any) -> None:
    with pytest.raises(DecodeError):
        REFUSED[vector["format"]](raw(vector["binary"]))


@pytest.mark.parametrize("vector", vectors("refused_text"), ids=label)
def test_refused_text(vector: Any) -> None:
    parse: Any = {"conn_req_text": parse_request, "short_link": parse_short_link}[vector["format"]]
    with pytest.raises(DecodeError):
        parse(vector["text"])


@pytest.mark.parametrize("vector", vectors("queue_message"), ids=label)
def test_queue_message(vector: Any) -> None:
    own, peer = (X25519PrivateKey(raw(vector[f"{who}_private"])) for who in ("sender", "recipient"))
    key = vector["sender_auth_key_der"] and decode_public_key(raw(vector["sender_auth_key_der"]))
    message = ClientMessage(raw(vector["body"]), key)
    dh_key, secret = own.public if vector["with_key"] else None, own.exchange(peer.public)
    sent = seal_body(vector["version"], dh_key, secret, raw(vector["nonce"]), message)
    assert sent.hex() == vector["send_body"]
    body = decode_body(sent)
    assert (body.client_version, body.dh_key) == (vector["version"], dh_key)
    assert body.open(peer.exchange(own.public)) == message
    with pytest.raises(BoxError):
        body.open(bytes(32))


@pytest.mark.parametrize("vector", vectors("contact_request"), ids=label)
def test_contact_request(vector: Any) -> None:
    own, address = (X25519PrivateKey(raw(vector[n])) for n in ("sender_private", "address_queue_private"))
    offered = parse_request(vector["address"])
    assert isinstance(offered, ContactRequest)
    assert offered.queues[0].dh_key == address.public
    content = encode_agent_envelope(InvitationEnvelope(7, vector["invitation"], raw(vector["info"])))
    assert content.hex() == vector["agent_envelope"]
    secret = own.exchange(address.public)
    sent = seal_body(4, own.public, secret, raw(vector["nonce"]), ClientMessage(content))
    assert sent.hex() == vector["send_body"]


@pytest.mark.parametrize("vector", vectors("rk_hash"), ids=label)
def test_synchronisation_roles(vector: Any) -> None:
    own, peer = (
        E2eKeys(pair(vector[f"{who}_k1_private"]), pair(vector[f"{who}_k2_private"])).params(3).hash
        for who in ("own", "peer")
    )
    assert (own.hex(), peer.hex()) == (vector["own_hash"], vector["peer_hash"])
    assert sends_first(own, peer) == (vector["own_role"] == "sending")


@pytest.mark.parametrize("vector", vectors("retry_interval"), ids=label)
def test_retry_interval(vector: Any) -> None:
    interval = {"fast": FAST, "reconnect": RECONNECT}[vector["name"]]
    retry, delays = first(interval), []
    for _ in vector["delays"]:
        delays.append(retry.delay)
        retry = retry.next(interval)
    assert delays == vector["delays"]


ERRORS: dict[str, type[Exception]] = {
    "DECRYPT_AES": BodyNotOpened,
    "DECRYPT_CB": BoxError,
    "RATCHET_HEADER": UnknownHeader,
    "RATCHET_EARLIER": EarlierMessage,
    "RATCHET_SKIPPED": TooManySkipped,
}


def test_synchronisation_states() -> None:
    captured_states = {ERRORS[vector["name"]]: vector["state"] for vector in vectors("sync_class")}
    assert {error: state.value for error, state in SYNC_STATES.items()} == captured_states


@pytest.mark.parametrize("vector", vectors("version"), ids=label)
def test_version(vector: Any) -> None:
    assert VersionRange(*vector["ours"]).common(VersionRange(*vector["theirs"])) == vector["agreed"]


@pytest.mark.parametrize("vector", vectors("padded_length"), ids=label)
def test_padded_length(vector: Any) -> None:
    sizes = padded_sizes(vector["agent_version"], vector["pq_support"])
    assert (sizes.connection_info, sizes.message) == (vector["connection_info"], vector["message"])
    empty = AGENT_MESSAGE.encode(Numbered(1, bytes(32), UserMessage(b"")))
    assert sizes.message - PAD_LENGTH_SIZE - len(empty) in (15795, 13573)  # the largest body
