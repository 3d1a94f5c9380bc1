"""The layers of SEND's body around a ratchet message: queue encryption, sender's key, kind of envelope."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.agent.e2e_params import E2E_PARAMS, E2eParams
from protocol.agent.forms import LARGE, TAIL, WORD16, Form, exactly, optional, record, text
from protocol.agent.kem import Accepted
from protocol.agent.versions import AGENT_PQ
from protocol.blocks import pad, unpad
from protocol.crypto import (
    AuthPublicKey,
    X25519PublicKey,
    box,
    open_box,
    pull_public_key,
    pull_x25519_public,
    push_key,
)
from protocol.encoding import NONCE_SIZE, Reader, Writer
from protocol.errors import DecodeError

SIZE_WITH_KEY = 15904
SIZE_WITHOUT_KEY = 16000
"Of the padded content of a queue's box: with the key in front the whole is not longer than without."


@dataclass(frozen=True, slots=True)
class PaddedSizes:
    """The lengths to which plaintexts of the ratchet are padded."""

    connection_info: int
    message: int


_CLASSIC_SIZES = PaddedSizes(14832, 15840)
_PQ_SIZES = PaddedSizes(11106, 13618)


def padded_sizes(agent_version: int, pq_support: bool) -> PaddedSizes:
    return _PQ_SIZES if pq_support and agent_version >= AGENT_PQ else _CLASSIC_SIZES


# The kind of envelope


@dataclass(frozen=True, slots=True)
class ConfirmationEnvelope:
    """Wire tag C: the first message of either side; the joiner's brings the keys of the ratchet."""

    agent_version: int
    params: E2eParams | None
    ratchet_message: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class MessageEnvelope:
    """Wire tag M."""

    agent_version: int
    ratchet_message: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class InvitationEnvelope:
    """Wire tag I: sent to a contact address, with a link for the answer."""

    agent_version: int
    link: str = field(repr=False)
    info: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class RatchetKeyEnvelope:
    """Wire tag R: keys for a new ratchet in place of one that went wrong."""

    agent_version: int
    params: E2eParams
    info: bytes = field(repr=False)


AgentEnvelope = ConfirmationEnvelope | MessageEnvelope | InvitationEnvelope | RatchetKeyEnvelope


_PARAMS = optional(E2E_PARAMS)
_LINK = text(LARGE)


def decode_agent_envelope(data: bytes) -> AgentEnvelope:
    r = Reader(data)
    version, tag = r.pull_word16(), r.pull_bytes(1)
    if tag == b"C":
        return ConfirmationEnvelope(version, _PARAMS.pull(r), r.pull_tail())
    if tag == b"M":
        return MessageEnvelope(version, r.pull_tail())
    if tag == b"I":
        return InvitationEnvelope(version, _LINK.pull(r), r.pull_tail())
    if tag == b"R":
        return RatchetKeyEnvelope(version, _proposing(E2E_PARAMS.pull(r)), r.pull_tail())
    raise DecodeError


def encode_agent_envelope(envelope: AgentEnvelope) -> bytes:
    w = Writer()
    w.push_word16(envelope.agent_version)
    match envelope:
        case ConfirmationEnvelope(_, params, message):
            w.push_bytes(b"C")
            _PARAMS.push(w, params)
            w.push_bytes(message)
        case MessageEnvelope(_, message):
            w.push_bytes(b"M" + message)
        case InvitationEnvelope(_, link, info):
            w.push_bytes(b"I")
            _LINK.push(w, link)
            w.push_bytes(info)
        case _:
            w.push_bytes(b"R")
            E2E_PARAMS.push(w, envelope.params)
            w.push_bytes(envelope.info)
    return w.value()


def _proposing(params: E2eParams) -> E2eParams:
    """Nothing was proposed before it, so it can accept nothing."""
    if isinstance(params.kem, Accepted):
        raise DecodeError
    return params


# The content of a queue's box


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """`sender_key` is for a queue that its recipient has to secure."""

    envelope: bytes = field(repr=False)
    sender_key: AuthPublicKey | None = None


def decode_client_message(data: bytes) -> ClientMessage:
    r = Reader(data)
    tag = r.pull_bytes(1)
    if tag == b"_":
        return ClientMessage(r.pull_tail())
    if tag == b"K":
        key = pull_public_key(r)
        return ClientMessage(r.pull_tail(), key)
    raise DecodeError


def encode_client_message(message: ClientMessage) -> bytes:
    if message.sender_key is None:
        return b"_" + message.envelope
    w = Writer(b"K")
    push_key(w, message.sender_key)
    w.push_bytes(message.envelope)
    return w.value()


# The body of SEND


@dataclass(frozen=True, slots=True)
class SentBody:
    """`dh_key` comes with the first message to a queue and agrees the secret of all others."""

    client_version: int
    dh_key: X25519PublicKey | None
    nonce: bytes = field(repr=False)
    boxed: bytes = field(repr=False)

    def open(self, secret: bytes) -> ClientMessage:
        """DecodeError for what is malformed inside, BoxError for what does not open."""
        return decode_client_message(unpad(open_box(secret, self.nonce, self.boxed)))


_BODY = record(
    SentBody,
    client_version=WORD16,
    dh_key=optional(Form(pull_x25519_public, push_key)),
    nonce=exactly(NONCE_SIZE),
    boxed=TAIL,
)
decode_body = _BODY.decode


def seal_body(
    client_version: int, dh_key: X25519PublicKey | None, secret: bytes, nonce: bytes, message: ClientMessage
) -> bytes:
    """The body of SEND; TooLarge if the message does not fit."""
    size = SIZE_WITHOUT_KEY if dh_key is None else SIZE_WITH_KEY
    boxed = box(secret, nonce, pad(encode_client_message(message), size))
    return _BODY.encode(SentBody(client_version, dh_key, nonce, boxed))
