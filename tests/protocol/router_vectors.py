"""The captured bytes of routers, proxies and their clients, and the messages behind them."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

from protocol import smp_messages as smp
from protocol.addresses import SmpServer
from protocol.crypto import (
    AuthPrivateKey,
    AuthPublicKey,
    Ed448PrivateKey,
    Ed25519PrivateKey,
    X25519PrivateKey,
    X25519PublicKey,
)
from protocol.encoding import EntityId
from protocol.versions import VersionRange

VECTORS = Path(__file__).parent.parent / "vectors" / "router-vectors.json.xz"
KINDS: dict[str, type[Any]] = {
    "Ed25519": Ed25519PrivateKey,
    "Ed448": Ed448PrivateKey,
    "X25519": X25519PrivateKey,
}


@cache
def _document() -> Any:
    return json.loads(lzma.decompress(VECTORS.read_bytes()))


def inputs() -> Any:
    return _document()["inputs"]


def groups() -> set[str]:
    return {vector["group"] for vector in _document()["vectors"]}


def vectors(group: str) -> list[Any]:
    found = [vector for vector in _document()["vectors"] if vector["group"] == group]
    assert found, group
    return found


def label(vector: Any) -> str:
    return f"{vector['name']} v{vector['version']}"


def private(name: str) -> AuthPrivateKey:
    entry = inputs()["keys"][name]
    key: AuthPrivateKey = KINDS[entry["algorithm"]](bytes.fromhex(entry["private"]))
    assert key.public.der.hex() == entry["public_der"]
    return key


def public(name: str) -> AuthPublicKey:
    return private(name).public


def dh(name: str) -> X25519PublicKey:
    return dh_private(name).public


def dh_private(name: str) -> X25519PrivateKey:
    key = private(name)
    assert isinstance(key, X25519PrivateKey)
    return key


def _hex(text: str) -> bytes:
    return bytes.fromhex(text)


def _entity(text: str) -> EntityId:
    return EntityId(bytes.fromhex(text))


def _optional_entity(text: str | None) -> EntityId | None:
    return None if text is None else _entity(text)


def _link_data(data: Any) -> smp.LinkData:
    return smp.LinkData(_hex(data["fixed"]), _hex(data["user"]))


def _queues(fields: Any) -> smp.QueueSet:
    return smp.QueueSet(fields["count"], _hex(fields["hash"]))


def _mode(text: str | None) -> smp.QueueMode | None:
    return None if text is None else smp.QueueMode(text[0].upper().encode())


def _new(fields: Any) -> smp.New:
    queue, ntf = fields["queue"] or {}, fields["ntf"]
    mode, entry = _mode(queue.get("mode")), queue.get("link")
    link = None
    if entry is not None:
        link_id = _optional_entity(entry.get("link_id"))
        link = smp.NewLink(link_id, _entity(entry["sender_id"]), _link_data(entry["data"]))
    return smp.New(
        recipient_key=public(fields["rcv_key"]),
        dh_key=dh(fields["rcv_dh"]),
        password=None if fields["basic_auth"] is None else _hex(fields["basic_auth"]),
        subscribe=fields["sub_mode"] == "S",
        mode=mode,
        link=link,
        notifier=None if ntf is None else smp.NotifierKeys(public(ntf["key"]), dh(ntf["dh"])),
    )


def _server(fields: Any) -> SmpServer:
    return SmpServer(tuple(fields["hosts"]), fields["port"], _hex(fields["key_hash"]))


def _prxy(fields: Any) -> smp.Prxy:
    password = fields["basic_auth"]
    return smp.Prxy(_server(fields["server"]), None if password is None else _hex(password))


_COMMANDS: dict[str, Any] = {
    "NEW": _new,
    "SUB": lambda f: smp.Sub(),
    "SUBS": lambda f: smp.Subs(_queues(f)),
    "NSUB": lambda f: smp.Nsub(),
    "NSUBS": lambda f: smp.Nsubs(_queues(f)),
    "KEY": lambda f: smp.Key(public(f["key"])),
    "RKEY": lambda f: smp.Rkey(tuple(public(key) for key in f["keys"])),
    "LSET": lambda f: smp.Lset(_entity(f["link_id"]), _link_data(f["data"])),
    "LDEL": lambda f: smp.Ldel(),
    "NKEY": lambda f: smp.Nkey(smp.NotifierKeys(public(f["key"]), dh(f["dh"]))),
    "NDEL": lambda f: smp.Ndel(),
    "GET": lambda f: smp.Get(),
    "ACK": lambda f: smp.Ack(_hex(f["msg_id"])),
    "OFF": lambda f: smp.Off(),
    "DEL": lambda f: smp.Del(),
    "QUE": lambda f: smp.Que(),
    "SKEY": lambda f: smp.Skey(public(f["key"])),
    "SEND": lambda f: smp.Send(f["notification"], _hex(f["body"])),
    "PING": lambda f: smp.Ping(),
    "LKEY": lambda f: smp.Lkey(public(f["key"])),
    "LGET": lambda f: smp.Lget(),
    "PRXY": _prxy,
    "PFWD": lambda f: smp.Pfwd(f["fwd_version"], dh(f["key"]), _hex(f["body"])),
    "RFWD": lambda f: smp.Rfwd(_hex(f["body"])),
}


def command(vector: Any) -> smp.SmpCommand:
    """The command that a vector's name and fields describe."""
    word = vector["name"].split()[0]
    made: smp.SmpCommand = _COMMANDS[word](vector["fields"])
    return made


