"""The router: a broker with a TLS server around it, and the handles for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from weakref import WeakKeyDictionary

from OpenSSL import SSL

from protocol.addresses import SmpServer
from protocol.blocking import BlockingInfo
from protocol.encoding import EntityId
from protocol.versions import SMP_ALPN, VersionRange
from smp_router.broker import Broker
from smp_router.client_limits import ClientLimits, budget_config
from smp_router.config import RouterConfig
from smp_router.faults import Faults
from smp_router.load import Load
from smp_router.session import Session
from smp_router.state import RouterState
from transport.budget import CpuBudget
from transport.certificates import Credentials, KeyAlgorithm, make_ca, make_online
from transport.hosts import bracketed
from transport.limits import ConnectionCounter, source_of
from transport.server import Server, ServerConfig, serve
from transport.streams import TlsStream
from transport.tls import server_context

WRITE_LIMIT = 0
"The next batch is taken when the last one has left: what a connection that ends still has is given back."


def utc_now() -> datetime:
    return datetime.now(UTC)


def make_credentials(host: str, algorithm: KeyAlgorithm = KeyAlgorithm.ED25519) -> Credentials:
    """A fresh identity, for routers that do not outlive the process."""
    now = utc_now()
    certificate, key = make_ca(algorithm, "SMP router CA", now)
    return make_online(certificate, key, algorithm, host, now)


class Router:
    """Use `Router.start`; with another router's `state` it takes that router's place."""

    def __init__(
        self,
        config: RouterConfig,
        hosts: tuple[str, ...],
        state: RouterState,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """`hosts` stand in the router's address."""
        self.state = state
        self.config = config
        self.port = 0
        self._hosts = hosts
        self._broker = Broker(state, config, now)
        self.counts = self._broker.counts
        self.services = state.services
        self._sessions: set[Session] = set()
        self._server: Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._open = ConnectionCounter(config.max_connections, config.max_connections_per_address)
        self._limits = ClientLimits(config)
        self._budget = CpuBudget(budget_config(config))
        self._presented: WeakKeyDictionary[SSL.Context, Credentials] = WeakKeyDictionary()
        "By the context of TLS: a handshake ends with the certificate it began with."
        self._present(None)
        self.faults = Faults(self._broker, self._drop_sessions, self._present)
        self.load = Load(self._broker)

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        config: RouterConfig | None = None,
        *,
        host: str = "127.0.0.1",
        more_hosts: tuple[str, ...] = (),
        port: int = 0,
        versions: VersionRange | None = None,
        state: RouterState | None = None,
        credentials: Credentials | None = None,
        listen: str | None = None,
        now: Callable[[], datetime] = utc_now,
    ) -> AsyncIterator[Router]:
        """A running router; port 0 lets the system choose. It stops at the end of the block.

        `host` and `more_hosts` are in its address; `listen` is where it listens, if that is something else.
        """
        config = config or RouterConfig()
        if versions is not None:
            config = replace(config, versions=versions)
        router = cls(
            config, (host, *more_hosts), state or RouterState(credentials or make_credentials(host)), now
        )
        await router.listen(listen or host, port)
        try:
            yield router
        finally:
            await router.stop()

    async def listen(self, host: str, port: int) -> None:
        self._server = await serve(
            self._serve,
            host,
            port,
            context=lambda: self._context,
            config=ServerConfig(
                handshake_timeout=self.config.handshake_timeout,
                max_handshakes=self.config.max_handshakes,
                budget=self._budget,
                on_refused=self._refused,
                write_limit=WRITE_LIMIT,
                admit=self._admit,
                release=lambda peer: self._open.release(source_of(peer)),
            ),
        )
        self.port = self._server.port
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self._expire(), name="router expiry"))
        if self.config.interval:
            self._tasks.append(loop.create_task(self._deliver_rounds(), name="router delivery rounds"))

    async def stop(self) -> None:
        """Close everything; `state` stays valid for another router. May be called again."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._server is not None:
            self._drop_sessions()
            self._server.close()
            await self._server.wait_closed()
            self._server = None
        if self._broker.relays is not None:
            await self._broker.relays.close()
            self._broker.relays = None

    @property
    def address(self) -> SmpServer:
        return SmpServer(tuple(map(bracketed, self._hosts)), str(self.port), self.state.credentials.identity)

    @property
    def connections(self) -> int:
        """Connections that are open now, in whatever state."""
        return len(self._sessions)

    @property
    def relays(self) -> int:
        """Sessions with other routers."""
        return 0 if self._broker.relays is None else len(self._broker.relays)

    @property
    def relays_waiting(self) -> int:
        """Commands that were forwarded to other routers and are not answered yet."""
        return 0 if self._broker.relays is None else self._broker.relays.waiting

    def block(self, entity_id: EntityId, info: BlockingInfo | None) -> bool:
        """Block the queue with any such id, or with None allow it again; False if there is none."""
        queue = self.state.queues.by_any(entity_id)
        if queue is not None:
            self.state.block(queue, info)
        return queue is not None

    def subscribed_notifiers(self) -> set[EntityId]:
        """Notifier ids whose NMSGs have a receiver now, by NSUB or through a subscribed service."""
        return self._broker.notifiers.subscribed()

    def receiver(self, notifier_id: EntityId) -> tuple[str, int] | None:
        """The address of the client that an NMSG of this queue would go to now; None: it would be kept."""
        client = self._broker.notifiers.subscriber(notifier_id)
        found = (session.peer for session in self._sessions if session.client is client)
        return None if client is None else next(found, None)

    def _admit(self, peer: str) -> bool:
        admitted = not self.faults.refusing and self._open.admit(source_of(peer))
        self.counts["connections"] += admitted
        return admitted

    def _refused(self) -> None:
        self.counts["connections_refused"] += 1

    async def _serve(self, stream: TlsStream) -> None:
        presented = self._presented[stream.context]
        session = Session(stream, self._broker, self.faults, presented, self._limits, self._budget)
        self._sessions.add(session)
        try:
            await session.run()
        finally:
            self._sessions.discard(session)

    def _drop_sessions(self) -> int:
        sessions = list(self._sessions)
        for session in sessions:
            session.drop()
        return len(sessions)

    def _present(self, credentials: Credentials | None) -> None:
        presented = credentials or self.state.credentials
        self._context = server_context(presented, [SMP_ALPN], ask_client_certificate=True)
        self._presented[self._context] = presented

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self.config.expiry_interval)
            await self._broker.expire()
            await self.state.records.maintain()
            if self._broker.relays is not None:
                await self._broker.relays.close_idle()

    async def _deliver_rounds(self) -> None:
        while True:
            await asyncio.sleep(self.config.interval)
            self._broker.deliver_round()
