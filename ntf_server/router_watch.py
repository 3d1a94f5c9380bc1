"""The daemon's side of one router, for as long as it has subscriptions there."""

from __future__ import annotations

import asyncio
import logging
import random
import traceback
from collections.abc import Collection
from dataclasses import dataclass

from ntf_server.clock import Clock
from ntf_server.interfaces import PushSink
from ntf_server.journal import EventSink
from ntf_server.metrics import counter
from ntf_server.router_events import Notifications, patiently
from ntf_server.router_work import EndSession, RouterState, SessionWork, is_needed
from ntf_server.service_credentials import ServiceLogin
from ntf_server.subscriber_config import SubscriberConfig
from protocol.addresses import SmpServer
from protocol.connection import Received
from protocol.encoding import EntityId
from protocol.errors import TE_BAD_SERVICE
from protocol.smp_messages import Ends, SmpMessage
from smp_client.agent import RouterAgent
from smp_client.backoff import Backoff
from smp_client.dialer import Dialer
from smp_client.errors import ClientError, HandshakeFailed, WrongIdentity
from smp_client.session import Service, SmpSession
from smp_client.subscriptions import queue_event
from store.interface import StoreError, SubscriberStore
from store.journal_schema import JournalEvent
from store.records import Moved, QueueEvent, QueueRow, ServerKey
from transport.cancellation import raise_if_cancelled

logger = logging.getLogger(__name__)