def _ids(fields: Any) -> smp.Ids:
    ntf = fields["ntf"]
    return smp.Ids(
        recipient_id=_entity(fields["rcv_id"]),
        sender_id=_entity(fields["snd_id"]),
        dh_key=dh(fields["srv_dh"]),
        mode=_mode(fields["mode"]),
        link_id=_optional_entity(fields["link_id"]),
        service_id=_optional_entity(fields["service_id"]),
        notifier=None if ntf is None else smp.NotifierIds(_entity(ntf["notifier_id"]), dh(ntf["srv_dh"])),
    )


def _pkey(fields: Any) -> smp.Pkey:
    return smp.Pkey(
        _hex(fields["session_id"]),
        VersionRange(*fields["versions"]),
        tuple(_hex(der) for der in inputs()[fields["certs"]]),
        _hex(inputs()[fields["signed_key"]]),
    )


_RESPONSES: dict[str, Any] = {
    "IDS": _ids,
    "LNK": lambda f: smp.Lnk(_entity(f["snd_id"]), _link_data(f["data"])),
    "SOK": lambda f: smp.Sok(_optional_entity(f["service_id"])),
    "SOKS": lambda f: smp.Soks(_queues(f)),
    "ENDS": lambda f: smp.Ends(_queues(f)),
    "END": lambda f: smp.End(),
    "DELD": lambda f: smp.Deld(),
    "ALLS": lambda f: smp.Alls(),
    "MSG": lambda f: smp.Msg(_hex(f["msg_id"]), _hex(f["body"])),
    "NID": lambda f: smp.Nid(smp.NotifierIds(_entity(f["notifier_id"]), dh(f["srv_dh"]))),
    "NMSG": lambda f: smp.Nmsg(_hex(f["nonce"]), _hex(f["meta"])),
    "PKEY": _pkey,
    "PRES": lambda f: smp.Pres(_hex(f["body"])),
    "RRES": lambda f: smp.Rres(_hex(f["body"])),
    "INFO": lambda f: None,
    "OK": lambda f: smp.Ok(),
    "PONG": lambda f: smp.Pong(),
}


def response(vector: Any) -> smp.SmpMessage | None:
    """The message that a vector's fields describe; None if only its bytes are comparable (INFO is JSON)."""
    made: smp.SmpMessage | None = _RESPONSES[vector["name"].split()[0]](vector["fields"])
    return made
