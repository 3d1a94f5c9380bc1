"""sntrup761, the post-quantum half of the ratchet, and its keys as they stand in messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pqcrypto.kem import sntrup_761

from protocol.agent.forms import LARGE, Form, checked, optional, record, tagged
from protocol.agent.x448 import X448Pair
from protocol.errors import DecodeError

KEM_PUBLIC_SIZE = 1158
KEM_CIPHERTEXT_SIZE = 1039


@dataclass(frozen=True, slots=True)
class KemPair:
    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Encapsulated:
    ciphertext: bytes = field(repr=False)
    shared: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Proposed:
    """A key that the peer may encapsulate to. Wire tag P."""

    public: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The answer to a proposed key, and a key for the way back. Wire tag A."""

    ciphertext: bytes = field(repr=False)
    public: bytes = field(repr=False)


KemParams = Proposed | Accepted


class Fresh(Protocol):
    """Where new secrets come from: the one thing about a ratchet that is not a function of its input."""

    def dh(self) -> X448Pair: ...
    def kem_pair(self) -> KemPair: ...
    def encapsulate(self, public: bytes) -> Encapsulated: ...


def new_kem_pair() -> KemPair:
    """Takes some 30 ms and holds the interpreter: make pairs ahead of need, in another process."""
    return KemPair(*sntrup_761.keygen())


def encapsulate(public: bytes) -> Encapsulated:
    return Encapsulated(*sntrup_761.encaps(public))


def decapsulate(secret: bytes, ciphertext: bytes) -> bytes:
    """A wrong ciphertext yields another shared key, never an error: nothing can be learned from it."""
    shared: bytes = sntrup_761.decaps(secret, ciphertext)
    return shared


def sized(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise DecodeError
    return data


_PUBLIC = checked(LARGE, lambda data: sized(data, KEM_PUBLIC_SIZE))
_CIPHERTEXT = checked(LARGE, lambda data: sized(data, KEM_CIPHERTEXT_SIZE))
KEM_PARAMS: Form[KemParams] = tagged(
    {
        b"P": record(Proposed, public=_PUBLIC),
        b"A": record(Accepted, ciphertext=_CIPHERTEXT, public=_PUBLIC),
    }
)
OPTIONAL_KEM = optional(KEM_PARAMS)
