"""Who made a statement: checks of its proof. Loaded by the statement gateway only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import nacl.bindings
import nacl.exceptions
import sr25519
import wallycore

from protocol.statements import HASH_SIZE, Proof, Scheme, Signed, signed_part

_NEUTRAL_KEY = bytes(32)
"""The neutral element: an all-zero signature by it is right for every message. The group of sr25519
(ristretto255) has a prime order and one encoding of each element, so there is no other key of small order."""
MAX_RECOVERY_NUMBER = 3
RECOVERY_HEADER = 31
"What the library adds to the recovery number of a compressed key, and puts first."


def is_genuine(encoded: bytes, proof: Proof | None) -> bool:
    """Whether the proof of an encoded statement is a signature of it by the signer named. Never raises."""
    if not isinstance(proof, Signed):
        return False
    scheme, signature, signer = proof
    return _CHECKS[scheme](signature, signed_part(encoded, proof), signer)


def verify_sr25519(signature: bytes, message: bytes, public_key: bytes) -> bool:
    """In the signing context `substrate`."""
    if public_key == _NEUTRAL_KEY:
        return False
    try:
        return bool(sr25519.verify(signature, message, public_key))
    except ValueError:
        return False


def _verify_ed25519(signature: bytes, message: bytes, public_key: bytes) -> bool:
    try:
        nacl.bindings.crypto_sign_open(signature + message, public_key)
    except nacl.exceptions.BadSignatureError:
        return False
    return True


def _verify_secp256k1(signature: bytes, message: bytes, public_key: bytes) -> bool:
    """The signature tells its key; a signature with a wrong recovery number is another key's."""
    compact, number = signature[:-1], signature[-1]
    if number > MAX_RECOVERY_NUMBER:
        return False
    digest = hashlib.blake2b(message, digest_size=HASH_SIZE).digest()
    try:
        key = wallycore.ec_sig_to_public_key(digest, bytes((RECOVERY_HEADER + number,)) + compact)
    except ValueError:
        return False
    return bytes(key) == public_key


_CHECKS: Mapping[Scheme, Callable[[bytes, bytes, bytes], bool]] = {
    Scheme.SR25519: verify_sr25519,
    Scheme.ED25519: _verify_ed25519,
    Scheme.SECP256K1: _verify_secp256k1,
}
