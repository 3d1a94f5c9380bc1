"""X448, the curve of the ratchet. Pairs hold both keys: computing the public one costs as much as a DH."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from cryptography.hazmat.primitives.asymmetric import x448

from protocol.agent.forms import Form
from protocol.errors import DecodeError
from protocol.hiding import hides_bytes

X448_SIZE = 56
_SPKI = bytes.fromhex("3042300506032b656f033900")


@hides_bytes
@dataclass(frozen=True, slots=True)
class X448PublicKey:
    raw: bytes

    @property
    def der(self) -> bytes:
        return _SPKI + self.raw


@dataclass(frozen=True)
class X448Pair:
    private: bytes = field(repr=False)
    public: X448PublicKey

    @cached_property
    def _key(self) -> x448.X448PrivateKey:
        return x448.X448PrivateKey.from_private_bytes(self.private)

    def exchange(self, peer: X448PublicKey) -> bytes:
        """The shared secret; a peer key that would make it all zeros is refused."""
        try:
            return self._key.exchange(x448.X448PublicKey.from_public_bytes(peer.raw))
        except ValueError:
            raise DecodeError from None


def x448_pair(private: bytes) -> X448Pair:
    """The pair of 56 random bytes."""
    key = x448.X448PrivateKey.from_private_bytes(private)
    pair = X448Pair(private, X448PublicKey(key.public_key().public_bytes_raw()))
    pair.__dict__["_key"] = key  # reading a private key costs as much as using it
    return pair


def decode_x448(der: bytes) -> X448PublicKey:
    if not der.startswith(_SPKI) or len(der) != len(_SPKI) + X448_SIZE:
        raise DecodeError
    return X448PublicKey(der[len(_SPKI) :])


X448 = Form(lambda r: decode_x448(r.pull_short()), lambda w, key: w.push_short(key.der))
