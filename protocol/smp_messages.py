"""SMP commands and router messages, one class per wire word, for versions 6 to 19."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from protocol.commands import Codec, CredentialRule, Spec
from protocol.crypto import AuthPublicKey, X25519PublicKey, pull_public_key, pull_x25519_public, push_key
from protocol.encoding import NONCE_SIZE, EntityId, Reader, Writer, new_tuple
from protocol.error_codec import decode_error, encode_smp_error
from protocol.errors import DecodeError, ErrorType
from protocol.ids_hash import IDS_HASH_SIZE, NO_IDS
from protocol.versions import (
    SMP_DELD,
    SMP_NEW_NOTIFIER,
    SMP_RCV_SERVICE,
    SMP_SENDER_SECURES,
    SMP_SERVICE_CERTS,
    SMP_SHORT_LINKS,
)


class QueueMode(Enum):
    MESSAGING = b"M"
    "The sender can secure the queue."
    CONTACT = b"C"


@dataclass(frozen=True, slots=True)
class LinkData:
    """Short link data: carried for completeness of the grammar. A messaging queue has no link id."""

    link_id: EntityId | None = field(repr=False)
    sender_id: EntityId = field(repr=False)
    fixed: bytes = field(repr=False)
    user: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NotifierKeys:
    """A notifier's key for NSUB and the recipient's DH key for the meta of NMSG."""

    notifier_key: AuthPublicKey
    dh_key: X25519PublicKey


@dataclass(frozen=True, slots=True)
class NotifierIds:
    notifier_id: EntityId = field(repr=False)
    dh_key: X25519PublicKey


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
    link: LinkData | None = None
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
class Unsupported:
    """A command of the protocol that this implementation refuses; its parameters are not read."""


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
    | Unsupported
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


@dataclass(frozen=True, slots=True)
class Msg:
    message_id: bytes
    body: bytes = field(repr=False)


class Nmsg(NamedTuple):
    """A tuple, not a dataclass: eighty of them come in a block, and a tuple is made in half the time."""

    nonce: bytes
    meta: bytes

    def __repr__(self) -> str:
        return "Nmsg()"


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


SmpMessage = Ids | Nid | Sok | Soks | Msg | Nmsg | End | Ends | Deld | Alls | Info | Ok | Err | Pong


def pull_new(r: Reader, version: int) -> New:
    recipient_key, dh_key = pull_public_key(r), pull_x25519_public(r)
    password = _pull_password(r, version)
    subscribe = _pull_subscribe(r)
    mode, link = None, None
    if version >= SMP_SHORT_LINKS:
        mode, link = r.pull_optional(_pull_queue_request) or (None, None)
    elif version >= SMP_SENDER_SECURES:
        mode = QueueMode.MESSAGING if r.pull_bool() else None
    notifier = r.pull_optional(_pull_notifier_keys) if version >= SMP_NEW_NOTIFIER else None
    return New(
        recipient_key=recipient_key,
        dh_key=dh_key,
        password=password,
        subscribe=subscribe,
        mode=mode,
        link=link,
        notifier=notifier,
    )


def push_new(w: Writer, new: New, version: int) -> None:
    push_key(w, new.recipient_key)
    push_key(w, new.dh_key)
    if version >= SMP_SENDER_SECURES:
        w.push_optional(new.password, Writer.push_short)
    elif new.password is not None:
        w.push_bytes(b"A")
        w.push_short(new.password)
    w.push_bytes(b"S" if new.subscribe else b"C")
    if version >= SMP_SHORT_LINKS:
        w.push_optional(None if new.mode is None else (new.mode, new.link), _push_queue_request)
    elif version >= SMP_SENDER_SECURES:
        w.push_bool(new.mode is QueueMode.MESSAGING)
    if version >= SMP_NEW_NOTIFIER:
        w.push_optional(new.notifier, _push_notifier_keys)


def _pull_password(r: Reader, version: int) -> bytes | None:
    if version >= SMP_SENDER_SECURES:
        return r.pull_optional(Reader.pull_short)
    if r.peek() == b"A":
        r.pull_bytes(1)
        return r.pull_short()
    return None


def _pull_subscribe(r: Reader) -> bool:
    char = r.pull_bytes(1)
    if char not in (b"S", b"C"):
        raise DecodeError
    return char == b"S"


def _pull_mode(r: Reader) -> QueueMode:
    try:
        return QueueMode(r.pull_bytes(1))
    except ValueError:
        raise DecodeError from None


def _pull_queue_request(r: Reader) -> tuple[QueueMode, LinkData | None]:
    mode = _pull_mode(r)
    return mode, r.pull_optional(lambda r: _pull_link(r, mode))


def _push_queue_request(w: Writer, request: tuple[QueueMode, LinkData | None]) -> None:
    mode, link = request
    w.push_bytes(mode.value)
    w.push_optional(link, _push_link)


def _pull_link(r: Reader, mode: QueueMode) -> LinkData:
    link_id = EntityId(r.pull_short()) if mode is QueueMode.CONTACT else None
    return LinkData(link_id, EntityId(r.pull_short()), r.pull_large(), r.pull_large())


def _push_link(w: Writer, link: LinkData) -> None:
    if link.link_id is not None:
        w.push_short(link.link_id)
    w.push_short(link.sender_id)
    w.push_large(link.fixed)
    w.push_large(link.user)


def _pull_notifier_keys(r: Reader) -> NotifierKeys:
    return NotifierKeys(pull_public_key(r), pull_x25519_public(r))


def _push_notifier_keys(w: Writer, keys: NotifierKeys) -> None:
    push_key(w, keys.notifier_key)
    push_key(w, keys.dh_key)


def _pull_notifier_ids(r: Reader) -> NotifierIds:
    return NotifierIds(EntityId(r.pull_short()), pull_x25519_public(r))


def _push_notifier_ids(w: Writer, ids: NotifierIds) -> None:
    w.push_short(ids.notifier_id)
    push_key(w, ids.dh_key)


def pull_ids(r: Reader, version: int) -> Ids:
    recipient_id, sender_id = EntityId(r.pull_short()), EntityId(r.pull_short())
    dh_key = pull_x25519_public(r)
    mode, link_id = None, None
    if version >= SMP_SHORT_LINKS:
        mode = r.pull_optional(_pull_mode)
        link_id = r.pull_optional(_pull_entity)
    elif version >= SMP_SENDER_SECURES:
        mode = QueueMode.MESSAGING if r.pull_bool() else None
    return Ids(
        recipient_id=recipient_id,
        sender_id=sender_id,
        dh_key=dh_key,
        mode=mode,
        link_id=link_id,
        service_id=r.pull_optional(_pull_entity) if version >= SMP_SERVICE_CERTS else None,
        notifier=r.pull_optional(_pull_notifier_ids) if version >= SMP_NEW_NOTIFIER else None,
    )


def push_ids(w: Writer, ids: Ids, version: int) -> None:
    w.push_short(ids.recipient_id)
    w.push_short(ids.sender_id)
    push_key(w, ids.dh_key)
    if version >= SMP_SHORT_LINKS:
        w.push_optional(ids.mode, lambda w, mode: w.push_bytes(mode.value))
        w.push_optional(ids.link_id, Writer.push_short)
    elif version >= SMP_SENDER_SECURES:
        w.push_bool(ids.mode is QueueMode.MESSAGING)
    if version >= SMP_SERVICE_CERTS:
        w.push_optional(ids.service_id, Writer.push_short)
    if version >= SMP_NEW_NOTIFIER:
        w.push_optional(ids.notifier, _push_notifier_ids)


def _pull_entity(r: Reader) -> EntityId:
    return EntityId(r.pull_short())


def pull_queue_set(r: Reader, version: int) -> QueueSet:
    count = r.pull_int64()
    if version < SMP_RCV_SERVICE:
        return QueueSet(count)
    ids_hash = r.pull_short()
    if len(ids_hash) != IDS_HASH_SIZE:
        raise DecodeError
    return QueueSet(count, ids_hash)


def push_queue_set(w: Writer, queues: QueueSet, version: int) -> None:
    w.push_int64(queues.count)
    if version >= SMP_RCV_SERVICE:
        w.push_short(queues.ids_hash or NO_IDS)


def pull_send(r: Reader, version: int) -> Send:
    notification = r.pull_bool()
    r.pull_word()  # later versions may add flags before the space
    return Send(notification, r.pull_tail())


def push_send(w: Writer, command: Send, version: int) -> None:
    w.push_bytes(b"T " if command.notification else b"F ")
    w.push_bytes(command.body)


def push_msg(w: Writer, message: Msg, version: int) -> None:
    w.push_short(message.message_id)
    w.push_bytes(message.body)


def pull_nmsg(r: Reader, version: int) -> Nmsg:
    return new_tuple(Nmsg, (r.pull_bytes(NONCE_SIZE), r.pull_short()))


def push_nmsg(w: Writer, message: Nmsg, version: int) -> None:
    w.push_nonce(message.nonce)
    w.push_short(message.meta)


class SmpCommands(Codec[SmpCommand]):
    """SUBS and NSUBS say how many queues they expect only from v19 on."""

    def encode(self, message: SmpCommand, version: int) -> bytes:
        if version < SMP_RCV_SERVICE and isinstance(message, Subs | Nsubs):
            return b"SUBS" if isinstance(message, Subs) else b"NSUBS"
        return super().encode(message, version)

    def decode(self, data: bytes, version: int) -> SmpCommand:
        if version < SMP_RCV_SERVICE and data in (b"SUBS", b"NSUBS"):
            return Subs() if data == b"SUBS" else Nsubs()
        return super().decode(data, version)


def _push_expected(w: Writer, command: Subs | Nsubs, version: int) -> None:
    push_queue_set(w, command.queues or QueueSet(0), version)


def _pull_unsupported(r: Reader, version: int) -> Unsupported:
    r.pull_tail()
    return Unsupported()


_UNSUPPORTED: Spec[Any] = Spec(Unsupported, _pull_unsupported, credentials=CredentialRule.ANYTHING)

_COMMAND_SPECS: dict[bytes, Spec[Any]] = {
    b"NEW": Spec(New, pull_new, push_new, CredentialRule.KEY),
    b"SUB": Spec(Sub),
    b"SUBS": Spec(Subs, lambda r, v: Subs(pull_queue_set(r, v)), _push_expected),
    b"KEY": Spec(Key, lambda r, v: Key(pull_public_key(r)), lambda w, c, v: push_key(w, c.sender_key)),
    b"SKEY": Spec(Skey, lambda r, v: Skey(pull_public_key(r)), lambda w, c, v: push_key(w, c.sender_key)),
    b"NKEY": Spec(
        Nkey, lambda r, v: Nkey(_pull_notifier_keys(r)), lambda w, c, v: _push_notifier_keys(w, c.keys)
    ),
    b"NDEL": Spec(Ndel),
    b"GET": Spec(Get),
    b"ACK": Spec(Ack, lambda r, v: Ack(r.pull_short()), lambda w, c, v: w.push_short(c.message_id)),
    b"OFF": Spec(Off),
    b"DEL": Spec(Del),
    b"QUE": Spec(Que),
    b"SEND": Spec(Send, pull_send, push_send, CredentialRule.ENTITY_ONLY),
    b"NSUB": Spec(Nsub),
    b"NSUBS": Spec(Nsubs, lambda r, v: Nsubs(pull_queue_set(r, v)), _push_expected),
    b"PING": Spec(Ping, credentials=CredentialRule.NOTHING),
}
_REFUSED_TAGS = b"RKEY LSET LDEL LKEY LGET PRXY PFWD RFWD RSLV".split()

SMP_COMMANDS = SmpCommands(_COMMAND_SPECS | dict.fromkeys(_REFUSED_TAGS, _UNSUPPORTED))


class SmpMessages(Codec[SmpMessage]):
    """Words that older peers do not know are sent as the ones they do."""

    def encode(self, message: SmpMessage, version: int) -> bytes:
        if version < SMP_SERVICE_CERTS and isinstance(message, Sok):
            return b"OK"
        if version < SMP_DELD and isinstance(message, Deld):
            return b"END"
        return super().encode(message, version)


SMP_MESSAGES = SmpMessages(
    {
        b"IDS": Spec(Ids, pull_ids, push_ids),
        b"NID": Spec(
            Nid, lambda r, v: Nid(_pull_notifier_ids(r)), lambda w, m, v: _push_notifier_ids(w, m.ids)
        ),
        b"SOK": Spec(
            Sok,
            lambda r, v: Sok(r.pull_optional(_pull_entity)),
            lambda w, m, v: w.push_optional(m.service_id, Writer.push_short),
        ),
        b"SOKS": Spec(
            Soks, lambda r, v: Soks(pull_queue_set(r, v)), lambda w, m, v: push_queue_set(w, m.queues, v)
        ),
        b"MSG": Spec(
            Msg,
            lambda r, v: Msg(r.pull_short(), r.pull_tail()),
            push_msg,
        ),
        b"NMSG": Spec(Nmsg, pull_nmsg, push_nmsg),
        b"END": Spec(End),
        b"ENDS": Spec(
            Ends, lambda r, v: Ends(pull_queue_set(r, v)), lambda w, m, v: push_queue_set(w, m.queues, v)
        ),
        b"DELD": Spec(Deld),
        b"ALLS": Spec(Alls),
        b"INFO": Spec(Info, lambda r, v: Info(r.pull_tail()), lambda w, m, v: w.push_bytes(m.json)),
        b"OK": Spec(Ok),
        b"ERR": Spec(
            Err,
            lambda r, v: Err(decode_error(r.pull_tail())),
            lambda w, m, v: w.push_bytes(encode_smp_error(m.error, v)),
        ),
        b"PONG": Spec(Pong),
    }
)
