"""Pinned identities: a server is who the hash of a certificate in its chain says, whatever its name or CA."""

from __future__ import annotations

import hashlib
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from protocol.signed_key import identity_hashes
from transport.errors import ChainInvalid, IdentityMismatch

MIN_CHAIN, MAX_CHAIN = 2, 4  # leaf and CA; up to two certificates of operators above them
VERIFIED_CHAINS = (
    1024  # a chain is about 1 kB; routers are reconnected to far more often than they are replaced
)


class Validity(NamedTuple):
    """The time in which all certificates of a chain are valid."""

    start: datetime
    end: datetime


def fingerprint(der: bytes) -> bytes:
    """SHA-256 of a certificate's DER: the identity ("key hash") of whoever owns it."""
    return hashlib.sha256(der).digest()


def check_chain(chain: tuple[bytes, ...], identity: bytes | None, now: datetime) -> None:
    """Accept a server's chain (DER, leaf first) or raise `IdentityMismatch` or `ChainInvalid`.

    Checked: length, identity (unless it is None), every signature up the chain, dates. There is no check of
    names and no list of public authorities. The last certificate's own signature proves nothing and is not
    read.
    """
    if not MIN_CHAIN <= len(chain) <= MAX_CHAIN:
        raise ChainInvalid(f"a chain of {len(chain)} certificates; {MIN_CHAIN} to {MAX_CHAIN} are allowed")
    if identity is not None and identity not in identity_hashes(chain):
        raise IdentityMismatch(
            "the certificate does not match the pinned fingerprint (wrong server or interception)"
        )
    validity = _verified(chain)
    if now < validity.start:
        raise ChainInvalid(f"a certificate is not valid before {validity.start:%Y-%m-%d %H:%M} UTC")
    if now > validity.end:
        raise ChainInvalid(f"a certificate expired at {validity.end:%Y-%m-%d %H:%M} UTC")


@lru_cache(maxsize=VERIFIED_CHAINS)
def _verified(chain: tuple[bytes, ...]) -> Validity:
    """Verify the signatures. Cached: they never change for the same bytes (failures are not cached)."""
    try:
        certificates = [x509.load_der_x509_certificate(der) for der in chain]
        for signed, issuer in pairwise(certificates):
            _check_signature(signed, issuer)
        return Validity(
            max(certificate.not_valid_before_utc for certificate in certificates),
            min(certificate.not_valid_after_utc for certificate in certificates),
        )
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise ChainInvalid("a certificate cannot be read") from error


def _check_signature(signed: x509.Certificate, issuer: x509.Certificate) -> None:
    key = issuer.public_key()
    if not isinstance(key, Ed25519PublicKey | Ed448PublicKey):
        raise ChainInvalid("a certificate's key is neither Ed25519 nor Ed448")
    try:
        key.verify(signed.signature, signed.tbs_certificate_bytes)
    except InvalidSignature as error:
        raise ChainInvalid("a certificate was not signed by the next one in the chain") from error
