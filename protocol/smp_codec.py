"""How SMP commands and router messages stand on the wire, in versions 6 to 20."""

from __future__ import annotations

from typing import Any

from protocol.addresses import pull_smp_server, push_smp_server
from protocol.commands import Codec, CredentialRule, Spec
from protocol.crypto import pull_public_key, pull_x25519_public, push_key
from protocol.encoding import NONCE_SIZE, EntityId, Reader, Writer, new_tuple
from protocol.error_codec import decode_error, encode_smp_error
from protocol.errors import DecodeError
from protocol.ids_hash import IDS_HASH_SIZE, NO_IDS
from protocol.names import pull_name, pull_name_record, push_name, push_name_record
from protocol.smp_messages import (
    Ack,
    Alls,
    Del,
    Deld,
    End,
    Ends,
    Err,
    Get,
    Ids,
    Info,
    Key,
    Ldel,
    Lget,
    LinkData,
    Lkey,
    Lnk,
    Lset,
    Msg,
    Ndel,
    New,
    NewLink,
    Nid,
    Nkey,
    Nmsg,
    NotifierIds,
    NotifierKeys,
    Nsub,
    Nsubs,
    Off,
    Ok,
    Pfwd,
    Ping,
    Pkey,
    Pong,
    Pres,
    Prxy,
    Que,
    QueueMode,
    QueueSet,
    Rfwd,
    Rkey,
    Rname,
    Rres,
    Rslv,
    Send,
    Skey,
    SmpCommand,
    SmpMessage,
    Sok,
    Soks,
    Sub,
    Subs,
)
from protocol.versions import (
    SMP_DELD,
    SMP_NEW_NOTIFIER,
    SMP_RCV_SERVICE,
    SMP_SENDER_SECURES,
    SMP_SERVICE_CERTS,
    SMP_SHORT_LINKS,
    pull_version_range,
    push_version_range,
)


def pull_new(r: Reader, version: int) -> New:
    recipient_key, dh_key = pull_public_key(r), pull_x25519_public(r)
    password = _pull_password(r, version)
    subscribe = _pull_subscribe(r)
    mode, link = None, None
    if version >= SMP_SHORT_LINKS:
        mode, link = r.pull_optional(_pull_queue_request) or (None, None)
    elif version >= SMP_SENDER_SECURES:
        mode = QueueMode.MESSAGING if r.pull_bool() else QueueMode.CONTACT
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


def _pull_queue_request(r: Reader) -> tuple[QueueMode, NewLink | None]:
    mode = _pull_mode(r)
    return mode, r.pull_optional(lambda r: _pull_new_link(r, mode))


def _push_queue_request(w: Writer, request: tuple[QueueMode, NewLink | None]) -> None:
    mode, link = request
    w.push_bytes(mode.value)
    w.push_optional(link, _push_new_link)


def _pull_new_link(r: Reader, mode: QueueMode) -> NewLink:
    link_id = _pull_entity(r) if mode is QueueMode.CONTACT else None
    return NewLink(link_id, _pull_entity(r), _pull_link_data(r))


def _push_new_link(w: Writer, link: NewLink) -> None:
    if link.link_id is not None:
        w.push_short(link.link_id)
    w.push_short(link.sender_id)
    _push_link_data(w, link.data)


def _pull_link_data(r: Reader) -> LinkData:
    return LinkData(r.pull_large(), r.pull_large())


def _push_link_data(w: Writer, data: LinkData) -> None:
    w.push_large(data.fixed)
    w.push_large(data.user)


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
        mode = QueueMode.MESSAGING if r.pull_bool() else QueueMode.CONTACT
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


def _pull_lset(r: Reader, version: int) -> Lset:
    return Lset(_pull_entity(r), _pull_link_data(r))


def _push_lset(w: Writer, command: Lset, version: int) -> None:
    w.push_short(command.link_id)
    _push_link_data(w, command.data)


def _pull_lnk(r: Reader, version: int) -> Lnk:
    return Lnk(_pull_entity(r), _pull_link_data(r))


def _push_lnk(w: Writer, message: Lnk, version: int) -> None:
    w.push_short(message.sender_id)
    _push_link_data(w, message.data)


def _pull_prxy(r: Reader, version: int) -> Prxy:
    return Prxy(pull_smp_server(r), r.pull_optional(Reader.pull_short))


def _push_prxy(w: Writer, command: Prxy, version: int) -> None:
    push_smp_server(w, command.server)
    w.push_optional(command.password, Writer.push_short)


def _pull_pfwd(r: Reader, version: int) -> Pfwd:
    return Pfwd(r.pull_word16(), pull_x25519_public(r), r.pull_tail())


def _push_pfwd(w: Writer, command: Pfwd, version: int) -> None:
    w.push_word16(command.version)
    push_key(w, command.key)
    w.push_bytes(command.body)


def _pull_pkey(r: Reader, version: int) -> Pkey:
    session_id, versions = r.pull_short(), pull_version_range(r)
    return Pkey(session_id, versions, tuple(r.pull_nonempty(Reader.pull_large)), r.pull_large())


