"""What the ratchet carries: connection information, and numbered messages of users and agents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protocol.addresses import SmpServer, pull_smp_server, push_smp_server
from protocol.crypto import AuthPublicKey, pull_public_key, push_key, sha256
from protocol.encoding import EntityId, Reader, Writer
from protocol.errors import DecodeError
from protocol.queue_uri import (
    QueueInfo,
    QueueUri,
    pull_queue_info,
    pull_queue_uri,
    push_queue_info,
    push_queue_uri,
)


@dataclass(frozen=True, slots=True)
class QueueAddress:
    """A queue as its sender knows it."""

    server: SmpServer
    sender_id: EntityId = field(repr=False)


@dataclass(frozen=True, slots=True)
class Hello:
    """The last word of a handshake whose queues are secured by their recipients."""


@dataclass(frozen=True, slots=True)
class UserMessage:
    """A_MSG."""

    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Receipt:
    message_id: int
    message_hash: bytes = field(repr=False)
    info: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Receipts:
    """A_RCVD."""

    receipts: tuple[Receipt, ...]


@dataclass(frozen=True, slots=True)
class QueueContinue:
    """A_QCONT: the queue at this address is no longer full."""

    address: QueueAddress


@dataclass(frozen=True, slots=True)
class NewQueue:
    queue: QueueUri
    replaced: QueueAddress | None


@dataclass(frozen=True, slots=True)
class QueueAdd:
    """QADD: the recipient offers a queue in place of another."""

    queues: tuple[NewQueue, ...]


@dataclass(frozen=True, slots=True)
class QueueKey:
    queue: QueueInfo
    "With the sender's X25519 key in place of the recipient's."
    sender_key: AuthPublicKey


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """QKEY: the sender's keys for offered queues."""

    queues: tuple[QueueKey, ...]


@dataclass(frozen=True, slots=True)
class QueueUse:
    address: QueueAddress
    primary: bool


@dataclass(frozen=True, slots=True)
class QueuesUse:
    """QUSE: the offered queues are secured."""

    queues: tuple[QueueUse, ...]


@dataclass(frozen=True, slots=True)
class QueueTest:
    """QTEST: the first message on an offered queue."""

    addresses: tuple[QueueAddress, ...]


@dataclass(frozen=True, slots=True)
class RatchetReady:
    """EREADY: the first message of a synchronised ratchet; the id is the last that was received before."""

    last_message_id: int


AMessage = (
    Hello
    | UserMessage
    | Receipts
    | QueueContinue
    | QueueAdd
    | QueueKeys
    | QueuesUse
    | QueueTest
    | RatchetReady
)


def pull_address(r: Reader) -> QueueAddress:
    return QueueAddress(pull_smp_server(r), EntityId(r.pull_short()))


def push_address(w: Writer, address: QueueAddress) -> None:
    push_smp_server(w, address.server)
    w.push_short(address.sender_id)


def _pull_receipt(r: Reader) -> Receipt:
    return Receipt(r.pull_int64(), r.pull_short(), r.pull_large())


def _push_receipt(w: Writer, receipt: Receipt) -> None:
    w.push_int64(receipt.message_id)
    w.push_short(receipt.message_hash)
    w.push_large(receipt.info)


def _pull_new_queue(r: Reader) -> NewQueue:
    return NewQueue(pull_queue_uri(r), r.pull_optional(pull_address))


def _push_new_queue(w: Writer, new: NewQueue) -> None:
    push_queue_uri(w, new.queue)
    w.push_optional(new.replaced, push_address)


def _pull_queue_key(r: Reader) -> QueueKey:
    return QueueKey(pull_queue_info(r), pull_public_key(r))


def _push_queue_key(w: Writer, key: QueueKey) -> None:
    push_queue_info(w, key.queue)
    push_key(w, key.sender_key)


def _pull_queue_use(r: Reader) -> QueueUse:
    return QueueUse(pull_address(r), r.pull_bool())


def _push_queue_use(w: Writer, use: QueueUse) -> None:
    push_address(w, use.address)
    w.push_bool(use.primary)


@dataclass(frozen=True, slots=True)
class _Form:
    tag: bytes
    kind: type[AMessage]
    pull: Callable[[Reader], Any]
    push: Callable[[Writer, Any], None]


