"""The whole daemon: the one place that makes the parts and wires them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ntf_server import setup
from ntf_server.clock import Clock, SharedClock, SystemClock
from ntf_server.commands import Commands
from ntf_server.config import Config, ConfigError, unlike
from ntf_server.control import ControlPort
from ntf_server.daemon_life import DaemonLife
from ntf_server.descriptors import DescriptorBudget, descriptor_budget
from ntf_server.figures import Figures, watch_loop
from ntf_server.health import Health
from ntf_server.housekeeping import Deletions, Housekeeping
from ntf_server.http_endpoint import HttpEndpoint, write_metrics_file
from ntf_server.journal import MEGABYTE, EventSink, Journal, WriterConfig
from ntf_server.limits import AddressLimits, budget_config
from ntf_server.listener import Listener
from ntf_server.metrics import histogram
from ntf_server.own_routers import OwnRouters
from ntf_server.ownership import OwnershipLoop
from ntf_server.periodic import Periodic
from ntf_server.push.dispatcher import Dispatcher
from ntf_server.push.providers import Providers, make_providers
from ntf_server.push.verification_limits import VerificationLimits
from ntf_server.status_page import StatusPage
from ntf_server.store_watch import StoreWatch
from ntf_server.stores import daemon_name, make_store, opened
from ntf_server.subscriber import RouterSubscriber
from protocol.addresses import NtfServer
from store.interface import StoreVanished
from store.journal_schema import KEY_FILE_NAME, load_or_create_key
from transport.budget import CpuBudget
from transport.cancellation import TaskGroup
from transport.certificates import load_server_files
from transport.errors import TransportError
from transport.open_files import open_file_limit

if TYPE_CHECKING:
    from ntf_server.statements.service import StatementGateway

logger = logging.getLogger(__name__)

PUSH_DRAIN_TIMEOUT = 10.0

COMMIT_SECONDS = histogram("store_commit_seconds", "Time of a group of writes up to its commit")


class App:
    """A notification server in this process. `run` once; `ready` is called when clients can connect."""

    def __init__(
        self,
        config_dir: Path,
        config: Config,
        *,
        clock: Clock | None = None,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._config_dir = config_dir
        self._config = config
        self._random = random
        self._vanished: StoreVanished | None = None
        self.metrics_port = 0
        self.gateway_port = 0
        self.descriptors = _descriptors(config)
        self._addresses = AddressLimits(config.LIMITS)
        self._budget = CpuBudget(budget_config(config.LIMITS))
        self._data_dir = data_dir = setup.data_folder(config)
        self.store = make_store(config_dir, config, on_commit=COMMIT_SECONDS.observe)
        own = clock or SystemClock()
        self._clock = own if self.store.leases is None else SharedClock(own)
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._credentials = load_server_files(config_dir)
        self._journal = self._make_journal()
        self._providers = make_providers(
            config, data_dir, self._clock.now, idle_connections=self.descriptors.idle_pushes
        )
        self.dispatcher = self._make_dispatcher(self._providers)
        self.subscriber = RouterSubscriber(
            self.store,
            self.dispatcher,
            self._clock,
            config.SUBSCRIBER,
            self._journal,
            max_routers=self.descriptors.routers,
            ownership=self.store.ownership,
        )
        self._store_watch = StoreWatch(self.store, self._clock)
        self._own_routers = OwnRouters(self.store, self.subscriber, self._clock.monotonic)
        self.health = Health(
            lambda: self._store_watch.problem,
            self._own_routers,
            self.dispatcher.provider_watch,
            self._providers.set_up,
            own_percent=config.METRICS.ready_own_percent,
        )
        name, usable = config.STORE.daemon or config.TRANSPORT.host, self._providers.set_up
        self._status = StatusPage(
            *(name, self._clock, self.health, self._own_routers, usable),
            with_gateway=config.STATEMENTS.enabled,
        )
        self._figures = self._make_figures()
        self._verifications = VerificationLimits(config.LIMITS)
        self._gateway = self._make_gateway() if config.STATEMENTS.enabled else None
        if self._gateway is not None:
            self.health.gateway_problem = self._gateway.problem
        self._deletions = Deletions(self.subscriber, self._journal)
        self.listener = self._make_listener()
        self._control = ControlPort(self.store, self.subscriber, config.AUTH, self.store.ownership)
        self._sharing = self._make_ownership_loop()

    @property
    def address(self) -> NtfServer:
        """What clients are given; valid once the server is ready."""
        return setup.address(self._config_dir, self._config, self.listener.port)

    async def run(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        """Serve until `stop` is set, then finish what is in progress. StoreVanished if the database is taken
        away meanwhile: what would be answered from now on could not be kept."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._providers.close)
            await stack.enter_async_context(opened(self.store, self._config_dir, self._config))
            if self._sharing is not None:
                await stack.enter_async_context(self._sharing.joined())
            if isinstance(self._journal, Journal):
                life = DaemonLife(
                    self._journal,
                    self.store,
                    self._clock,
                    daemon_name(self._config),
                    self.subscriber.status,
                )
                await stack.enter_async_context(life.recorded())
            endpoint = HttpEndpoint(self.health, self._status, self._config.METRICS.hosts)
            stack.push_async_callback(endpoint.close)
            if self._config.METRICS.port:
                self.metrics_port = await endpoint.open(self._config.METRICS.host, self._config.METRICS.port)
            stack.push_async_callback(self._control.close)
            if self._config.TRANSPORT.control_port:
                await self._control.open(self._config.TRANSPORT.control_port)
            await self._serve(stop, ready)
        if self._vanished is not None:
            raise self._vanished

    def reload(self, config: Config) -> list[str]:
        """Take over what can be changed while it runs; returns the keys that count after a restart only.
        TransportError, and nothing changed, if the certificate cannot be used."""
        credentials = load_server_files(self._config_dir)
        if credentials.identity != self._credentials.identity:
            raise TransportError("ca.crt is another identity than the one that clients know")
        self.listener.use_credentials(credentials)
        self.descriptors = _descriptors(config)
        self._addresses.use(config.LIMITS)
        self._budget.config = budget_config(config.LIMITS)
        self.listener.use_limits(config.LIMITS, self.descriptors.clients)
        self._verifications.use(config.LIMITS)
        self._providers.read_keys_again()
        waiting = unlike(self._config, config)
        self._config = replace(self._config, LIMITS=config.LIMITS, LOG=config.LOG)
        return waiting

    def queues(self) -> dict[str, int]:
        """What waits where, for the log."""
        statuses = self.subscriber.status()
        return {
            "clients": self.listener.clients,
            "pushes in memory": self.dispatcher.jobs_in_memory,
            "routers": len(statuses),
            "routers that are down": sum(not status.connected for status in statuses),
            "queues to subscribe": sum(status.waiting for status in statuses),
        }

    async def check(self) -> None:
        """Open and migrate the store, and close it: what `--maintenance` does."""
        async with opened(self.store, self._config_dir, self._config):
            pass
        await self._providers.close()

    async def _serve(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        housekeeping = Housekeeping(
            self.store, self._deletions, self._clock, self._config.STORE, self.store.ownership
        )
        periodic = Periodic(
            self.store,
            self.dispatcher,
            self._clock,
            self._random,
            is_shared=self.store.ownership.is_shared,
        )
        async with TaskGroup() as tasks:
            pushing = tasks.create_task(self.dispatcher.run(), name="push dispatcher")
            background = [
                tasks.create_task(self.subscriber.run(), name="router subscriber"),
                tasks.create_task(periodic.run(), name="periodic"),
                tasks.create_task(housekeeping.run(), name="housekeeping"),
                tasks.create_task(self._figures.run(), name="figures"),
                tasks.create_task(self._status.history.run(), name="history"),
                tasks.create_task(watch_loop(), name="loop lag"),
                tasks.create_task(self._watch_store(stop), name="store watch"),
                tasks.create_task(self._own_routers.run(), name="own routers"),
                tasks.create_task(self.listener.run(), name="idle clients"),
            ]
            if self._config.METRICS.file is not None:
                writing = write_metrics_file(self._config.METRICS.file, self._config.METRICS)
                background.append(tasks.create_task(writing, name="metrics file"))
            if self._gateway is not None:
                self.gateway_port = await self._gateway.api.open()
                background.append(tasks.create_task(self._gateway.run(), name="statement gateway"))
            sharing = None
            if self._sharing is not None:
                sharing = tasks.create_task(self._sharing.run(), name="ownership")
            await self.listener.open()
            self.health.listening = True
            ready()
            try:
                await stop.wait()
            finally:
                self.health.listening = False
                await self.listener.close()
                if self._gateway is not None:
                    await self._gateway.api.close()
                if sharing is not None:
                    sharing.cancel()
                await self.dispatcher.stop(PUSH_DRAIN_TIMEOUT)
                if self._sharing is not None:
                    await self._sharing.retire()
                for task in background:
                    task.cancel()
                pushing.cancel()

    async def _watch_store(self, stop: asyncio.Event) -> None:
        self._vanished = await self._store_watch.run()
        logger.critical("stopping: %s", self._vanished)
        stop.set()

    def _make_journal(self) -> EventSink:
        section = self._config.JOURNAL
        if not section.enabled:
            return EventSink()
        config = WriterConfig(
            folder=self._data_dir / setup.JOURNAL_FOLDER,
            key=load_or_create_key(self._data_dir / KEY_FILE_NAME),
            format="jsonl" if section.format == "jsonl" else "parquet",
            segment_bytes=section.segment_mb * MEGABYTE,
            segment_seconds=section.segment_seconds,
        )
        return Journal(config, self._clock.now)

    def _make_figures(self) -> Figures:
        return Figures(
            self.store,
            self._clock,
            self._data_dir,
            setup.database_path(self._config) if self._config.STORE.database == "sqlite" else None,
            lambda: self.listener.certificate_expiry,
        )

    def _make_dispatcher(self, providers: Providers) -> Dispatcher:
        return Dispatcher(
            self.store,
            providers.by_tag,
            self._config.PUSH,
            clock=self._clock,
            random=self._random,
            journal=self._journal,
            ownership=self.store.ownership,
            title=self._config.STATEMENTS.title,
            web_pushes=self.descriptors.web_pushes,
            statement_limits=self._config.STATEMENTS.push_limits,
        )

    def _make_ownership_loop(self) -> OwnershipLoop | None:
        """None: this daemon shares its store with nobody."""
        if self.store.leases is None:
            return None
        assert isinstance(self._clock, SharedClock)
        return OwnershipLoop(
            self.store.leases,
            self.subscriber,
            self.dispatcher,
            self._clock,
            lease_seconds=self._config.STORE.lease_seconds,
        )

    def _make_gateway(self) -> StatementGateway:
        try:
            from ntf_server.statements.api import Devices, GatewayApi  # with libraries of its own
            from ntf_server.statements.service import StatementGateway
        except ImportError as error:
            raise ConfigError(
                f"[STATEMENTS] needs {error.name}: install ntf-server with the extra statements"
            ) from None

        config = self._config.STATEMENTS
        api = GatewayApi(
            self.store,
            config,
            self._clock,
            self._random,
            addresses=self._addresses,
            devices=Devices(self.dispatcher, self._providers.reachable, self._verifications),
            budget=self._budget,
            most_connections=self.descriptors.gateway,
            reuse_port=self._config.TRANSPORT.reuse_port,
        )
        return StatementGateway(self.store, self.dispatcher, config, self._clock, api, self.store.ownership)

    def _make_listener(self) -> Listener:
        config = self._config
        commands = Commands(
            self.store,
            self.subscriber,
            self.dispatcher,
            clock=self._clock,
            random=self._random,
            providers=frozenset(self._providers.by_tag),
            verifications=self._verifications,
            journal=self._journal,
            deletions=self._deletions,
            budget=self._budget,
        )
        return Listener(
            config.TRANSPORT,
            config.LIMITS,
            self._addresses,
            config.INACTIVE_CLIENTS,
            self._credentials,
            commands,
            self._clock,
            self._random,
            budget=self._budget,
            max_clients=self.descriptors.clients,
        )


def _descriptors(config: Config) -> DescriptorBudget:
    return descriptor_budget(
        open_file_limit(), config.LIMITS.connections, with_gateway=config.STATEMENTS.enabled
    )


@asynccontextmanager
async def running(app: App) -> AsyncIterator[App]:
    """A server inside another program: the demo, tests and benchmarks."""
    stop, ready = asyncio.Event(), asyncio.Event()
    async with TaskGroup() as tasks:
        serving = tasks.create_task(app.run(stop, ready.set), name="ntf server")
        waiting = tasks.create_task(ready.wait(), name="ntf server ready")
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if ready.is_set():
                yield app
        finally:
            waiting.cancel()
            stop.set()
