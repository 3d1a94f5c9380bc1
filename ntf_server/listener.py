"""Accepts client connections, within limits, and ends those that have been idle for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary

from cryptography import x509
from OpenSSL import SSL

from ntf_server.client_session import HANDSHAKE_FAILURES, ClientSession, ServerIdentity
from ntf_server.clock import Clock
from ntf_server.commands import Commands
from ntf_server.config import InactiveClientsConfig, LimitsConfig, TransportConfig
from ntf_server.limits import AddressLimits
from ntf_server.metrics import counter, gauge
from protocol.versions import NTF_ALPN
from transport.budget import CpuBudget
from transport.certificates import Credentials
from transport.errors import TransportError
from transport.limits import ConnectionCounter, source_of
from transport.server import Server, ServerConfig, serve
from transport.streams import TlsStream
from transport.tls import server_context

CLIENTS = gauge("clients", "Client connections now")
REFUSED = counter("clients_refused", "Connections refused because of a limit")
EXPIRED = counter("clients_expired", "Idle connections ended")
SHUTDOWN_TIMEOUT = 5.0
MAX_HANDSHAKES = 500
"TLS handshakes that have begun: each holds some 50 kB until it ends."
READ_LIMIT = 64 * 1024
"What a client may have sent while its commands are worked on: more than any client sends at once."
OTHERS = 8
"One place of so many is kept for other sources than the one that has most."
WRITE_LIMIT = 0
"A client that has not taken its answers is not read."


class Listener:
    """The TLS side of the server. `open` before `run`; `close` ends all sessions."""

    def __init__(
        self,
        transport: TransportConfig,
        limits: LimitsConfig,
        addresses: AddressLimits,
        inactive: InactiveClientsConfig,
        credentials: Credentials,
        commands: Commands,
        clock: Clock,
        random: Callable[[int], bytes],
        *,
        budget: CpuBudget,
        max_clients: int,
    ) -> None:
        self._transport = transport
        self._limits = limits
        self._inactive = inactive
        self._commands = commands
        self._clock = clock
        self._random = random
        self._identities: WeakKeyDictionary[SSL.Context, ServerIdentity] = WeakKeyDictionary()
        "By what TLS shows: a handshake that began before a reload ends with the keys it began with."
        self.use_credentials(credentials)
        self._counter = ConnectionCounter(max_clients, _per_source(limits, max_clients))
        self._addresses = addresses
        self._budget = budget
        self._sessions: dict[TlsStream, ClientSession] = {}
        self._server: Server | None = None

    def use_credentials(self, credentials: Credentials) -> None:
        """For connections that come from now on."""
        self._context = server_context(credentials, [NTF_ALPN])
        self._identities[self._context] = ServerIdentity(
            key_hash=credentials.identity, signer=credentials.signing_key
        )
        leaf = x509.load_der_x509_certificate(credentials.chain[0])
        self.certificate_expiry = leaf.not_valid_after_utc.timestamp()

    def use_limits(self, limits: LimitsConfig, max_clients: int) -> None:
        """Those per connection count for connections that come from now on."""
        self._limits = limits
        self._counter.limit, self._counter.per_source = max_clients, _per_source(limits, max_clients)

    @property
    def clients(self) -> int:
        return len(self._sessions)

    async def open(self) -> None:
        config = ServerConfig(
            handshake_timeout=self._limits.handshake_timeout,
            max_handshakes=MAX_HANDSHAKES,
            read_limit=READ_LIMIT,
            write_limit=WRITE_LIMIT,
            admit=lambda address: self._counter.admit(source_of(address)),
            release=lambda address: self._counter.release(source_of(address)),
            on_handshake_error=_count_tls_failure,
            budget=self._budget,
            on_refused=REFUSED.inc,
            reuse_port=self._transport.reuse_port,
        )
        host, port = self._transport.listen or None, self._transport.port
        self._server = await serve(self._handle, host, port, context=lambda: self._context, config=config)

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
            await asyncio.sleep(self._inactive.check_interval)
            self.end_idle()

    def end_idle(self) -> None:
        if not self._inactive.disconnect:
            return
        oldest = asyncio.get_running_loop().time() - self._inactive.ttl
        for stream in [stream for stream in self._sessions if stream.last_received < oldest]:
            EXPIRED.inc()
            stream.close()

    async def _handle(self, stream: TlsStream) -> None:
        session = ClientSession(
            stream,
            self._commands,
            self._identities[stream.context],
            self._limits,
            self._addresses,
            self._budget,
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


def _count_tls_failure(error: TransportError) -> None:
    HANDSHAKE_FAILURES.labels("tls").inc()


def _per_source(limits: LimitsConfig, max_clients: int) -> int:
    """Few open files must not let one source have all places."""
    return min(limits.connections_per_address or max_clients, max_clients - max_clients // OTHERS)
