"""SMP commands and router messages, one class per wire word; `protocol.smp_codec` reads and writes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from protocol.addresses import SmpServer
from protocol.crypto import AuthPublicKey, X25519PublicKey
from protocol.encoding import EntityId
from protocol.errors import ErrorType
from protocol.hiding import hides_bytes
from protocol.names import NameRecord
from protocol.versions import VersionRange


class QueueMode(Enum):
    MESSAGING = b"M"
    "The sender can secure the queue."
    CONTACT = b"C"


@dataclass(frozen=True, slots=True)
class LinkData:
    """What a short link leads to, as its owner encrypted it: a part that never changes and one that may."""

    fixed: bytes = field(repr=False)
    user: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NewLink:
    """The short link that NEW sets at once. A messaging queue's link id is made by the router."""

    link_id: EntityId | None = field(repr=False)
    sender_id: EntityId = field(repr=False)
    "Made from the correlation id, so that a NEW whose answer was lost can be sent again."
    data: LinkData


@dataclass(frozen=True, slots=True)
class NotifierKeys:
    """A notifier's key for NSUB and the recipient's DH key for the meta of NMSG."""

    notifier_key: AuthPublicKey
    dh_key: X25519PublicKey


@dataclass(frozen=True, slots=True)
class NotifierIds:
    notifier_id: EntityId = field(repr=False)
    dh_key: X25519PublicKey


@hides_bytes
@dataclass(frozen=True, slots=True)
class QueueSet:
    """A set of queues by size and XOR hash. Before v19 the hash is unknown."""

    count: int
    ids_hash: bytes | None = None


# Commands


@dataclass(frozen=True, slots=True, kw_only=True)
class New:
    recipient_key: AuthPublicKey
    dh_key: X25519PublicKey
    password: bytes | None = field(default=None, repr=False)
    subscribe: bool = True
    mode: QueueMode | None = None
    link: NewLink | None = None
    notifier: NotifierKeys | None = None


@dataclass(frozen=True, slots=True)
class Sub:
    pass


@dataclass(frozen=True, slots=True)
class Subs:
    queues: QueueSet | None = None


@dataclass(frozen=True, slots=True)
class Key:
    sender_key: AuthPublicKey


@dataclass(frozen=True, slots=True)
class Skey:
    sender_key: AuthPublicKey


@dataclass(frozen=True, slots=True)
class Nkey:
    keys: NotifierKeys


@dataclass(frozen=True, slots=True)
class Ndel:
    pass


@dataclass(frozen=True, slots=True)
class Get:
    pass


@hides_bytes
@dataclass(frozen=True, slots=True)
class Ack:
    message_id: bytes


@dataclass(frozen=True, slots=True)
class Off:
    pass


@dataclass(frozen=True, slots=True)
class Del:
    pass


@dataclass(frozen=True, slots=True)
class Que:
    pass


@dataclass(frozen=True, slots=True)
class Send:
    notification: bool
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Nsub:
    pass


@dataclass(frozen=True, slots=True)
class Nsubs:
    queues: QueueSet | None = None


@dataclass(frozen=True, slots=True)
class Ping:
    pass


@dataclass(frozen=True, slots=True)
class Rkey:
    """All keys that the recipients of a contact queue may use from now on."""

    keys: tuple[AuthPublicKey, ...]


@dataclass(frozen=True, slots=True)
class Lset:
    link_id: EntityId = field(repr=False)
    data: LinkData


@dataclass(frozen=True, slots=True)
class Ldel:
    pass


@dataclass(frozen=True, slots=True)
class Lkey:
    sender_key: AuthPublicKey


@dataclass(frozen=True, slots=True)
class Lget:
    pass


@dataclass(frozen=True, slots=True)
class Prxy:
    """Asks a router to connect to another one and to forward commands to it."""

    server: SmpServer
    password: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Pfwd:
    """A client's command for another router, encrypted to it."""

    version: int
    key: X25519PublicKey = field(repr=False)
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Rfwd:
    """What a proxy makes of PFWD."""

    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Rslv:
    """Asks which contacts and channels a name leads to."""

    name: str = field(repr=False)


SmpCommand = (
    New
    | Sub
    | Subs
    | Key
    | Skey
    | Nkey
    | Ndel
    | Get
    | Ack
    | Off
    | Del
    | Que
    | Send
    | Nsub
    | Nsubs
    | Ping
    | Rkey
    | Lset
    | Ldel
    | Lkey
    | Lget
    | Prxy
    | Pfwd
    | Rfwd
    | Rslv
)

# Router messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Ids:
    recipient_id: EntityId = field(repr=False)
    sender_id: EntityId = field(repr=False)
    dh_key: X25519PublicKey
    mode: QueueMode | None = None
    link_id: EntityId | None = field(default=None, repr=False)
    service_id: EntityId | None = field(default=None, repr=False)
    notifier: NotifierIds | None = None


@dataclass(frozen=True, slots=True)
class Nid:
    ids: NotifierIds


@dataclass(frozen=True, slots=True)
class Sok:
    service_id: EntityId | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Soks:
    queues: QueueSet


@hides_bytes
@dataclass(frozen=True, slots=True)
class Msg:
    message_id: bytes
    body: bytes = field(repr=False)


@hides_bytes
class Nmsg(NamedTuple):
    """A tuple, not a dataclass: eighty of them come in a block, and a tuple is made in half the time."""

    nonce: bytes
    meta: bytes


@dataclass(frozen=True, slots=True)
class End:
    pass


@dataclass(frozen=True, slots=True)
class Ends:
    queues: QueueSet


@dataclass(frozen=True, slots=True)
class Deld:
    pass


@dataclass(frozen=True, slots=True)
class Alls:
    pass


@hides_bytes
@dataclass(frozen=True, slots=True)
class Info:
    json: bytes


@dataclass(frozen=True, slots=True)
class Ok:
    pass


@dataclass(frozen=True, slots=True)
class Err:
    error: ErrorType


@dataclass(frozen=True, slots=True)
class Pong:
    pass


@dataclass(frozen=True, slots=True)
class Lnk:
    sender_id: EntityId = field(repr=False)
    data: LinkData


@dataclass(frozen=True, slots=True)
class Pkey:
    """The proxy's session with the router, with that router's own proof of its session key."""

    session_id: bytes = field(repr=False)
    versions: VersionRange
    chain: tuple[bytes, ...] = field(repr=False)
    signed_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Pres:
    """The answer to a forwarded command, encrypted for the client that sent it."""

    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Rres:
    """What the router answers to the proxy's RFWD."""

    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Rname:
    record: NameRecord = field(repr=False)


SmpMessage = (
    Ids
    | Lnk
    | Nid
    | Sok
    | Soks
    | Msg
    | Nmsg
    | End
    | Ends
    | Deld
    | Alls
    | Pkey
    | Pres
    | Rres
    | Rname
    | Info
    | Ok
    | Err
    | Pong
)
