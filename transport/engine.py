"""One TLS connection as a machine over bytes: ciphertext in, plaintext out, no sockets.

The ciphertext is cut into TLS records here, and OpenSSL gets one whole record at a time. So a read never has
to fail just to learn that there is nothing more, OpenSSL's buffers never grow beyond one record, and
decryption can stop at any record when the reader is slow.

pyOpenSSL shakes hands. Records then pass through OpenSSL's own calls and through buffers that all connections
of a thread share: pyOpenSSL makes a buffer for each call, which for small records costs more than the cipher.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL
from OpenSSL._util import exception_from_error_queue, ffi, lib

from protocol.hiding import hides_bytes
from transport.errors import ChainInvalid, ConnectionClosed, TlsFailed
from transport.tls import certificate_was_sent

HEADER_SIZE = 5  # type, legacy version, word16 length
MAX_PLAINTEXT = 16384
MAX_RECORD_BODY = MAX_PLAINTEXT + 256  # the most that TLS 1.3 allows
RECORD_OVERHEAD = HEADER_SIZE + 1 + 16  # inner content type, tag
RECEIVE_SIZE = 8 * (MAX_PLAINTEXT + RECORD_OVERHEAD)  # the most that is read from a socket at once
ENCRYPTED_AT_ONCE = 4 * MAX_PLAINTEXT  # the most that becomes one piece for a socket
OUTGOING_SIZE = 5 * (MAX_PLAINTEXT + RECORD_OVERHEAD)  # with room for what OpenSSL sends on its own
PIECE_SIZE = 4096  # of a flight; most are shorter
RECORD_TYPES = range(20, 24)
SLIGHT_RECORD = 128  # bytes: less is not worth its cost, least of all a key update, which holds none
SLIGHT_RECORDS = 64  # of a connection: far more than anybody needs who sends blocks
DATA_PER_SLIGHT_RECORD = 512  # bytes that make up for one of them: a block of a client, however it is cut


class _Scratch(threading.local):
    """Buffers of an event loop's thread, used by one connection after the other."""

    def __init__(self) -> None:
        self.received = memoryview(bytearray(RECEIVE_SIZE))
        self.plaintext = ffi.new("char[]", RECEIVE_SIZE)
        self.outgoing = ffi.new("char[]", OUTGOING_SIZE)


_scratch = _Scratch()


def receive_buffer() -> memoryview:
    """Where all streams of this thread receive, one after the other."""
    return _scratch.received


@hides_bytes
class Established(NamedTuple):
    """What both sides know after the handshake."""

    session_id: bytes
    "tls-unique: the client's Finished message."
    alpn: bytes
    "The application protocol; empty if none was agreed."
    peer_chain: tuple[bytes, ...]
    "The peer's certificates (DER, leaf first); empty if it sent none."
    certificate_sent: bool
    "Client side: whether the server asked for our certificate and got it."


