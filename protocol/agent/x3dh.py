"""X3DH with an optional KEM secret: what both sides of a new ratchet start from.

The creator of a link has keys r1 and r2, the joiner s1 and s2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.agent.e2e_params import E2eKeys, E2eParams
from protocol.agent.errors import KemStateError
from protocol.agent.kem import (
    Accepted,
    Encapsulated,
    Fresh,
    KemPair,
    KemParams,
    Proposed,
    decapsulate,
)
from protocol.agent.versions import E2E_PQ
from protocol.crypto import hkdf_sha512

_SALT = bytes(64)
_INFO = b"SimpleXX3DH"


@dataclass(frozen=True, slots=True)
class AcceptedKem:
    """The peer's key, and the secret that was encapsulated to it."""

    peer_public: bytes = field(repr=False)
    shared: bytes = field(repr=False)
    ciphertext: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class RatchetKem:
    pair: KemPair
    accepted: AcceptedKem | None = None

    @property
    def params(self) -> KemParams:
        if self.accepted:
            return Accepted(self.accepted.ciphertext, self.pair.public)
        return Proposed(self.pair.public)


@dataclass(frozen=True, slots=True)
class X3dhSecrets:
    associated_data: bytes = field(repr=False)
    header_key: bytes = field(repr=False)
    next_header_key: bytes = field(repr=False)
    root_key: bytes = field(repr=False)
    kem: RatchetKem | None = None


def joiner_kem(theirs: E2eParams, pq: bool, version: int, fresh: Fresh) -> RatchetKem | None:
    """What the joiner answers to the creator's parameters: acceptance, a proposal of its own, or nothing."""
    if not pq or version < E2E_PQ:
        return None
    pair = fresh.kem_pair()
    if not isinstance(theirs.kem, Proposed):
        return RatchetKem(pair)
    return accept(pair, theirs.kem.public, fresh.encapsulate(theirs.kem.public))


def accept(pair: KemPair, peer_public: bytes, made: Encapsulated) -> RatchetKem:
    return RatchetKem(pair, AcceptedKem(peer_public, made.shared, made.ciphertext))


def joiner_params(keys: E2eKeys, kem: RatchetKem | None, version: int) -> E2eParams:
    return E2eParams(version, keys.k1.public, keys.k2.public, kem.params if kem else None)


def agree_as_joiner(keys: E2eKeys, kem: RatchetKem | None, theirs: E2eParams) -> X3dhSecrets:
    dh = keys.k2.exchange(theirs.k1) + keys.k1.exchange(theirs.k2) + keys.k2.exchange(theirs.k2)
    return _agreed(keys.k1.public.raw + theirs.k1.raw, dh, kem)


def agree_as_creator(keys: E2eKeys, theirs: E2eParams) -> X3dhSecrets:
    """KemStateError if they accepted a key that was never proposed."""
    dh = keys.k1.exchange(theirs.k2) + keys.k2.exchange(theirs.k1) + keys.k2.exchange(theirs.k2)
    return _agreed(theirs.k1.raw + keys.k1.public.raw, dh, _creator_kem(keys.kem, theirs.kem))


def _creator_kem(pair: KemPair | None, theirs: KemParams | None) -> RatchetKem | None:
    """A proposal of theirs is answered in the first header, by a new pair."""
    if not isinstance(theirs, Accepted):
        return None
    if pair is None:
        raise KemStateError
    made = Encapsulated(theirs.ciphertext, decapsulate(pair.secret, theirs.ciphertext))
    return accept(pair, theirs.public, made)


def _agreed(associated_data: bytes, dh: bytes, kem: RatchetKem | None) -> X3dhSecrets:
    secret = kem.accepted.shared if kem and kem.accepted else b""
    keys = hkdf_sha512(_SALT, dh + secret, _INFO, 96)
    return X3dhSecrets(associated_data, keys[:32], keys[32:64], keys[64:], kem)
