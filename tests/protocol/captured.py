"""The messages behind the captured vectors, by the names that the vectors have."""

from __future__ import annotations

from typing import Any

from protocol import ntf_commands as ntf
from protocol import smp_messages as smp
from protocol.addresses import SmpQueueNtf, SmpServer
from protocol.crypto import AuthPrivateKey, sha256
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import EntityId
from protocol.errors import ErrorType
from protocol.ids_hash import ids_hash
from protocol.statuses import SubState, SubStatus, TokenStatus
from tests.builders import ed25519, fixed, vectors, x25519

ONION = "beccx4yfxxbvyhqypaavemqurytl6hozr47wfc7uuecacjqdvwpw2xid.onion"
RECIPIENT_ID, SENDER_ID = EntityId(b"r" * 24), EntityId(b"q" * 24)
LOCALHOST = SmpServer(("localhost",), "5223", fixed("keyHash"))
TWO_HOSTS = SmpServer(("smp8.simplex.im", ONION), "", fixed("keyHash"))
NOTIFIER_ID = EntityId(fixed("notifierId"))
QUEUES = smp.QueueSet(3, ids_hash([b"n" * 24, b"o" * 24, b"p" * 24]))


def _device(provider: Provider, token: bytes = b"abcd") -> ApnsToken:
    return ApnsToken(provider, token)


def _tnew(provider: Provider, key: AuthPrivateKey) -> ntf.Tnew:
    return ntf.Tnew(_device(provider), key.public, x25519("tknX").public)


def _snew(server: SmpServer, key: AuthPrivateKey) -> ntf.Snew:
    return ntf.Snew(EntityId(fixed("tokenId")), SmpQueueNtf(server, NOTIFIER_ID), key)


def ntf_commands() -> dict[str, ntf.NtfCommand]:
    return {
        "TNEW apns_dev ed25519": _tnew(Provider.APNS_DEV, ed25519()),
        "TNEW apns_prod ed25519": _tnew(Provider.APNS_PROD, ed25519()),
        "TNEW apns_test ed25519": _tnew(Provider.APNS_TEST, ed25519()),
        "TNEW apns_null ed25519": _tnew(Provider.APNS_NULL, ed25519()),
        "TNEW apns_test x25519": _tnew(Provider.APNS_TEST, x25519()),
        "TVFY": ntf.Tvfy(fixed("regCode")),
        "TCHK": ntf.Tchk(),
        "TRPL": ntf.Trpl(_device(Provider.APNS_TEST, b"efgh")),
        "TCRN 0": ntf.Tcrn(0),
        "TCRN 20": ntf.Tcrn(20),
        "TCRN 65535": ntf.Tcrn(65535),
        "TDEL": ntf.Tdel(),
        "SNEW ed25519": _snew(LOCALHOST, ed25519()),
        "SNEW x25519": _snew(LOCALHOST, x25519()),
        "SNEW two hosts": _snew(TWO_HOSTS, ed25519()),
        "SCHK": ntf.Schk(),
        "SDEL": ntf.Sdel(),
        "PING": ntf.Ping(),
    }


def ntf_response(name: str) -> ntf.NtfResponse:
    word, _, rest = name.partition(" ")
    match word:
        case "IDTKN":
            return ntf.IdTkn(EntityId(fixed("tokenId")), x25519("ntfSrvX").public)
        case "IDSUB":
            return ntf.IdSub(EntityId(fixed("subId")))
        case "OK":
            return ntf.Ok()
        case "PONG":
            return ntf.Pong()
        case "TKN":
            return ntf.Tkn(TokenStatus(rest))
        case "SUB":
            state, _, detail = rest.partition(" ")
            return ntf.Sub(SubStatus(SubState(state), detail))
    assert word == "ERR"
    return ntf.Err(ErrorType(rest.encode()))


def smp_commands() -> dict[str, smp.SmpCommand]:
    queue_key, dh_key = ed25519().public, x25519("tknX").public
    keys = smp.NotifierKeys(queue_key, dh_key)
    mode = smp.QueueMode.MESSAGING
    return {
        "NSUB": smp.Nsub(),
        "NSUBS 3 hash": smp.Nsubs(QUEUES),
        "SUB": smp.Sub(),
        "SUBS 3 hash": smp.Subs(QUEUES),
        "NKEY": smp.Nkey(keys),
        "NDEL": smp.Ndel(),
        "NEW plain": smp.New(recipient_key=queue_key, dh_key=dh_key, mode=mode),
        "NEW with ntf creds": smp.New(
            recipient_key=queue_key,
            dh_key=dh_key,
            password=b"pass",
            subscribe=False,
            mode=mode,
            notifier=smp.NotifierKeys(queue_key, x25519("clientX").public),
        ),
        "SEND ntf": smp.Send(True, b"hello"),
        "SEND silent": smp.Send(False, b"hello"),
        "PING": smp.Ping(),
    }


def smp_message(name: str) -> smp.SmpMessage:
    if name.startswith("ERR "):
        return smp.Err(ErrorType(name[4:].encode()))
    return _smp_messages()[name]


def _smp_messages() -> dict[str, smp.SmpMessage]:
    router_key = x25519("serverX").public
    notifier = smp.NotifierIds(NOTIFIER_ID, router_key)
    ids = smp.Ids(
        recipient_id=RECIPIENT_ID,
        sender_id=SENDER_ID,
        dh_key=router_key,
        mode=smp.QueueMode.MESSAGING,
        notifier=notifier,
    )
    [meta] = [v["hex"] for v in vectors("nmsg_meta") if v["name"].startswith("encrypted")]
    return {
        "SOK none": smp.Sok(),
        "SOK service": smp.Sok(EntityId(fixed("serviceId"))),
        "SOKS 3 hash": smp.Soks(QUEUES),
        "NMSG": smp.Nmsg(fixed("nonce"), bytes.fromhex(meta)),
        "END": smp.End(),
        "ENDS 3 hash": smp.Ends(QUEUES),
        "DELD": smp.Deld(),
        "ALLS": smp.Alls(),
        "OK": smp.Ok(),
        "PONG": smp.Pong(),
        "IDS": ids,
        "NID": smp.Nid(notifier),
    }


def entity_of(group: str, name: str) -> EntityId:
    """The entity that the vectors use with a command."""
    for vector in vectors(group):
        if vector["name"].split(" ")[0] == name.split(" ")[0]:
            return EntityId(bytes.fromhex(vector["entity_hex"]))
    raise AssertionError(name)


def label(vector: Any) -> str:
    return f"{vector['name']} v{vector.get('version', '')}"


def check_block(vector: Any, block: bytes, kind: str = "padded_block") -> None:
    """Blocks are captured by length, ends and hash."""
    assert len(block) == vector[f"{kind}_len"]
    assert block[:64].hex() == vector[f"{kind}_first64"]
    assert block[-64:].hex() == vector[f"{kind}_last64"]
    assert sha256(block).hex() == vector[f"{kind}_sha256"]