class TlsEngine:
    """Handshake, then records. Raises only `TransportError`s."""

    __slots__ = (
        "_client_side",
        "_connection",
        "_incoming",
        "_outgoing",
        "_slight",
        "_ssl",
        "_waiting",
        "established",
    )

    def __init__(self, context: SSL.Context, *, client_side: bool) -> None:
        self._ssl: Any = ffi.NULL
        connection = SSL.Connection(context)
        self._connection: SSL.Connection | None = connection
        self._ssl = connection._ssl
        ffi.gc(self._ssl, None)  # ours from here on: see __del__
        self._incoming: Any = connection._into_ssl
        self._outgoing: Any = connection._from_ssl
        self._client_side = client_side
        # Ciphertext not yet given to OpenSSL; from `feed` to the next call it is a view of the lent buffer.
        self._waiting: bytes | memoryview = b""
        self._slight = 0
        self.established = False
        if client_side:
            connection.set_connect_state()
        else:
            connection.set_accept_state()

    def __del__(self) -> None:
        """Free OpenSSL's part, and know that it is gone.

        The garbage collector finalizes a cycle in any order, and a handler's `finally` may still use its
        stream after that. pyOpenSSL's own finalizer would leave a pointer to freed memory behind.
        """
        ssl, self._ssl, self._connection, self.established = self._ssl, ffi.NULL, None, False
        lib.SSL_free(ssl)

    def lend(self, plaintext: int = RECEIVE_SIZE) -> memoryview:
        """The part of the thread's buffer to receive ciphertext into; what waits already stands before it.

        It has room for the records of so much `plaintext`, if they are long ones.
        """
        buffer, size = _scratch.received, len(self._waiting)
        buffer[:size] = self._waiting
        return buffer[size : size + plaintext + plaintext // MAX_PLAINTEXT * RECORD_OVERHEAD]

    def feed(self, received: int) -> None:
        """Take the ciphertext received into what `lend` gave; the buffer is free after the next call."""
        self._waiting = _scratch.received[: len(self._waiting) + received]

    def shake_hands(self) -> bool:
        """Go on with the handshake as far as the received records allow; True when it is finished."""
        if self._connection is None:
            raise ConnectionClosed("the connection is closed")
        if self._client_side and not self._waiting:
            return self._step()
        data, start, self._waiting = self._waiting, 0, b""
        while not self.established and (end := self._record_end(data, start)):
            lib.BIO_write(self._incoming, ffi.from_buffer(data) + start, end - start)
            start = end
            self._step()
        self._waiting = bytes(data[start:])
        return self.established

    def decrypt(self, limit: int) -> tuple[bytes, bool]:
        """The plaintext of the waiting whole records, and whether the peer said that it closes.

        Stops at the record that reaches `limit` bytes; call again for the rest.
        """
        data, start, self._waiting = self._waiting, 0, b""
        ciphertext, plaintext, taken, closed = ffi.from_buffer(data), _scratch.plaintext, 0, False
        while taken < limit and (end := self._record_end(data, start)):
            lib.BIO_write(self._incoming, ciphertext + start, end - start)
            # There is room: no plaintext is longer than its record, and all records were in one buffer.
            size = lib.SSL_read(self._ssl, plaintext + taken, RECEIVE_SIZE - taken)
            start = end
            if size >= SLIGHT_RECORD:
                taken += size
                continue
            if size > 0:
                taken += size
            elif self._said_goodbye(size):
                closed, start = True, len(data)  # what follows a goodbye means nothing
                break
            self._count_slight()
        if self._slight:
            self._slight = max(0, self._slight - taken)
        self._waiting = bytes(data[start:])
        return ffi.buffer(plaintext, taken)[:], closed

    @property
    def has_waiting(self) -> bool:
        """Whether ciphertext waits that `decrypt` left over (perhaps only a part of a record)."""
        return bool(self._waiting)

    def encrypt(self, data: bytes | memoryview) -> bytes:
        """The records that carry `data`, which is at most `ENCRYPTED_AT_ONCE` long and not empty."""
        if not self.established:
            raise ConnectionClosed("the connection is closed")
        plaintext, left, outgoing, size = ffi.from_buffer(data), len(data), _scratch.outgoing, 0
        while left > 0:
            written = lib.SSL_write(self._ssl, plaintext, min(left, MAX_PLAINTEXT))
            if written <= 0:
                raise ConnectionClosed(_last_error())
            left -= written
            plaintext += written
            size += lib.BIO_read(self._outgoing, outgoing + size, OUTGOING_SIZE - size)
        records: bytes = ffi.buffer(outgoing, size)[:]
        return records

    def take_outgoing(self) -> bytes:
        """What OpenSSL wants to send besides data: handshake flights, alerts, key updates."""
        # Not the thread's buffer: the garbage collector may close one stream while another encrypts.
        outgoing, piece = b"", ffi.new("char[]", PIECE_SIZE)
        while self._ssl and (size := lib.BIO_read(self._outgoing, piece, PIECE_SIZE)) > 0:
            outgoing += ffi.buffer(piece, size)[:]
        return outgoing

    def close(self) -> bytes:
        """The record that tells the peer that nothing follows."""
        if not self.established:
            return b""
        if lib.SSL_shutdown(self._ssl) < 0:
            lib.ERR_clear_error()
            return b""  # the connection failed before
        return self.take_outgoing()

    def finish_handshake(self) -> Established:
        """What came out of it, once; what only the handshake needed is freed. Its last flight was taken."""
        assert self._connection is not None
        connection, client_side = self._connection, self._client_side
        session_id = connection.get_finished() if client_side else connection.get_peer_finished()
        agreed = Established(
            session_id or b"",
            connection.get_alpn_proto_negotiated(),
            _peer_chain(connection, client_side=client_side),
            client_side and certificate_was_sent(connection),
        )
        # These two have grown to the size of a flight.
        self._incoming, self._outgoing = _memory_bio(), _memory_bio()
        lib.SSL_set_bio(self._ssl, self._incoming, self._outgoing)
        if not client_side:  # a client's context tells its connection of key updates
            self._connection = None
        return agreed

    def _step(self) -> bool:
        assert self._connection is not None
        try:
            self._connection.do_handshake()
        except SSL.WantReadError:
            return False
        except SSL.Error as error:
            raise TlsFailed(_reason(error)) from error
        self.established = True
        return True

    def _said_goodbye(self, result: int) -> bool:
        """Why a record held no data: the peer closes, or it was a record of TLS itself."""
        reason = lib.SSL_get_error(self._ssl, result)
        if reason == lib.SSL_ERROR_WANT_READ:
            return False
        if reason == lib.SSL_ERROR_ZERO_RETURN:
            return True
        raise ConnectionClosed(_last_error())

    def _count_slight(self) -> None:
        """A record held little. It costs as much as a block, a key update also an answer that the peer need
        not read; and no limit of the protocol above sees it."""
        self._slight += DATA_PER_SLIGHT_RECORD
        if self._slight > SLIGHT_RECORDS * DATA_PER_SLIGHT_RECORD:
            raise ConnectionClosed("the peer sends records with hardly any data")

    def _record_end(self, data: bytes | memoryview, start: int) -> int:
        """Where the record at `start` ends; 0 if it is not complete."""
        body = start + HEADER_SIZE
        if len(data) < body:
            return 0
        length = data[start + 3] << 8 | data[start + 4]
        if length > MAX_RECORD_BODY or data[start] not in RECORD_TYPES:
            raise (ConnectionClosed if self.established else TlsFailed)("the peer does not speak TLS")
        return body + length if len(data) >= body + length else 0


def _peer_chain(connection: SSL.Connection, *, client_side: bool) -> tuple[bytes, ...]:
    try:
        chain = connection.get_peer_cert_chain(as_cryptography=True) or []
        if not client_side:  # on this side OpenSSL's list lacks the leaf
            leaf = connection.get_peer_certificate(as_cryptography=True)
            chain = [leaf, *chain] if leaf is not None else []
    except (ValueError, x509.InvalidVersion) as error:
        raise ChainInvalid("a certificate cannot be read") from error
    return tuple(certificate.public_bytes(Encoding.DER) for certificate in chain)


def _memory_bio() -> Any:
    bio = lib.BIO_new(lib.BIO_s_mem())
    if bio == ffi.NULL:
        raise MemoryError
    return bio


def _last_error() -> str:
    """Takes it out of OpenSSL's queue: there it would be found after the next call, of another connection."""
    try:
        exception_from_error_queue(SSL.Error)
    except SSL.Error as error:
        return _reason(error)


def _reason(error: SSL.Error) -> str:
    """OpenSSL's words for what failed; they never contain data of the connection."""
    details = error.args[0] if error.args else None
    if isinstance(details, list):
        return "; ".join(entry[-1] for entry in details) or "TLS failed"
    return "TLS failed" if details is None else f"TLS failed: {details}"
