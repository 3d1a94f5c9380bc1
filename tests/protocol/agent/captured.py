"""The agents' vectors, and our values of their fields."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

from protocol.agent.e2e_params import E2eKeys
from protocol.agent.kem import Accepted, Encapsulated, KemPair, KemParams, Proposed
from protocol.agent.ratchet_state import Ratchet
from protocol.agent.x3dh import AcceptedKem, RatchetKem
from protocol.agent.x448 import X448Pair, X448PublicKey, x448_pair

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
