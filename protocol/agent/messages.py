"""What the ratchet carries: connection information, and numbered messages of users and agents."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.addresses import SmpServer, pull_smp_server, push_smp_server
from protocol.agent.forms import (
    BOOL,
    INT64,
    LARGE,
    PUBLIC_KEY,
    QUEUE_INFO,
    QUEUE_URI,
    SHORT,
    TAIL,
    Form,
    nonempty,
    optional,
    record,
    tagged,
)
from protocol.crypto import AuthPublicKey, sha256
from protocol.encoding import EntityId
from protocol.queue_uri import QueueInfo, QueueUri


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


_ADDRESS = record(QueueAddress, server=Form(pull_smp_server, push_smp_server), sender_id=SHORT)
_RECEIPT = record(Receipt, message_id=INT64, message_hash=SHORT, info=LARGE)
_NEW_QUEUE = record(NewQueue, queue=QUEUE_URI, replaced=optional(_ADDRESS))
_QUEUE_KEY = record(QueueKey, queue=QUEUE_INFO, sender_key=PUBLIC_KEY)
_QUEUE_USE = record(QueueUse, address=_ADDRESS, primary=BOOL)
A_MESSAGE: Form[AMessage] = tagged(
    {
        b"H": record(Hello),
        b"M": record(UserMessage, body=TAIL),
        b"V": record(Receipts, receipts=nonempty(_RECEIPT)),
        b"QC": record(QueueContinue, address=_ADDRESS),
        b"QA": record(QueueAdd, queues=nonempty(_NEW_QUEUE)),
        b"QK": record(QueueKeys, queues=nonempty(_QUEUE_KEY)),
        b"QU": record(QueuesUse, queues=nonempty(_QUEUE_USE)),
        b"QT": record(QueueTest, addresses=nonempty(_ADDRESS)),
        b"E": record(RatchetReady, last_message_id=INT64),
    }
)


@dataclass(frozen=True, slots=True)
class ConnectionInfo:
    """What the creator of a connection says of himself."""

    info: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ConnectionReply:
    """What the joiner says of himself, and where he is to be answered."""

    queues: tuple[QueueInfo, ...]
    info: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class RatchetInfo:
    """Comes with new ratchet keys; empty so far."""

    info: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Numbered:
    """A link of the integrity chain."""

    message_id: int
    previous_hash: bytes = field(repr=False)
    message: AMessage


AgentMessage = ConnectionInfo | ConnectionReply | RatchetInfo | Numbered


AGENT_MESSAGE: Form[AgentMessage] = tagged(
    {
        b"I": record(ConnectionInfo, info=TAIL),
        b"D": record(ConnectionReply, queues=nonempty(QUEUE_INFO), info=TAIL),
        b"R": record(RatchetInfo, info=TAIL),
        b"M": record(Numbered, message_id=INT64, previous_hash=SHORT, message=A_MESSAGE),
    }
)


def message_hash(encoded: bytes) -> bytes:
    """What the next message of the same sender refers to."""
    return sha256(encoded)
