"""The gateway's connections: so many at once, of one address a part of them, and none that only waits."""

from __future__ import annotations

import asyncio
import logging
import ssl

from aiohttp import web

from ntf_server.metrics import counter
from transport.limits import ConnectionCounter, source_of

log = logging.getLogger(__name__)

ADDRESS_PART = 4
"One address may have one connection of so many."
SILENCE = 20.0
"Seconds until a connection without a whole head of a request is closed."
BODY_TIMEOUT = 30.0
HANDSHAKE_TIMEOUT = 15.0
LINGER = 2.0
"Seconds in which the rest of a request that was answered is read."
SHUTDOWN_TIMEOUT = 2.0

REFUSED = counter("statements_connections_refused", "Connections to the statement gateway beyond the limit")


class HttpServer:
    """Serves the application between `open` and `close`."""

    def __init__(self, application: web.Application, connections: ConnectionCounter) -> None:
        self._runner = web.AppRunner(application, shutdown_timeout=SHUTDOWN_TIMEOUT)
        self._connections = connections
        self._listening: asyncio.Server | None = None

    async def open(self, host: str | None, port: int, tls: ssl.SSLContext | None, *, reuse_port: bool) -> int:
        """Returns the port."""
        await self._runner.setup()
        self._listening = await asyncio.get_running_loop().create_server(
            self._connection,
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT if tls else None,
            reuse_port=reuse_port,
        )
        return int(self._listening.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()

    def _connection(self) -> asyncio.Protocol:
        assert self._runner.server is not None
        return _Connection(self._runner.server, self._connections)


class _Connection(web.RequestHandler):
    def __init__(self, server: web.Server, connections: ConnectionCounter) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            logger=_library_log(),
            access_log=None,  # type: ignore[arg-type]  # the library allows it
            keepalive_timeout=SILENCE,
            lingering_time=LINGER,
            auto_decompress=False,  # what is small here must not become large
        )
        self._connections = connections
        self._source: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        peer = transport.get_extra_info("peername")
        source = source_of(str(peer[0]) if peer else "")
        if not self._connections.admit(source):
            REFUSED.inc()
            transport.abort()
            return
        self._source = source
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._source is not None:
            self._connections.release(self._source)
            self._source = None
            super().connection_lost(exc)


async def whole_body(request: web.Request) -> bytes:
    """HTTPException if it does not come, in time."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    except (web.RequestPayloadError, ConnectionError):
        raise web.HTTPBadRequest from None


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
