"""A TLS 1.3 client that sends key updates (RFC 8446, 4.6.3) as often as it likes, which no library offers."""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from OpenSSL import SSL

APPLICATION_SECRET = "CLIENT_TRAFFIC_SECRET_0"
UPDATE_REQUESTED = bytes([24, 0, 0, 1, 1])
"The message: the other side is to change its keys too, and to say so."
HANDSHAKE, DATA = 22, 23
TAG_SIZE = 16


class UpdatingClient:
    """Shakes hands over bytes; then `update` and `data` make the records to send."""

    def __init__(self) -> None:
        self._secret, self._number = b"", 0
        context = SSL.Context(SSL.TLS_CLIENT_METHOD)
        context.set_min_proto_version(SSL.TLS1_3_VERSION)
        context.set_tls13_ciphersuites(b"TLS_CHACHA20_POLY1305_SHA256")
        noted: list[bytes] = []
        context.set_keylog_callback(lambda _, line: noted.append(line))  # holds nothing of ours: no cycle
        self._noted = noted
        self._connection = SSL.Connection(context, None)
        self._connection.set_connect_state()
        self.is_connected = False

    def shake_hands(self, received: bytes = b"") -> bytes:
        """What to send next."""
        if received:
            self._connection.bio_write(received)
        try:
            self._connection.do_handshake()
            self.is_connected = True
            self._secret = self._first_secret()
        except SSL.WantReadError:
            pass
        try:
            return self._connection.bio_read(1 << 16)
        except SSL.WantReadError:
            return b""

    def _first_secret(self) -> bytes:
        lines = (line.decode().split(" ") for line in self._noted)
        return next(bytes.fromhex(secret) for label, _, secret in lines if label == APPLICATION_SECRET)

    def update(self) -> bytes:
        """Each ends the use of the keys that it was sent with."""
        record = self._record(UPDATE_REQUESTED, HANDSHAKE)
        self._secret, self._number = _expanded(self._secret, b"traffic upd", 32), 0
        return record

    def data(self, data: bytes) -> bytes:
        record = self._record(data, DATA)
        self._number += 1
        return record

    def _record(self, content: bytes, kind: int) -> bytes:
        key, start = _expanded(self._secret, b"key", 32), _expanded(self._secret, b"iv", 12)
        nonce = int.from_bytes(start, "big") ^ self._number
        header = bytes([DATA, 3, 3]) + (len(content) + 1 + TAG_SIZE).to_bytes(2, "big")
        return header + ChaCha20Poly1305(key).encrypt(
            nonce.to_bytes(12, "big"), content + bytes([kind]), header
        )


def _expanded(secret: bytes, label: bytes, size: int) -> bytes:
    label = b"tls13 " + label
    info = size.to_bytes(2, "big") + bytes([len(label)]) + label + b"\0"
    return HKDFExpand(SHA256(), size, info).derive(secret)
