"""Certificate chains and session keys signed by a certificate's key, as handshakes carry them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from construct import (
    Const,
    Construct,
    ConstructError,
    FocusedSeq,
    GreedyBytes,
    Int8ub,
    Int16ub,
    Prefixed,
    PrefixedArray,
    Struct,
    stream_read,
    stream_write,
)
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ed448, ed25519

from protocol.crypto import (
    AuthPublicKey,
    Ed448PrivateKey,
    Ed448PublicKey,
    Ed25519PublicKey,
    SigningKey,
    VerifyKey,
    X25519PublicKey,
    decode_public_key,
    sha256,
)
from protocol.errors import DecodeError

Key = TypeVar("Key", Ed25519PublicKey, X25519PublicKey, Ed448PublicKey)

MAX_CHAIN = 4
_SEQUENCE = b"\x30"
_BIT_STRING = b"\x03"


class _DerLength(Construct):  # type: ignore[misc]
    """Definite lengths up to 65535."""

    def _parse(self, stream: Any, context: Any, path: str) -> int:
        first = stream_read(stream, 1, path)[0]
        if first < 0x80:
            return int(first)
        if first not in (0x81, 0x82):
            raise ConstructError("long DER length", path=path)
        return int.from_bytes(stream_read(stream, first - 0x80, path), "big")

    def _build(self, obj: int, stream: Any, context: Any, path: str) -> int:
        if obj < 0x80:
            encoded = bytes((obj,))
        elif obj < 0x100:
            encoded = bytes((0x81, obj))
        else:
            encoded = b"\x82" + obj.to_bytes(2, "big")
        stream_write(stream, encoded, len(encoded), path)
        return obj


def _tlv(tag: bytes) -> Construct:
    return FocusedSeq("body", Const(tag), "body" / Prefixed(_DerLength(), GreedyBytes))


ShortString = Prefixed(Int8ub, GreedyBytes)
LargeString = Prefixed(Int16ub, GreedyBytes)
CertificateChain = PrefixedArray(Int8ub, LargeString)
_SignedBody = Struct(
    "object" / _tlv(_SEQUENCE), "algorithm" / _tlv(_SEQUENCE), "signature" / _tlv(_BIT_STRING)
)
_Outer = _tlv(_SEQUENCE)
_ALGORITHMS = {bytes.fromhex("06032b6570"): 64, bytes.fromhex("06032b6571"): 114}
_ED25519_OID, _ED448_OID = _ALGORITHMS


_IDENTITY_PLACES = {2: (1,), 3: (1, 2), 4: (1, 2)}
"""By the length of a chain, leaf first. Deployed servers have their identity at place 1, with certificates of
their operator behind it; longer chains of the protocol begin with a session certificate, so it is at 2."""


def identity_hashes(chain: Sequence[bytes]) -> tuple[bytes, ...]:
    """The hashes by which a server that shows this chain may be known; none for chains of other lengths."""
    return tuple(sha256(chain[place]) for place in _IDENTITY_PLACES.get(len(chain), ()))


def sign_key(signer: SigningKey, key: AuthPublicKey) -> bytes:
    """The signature covers the SEQUENCE around the key, not the key alone."""
    signed = _tlv(_SEQUENCE).build(key.der)
    oid = _ED448_OID if isinstance(signer, Ed448PrivateKey) else _ED25519_OID
    body = _SignedBody.build({"object": key.der, "algorithm": oid, "signature": b"\0" + signer.sign(signed)})
    return bytes(_Outer.build(body))


def open_signed_key(certificate: bytes, signed_key: bytes, kind: type[Key]) -> Key:
    """The key, if it is of this kind and was signed by the certificate's; DecodeError for anything else."""
    try:
        body = _SignedBody.parse(_Outer.parse(signed_key))
    except ConstructError:
        raise DecodeError from None
    if _Outer.build(_SignedBody.build(body)) != signed_key:  # one form only: shortest lengths, nothing behind
        raise DecodeError
    signature = bytes(body.signature[1:])
    if _ALGORITHMS.get(bytes(body.algorithm)) != len(signature) or body.signature[:1] != b"\0":
        raise DecodeError
    verify_key = certificate_key(certificate)
    if not verify_key.verify(signature, _tlv(_SEQUENCE).build(body.object)):
        raise DecodeError
    key = decode_public_key(bytes(body.object))
    if not isinstance(key, kind):
        raise DecodeError
    return key


def certificate_key(certificate: bytes) -> VerifyKey:
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        raise DecodeError from None
    if isinstance(key, ed25519.Ed25519PublicKey):
        return Ed25519PublicKey(key.public_bytes_raw())
    if isinstance(key, ed448.Ed448PublicKey):
        return Ed448PublicKey(key.public_bytes_raw())
    raise DecodeError
