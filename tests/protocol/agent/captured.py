"""The agents' vectors, and our values of their fields."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

from protocol.addresses import SmpServer
from protocol.agent.connection_requests import ConnectionRequest, ContactRequest, InvitationRequest
from protocol.agent.e2e_params import E2eKeys, E2eParams, E2eUri
from protocol.agent.kem import Accepted, Encapsulated, KemPair, KemParams, Proposed
from protocol.agent.messages import (
    AMessage,
    Hello,
    NewQueue,
    QueueAdd,
    QueueAddress,
    QueueContinue,
    QueueKey,
    QueueKeys,
    QueuesUse,
    QueueTest,
    QueueUse,
    RatchetReady,
    Receipt,
    Receipts,
    UserMessage,
)
from protocol.agent.ratchet_state import Ratchet
from protocol.agent.short_links import LinkKind, LinkScheme, ShortLink
from protocol.agent.x3dh import AcceptedKem, RatchetKem
from protocol.agent.x448 import X448Pair, X448PublicKey, x448_pair
from protocol.crypto import X25519PublicKey, decode_public_key
from protocol.encoding import EntityId
from protocol.queue_uri import QueueInfo, QueueUri
from protocol.smp_messages import QueueMode
from protocol.versions import VersionRange

VECTORS = Path(__file__).parents[2] / "vectors" / "agent-vectors.json.xz"


@cache
def _document() -> Any:
    return json.loads(lzma.decompress(VECTORS.read_bytes()))


def kinds() -> set[str]:
    return {vector["kind"] for vector in _document()["vectors"]}


def vectors(kind: str) -> list[Any]:
    """The vectors of a kind; never none, so that a test over them cannot pass unseen."""
    found = [vector for vector in _document()["vectors"] if vector["kind"] == kind]
    assert found, kind
    return found


def label(vector: Any) -> str:
    return str(vector["name"])


def raw(text: str) -> bytes:
    return bytes.fromhex(text)


def pair(private: str) -> X448Pair:
    return x448_pair(raw(private))


def public(text: str) -> X448PublicKey:
    return X448PublicKey(raw(text))


def kem_params(value: Any) -> KemParams | None:
    if value is None:
        return None
    if value["type"] == "P":
        return Proposed(raw(value["public"]))
    return Accepted(raw(value["ciphertext"]), raw(value["public"]))


def kem_pair(value: Any) -> KemPair | None:
    return KemPair(raw(value["public"]), raw(value["secret"])) if value else None


def ratchet_kem(value: Any) -> RatchetKem | None:
    own = kem_pair(value)
    return RatchetKem(own, _accepted(value.get("accepted"))) if own else None


def _accepted(value: Any) -> AcceptedKem | None:
    if value is None:
        return None
    return AcceptedKem(raw(value["peer_public"]), raw(value["shared"]), raw(value["ciphertext"]))


def creator_keys(vector: Any) -> E2eKeys:
    return E2eKeys(pair(vector["a_r1_private"]), pair(vector["a_r2_private"]), kem_pair(vector["a_kem"]))


def joiner_keys(vector: Any) -> E2eKeys:
    return E2eKeys(pair(vector["b_s1_private"]), pair(vector["b_s2_private"]))


class Script:
    """The secrets that the reference made up at one step."""

    def __init__(self, dh: str | None, kem: Any = None) -> None:
        self._dh = dh
        self._kem = ratchet_kem(kem)

    def dh(self) -> X448Pair:
        assert self._dh is not None
        return pair(self._dh)

    def kem_pair(self) -> KemPair:
        assert self._kem is not None
        return self._kem.pair

    def encapsulate(self, public: bytes) -> Encapsulated:
        assert self._kem is not None
        accepted = self._kem.accepted
        assert accepted is not None
        assert accepted.peer_public == public
        return Encapsulated(accepted.ciphertext, accepted.shared)


def state(ratchet: Ratchet) -> dict[str, Any]:
    """A ratchet as the vectors print it."""
    snd, rcv = ratchet.snd, ratchet.rcv
    return {
        "associated_data": ratchet.associated_data.hex(),
        "dh_private": ratchet.dh.private.hex(),
        "enable": ratchet.enable,
        "kem": _kem_state(ratchet.kem),
        "next_header_key_rcv": ratchet.next_rcv_header_key.hex(),
        "next_header_key_snd": ratchet.next_snd_header_key.hex(),
        "nr": ratchet.received,
        "ns": ratchet.sent,
        "pn": ratchet.previous_sent,
        "rcv": rcv and {"chain_key": rcv.chain_key.hex(), "header_key": rcv.header_key.hex()},
        "rcv_kem": ratchet.rcv_kem,
        "root_key": ratchet.root_key.hex(),
        "snd": snd
        and {
            "chain_key": snd.chain_key.hex(),
            "header_key": snd.header_key.hex(),
            "peer_dh": snd.peer_dh.raw.hex(),
        },
        "snd_kem": ratchet.snd_kem,
        "support": ratchet.support,
        "versions": [ratchet.version, ratchet.max_version],
    }


def _kem_state(kem: RatchetKem | None) -> Any:
    if kem is None:
        return None
    accepted = kem.accepted and {
        "ciphertext": kem.accepted.ciphertext.hex(),
        "peer_public": kem.accepted.peer_public.hex(),
        "shared": kem.accepted.shared.hex(),
    }
    return {"accepted": accepted, "public": kem.pair.public.hex(), "secret": kem.pair.secret.hex()}


def server(value: Any) -> SmpServer:
    return SmpServer(tuple(value["hosts"]), value["port"], raw(value["key_hash"]))


def _mode(value: Any) -> QueueMode | None:
    return None if value["mode"] is None else QueueMode(value["mode"].encode())


def queue_uri(value: Any) -> QueueUri:
    key = X25519PublicKey(raw(value["dh_public"]))
    versions = VersionRange(*value["versions"])
    return QueueUri(versions, server(value["server"]), EntityId(raw(value["sender_id"])), key, _mode(value))


def queue_info(value: Any) -> QueueInfo:
    key = X25519PublicKey(raw(value["dh_public"]))
    return QueueInfo(
        value["version"], server(value["server"]), EntityId(raw(value["sender_id"])), key, _mode(value)
    )


def address(value: Any) -> QueueAddress:
    return QueueAddress(server(value["server"]), EntityId(raw(value["sender_id"])))


def e2e_params(value: Any) -> E2eParams:
    return E2eParams(value["version"], public(value["k1"]), public(value["k2"]), kem_params(value["kem"]))


def request(value: Any) -> ConnectionRequest:
    versions, queues = VersionRange(*value["agent_versions"]), tuple(map(queue_uri, value["queues"]))
    if value["mode"] == "contact":
        return ContactRequest(versions, queues, value["data"])
    e2e = value["e2e"]
    keys = E2eUri(
        VersionRange(*e2e["versions"]), public(e2e["k1"]), public(e2e["k2"]), kem_params(e2e["kem"])
    )
    return InvitationRequest(versions, queues, keys, value["data"])


def a_message(value: Any) -> AMessage:
    match value["type"]:
        case "HELLO":
            return Hello()
        case "A_MSG":
            return UserMessage(raw(value["body"]))
        case "A_RCVD":
            receipts = value["receipts"]
            return Receipts(tuple(Receipt(r["id"], raw(r["hash"]), raw(r["info"])) for r in receipts))
        case "A_QCONT":
            return QueueContinue(address(value["address"]))
        case "QADD":
            return QueueAdd(tuple(_new_queue(item) for item in value["queues"]))
        case "QKEY":
            keys = [
                QueueKey(queue_info(q["queue"]), decode_public_key(raw(q["key_der"])))
                for q in value["queues"]
            ]
            return QueueKeys(tuple(keys))
        case "QUSE":
            return QueuesUse(tuple(QueueUse(address(q["address"]), q["primary"]) for q in value["queues"]))
        case "QTEST":
            return QueueTest(tuple(map(address, value["addresses"])))
        case "EREADY":
            return RatchetReady(value["id"])
    raise AssertionError(value["type"])


def _new_queue(value: Any) -> NewQueue:
    replaced = value["replaced"]
    return NewQueue(queue_uri(value["queue"]), replaced and address(replaced))


def short_link(value: Any) -> ShortLink:
    kind = LinkKind[value["type"].upper()]
    link_id = value["link_id"] and EntityId(raw(value["link_id"]))
    return ShortLink(
        kind, server(value["server"]), raw(value["link_key"]), link_id, LinkScheme(value["scheme"])
    )