CONNECTS = counter("smp_connects", "Sessions with routers")
CONNECT_ERRORS = counter("smp_connect_errors", "Attempts to connect to a router that failed", ["reason"])
WRONG_IDENTITIES = counter(
    "smp_wrong_identity", "Attempts to connect that reached somebody else than the router"
)
TAKEOVERS = counter(
    "smp_service_takeovers", "Times another instance took over the subscriptions of a service"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatus:
    """What an operator wants to know of a router."""

    server: str
    connected: bool
    version: int | None
    service: bool
    "Whether the session is one of a service."
    subscribed: bool
    "Everything stored was asked for in this session."
    service_queues: int
    individual_queues: int
    waiting: int
    taken_over: bool
    last_error: str | None


class RouterWatch:
    """Implements `smp_client.agent.Duties`: sessions come and go, subscriptions stay."""

    def __init__(
        self,
        key: ServerKey,
        server: SmpServer,
        store: SubscriberStore,
        push_sink: PushSink,
        clock: Clock,
        config: SubscriberConfig,
        journal: EventSink,
        dialer: Dialer,
    ) -> None:
        self.server = server
        self.host = server.hosts[0]
        self.is_own = self.host in config.own_hosts
        self._store = store
        self._clock = clock
        self._config = config
        self._journal = journal
        self.state = RouterState(key, server.host_port, config.waiting_limit)
        self._login = ServiceLogin(
            store,
            key,
            self.host,
            clock,
            enabled=config.use_service_credentials,
            reset_interval=config.service_reset_interval,
        )
        self._notifications = Notifications(
            store,
            push_sink,
            clock,
            journal,
            key=key,
            server=server.host_port,
            own=self.host if self.is_own else None,
        )
        self._agent = RouterAgent(server, self, dialer, config.agent())
        self._takeover_backoff = Backoff(
            config.takeover_first_delay, config.takeover_longest_delay, random.random
        )
        self._session: SmpSession | None = None
        self._work: SessionWork | None = None
        self._work_started = 0.0
        self._attempt_started = 0.0
        self._marked_inactive = False
        self._taken_over = False
        self._last_error: str | None = None

    async def run(self) -> None:
        """Until there is nothing to subscribe here."""
        self._session = None
        await self._agent.run()

    def subscribe(self, queue: QueueRow) -> None:
        """A stored queue is to be subscribed."""
        self.state.waiting.add(queue.notifier_id)
        self.state.wake.set()

    def forget(self, notifier_ids: Collection[EntityId]) -> None:
        """These queues are no longer stored."""
        for notifier_id in notifier_ids:
            self.state.waiting.discard(notifier_id)
        if self._login.service is not None:
            self.state.balance.given_up(notifier_ids)
        self.state.shrunk = True
        self.state.wake.set()

    def resubscribe(self) -> None:
        """Start again with a new session, now."""
        if self._work is not None:
            self._work.end(EndSession("asked for by the operator", 0))
        self._agent.hurry()

    def status(self) -> RouterStatus:
        session, state = self._session, self.state
        return RouterStatus(
            server=str(self.server),
            connected=session is not None,
            version=None if session is None else session.params.version,
            service=session is not None and session.params.service is not None,
            subscribed=session is not None and state.is_subscribed,
            service_queues=0 if session is None else state.service_queues,
            individual_queues=0 if session is None else state.individual_queues,
            waiting=len(state.waiting),
            taken_over=self._taken_over,
            last_error=self._last_error,
        )

    # Duties

    @property
    def service(self) -> Service | None:
        return self._login.service

    async def prepare(self) -> bool:
        return await patiently(self._prepare, self.host)

    async def _prepare(self) -> bool:
        if not await is_needed(self._store, self.state):
            return False
        await self._login.prepare(await self._store.server(self.state.key))
        self._attempt_started = self._clock.monotonic()
        return True

    async def serve(self, session: SmpSession) -> float | None:
        self._session = session
        self._connected(session)
        work = SessionWork(
            self.state, session, self._store, self._login, self._clock, self._config, self._journal
        )
        self._work, self._work_started = work, self._clock.monotonic()
        try:
            await work.run()
        except EndSession as end:
            self._last_error = str(end)
            return end.delay
        except (ClientError, StoreError) as error:
            self._last_error = str(error) or type(error).__name__
            logger.warning("%s: the session is given up: %s", self.host, self._last_error)
        finally:
            self._work = None
        return None

    def _connected(self, session: SmpSession) -> None:
        CONNECTS.inc()
        self._marked_inactive = False
        self._taken_over = False
        self._last_error = None
        took = self._clock.monotonic() - self._attempt_started
        logger.info("%s: connected, version %d", self.host, session.params.version)
        self._journal.record(
            JournalEvent.SMP_CONNECTED, server=self.state.host, latency_us=int(took * 1_000_000)
        )

    async def events(self, events: list[Received[SmpMessage]]) -> None:
        await self._notifications.receive(events)
        changes: list[QueueEvent] = []
        for received in events:
            event = queue_event(received.message)
            if event is not None:
                if self._work is None or not self._work.absorbs(received.entity_id, event):
                    changes.append(QueueEvent(received.entity_id, event))
            elif isinstance(received.message, Ends):
                self._take_leave()
        if changes:
            moves = await patiently(lambda: self._move_queues(changes), self.host)
            self.state.record_moves(self._journal, moves)
            self.state.individual_queues = max(0, self.state.individual_queues - len(changes))
            self.state.shrunk = True
            self.state.wake.set()

    async def _move_queues(self, changes: list[QueueEvent]) -> list[Moved]:
        return await self._store.move_queues(self.state.key, changes, now=int(self._clock.now()))

    def _take_leave(self) -> None:
        """Another instance has the service now: no fight, but a look from time to time."""
        TAKEOVERS.inc()
        self._taken_over = True
        if self._clock.monotonic() - self._work_started >= self._config.takeover_longest_delay:
            self._takeover_backoff.reset()
        delay = self._takeover_backoff.next()
        logger.warning("%s: another instance took over; next attempt in %.0f s", self.host, delay)
        if self._work is not None:
            self._work.end(EndSession("another instance took over", delay))

    async def failed(self, error: ClientError) -> float | None:
        problem = str(error) or type(error).__name__
        CONNECT_ERRORS.labels(type(error).__name__).inc()
        if isinstance(error, WrongIdentity):
            WRONG_IDENTITIES.inc()
            logger.error("%s: NOT the pinned router answers at this address: %s", self.host, error)
        elif problem != self._last_error:  # once, not every few seconds for as long as it lasts
            logger.warning("%s: cannot connect: %s", self.host, problem)
        self._last_error = problem
        if isinstance(error, HandshakeFailed) and error.error == TE_BAD_SERVICE and self.service is not None:
            await patiently(self._login.refused_in_handshake, self.host)
            return self._config.first_delay
        await self._mark_inactive(error)
        return None

    async def disconnected(self, reason: ClientError) -> None:
        self._session = None
        self.state.is_subscribed = False
        if self._last_error is None:
            self._last_error = str(reason)
        logger.info("%s: disconnected: %s", self.host, self._last_error)
        await self._mark_inactive(reason)

    async def _mark_inactive(self, reason: ClientError) -> None:
        """Once per outage, and also if the first attempt after a start fails."""
        if self._marked_inactive:
            return
        count = await patiently(lambda: self._store.set_disconnected(self.state.key), self.host)
        self._marked_inactive = True
        self._journal.record(
            JournalEvent.SMP_DISCONNECTED, server=self.state.host, error=type(reason).__name__, changed=count
        )


async def run_for_ever(watch: RouterWatch, pause: float) -> None:
    """Run a watch to its end; a defect in it is logged, and silences neither this router nor the others."""
    while True:
        try:
            return await watch.run()
        except Exception as error:
            raise_if_cancelled()
            # The error's text may hold what the router sent, so only its kind and place are logged.
            place = "".join(traceback.format_tb(error.__traceback__))
            logger.error("%s: the subscriber failed with %s\n%s", watch.host, type(error).__name__, place)
        await asyncio.sleep(pause)
