"""Accepts client connections, within limits, and ends those that have been idle for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from ntf_server.client_session import HANDSHAKE_FAILURES, ClientLimits, ClientSession, ServerIdentity
from ntf_server.clock import Clock
from ntf_server.commands import Commands
from ntf_server.limits import UNLIMITED, ConnectionCounter, Rate, RateLimiter
from ntf_server.metrics import counter, gauge
from protocol.versions import NTF_ALPN
from transport.certificates import Credentials
from transport.errors import TransportError
from transport.streams import Server, TlsStream, serve
from transport.tls import server_context

CLIENTS = gauge("clients", "Client connections now")
REFUSED = counter("clients_refused", "Connections refused because of a limit")
SHUTDOWN_TIMEOUT = 5.0
EXPIRED = counter("clients_expired", "Idle connections ended")


@dataclass(frozen=True, kw_only=True)
class ListenerSettings:
    host: str | None
    port: int
    max_connections: int = 0
    connections_per_address: int = 0
    address_rate: Rate = UNLIMITED
    idle_ttl: float = 43_200.0
    "0: idle clients are never disconnected."
    idle_check_interval: float = 3600.0
    client: ClientLimits = field(default_factory=ClientLimits)


class Listener:
    """The TLS side of the server. `open` before `run`; `close` ends all sessions."""

    def __init__(
        self,
        settings: ListenerSettings,
        credentials: Credentials,
        commands: Commands,
        clock: Clock,
        random: Callable[[int], bytes],
    ) -> None:
        self._settings = settings
        self._commands = commands
        self._clock = clock
        self._random = random
        self._context = server_context(credentials, [NTF_ALPN])
        self._identity = ServerIdentity(key_hash=credentials.identity, signer=credentials.signing_key)
        self._counter = ConnectionCounter(settings.max_connections, settings.connections_per_address)
        self._address_rate = RateLimiter(settings.address_rate)
        self._sessions: dict[TlsStream, ClientSession] = {}
        self._server: Server | None = None

    async def open(self) -> None:
        self._server = await serve(
            self._handle,
            self._settings.host,
            self._settings.port,
            context=self._context,
            handshake_timeout=self._settings.client.handshake_timeout,
            admit=self._admit,
            on_handshake_error=_count_tls_failure,
        )

    @property
    def port(self) -> int:
        assert self._server is not None
        return self._server.port

    async def close(self) -> None:
        """No new connections; commands in progress are finished and answered within a bounded time."""
        if self._server is None:
            return
        self._server.stop_accepting()
        for session in self._sessions.values():
            session.stop()
        await self._server.wait_closed(SHUTDOWN_TIMEOUT)
        self._server.close()

    async def run(self) -> None:
        """End idle connections, for ever."""
        while True:
            await asyncio.sleep(self._settings.idle_check_interval)
            self.end_idle()

    def end_idle(self) -> None:
        if not self._settings.idle_ttl:
            return
        oldest = asyncio.get_running_loop().time() - self._settings.idle_ttl
        for stream in [stream for stream in self._sessions if stream.last_received < oldest]:
            EXPIRED.inc()
            stream.close()

    def _admit(self, address: str) -> bool:
        admitted = self._counter.admits(address)
        if not admitted:
            REFUSED.inc()
        return admitted

    async def _handle(self, stream: TlsStream) -> None:
        address = stream.peer[0]
        self._counter.opened(address)
        session = ClientSession(
            stream,
            self._commands,
            self._identity,
            self._settings.client,
            self._address_rate,
            self._clock,
            self._random,
        )
        self._sessions[stream] = session
        CLIENTS.inc()
        try:
            await session.run()
        finally:
            CLIENTS.dec()
            del self._sessions[stream]
            self._counter.closed(address)


def _count_tls_failure(error: TransportError) -> None:
    HANDSHAKE_FAILURES.labels("tls").inc()
