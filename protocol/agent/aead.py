"""AES-256-GCM with 16-byte IVs over padded plaintext, the tag apart from the body."""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from protocol.blocks import pad, unpad
from protocol.crypto import TAG_SIZE

IV_SIZE = 16


class AeadError(Exception):
    """It does not open: another key, or changed bytes."""


def seal(key: bytes, iv: bytes, associated: bytes, plaintext: bytes, size: int) -> tuple[bytes, bytes]:
    """Tag and body of `plaintext` padded to `size`; TooLarge if it does not fit."""
    sealed = AESGCM(key).encrypt(iv, pad(plaintext, size), associated)
    return sealed[-TAG_SIZE:], sealed[:-TAG_SIZE]


def open_sealed(key: bytes, iv: bytes, associated: bytes, tag: bytes, body: bytes) -> bytes:
    """The plaintext; AeadError if it does not open, DecodeError if its padding is none."""
    try:
        padded = AESGCM(key).decrypt(iv, body + tag, associated)
    except InvalidTag:
        raise AeadError from None
    return unpad(padded)
