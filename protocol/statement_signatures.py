"""Who made a statement: checks of its proof. Loaded by the statement gateway only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import coincurve
import nacl.bindings
import nacl.exceptions
import sr25519

from protocol.statements import HASH_SIZE, Proof, Scheme, Signed, signed_part


def is_genuine(encoded: bytes, proof: Proof | None) -> bool:
    """Whether the proof of an encoded statement is a signature of it by the signer named. Never raises."""
    return isinstance(proof, Signed) and _CHECKS[proof.scheme](proof, signed_part(encoded, proof))


def verify_sr25519(signature: bytes, message: bytes, public_key: bytes) -> bool:
    """In the signing context `substrate`."""
    try:
        return bool(sr25519.verify(signature, message, public_key))
    except ValueError:
        return False


def _sr25519(proof: Signed, message: bytes) -> bool:
    return verify_sr25519(proof.signature, message, proof.signer)


def _ed25519(proof: Signed, message: bytes) -> bool:
    try:
        nacl.bindings.crypto_sign_open(proof.signature + message, proof.signer)
    except nacl.exceptions.BadSignatureError:
        return False
    return True


def _secp256k1(proof: Signed, message: bytes) -> bool:
    """The signature tells its key; a signature with a wrong recovery number is another key's."""
    digest = hashlib.blake2b(message, digest_size=HASH_SIZE).digest()
    try:
        key = coincurve.PublicKey.from_signature_and_message(proof.signature, digest, hasher=None)
    except Exception:  # the library raises a bare Exception
        return False
    return key.format() == proof.signer


_CHECKS: Mapping[Scheme, Callable[[Signed, bytes], bool]] = {
    Scheme.SR25519: _sr25519,
    Scheme.ED25519: _ed25519,
    Scheme.SECP256K1: _secp256k1,
}