_FORMS = (
    _Form(b"H", Hello, lambda r: Hello(), lambda w, m: None),
    _Form(b"M", UserMessage, lambda r: UserMessage(r.pull_tail()), lambda w, m: w.push_bytes(m.body)),
    _Form(
        b"V",
        Receipts,
        lambda r: Receipts(tuple(r.pull_nonempty(_pull_receipt))),
        lambda w, m: w.push_nonempty(m.receipts, _push_receipt),
    ),
    _Form(
        b"QC",
        QueueContinue,
        lambda r: QueueContinue(pull_address(r)),
        lambda w, m: push_address(w, m.address),
    ),
    _Form(
        b"QA",
        QueueAdd,
        lambda r: QueueAdd(tuple(r.pull_nonempty(_pull_new_queue))),
        lambda w, m: w.push_nonempty(m.queues, _push_new_queue),
    ),
    _Form(
        b"QK",
        QueueKeys,
        lambda r: QueueKeys(tuple(r.pull_nonempty(_pull_queue_key))),
        lambda w, m: w.push_nonempty(m.queues, _push_queue_key),
    ),
    _Form(
        b"QU",
        QueuesUse,
        lambda r: QueuesUse(tuple(r.pull_nonempty(_pull_queue_use))),
        lambda w, m: w.push_nonempty(m.queues, _push_queue_use),
    ),
    _Form(
        b"QT",
        QueueTest,
        lambda r: QueueTest(tuple(r.pull_nonempty(pull_address))),
        lambda w, m: w.push_nonempty(m.addresses, push_address),
    ),
    _Form(
        b"E",
        RatchetReady,
        lambda r: RatchetReady(r.pull_int64()),
        lambda w, m: w.push_int64(m.last_message_id),
    ),
)
_BY_TAG = {form.tag: form for form in _FORMS}
_BY_KIND = {form.kind: form for form in _FORMS}


def pull_a_message(r: Reader) -> AMessage:
    tag = r.pull_bytes(1)
    form = _BY_TAG.get(tag if tag != b"Q" else tag + r.pull_bytes(1))
    if form is None:
        raise DecodeError
    message: AMessage = form.pull(r)
    r.check_end()
    return message


def push_a_message(w: Writer, message: AMessage) -> None:
    form = _BY_KIND[type(message)]
    w.push_bytes(form.tag)
    form.push(w, message)


@dataclass(frozen=True, slots=True)
class ConnectionInfo:
    """What the creator of a connection says of himself. Wire tag I."""

    info: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ConnectionReply:
    """What the joiner says of himself, and where he is to be answered. Wire tag D."""

    queues: tuple[QueueInfo, ...]
    info: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class RatchetInfo:
    """Comes with new ratchet keys; empty so far. Wire tag R."""

    info: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Numbered:
    """A link of the integrity chain. Wire tag M."""

    message_id: int
    previous_hash: bytes = field(repr=False)
    message: AMessage


AgentMessage = ConnectionInfo | ConnectionReply | RatchetInfo | Numbered


def decode_agent_message(data: bytes) -> AgentMessage:
    r = Reader(data)
    tag = r.pull_bytes(1)
    if tag == b"I":
        return ConnectionInfo(r.pull_tail())
    if tag == b"D":
        return ConnectionReply(tuple(r.pull_nonempty(pull_queue_info)), r.pull_tail())
    if tag == b"R":
        return RatchetInfo(r.pull_tail())
    if tag == b"M":
        return Numbered(r.pull_int64(), r.pull_short(), pull_a_message(r))
    raise DecodeError


def encode_agent_message(message: AgentMessage) -> bytes:
    w = Writer()
    match message:
        case ConnectionInfo(info):
            w.push_bytes(b"I" + info)
        case ConnectionReply(queues, info):
            w.push_bytes(b"D")
            w.push_nonempty(queues, push_queue_info)
            w.push_bytes(info)
        case RatchetInfo(info):
            w.push_bytes(b"R" + info)
        case _:
            w.push_bytes(b"M")
            w.push_int64(message.message_id)
            w.push_short(message.previous_hash)
            push_a_message(w, message.message)
    return w.value()


def message_hash(encoded: bytes) -> bytes:
    """What the next message of the same sender refers to."""
    return sha256(encoded)
