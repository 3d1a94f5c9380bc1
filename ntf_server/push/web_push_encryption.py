"""Message encryption for Web Push (RFC 8291, content encoding aes128gcm of RFC 8188)."""

from __future__ import annotations

import os
from typing import Final

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SALT_SIZE: Final = 16
RECORD_SIZE: Final = 4096  # what push services must accept; a longer text gets one longer record
TAG_SIZE: Final = 16
LAST_RECORD: Final = b"\x02"


def encrypt(
    text: bytes,
    *,
    p256dh: bytes,
    auth: bytes,
    salt: bytes | None = None,
    sender_key: ec.EllipticCurvePrivateKey | None = None,
) -> bytes:
    """The body of a push message in one record; ValueError if the device's key is no point of the curve."""
    salt = salt or os.urandom(SALT_SIZE)
    sender_key = sender_key or ec.generate_private_key(ec.SECP256R1())
    sender_point = sender_key.public_key().public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
    )
    device_key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), p256dh)
    shared = sender_key.exchange(ec.ECDH(), device_key)
    secret = _derive(auth, shared, b"WebPush: info\0" + p256dh + sender_point, 32)
    key = _derive(salt, secret, b"Content-Encoding: aes128gcm\0", 16)
    nonce = _derive(salt, secret, b"Content-Encoding: nonce\0", 12)
    record = AESGCM(key).encrypt(nonce, text + LAST_RECORD, None)
    size = max(RECORD_SIZE, len(record))
    return salt + size.to_bytes(4, "big") + bytes((len(sender_point),)) + sender_point + record


def _derive(salt: bytes, secret: bytes, info: bytes, size: int) -> bytes:
    return HKDF(hashes.SHA256(), size, salt, info).derive(secret)
