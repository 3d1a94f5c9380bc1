"""The gateway's connections: so many at once, of one address a part of them, and none that only waits."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from contextlib import ExitStack, suppress
from http import HTTPStatus

from aiohttp import web

from ntf_server.metrics import counter
from transport.accepting import Acceptor
from transport.limits import ConnectionCounter, Turns, source_of
from transport.server import HANDSHAKE_TIMEOUT

log = logging.getLogger(__name__)

ADDRESS_PART = 4
"One address may have one connection of so many."
SILENCE = 20.0
"Seconds until a connection without a whole head of a request is closed."
BODY_TIMEOUT = 30.0
HANDSHAKES_PER_TURN = 1
"Of the event loop: each is a millisecond or two of arithmetic, and hundreds may come at once."
HANDSHAKES, HANDSHAKES_PER_SOURCE = 128, 64
"That have begun and not ended: each holds some 400 kB."
SEND_TIMEOUT = 60.0
"Seconds in which a client takes an answer that is long."
LINGER = 2.0
"Seconds in which the rest of a request that was answered is read."
SHUTDOWN_TIMEOUT = 2.0
MAX_BODY = 4 * 1024 * 1024
"Bytes of a request."
SHORT_BODY = 64 * 1024
"Longer ones are counted:"
LONG_BODIES = 32
"so many may come at once."

REFUSED = counter("statements_connections_refused", "Connections to the statement gateway beyond the limit")


class HttpServer:
    """Serves the application between `open` and `close`."""

    def __init__(self, application: web.Application, connections: ConnectionCounter) -> None:
        self._runner = web.AppRunner(application, shutdown_timeout=SHUTDOWN_TIMEOUT)
        self._connections = connections
        self._acceptor: Acceptor | None = None
        self._tls: ssl.SSLContext | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._handshakes = Turns(HANDSHAKES_PER_TURN)
        self._begun = ConnectionCounter(HANDSHAKES, HANDSHAKES_PER_SOURCE)

    async def open(self, host: str | None, port: int, tls: ssl.SSLContext | None, *, reuse_port: bool) -> int:
        """Returns the port."""
        await self._runner.setup()
        self._tls = tls
        self._acceptor = Acceptor(self._take, reuse_port=reuse_port)
        await self._acceptor.listen(host, port)
        return self._acceptor.port

    async def close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        for task in self._opening:
            task.cancel()
        if self._opening:
            await asyncio.wait(self._opening)
        await self._runner.cleanup()

    def _take(self, sock: socket.socket, address: str) -> None:
        """A connection counts from now on, and not only when it has shaken hands."""
        source = source_of(address)
        if not self._connections.admit(source):
            REFUSED.inc()
            sock.close()
            return
        task = asyncio.get_running_loop().create_task(self._connect(sock, source), name=f"gateway {address}")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, sock: socket.socket, source: str) -> None:
        assert self._runner.server is not None
        connection = _Connection(self._runner.server)
        timeout = HANDSHAKE_TIMEOUT if self._tls else None
        with ExitStack() as counted, suppress(OSError), ExitStack() as begun:  # it is gone, or speaks no TLS
            counted.callback(self._connections.release, source)
            if self._tls is not None:
                await self._its_turn(sock, source)
                begun.callback(self._begun.release, source)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, sock, ssl=self._tls, ssl_handshake_timeout=timeout
            )
            if connection.transport is not None:
                connection.counted = counted.pop_all()

    async def _its_turn(self, sock: socket.socket, source: str) -> None:
        """To shake hands. Who says nothing keeps nobody from it; OSError if too many have begun."""
        try:
            await _begins(sock)
            await self._handshakes.take(1)
            if not self._begun.admit(source):
                REFUSED.inc()
                raise ConnectionRefusedError
        except BaseException:
            sock.close()
            raise


async def _begins(sock: socket.socket) -> None:
    """Wait until the peer says something."""
    loop, said = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, said.set)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            await said.wait()
    finally:
        loop.remove_reader(sock)


class _Connection(web.RequestHandler):
    def __init__(self, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            logger=_library_log(),
            access_log=None,  # type: ignore[arg-type]  # the library allows it
            keepalive_timeout=SILENCE,
            lingering_time=LINGER,
            auto_decompress=False,  # what is small here must not become large
        )
        self.counted = ExitStack()
        "Closed when it ends."

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Of what is no HTTP; the library's answer repeats it."""
        super().handle_error(request, status, exc, message)
        response = json_error(status)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """What the library refuses before the application sees it is an error in JSON, too."""
        if isinstance(resp, web.HTTPException):
            resp = json_error(resp.status)
        return await super().finish_response(request, resp, start_time)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.counted.close()


def json_error(status: int, code: str = "", message: str = "", **more: str) -> web.Response:
    """`code`: what stands for the status alone, if none is given."""
    body = {"error": code or _CODES.get(status) or HTTPStatus(status).phrase.lower().replace(" ", "_")}
    return web.json_response(body | ({"message": message} if message else {}) | more, status=status)


_CODES = {413: "too_large"}
"Where the phrase is another in each version of Python."


async def whole_body(request: web.Request, long_bodies: ConnectionCounter) -> bytes:
    """HTTPException if it is too long, does not come in time, or so many long ones come already."""
    if (request.content_length or 0) > MAX_BODY:
        raise _too_large()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            return await _read(request, long_bodies)
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    except (web.RequestPayloadError, ConnectionError):
        raise web.HTTPBadRequest from None


async def _read(request: web.Request, long_bodies: ConnectionCounter) -> bytes:
    """Nobody knows who sends it until it is there: the room for long ones is shared out."""
    body, source, is_long = bytearray(), source_of(request.remote or ""), False
    with ExitStack() as counted:
        while chunk := await request.content.readany():
            body += chunk
            if len(body) > MAX_BODY:
                raise _too_large()
            if len(body) > SHORT_BODY and not is_long:
                if not long_bodies.admit(source):
                    raise web.HTTPTooManyRequests
                counted.callback(long_bodies.release, source)
                is_long = True
        return bytes(body)


def _too_large() -> web.HTTPException:
    return web.HTTPRequestEntityTooLarge(MAX_BODY, MAX_BODY)


async def send(request: web.Request, response: web.Response) -> None:
    """Returns when the client has taken it, but for what the system buffers; one that does not is let go."""
    try:
        async with asyncio.timeout(SEND_TIMEOUT):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # it is gone


class _OneLine(logging.Filter):
    """aiohttp calls what is no HTTP an error, with a traceback: nothing that a client should cause."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args, record.exc_info = "a client of the gateway sent what is no HTTP", (), None
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        return True


def _library_log() -> logging.Logger:
    library = log.getChild("library")
    if not library.filters:
        library.addFilter(_OneLine())
    return library