def _push_pkey(w: Writer, message: Pkey, version: int) -> None:
    w.push_short(message.session_id)
    push_version_range(w, message.versions)
    w.push_nonempty(message.chain, Writer.push_large)
    w.push_large(message.signed_key)


def _key_spec(kind: type[Any]) -> Spec[Any]:
    return Spec(kind, lambda r, v: kind(pull_public_key(r)), lambda w, c, v: push_key(w, c.sender_key))


def _body_spec(kind: type[Any], credentials: CredentialRule = CredentialRule.ENTITY) -> Spec[Any]:
    return Spec(kind, lambda r, v: kind(r.pull_tail()), lambda w, m, v: w.push_bytes(m.body), credentials)


_UNKNOWN_QUEUES = QueueSet(-1)


def _queues_spec(kind: type[Any], since: int = 0, older: bytes = b"") -> Spec[Any]:
    return Spec(
        kind,
        lambda r, v: kind(pull_queue_set(r, v)),
        lambda w, m, v: push_queue_set(w, m.queues or _UNKNOWN_QUEUES, v),
        since=since,
        older=older,
    )


SMP_COMMANDS: Codec[SmpCommand] = Codec(
    {
        b"NEW": Spec(New, pull_new, push_new, CredentialRule.KEY),
        b"SUB": Spec(Sub),
        b"SUBS": _queues_spec(Subs, SMP_RCV_SERVICE, b"SUBS"),
        b"KEY": _key_spec(Key),
        b"RKEY": Spec(
            Rkey,
            lambda r, v: Rkey(tuple(r.pull_nonempty(pull_public_key))),
            lambda w, c, v: w.push_nonempty(c.keys, push_key),
        ),
        b"LSET": Spec(Lset, _pull_lset, _push_lset),
        b"LDEL": Spec(Ldel),
        b"NKEY": Spec(
            Nkey, lambda r, v: Nkey(_pull_notifier_keys(r)), lambda w, c, v: _push_notifier_keys(w, c.keys)
        ),
        b"NDEL": Spec(Ndel),
        b"GET": Spec(Get),
        b"ACK": Spec(Ack, lambda r, v: Ack(r.pull_short()), lambda w, c, v: w.push_short(c.message_id)),
        b"OFF": Spec(Off),
        b"DEL": Spec(Del),
        b"QUE": Spec(Que),
        b"SKEY": _key_spec(Skey),
        b"SEND": Spec(Send, pull_send, push_send, CredentialRule.ENTITY_ONLY),
        b"LKEY": _key_spec(Lkey),
        b"LGET": Spec(Lget, credentials=CredentialRule.ENTITY_BARE),
        b"PRXY": Spec(Prxy, _pull_prxy, _push_prxy, CredentialRule.NOTHING),
        b"PFWD": Spec(Pfwd, _pull_pfwd, _push_pfwd, CredentialRule.ENTITY_BARE),
        b"RFWD": _body_spec(Rfwd, CredentialRule.NOTHING),
        b"RSLV": Spec(
            Rslv,
            lambda r, v: Rslv(pull_name(r)),
            lambda w, c, v: push_name(w, c.name),
            CredentialRule.NOTHING,
        ),
        b"NSUB": Spec(Nsub),
        b"NSUBS": _queues_spec(Nsubs, SMP_RCV_SERVICE, b"NSUBS"),
        b"PING": Spec(Ping, credentials=CredentialRule.NOTHING),
    }
)


SMP_MESSAGES: Codec[SmpMessage] = Codec(
    {
        b"IDS": Spec(Ids, pull_ids, push_ids),
        b"LNK": Spec(Lnk, _pull_lnk, _push_lnk),
        b"NID": Spec(
            Nid, lambda r, v: Nid(_pull_notifier_ids(r)), lambda w, m, v: _push_notifier_ids(w, m.ids)
        ),
        b"SOK": Spec(
            Sok,
            lambda r, v: Sok(r.pull_optional(_pull_entity)),
            lambda w, m, v: w.push_optional(m.service_id, Writer.push_short),
            since=SMP_SERVICE_CERTS,
            older=b"OK",
        ),
        b"SOKS": _queues_spec(Soks),
        b"MSG": Spec(
            Msg,
            lambda r, v: Msg(r.pull_short(), r.pull_tail()),
            push_msg,
        ),
        b"NMSG": Spec(Nmsg, pull_nmsg, push_nmsg),
        b"END": Spec(End),
        b"ENDS": _queues_spec(Ends),
        b"DELD": Spec(Deld, since=SMP_DELD, older=b"END"),
        b"ALLS": Spec(Alls),
        b"PKEY": Spec(Pkey, _pull_pkey, _push_pkey),
        b"PRES": _body_spec(Pres),
        b"RRES": _body_spec(Rres),
        b"RNAME": Spec(
            Rname,
            lambda r, v: Rname(pull_name_record(r)),
            lambda w, m, v: push_name_record(w, m.record),
        ),
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
