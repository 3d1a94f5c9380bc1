"""Certificate chains and session keys signed by a certificate's key, as handshakes carry them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from construct import (
    Construct,
    ConstructError,
    FocusedSeq,
    GreedyBytes,
    Int8ub,
    Int16ub,
    Prefixed,
    PrefixedArray,
    Struct,
    Terminated,
    stream_read,
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


class _Element(Construct):  # type: ignore[misc]
    """The content of an element of DER, behind its tag and the shortest form of its length."""

    def __init__(self, tag: bytes) -> None:
        super().__init__()
        self._tag = tag

    def _parse(self, stream: Any, context: Any, path: str) -> bytes:
        header = stream_read(stream, 2, path)
        length = header[1]
        if length >= 0x80:
            header += stream_read(stream, length & 0x7F, path)
            length = int.from_bytes(header[2:], "big")
        if header != self._header(length):
            raise ConstructError("another tag, or a length that is not DER", path=path)
        return bytes(stream_read(stream, length, path))

    def around(self, content: bytes) -> bytes:
        return self._header(len(content)) + content

    def _header(self, length: int) -> bytes:
        if length < 0x80:
            return self._tag + bytes((length,))
        encoded = length.to_bytes((length.bit_length() + 7) // 8, "big")
        return self._tag + bytes((0x80 | len(encoded),)) + encoded


ShortString = Prefixed(Int8ub, GreedyBytes)
LargeString = Prefixed(Int16ub, GreedyBytes)
CertificateChain = PrefixedArray(Int8ub, LargeString)
_Sequence, _BitString = _Element(b"\x30"), _Element(b"\x03")
_Outer = FocusedSeq("body", "body" / _Sequence, Terminated)
_SignedBody = Struct("object" / _Sequence, "algorithm" / _Sequence, "signature" / _BitString, Terminated)
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
    signed = _Sequence.around(key.der)
    oid = _ED448_OID if isinstance(signer, Ed448PrivateKey) else _ED25519_OID
    signature = _BitString.around(b"\0" + signer.sign(signed))
    return _Sequence.around(signed + _Sequence.around(oid) + signature)


def open_signed_key(certificate: bytes, signed_key: bytes, kind: type[Key]) -> Key:
    """The key, if it is of this kind and was signed by the certificate's; DecodeError for anything else."""
    try:
        body = _SignedBody.parse(_Outer.parse(signed_key))
    except ConstructError:
        raise DecodeError from None
    signature = body.signature[1:]
    if _ALGORITHMS.get(body.algorithm) != len(signature) or body.signature[:1] != b"\0":
        raise DecodeError
    verify_key = certificate_key(certificate)
    if not verify_key.verify(signature, _Sequence.around(body.object)):
        raise DecodeError
    key = decode_public_key(body.object)
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
