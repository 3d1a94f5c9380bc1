"""One router, for as long as it has subscriptions: connect, log in, subscribe, keep, and connect again.

`Router.run` is the whole story; what happens between connecting and the end of a session is in
`ntf_server.router_session`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from enum import Enum

from ntf_server.clock import MICROSECONDS
from ntf_server.config import SubscriberConfig
from ntf_server.metrics import counter
from ntf_server.router_session import (
    EndSession,
    KnownRouter,
    RouterSession,
    TakenOver,
    is_needed,
)
from ntf_server.service_credentials import RouterService
from ntf_server.surroundings import Surroundings
from protocol.encoding import EntityId
from protocol.errors import TE_BAD_SERVICE
from smp_client.backoff import Backoff
from smp_client.dialer import Dialer, DialSlots
from smp_client.errors import (
    ClientError,
    HandshakeFailed,
    PeerMisbehaves,
    RequestTimeout,
    WrongIdentity,
)
from smp_client.requests import Nonsense, SessionConfig
from smp_client.session import FormerSession, SmpSession, connect_smp
from store.journal_schema import JournalEvent
from store.records import QueueRow

logger = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 1.0, 10.0
"Seconds between attempts to connect to a router that was there before."
LONGEST_NEW_DELAY = 300.0
"Up to which the delay grows for one that was never there: clients may name what they like."
IDENTITY_DELAY = 60.0
"Between attempts while somebody else answers at a router's address: rare, but it may have moved."
SLOW_DIAL = 5.0
"Seconds: a router that takes longer to be connected to waits for its next attempt among those like it."
FIRST_LEAVE, LONGEST_LEAVE = 60.0, 3600.0
"After another instance took the service's subscriptions over, or the router sent nonsense."

CONNECTS = counter("smp_connects", "Sessions with routers")
CONNECT_ERRORS = counter("smp_connect_errors", "Attempts to connect to a router that failed", ["reason"])
WRONG_IDENTITIES = counter(
    "smp_wrong_identity", "Attempts to connect that reached somebody else than the router"
)
TAKEOVERS = counter(
    "smp_service_takeovers", "Times another instance took over the subscriptions of a service"
)
NONSENSE = counter("smp_nonsense", "What routers sent that was of no use", ["kind"])
MISBEHAVIOURS = counter("smp_misbehaviours", "Sessions ended because a router sent too much of no use")


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
    put_off: int
    "Of those waiting: what the router could not subscribe before."
    taken_over: bool
    last_error: str | None


class Acquaintance(Enum):
    """With whom a router shares what there is for connecting. It takes one connection to be no newcomer any
    more; so routers that were there and do not answer hold up each other only."""

    NEW = "it was never there"
    KNOWN = "it was there"
    SLOW = "it was there, and took long the last time"


@dataclass(frozen=True, slots=True)
class Dialing:
    """A dialer, and how many may use it at once."""

    dialer: Dialer
    slots: DialSlots


class Router:
    """Run `run` in a task of its own; to stop watching the router, cancel it."""

    def __init__(
        self,
        known: KnownRouter,
        parts: Surroundings,
        config: SubscriberConfig,
        dialing: Callable[[Acquaintance], Dialing],
        *,
        brought_by: Hashable,
        was_there: bool,
        is_crowded: Callable[[], bool],
    ) -> None:
        """`brought_by`: with whom it shares slots for dialing. `was_there`: whether it was ever connected."""
        self.known = known
        known.is_own = known.has_own_hosts and was_there
        self._parts = parts
        self._config = SessionConfig(
            connect=config.connect_timeout,
            answer=config.command_timeout,
            ping_after=config.ping_interval,
            ping_limit=config.ping_timeout,
        )
        self._dialing = dialing
        self._brought_by = brought_by
        self._was_there = was_there
        self._is_slow = False
        self._is_crowded = is_crowded
        self._service = RouterService(
            parts.store,
            known.key,
            known.name,
            parts.clock,
            parts.journal,
            enabled=config.use_service_credentials,
        )
        self._backoff = self._new_backoff()
        self._leaving = Backoff(FIRST_LEAVE, LONGEST_LEAVE, random.random)
        self._hurry = asyncio.Event()
        self._session: RouterSession | None = None
        self._marked_inactive = False
        self._taken_over = False
        self._last_error: str | None = None

    async def run(self) -> bool:
        """Watch the router until nothing is to be subscribed there (False), or while it cannot be reached
        others wait for its place (True)."""
        try:
            while await self._parts.patiently(self._prepare, self.known.name):
                delay = await self._one_session()
                if not self._was_there and self._is_crowded():
                    return True
                await self._pause(self._backoff.next() if delay is None else delay)
            return False
        finally:
            await self._close_former()

    # What the rest of the daemon asks for

    def subscribe(self, queue: QueueRow) -> None:
        """A stored queue is to be subscribed."""
        self.known.waiting.add(queue)
        if self._session is not None:
            self._session.look()

    def forget(self, notifier_ids: Collection[EntityId], *, associated: bool) -> None:
        """These queues are no longer stored; the router keeps those that were `associated`."""
        for notifier_id in notifier_ids:
            self.known.waiting.discard(notifier_id)
        if associated:
            self.known.balance.given_up(notifier_ids)
        if self._session is not None:
            self._session.look(shrunk=True)

    def resubscribe(self) -> None:
        """Start again with a new session, now."""
        if self._session is not None:
            self._session.end(EndSession("requested by the operator", at_once=True))
        self._hurry.set()

    @property
    def is_storing(self) -> bool:
        former = self.known.former
        if former is not None and former.is_storing:
            return True
        return self._session is not None and self._session.session.is_consuming

    def status(self) -> RouterStatus:
        session = self._session
        params = None if session is None else session.session.params
        return RouterStatus(
            server=str(self.known.server),
            connected=session is not None,
            version=None if params is None else params.version,
            service=params is not None and params.service is not None,
            subscribed=session is not None and session.is_subscribed,
            service_queues=0 if session is None else session.service_queues,
            individual_queues=0 if session is None else session.individual_queues,
            waiting=len(self.known.waiting),
            put_off=self.known.waiting.put_off,
            taken_over=self._taken_over,
            last_error=self._last_error,
        )

    # One attempt: connect, use the session, note its end

    async def _prepare(self) -> bool:
        """Whether there is anything to connect for; and as whom."""
        store, key = self._parts.store, self.known.key
        if not await self._is_needed():
            return False
        await self._service.prepare(await store.server(key))
        return True

    async def _is_needed(self) -> bool:
        """After a no there is no pause until nobody can hand this object a queue: all else is done before."""
        store = self._parts.store
        if await is_needed(store, self.known):
            return True
        await self._close_former()
        return await is_needed(store, self.known)

    async def _one_session(self) -> float | None:
        """The delay until the next one; None leaves it to the back-off."""
        work = RouterSession(self.known, self._parts, self._service)
        started = self._parts.clock.monotonic()
        try:
            session = await self._connect(work)
        except ClientError as error:
            return await self._not_connected(error)
        self._connected(session, self._parts.clock.monotonic() - started)
        self._session, started = work, self._parts.clock.monotonic()
        try:
            async with contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(session)
                stack.push_async_callback(session.finish)  # what a router sent is not sent again
                try:
                    await work.run(session)
                except (EndSession, RequestTimeout) as reason:
                    if work.has_queues and not isinstance(reason, TakenOver):
                        stack.pop_all()
                        await self._read_on(work)
                    raise
        except (EndSession, ClientError) as reason:
            lasted = self._parts.clock.monotonic() - started
            return await self._disconnected(reason, lasted)
        finally:
            self._session = None
        raise AssertionError("a session ends for a reason")

    async def _read_on(self, work: RouterSession) -> None:
        """The router may still send to a session that is given up here."""
        work.retire()
        before, self.known.former = self.known.former, FormerSession(work.session, self.known.name)
        if before is not None:
            await before.close()

    async def _close_former(self) -> None:
        former, self.known.former = self.known.former, None
        if former is not None:
            await former.close()

    async def _connect(self, work: RouterSession) -> SmpSession:
        dialing = self._dialing(self._acquaintance)
        async with dialing.slots.slot(self._brought_by):
            began = self._parts.clock.monotonic()
            try:
                return await connect_smp(
                    self.known.server,
                    dialing.dialer,
                    service=self._service.service,
                    on_events=work.receive,
                    on_nonsense=_count_nonsense,
                    config=self._config,
                )
            finally:
                self._is_slow = self._parts.clock.monotonic() - began > SLOW_DIAL

    @property
    def _acquaintance(self) -> Acquaintance:
        if not self._was_there:
            return Acquaintance.NEW
        return Acquaintance.SLOW if self._is_slow else Acquaintance.KNOWN

    def _connected(self, session: SmpSession, took: float) -> None:
        CONNECTS.inc()
        if not self._was_there:
            self._was_there = True
            self._backoff = self._new_backoff()
        self.known.is_own = self.known.has_own_hosts
        self._marked_inactive = self._taken_over = False
        self._last_error = None
        logger.info("%s: connected, version %d", self.known.name, session.params.version)
        self._parts.journal.record(
            JournalEvent.SMP_CONNECTED, server=self.known.name, latency_us=int(took * MICROSECONDS)
        )

    async def _not_connected(self, error: ClientError) -> float | None:
        name, problem = self.known.name, str(error) or type(error).__name__
        CONNECT_ERRORS.labels(type(error).__name__).inc()
        if isinstance(error, WrongIdentity):
            WRONG_IDENTITIES.inc()
            logger.error("%s: cannot connect: %s", name, error)
        elif problem != self._last_error:  # once, not every few seconds for as long as it lasts
            logger.warning("%s: cannot connect: %s", name, problem)
        self._last_error = problem
        if isinstance(error, HandshakeFailed) and error.error == TE_BAD_SERVICE and self._service.service:
            await self._parts.patiently(self._service.refused_in_handshake, name)
            return None
        await self._mark_inactive(error)
        return IDENTITY_DELAY if isinstance(error, WrongIdentity) else None

    async def _disconnected(self, reason: Exception, lasted: float) -> float | None:
        name = self.known.name
        reason.__traceback__ = None  # whose frames hold the session, which holds its reason
        self._last_error = str(reason) or type(reason).__name__
        logger.info("%s: disconnected: %s", name, self._last_error)
        await self._mark_inactive(reason)
        if lasted >= LONGEST_DELAY:
            self._backoff.reset()  # a router that drops every connection at once is left in peace
        if isinstance(reason, TakenOver) and self._parts.ownership.is_shared:
            return None  # by one that had it before, or has it now; then the next write says so
        if isinstance(reason, TakenOver | PeerMisbehaves):
            return self._leave(reason, lasted)
        return 0 if isinstance(reason, EndSession) and reason.at_once else None

    def _leave(self, reason: Exception, lasted: float) -> float:
        """No fight with another instance, no time for a router that wastes it; but a look now and then."""
        self._taken_over = isinstance(reason, TakenOver)
        (TAKEOVERS if self._taken_over else MISBEHAVIOURS).inc()
        if lasted >= LONGEST_LEAVE:
            self._leaving.reset()
        delay = self._leaving.next()
        logger.warning("%s: %s; next attempt in %.0f s", self.known.name, reason, delay)
        return delay

    async def _mark_inactive(self, reason: Exception) -> None:
        """Once per outage, and also if the first attempt after a start fails."""
        if self._marked_inactive:
            return
        key, name = self.known.key, self.known.name
        count = await self._parts.patiently(lambda: self._parts.store.set_disconnected(key), name)
        self._marked_inactive = True
        self._parts.journal.record(
            JournalEvent.SMP_DISCONNECTED, server=name, error=type(reason).__name__, changed=count
        )

    def _new_backoff(self) -> Backoff:
        return Backoff(FIRST_DELAY, LONGEST_DELAY if self._was_there else LONGEST_NEW_DELAY, random.random)

    async def _pause(self, delay: float) -> None:
        self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._hurry.wait()


def _count_nonsense(kind: Nonsense, count: int) -> None:
    NONSENSE.labels(kind).inc(count)
