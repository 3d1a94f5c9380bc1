"""One TLS connection as a machine over bytes: ciphertext in, plaintext out, no sockets.

The ciphertext is cut into TLS records here, and OpenSSL gets one whole record at a time. So a read never has
to fail just to learn that there is nothing more, OpenSSL's buffers never grow beyond one record, and
decryption can stop at any record when the reader is slow.
"""

from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL

from transport.errors import ChainInvalid, ConnectionClosed, TlsFailed
from transport.tls import certificate_was_sent

HEADER_SIZE = 5  # type, legacy version, word16 length
MAX_PLAINTEXT = 16384
MAX_RECORD_BODY = MAX_PLAINTEXT + 256  # the most that TLS 1.3 allows
RECORD_OVERHEAD = HEADER_SIZE + 1 + 16  # inner content type, tag
SPARE = 256  # room to take along, in the same read, what OpenSSL sends on its own (key updates, alerts)
RECORD_TYPES = range(20, 24)
FLIGHT_SIZE = 4096  # a handshake flight with two or three certificates; longer ones take several reads


class TlsEngine:
    """Handshake, then records. Raises only `TransportError`s."""

    __slots__ = ("_client_side", "_connection", "_waiting", "established")

    def __init__(self, context: SSL.Context, *, client_side: bool) -> None:
        self._connection = SSL.Connection(context)
        self._client_side = client_side
        # Ciphertext not yet given to OpenSSL; from `feed` to the next call it is a view of the lent buffer.
        self._waiting: bytes | memoryview = b""
        self.established = False
        if client_side:
            self._connection.set_connect_state()
        else:
            self._connection.set_accept_state()

    def lend(self, buffer: memoryview) -> memoryview:
        """The part of `buffer` to receive ciphertext into; what waits already stands before it."""
        size = len(self._waiting)
        buffer[:size] = self._waiting
        return buffer[size:]

    def feed(self, buffer: memoryview, received: int) -> None:
        """Take the ciphertext received into what `lend` gave; the buffer is free after the next call."""
        self._waiting = buffer[: len(self._waiting) + received]

    def shake_hands(self) -> bool:
        """Go on with the handshake as far as the received records allow; True when it is finished."""
        if self._client_side and not self._waiting:
            return self._step()
        data, start, self._waiting = self._waiting, 0, b""
        while not self.established and (end := self._record_end(data, start)):
            self._connection.bio_write(data[start:end])
            start = end
            self._step()
        self._waiting = bytes(data[start:])
        return self.established

    def decrypt(self, limit: int) -> tuple[list[bytes], bool]:
        """The plaintext of the waiting whole records, and whether the peer said that it closes.

        Stops at the record that reaches `limit` bytes; call again for the rest.
        """
        data, start, self._waiting = self._waiting, 0, b""
        connection, plaintexts, taken, closed = self._connection, [], 0, False
        while taken < limit and (end := self._record_end(data, start)):
            try:
                connection.bio_write(data[start:end])
                plaintext = connection.recv(end - start)
            except SSL.WantReadError:
                plaintext = b""  # a record of TLS itself
            except SSL.ZeroReturnError:
                closed, start = True, len(data)  # what follows a goodbye means nothing
                break
            except SSL.Error as error:
                raise ConnectionClosed(_reason(error)) from error
            start = end
            if plaintext:
                plaintexts.append(plaintext)
                taken += len(plaintext)
        self._waiting = bytes(data[start:])
        return plaintexts, closed

    @property
    def has_waiting(self) -> bool:
        """Whether ciphertext waits that `decrypt` left over (perhaps only a part of a record)."""
        return bool(self._waiting)

    def encrypt(self, data: bytes | memoryview) -> bytes:
        """The record that carries `data`, which is at most `MAX_PLAINTEXT` long and not empty."""
        wanted = len(data) + RECORD_OVERHEAD + SPARE
        try:
            self._connection.send(data)
            record = self._connection.bio_read(wanted)
        except SSL.Error as error:
            raise ConnectionClosed(_reason(error)) from error
        return record if len(record) < wanted else record + self.take_outgoing()

    def take_outgoing(self) -> bytes:
        """What OpenSSL wants to send besides data: handshake flights, alerts, key updates."""
        parts = []
        try:
            while True:
                parts.append(self._connection.bio_read(FLIGHT_SIZE))
        except SSL.Error:
            return b"".join(parts)

    def close(self) -> bytes:
        """The record that tells the peer that nothing follows."""
        if not self.established:
            return b""
        try:
            self._connection.shutdown()
        except SSL.Error:
            return b""  # the connection failed before
        return self.take_outgoing()

    @property
    def session_id(self) -> bytes:
        """tls-unique: the client's Finished message."""
        connection = self._connection
        return (connection.get_finished() if self._client_side else connection.get_peer_finished()) or b""

    @property
    def alpn(self) -> bytes:
        """The agreed application protocol; empty if none was."""
        return self._connection.get_alpn_proto_negotiated()

    @property
    def certificate_sent(self) -> bool:
        """Client side: whether the server asked for our certificate and got it."""
        return self._client_side and certificate_was_sent(self._connection)

    def peer_chain(self) -> tuple[bytes, ...]:
        """The peer's certificates (DER, leaf first); empty if it sent none."""
        connection = self._connection
        try:
            chain = connection.get_peer_cert_chain(as_cryptography=True) or []
            if not self._client_side:  # on this side OpenSSL's list lacks the leaf
                leaf = connection.get_peer_certificate(as_cryptography=True)
                chain = [leaf, *chain] if leaf is not None else []
        except (ValueError, x509.InvalidVersion) as error:
            raise ChainInvalid("a certificate cannot be read") from error
        return tuple(certificate.public_bytes(Encoding.DER) for certificate in chain)

    def _step(self) -> bool:
        try:
            self._connection.do_handshake()
        except SSL.WantReadError:
            return False
        except SSL.Error as error:
            raise TlsFailed(_reason(error)) from error
        self.established = True
        return True

    def _record_end(self, data: bytes | memoryview, start: int) -> int:
        """Where the record at `start` ends; 0 if it is not complete."""
        body = start + HEADER_SIZE
        if len(data) < body:
            return 0
        length = data[start + 3] << 8 | data[start + 4]
        if length > MAX_RECORD_BODY or data[start] not in RECORD_TYPES:
            raise (ConnectionClosed if self.established else TlsFailed)("the peer does not speak TLS")
        return body + length if len(data) >= body + length else 0


def _reason(error: SSL.Error) -> str:
    """OpenSSL's words for what failed; they never contain data of the connection."""
    details = error.args[0] if error.args else None
    if isinstance(details, list):
        return "; ".join(entry[-1] for entry in details) or "TLS failed"
    return "TLS failed" if details is None else f"TLS failed: {details}"
