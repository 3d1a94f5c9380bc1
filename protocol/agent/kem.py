"""sntrup761, the post-quantum half of the ratchet, and its keys as they stand in messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pqcrypto.kem import sntrup_761

from protocol.agent.x448 import X448Pair
from protocol.encoding import Reader, Writer
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


def pull_kem_params(r: Reader) -> KemParams:
    tag = r.pull_bytes(1)
    if tag == b"P":
        return Proposed(sized(r.pull_large(), KEM_PUBLIC_SIZE))
    if tag == b"A":
        ciphertext = sized(r.pull_large(), KEM_CIPHERTEXT_SIZE)
        return Accepted(ciphertext, sized(r.pull_large(), KEM_PUBLIC_SIZE))
    raise DecodeError


def push_kem_params(w: Writer, params: KemParams) -> None:
    if isinstance(params, Accepted):
        w.push_bytes(b"A")
        w.push_large(params.ciphertext)
    else:
        w.push_bytes(b"P")
    w.push_large(params.public)


def pull_optional_kem(r: Reader) -> KemParams | None:
    return r.pull_optional(pull_kem_params)


def push_optional_kem(w: Writer, params: KemParams | None) -> None:
    if params is None:
        w.push_bytes(b"0")
    else:
        w.push_bytes(b"1")
        push_kem_params(w, params)


def sized(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise DecodeError
    return data
