"""TLS over asyncio: the stream every server and client here uses, and how to get one."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from datetime import datetime
from typing import TypeAlias

from OpenSSL import SSL

from transport.engine import ENCRYPTED_AT_ONCE, TlsEngine
from transport.errors import ConnectionClosed, TlsFailed, TransportError
from transport.identity import check_chain

READ_LIMIT = 256 * 1024  # decrypted bytes that may wait for the reader; then the peer has to wait
# Of connections that this side makes: what waits here dies with the process, and is not sent again.
SERVER_READ_LIMIT = 64 * 1024
SERVER_SOCKET_BUFFER = 128 * 1024
CLOSE_TIMEOUT = 10.0  # what is still unsent this long after close() is given up

HandshakeCallback: TypeAlias = "Callable[[TlsStream, TransportError | None], None]"


class TlsStream(asyncio.BufferedProtocol):
    """Bytes over one TLS connection, for one reader and any number of writers.

    The methods of `asyncio.BufferedProtocol` are for the event loop only.
    """

    __slots__ = (
        "_check",
        "_client_side",
        "_close_waiters",
        "_drain_waiters",
        "_engine",
        "_error",
        "_loop",
        "_lost",
        "_no_more",
        "_on_handshake",
        "_reader",
        "_reading_paused",
        "_received",
        "_received_size",
        "_timer",
        "_transport",
        "_writing_paused",
        "alpn",
        "certificate_sent",
        "context",
        "last_received",
        "peer",
        "peer_chain",
        "read_limit",
        "session_id",
        "write_limit",
    )

    def __init__(
        self,
        context: SSL.Context,
        on_handshake: HandshakeCallback,
        *,
        client_side: bool,
        check: Callable[[tuple[bytes, ...]], None] | None = None,
        read_limit: int = READ_LIMIT,
        write_limit: int | None = None,
    ) -> None:
        """`on_handshake` is called once, when the handshake ended; `check` may refuse the peer's chain.

        With more than `write_limit` bytes unsent `drain` waits (None: asyncio's own limit).
        """
        self._loop = asyncio.get_running_loop()
        self.context = context
        self._client_side = client_side
        self._engine: TlsEngine  # made when the peer is admitted: until then it costs nothing
        self._on_handshake: HandshakeCallback | None = on_handshake
        self._check = check
        self.read_limit = read_limit
        self.write_limit = write_limit
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._received: list[bytes] = []
        self._received_size = 0
        self._reader: asyncio.Future[None] | None = None
        self._drain_waiters: list[asyncio.Future[None]] | None = None
        self._close_waiters: list[asyncio.Future[None]] | None = None
        self._reading_paused = self._writing_paused = self._no_more = self._lost = False
        self._error: TransportError | None = None
        self.session_id = b""
        self.peer_chain: tuple[bytes, ...] = ()
        self.alpn = b""
        self.certificate_sent = False
        self.peer: tuple[str, int] = ("", 0)
        self.last_received = self._loop.time()

    async def receive(self) -> bytes:
        """All bytes received so far, at least one; empty when the peer closed. Raises `ConnectionClosed`."""
        while not self._received:
            if self._error is not None:
                raise self._error
            if self._no_more:
                return b""
            if self._reader is not None:
                raise RuntimeError("another task is already receiving from this stream")
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        data = self._received[0] if len(self._received) == 1 else b"".join(self._received)
        self._received.clear()
        self._received_size = 0
        if self._reading_paused or self._engine.has_waiting:
            self._continue_reading()
        return data

    def write(self, data: bytes) -> None:
        """Encrypt and send without waiting; call `drain` now and then. Raises `ConnectionClosed`."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise self._error or ConnectionClosed("the connection is closed")
        encrypt = self._engine.encrypt
        if len(data) <= ENCRYPTED_AT_ONCE:
            if data:
                transport.write(encrypt(data))
            return
        view = memoryview(data)
        for start in range(0, len(data), ENCRYPTED_AT_ONCE):
            transport.write(encrypt(view[start : start + ENCRYPTED_AT_ONCE]))

    @property
    def is_closing(self) -> bool:
        """Whether nothing more can be sent or received."""
        return self._no_more or self._transport is None or self._transport.is_closing()

    @property
    def local_address(self) -> str:
        """The IP address that the peer connected to; empty if it is gone."""
        name = None if self._transport is None else self._transport.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def is_full(self) -> bool:
        """Whether `drain` has to wait."""
        return self._writing_paused

    async def drain(self) -> None:
        """Wait until the peer has taken enough of what was written. Raises `ConnectionClosed`."""
        if self._lost:
            raise self._error or ConnectionClosed("the connection is closed")
        while self._writing_paused:
            if self._drain_waiters is None:
                self._drain_waiters = []
            await self._wait_in(self._drain_waiters)
            if self._lost:
                raise self._error or ConnectionClosed("the connection is closed")

    @property
    def write_buffer_size(self) -> int:
        """Encrypted bytes that the operating system has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def end_writing(self) -> None:
        """Say goodbye, and go on receiving what the peer sends until it says so too."""
        if self._transport is not None and (goodbye := self._engine.close()):
            self._transport.write(goodbye)

    def close(self) -> None:
        """Send what was written and say goodbye; a peer that does not take it within a bound is cut off."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if goodbye := self._engine.close():
            transport.write(goodbye)
        transport.close()
        self._no_more = True
        self._wake_reader()
        self._set_timer(CLOSE_TIMEOUT, transport.abort)

    def abort(self) -> None:
        """Close at once; what is unsent is lost."""
        self._no_more = True
        if self._transport is not None:
            self._transport.abort()
        self._wake_reader()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        if not self._lost:
            if self._close_waiters is None:
                self._close_waiters = []
            await self._wait_in(self._close_waiters)

    def start_timeout(self, seconds: float) -> None:
        """Refuse a peer whose handshake takes longer."""
        self._set_timer(seconds, self._fail, TlsFailed("the peer did not finish the handshake in time"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self.write_limit is not None:
            transport.set_write_buffer_limits(self.write_limit)
        address = transport.get_extra_info("peername")
        if address:
            self.peer = (
                (str(address[0]), int(address[1])) if isinstance(address, tuple) else (str(address), 0)
            )
        self._start()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to receive: one buffer for all streams, emptied before any other stream can receive."""
        return self._engine.lend(self.read_limit)

    def buffer_updated(self, nbytes: int) -> None:
        """Decrypt, and wake the reader."""
        self.last_received = self._loop.time()
        self._engine.feed(nbytes)
        self._process()

    def eof_received(self) -> None:
        """Let the transport close itself: nobody here talks to a peer that stopped listening to answers."""
        self._no_more = True
        if self._on_handshake is not None:
            self._fail(ConnectionClosed("the peer closed the connection during the handshake"))
        self._wake_reader()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell everybody who waits."""
        self._lost = self._no_more = True
        self._cancel_timer()
        if error is not None and self._error is None:
            self._error = ConnectionClosed(f"the connection broke: {type(error).__name__}")
        if self._on_handshake is not None:
            self._finish_handshake(
                self._error or ConnectionClosed("the connection closed during the handshake")
            )
        self._wake_reader()
        _wake(self._drain_waiters)
        _wake(self._close_waiters)

    def pause_writing(self) -> None:
        """The peer reads slowly: `drain` waits."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """`drain` goes on."""
        self._writing_paused = False
        _wake(self._drain_waiters)

    def _start(self) -> None:
        self._engine = TlsEngine(self.context, client_side=self._client_side)
        self._process()

    def _process(self) -> None:
        try:
            if self._engine.established or self._shake_hands():
                self._decrypt()
        except TransportError as error:
            self._fail(error)

    def _shake_hands(self) -> bool:
        assert self._transport is not None
        finished = self._engine.shake_hands()
        flight = self._engine.take_outgoing()
        if finished:
            agreed = self._engine.finish_handshake()
            self.session_id, self.alpn, self.peer_chain, self.certificate_sent = agreed
            if self._check is not None:
                # Before our last flight leaves: an impostor does not get to see the client's certificate.
                self._check(self.peer_chain)
                self._check = None
        if flight:
            self._transport.write(flight)
        if finished:
            self._cancel_timer()
            self._finish_handshake(None)
        return finished

    def _decrypt(self) -> None:
        assert self._transport is not None
        plaintext, closed = self._engine.decrypt(self.read_limit - self._received_size)
        if plaintext:
            self._received.append(plaintext)
            self._received_size += len(plaintext)
        elif outgoing := self._engine.take_outgoing():
            self._transport.write(outgoing)
        if closed:
            self._no_more = True
        if plaintext or closed:
            self._wake_reader()
        # A reader that waits has its turn before the next bytes are received.
        if self._received_size >= self.read_limit and self._reader is None and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def _continue_reading(self) -> None:
        """The reader took everything: decrypt what waits, and let the peer send again if that was little."""
        if self._engine.has_waiting:
            self._process()
        if self._received_size < self.read_limit and self._reading_paused:
            self._reading_paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def _fail(self, error: TransportError) -> None:
        """End the connection because of `error`, after telling the peer why."""
        if self._error is None:
            self._error = error
        self._no_more = True
        self._cancel_timer()
        if self._transport is not None and not self._transport.is_closing():
            if self._check is None:
                self._transport.write(self._last_words())
            self._transport.abort()
        if self._on_handshake is not None:
            self._finish_handshake(error)
        self._wake_reader()

    def _last_words(self) -> bytes:
        return self._engine.take_outgoing()

    def _finish_handshake(self, error: TransportError | None) -> None:
        callback, self._on_handshake = self._on_handshake, None
        if callback is not None:
            callback(self, error)

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _wait_in(self, waiters: list[asyncio.Future[None]]) -> None:
        waiter = self._loop.create_future()
        waiters.append(waiter)
        try:
            await waiter
        finally:
            waiters.remove(waiter)

    def _set_timer(self, seconds: float, action: Callable[..., None], *arguments: object) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(seconds, action, *arguments)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _wake(waiters: list[asyncio.Future[None]] | None) -> None:
    for waiter in waiters or ():
        if not waiter.done():
            waiter.set_result(None)


async def connect(
    address: str,
    port: int,
    *,
    context: SSL.Context,
    identity: bytes | None,
    now: Callable[[], datetime],
    sock: socket.socket | None = None,
    timeout: float,
) -> TlsStream:
    """Connect, shake hands and check the server's chain against the pinned `identity` (None: any identity).

    `address` is an IP address: whoever has a name looks it up first (`smp_client.dialer`). With `sock`, a
    connected socket (say, a proxy's) is used instead, and owned from then on. Raises `OSError` (also
    `TimeoutError`) for network failures, otherwise `TransportError`s. Nothing stays open when it fails or is
    cancelled.
    """
    loop = asyncio.get_running_loop()
    handshake: asyncio.Future[TransportError | None] = loop.create_future()

    def finished(_stream: TlsStream, error: TransportError | None) -> None:
        if not handshake.done():
            handshake.set_result(error)

    def check(chain: tuple[bytes, ...]) -> None:
        check_chain(chain, identity, now())

    stream: TlsStream | None = None
    try:
        async with asyncio.timeout(timeout):
            if sock is None:
                sock = await connect_socket(address, port)
            sock.setblocking(False)
            _, stream = await loop.create_connection(
                lambda: TlsStream(
                    context, finished, client_side=True, check=check, read_limit=SERVER_READ_LIMIT
                ),
                sock=sock,
            )
            if (error := await handshake) is not None:
                raise error
    except BaseException:
        if stream is not None:
            stream.abort()
        elif sock is not None:
            sock.close()
        raise
    return stream


async def connect_socket(address: str, port: int) -> socket.socket:
    """To an IP address, without TLS; see `connect`."""
    try:
        family = socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6
    except ValueError:
        raise OSError(f"{address!r} is no IP address") from None
    # The protocol is named so that asyncio sends small blocks at once (TCP_NODELAY).
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setblocking(False)
        # Before connecting: the window that the peer is offered is agreed on there.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SERVER_SOCKET_BUFFER)
        await asyncio.get_running_loop().sock_connect(sock, (address, port))
    except BaseException:
        sock.close()
        raise
    return sock
