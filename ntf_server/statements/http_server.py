"""The gateway's connections and bodies: within limits, and for none longer than it needs.

With TLS, connections are accepted like those of the NTF port: `transport.server`. Without, they come from a
proxy of the operator's.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import ExitStack, suppress
from http import HTTPStatus
from typing import NamedTuple

from aiohttp import web
from OpenSSL import SSL

from ntf_server.metrics import counter
from ntf_server.statements.signed_requests import body_hash
from protocol.hiding import hides_bytes
from transport.accepting import Acceptor
from transport.budget import CpuBudget
from transport.limits import ConnectionCounter, Rate, RateLimiter, source_of
from transport.protocol_adapter import run_protocol
from transport.server import Server, ServerConfig, serve
from transport.streams import TlsStream

log = logging.getLogger(__name__)

ADDRESS_PART = 4
"One address may have one connection of so many."
MAX_HANDSHAKES = 200
"TLS handshakes that have begun: each holds some 50 kB until it ends."
READ_LIMIT = 64 * 1024
"Bytes that a client may have sent while what it sent before is worked on."
SILENCE = 20.0
"Seconds until a connection without a whole head of a request is closed."
BODY_TIMEOUT = 30.0
LINGER = 2.0
"Seconds in which the rest of a request that was answered is read."
SHUTDOWN_TIMEOUT = 2.0
SHORT_BODY = 64 * 1024
"Bytes. Longer bodies are counted:"
LONG_BODIES = 32
"so many may come at once."
BODY_BYTES = Rate(per_second=256 * 1024, burst=16 * 1024 * 1024)
"Of one source."

REFUSED = counter("statements_connections_refused", "Connections to the statement gateway beyond the limit")


class HttpServer:
    """Serves the application between `open` and `close`."""

    def __init__(
        self, application: web.Application, connections: ConnectionCounter, budget: CpuBudget
    ) -> None:
        self._runner = web.AppRunner(application, shutdown_timeout=SHUTDOWN_TIMEOUT)
        self._connections = connections
        self._budget = budget
        self._server: Server | None = None
        self._acceptor: Acceptor | None = None
        self._opening: set[asyncio.Task[None]] = set()

    async def open(self, host: str | None, port: int, tls: SSL.Context | None, *, reuse_port: bool) -> int:
        """Returns the port."""
        await self._runner.setup()
        if tls is None:
            self._acceptor = Acceptor(self._take, reuse_port=reuse_port)
            await self._acceptor.listen(host, port)
            return self._acceptor.port
        config = ServerConfig(
            max_handshakes=MAX_HANDSHAKES,
            read_limit=READ_LIMIT,
            admit=lambda address: self._connections.admit(source_of(address)),
            release=lambda address: self._connections.release(source_of(address)),
            on_refused=REFUSED.inc,
            budget=self._budget,
            reuse_port=reuse_port,
        )
        self._server = await serve(self._handle, host, port, context=tls, config=config)
        return self._server.port

    async def close(self) -> None:
        """Requests in progress are answered within a bounded time."""
        if self._server is not None:
            self._server.stop_accepting()
        if self._acceptor is not None:
            self._acceptor.close()
        for task in self._opening:
            task.cancel()
        if self._opening:
            await asyncio.wait(self._opening)
        await self._runner.cleanup()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed(SHUTDOWN_TIMEOUT)

    async def _handle(self, stream: TlsStream) -> None:
        assert self._runner.server is not None
        connection = _Connection(self._runner.server)
        await run_protocol(stream, connection, self._budget, source_of(stream.peer[0]))

    def _take(self, sock: socket.socket, address: str) -> None:
        """Without TLS."""
        source = source_of(address)
        if not (self._budget.admits(source) and self._connections.admit(source)):
            REFUSED.inc()
            sock.close()
            return
        task = asyncio.get_running_loop().create_task(self._connect(sock, source), name=f"gateway {address}")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, sock: socket.socket, source: str) -> None:
        assert self._runner.server is not None
        connection = _Connection(self._runner.server)
        with ExitStack() as counted, suppress(OSError):  # it is gone
            counted.callback(self._connections.release, source)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, sock)
            if connection.transport is not None:
                connection.counted = counted.pop_all()


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


@hides_bytes
class Body(NamedTuple):
    content: bytes
    digest: bytes
    "What a signature covers of it."


class Bodies:
    """Reads them. Nobody knows who sends one until it is there: what all may send is shared out by source."""

    def __init__(self, *, per_source: int) -> None:
        """`per_source`: long ones of one source at once; 0 is no limit."""
        self.long = ConnectionCounter(LONG_BODIES, per_source)
        self._bytes = RateLimiter(BODY_BYTES)
        self._clock = asyncio.get_running_loop().time

    async def read(self, request: web.Request, source: str, limit: int) -> Body:
        """HTTPException if it has more bytes than `limit`, does not come in time, or is more than the source
        may send."""
        if (request.content_length or 0) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                return await self._read(request, source, limit)
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        except (web.RequestPayloadError, ConnectionError):
            raise web.HTTPBadRequest from None

    async def _read(self, request: web.Request, source: str, limit: int) -> Body:
        content, digest, is_long = bytearray(), body_hash(), False
        with ExitStack() as counted:
            while chunk := await request.content.readany():
                content += chunk
                digest.update(chunk)
                if len(content) > limit:
                    raise _too_large(limit)
                if not self._bytes.allows(source, self._clock(), len(chunk)):
                    raise web.HTTPTooManyRequests
                if len(content) > SHORT_BODY and not is_long:
                    if not self.long.admit(source):
                        raise web.HTTPTooManyRequests
                    counted.callback(self.long.release, source)
                    is_long = True
            return Body(bytes(content), digest.digest())


def _too_large(limit: int) -> web.HTTPException:
    return web.HTTPRequestEntityTooLarge(limit, limit)


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
