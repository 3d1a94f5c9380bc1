"""Keeps the store's subscriptions subscribed at their routers: one task per router, none blocks another."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

from ntf_server.clock import SECONDS_PER_DAY, Clock, as_datetime
from ntf_server.config import SubscriberConfig
from ntf_server.interfaces import PushSink
from ntf_server.journal import EventSink
from ntf_server.metrics import gauge
from ntf_server.router import LONGEST_DELAY, Acquaintance, Dialing, Router, RouterStatus
from ntf_server.router_session import WAITING_IN_ALL, WAITING_SHARE, KnownRouter
from ntf_server.surroundings import Surroundings
from protocol.addresses import SmpServer, canonical_host
from protocol.encoding import EntityId
from protocol.errors import CMD_PROHIBITED, QUOTA, ErrorType
from smp_client.dialer import Dialer, DialSlots, NetworkConfig
from smp_client.subscriptions import WaitingRoom
from store.interface import LeaseLost, StoreVanished, SubscriberStore
from store.leases import SOLE_OWNER, Ownership, of_router
from store.records import DeletedSubscription, QueueRow, ServerKey, StoredRouter
from transport.address_guard import AddressGuard
from transport.cancellation import TaskGroup, raise_if_cancelled
from transport.limits import Rate, RateLimiter

logger = logging.getLogger(__name__)

STATUS_INTERVAL = 5.0
"Seconds between updates of the metrics about connections."
STOP_PATIENCE = 10.0
"Seconds for which a daemon that stops tries to store what was sent to it."
DIALS = {Acquaintance.NEW: (32, 4), Acquaintance.KNOWN: (64, 16), Acquaintance.SLOW: (32, 8)}
"Connections and handshakes under way at once, and of these, those that the same client address asked for."

NAMED_ROUTERS = 20_000
"Routers that clients named are remembered, so that they count once."

WATCHED = gauge("smp_routers", "Routers that are watched")
PARKED = gauge("smp_routers_waiting", "Routers that wait for others to make room")
SESSIONS = gauge("smp_sessions", "SMP sessions count")


class _SubscriptionGauges:
    """One kind of subscriptions, in the form that existing dashboards know."""

    def __init__(self, name: str, words: str) -> None:
        self.servers_own = gauge(f"{name}server_count_own", f"{words}, own server count", ["server"])
        self.queues_own = gauge(f"{name}sub_count_own", f"{words} count for own servers", ["server"])
        self.servers_other = gauge(f"{name}server_count_other", f"{words}, other server count")
        self.queues_other = gauge(f"{name}sub_count_other", f"{words} count for other servers")

    def show(self, counts: Sequence[tuple[KnownRouter, int]]) -> None:
        others = [count for router, count in counts if not router.is_own and count]
        self.servers_other.set(len(others))
        self.queues_other.set(sum(others))
        for router, count in counts:
            if router.is_own:
                self.servers_own.labels(router.host).set(count > 0)
                self.queues_own.labels(router.host).set(count)


ACTIVE_SERVICE = _SubscriptionGauges("smp_service_subscription_active_", "Active SMP service subscriptions")
ACTIVE_QUEUES = _SubscriptionGauges("smp_subscription_active_", "Active SMP subscriptions")
PENDING_QUEUES = _SubscriptionGauges("smp_subscription_pending_", "Pending SMP subscriptions")


class RouterPlaces:
    """How many routers are watched or about to be: so many in all, and so many that one client address
    brought. Pure. Each has one place, however many hold it."""

    def __init__(self, total: int, per_client: int) -> None:
        self._total = total
        self._per_client = per_client
        self._holders: Counter[SmpServer] = Counter()
        self._brought_by: dict[SmpServer, str] = {}
        self._brought: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, server: SmpServer) -> bool:
        return server in self._holders

    def has_room(self, server: SmpServer, client: str | None) -> bool:
        """Routers from the store (no client) are stopped by the total only."""
        if server in self._holders:
            return True
        return len(self) < self._total and (client is None or self._brought[client] < self._per_client)

    def take(self, server: SmpServer, client: str | None) -> None:
        """Hold a place; the first holder decides who brought the router."""
        if server not in self._holders and client is not None:
            self._brought_by[server] = client
            self._brought[client] += 1
        self._holders[server] += 1

    def leave(self, server: SmpServer) -> None:
        self._holders[server] -= 1
        if self._holders[server]:
            return
        del self._holders[server]
        client = self._brought_by.pop(server, None)
        if client is not None:
            self._brought[client] -= 1
            if not self._brought[client]:
                del self._brought[client]

    def brought_by(self, server: SmpServer) -> str | None:
        return self._brought_by.get(server)


class NamedRouters:
    """Where daemons share the routers, the one whose client names a router seldom watches it, and does not
    learn when another one stops to. So here an address may name so many a day for the first time."""

    def __init__(self, per_client: int) -> None:
        self._new = RateLimiter(Rate.over(per_client, SECONDS_PER_DAY))
        self._named_by: OrderedDict[SmpServer, str] = OrderedDict()

    def allows(self, server: SmpServer, client: str, now: float) -> bool:
        if server in self._named_by:
            self._named_by.move_to_end(server)
            return True
        if not self._new.allows(client, now):
            return False
        self._named_by[server] = client
        if len(self._named_by) > NAMED_ROUTERS:
            self._named_by.popitem(last=False)
        return True

    def named_by(self, server: SmpServer) -> str | None:
        """Who named it first, as far as it is remembered."""
        return self._named_by.get(server)


class RouterSubscriber:
    """Implements `ntf_server.interfaces.Subscriber`. Its owner runs `run()` and cancels it to stop."""

    def __init__(
        self,
        store: SubscriberStore,
        push_sink: PushSink,
        clock: Clock,
        config: SubscriberConfig,
        journal: EventSink,
        *,
        max_routers: int,
        dialer: Dialer | None = None,
        ownership: Ownership = SOLE_OWNER,
    ) -> None:
        """`max_routers`: watched at a time."""
        self._store = store
        self._ownership = ownership
        self._parts = Surroundings(store, push_sink, clock, journal, ownership)
        self._config = config
        self._own_hosts = frozenset(map(canonical_host, config.own_hosts))
        # Names that resolve slowly, and hosts that do not answer, hold up nobody who was there before.
        self._dialing = {
            standing: Dialing(dialer or make_dialer(config, clock), DialSlots(total, each))
            for standing, (total, each) in DIALS.items()
        }
        # Thousands of queues name the same few routers: each is looked at once.
        self._permits = lru_cache(4096)(self._dialing[Acquaintance.NEW].dialer.permits)
        self._places = RouterPlaces(max_routers, config.routers_per_address)
        self._named = NamedRouters(config.routers_per_address)
        self._room = WaitingRoom(WAITING_IN_ALL, WAITING_SHARE)
        self._routers: dict[ServerKey, Router] = {}
        self._parked: dict[ServerKey, StoredRouter] = {}
        "They wait for a place, in this order."
        self._running: dict[ServerKey, asyncio.Task[None]] = {}
        self._tasks: TaskGroup | None = None

    async def run(self) -> None:
        """Watch every router that has subscriptions, then those that are handed over, until cancelled. Where
        several daemons share them, they come one by one (`watch`)."""
        stored = [] if self._ownership.is_shared else await self._store.servers()
        try:
            async with TaskGroup() as tasks:
                self._tasks = tasks
                for key in self._routers:
                    self._start(key)
                for router in stored:
                    self.watch(router)
                if self._parked:
                    watched, waiting = len(self._routers), len(self._parked)
                    logger.warning("too many routers for the open files allowed: %d wait", waiting)
                    logger.info("%d routers are watched", watched)
                try:
                    while True:
                        self._show()
                        await asyncio.sleep(STATUS_INTERVAL)
                finally:
                    asyncio.get_running_loop().call_later(STOP_PATIENCE, self._parts.gives_up.set)
        finally:
            self._tasks = None

    # Which routers are watched

    def watched(self) -> list[ServerKey]:
        """Also those that wait for their turn."""
        return [*self._routers, *self._parked]

    def watch(self, stored: StoredRouter) -> Router | None:
        """Start to keep the stored queues of a router subscribed; None if it has to wait for its turn."""
        key, server, was_there = stored
        if key in self._routers:
            return self._routers[key]
        place = server.canonical
        if not self._places.has_room(place, None):
            self._parked.setdefault(key, stored)
            return None
        self._places.take(place, None)
        self._parked.pop(key, None)
        router = self._routers[key] = Router(
            KnownRouter(key, server, self._room, own=is_at(server, self._own_hosts)),
            self._parts,
            self._config,
            self._dialing.__getitem__,
            brought_by=self._brought_by(place) or key,
            was_there=was_there,
            is_crowded=lambda: bool(self._parked),
        )
        if self._tasks is not None:
            self._start(key)
        return router

    def is_storing(self, keys: Collection[ServerKey]) -> bool:
        """Whether anything that one of these routers sent is not stored yet."""
        return any(key in self._routers and self._routers[key].is_storing for key in keys)

    async def unwatch(self, key: ServerKey) -> None:
        """Leave a router alone, and return when its connection is closed. Its queues stay stored."""
        self._parked.pop(key, None)
        if (task := self._running.get(key)) is not None:
            task.cancel()
            await asyncio.wait([task])

    def _start(self, key: ServerKey) -> None:
        assert self._tasks is not None
        router = self._routers[key]
        self._running[key] = self._tasks.create_task(
            self._keep(key, router), name=f"router {router.known.name}"
        )

    async def _keep(self, key: ServerKey, router: Router) -> None:
        gave_way = False
        try:
            gave_way = await self._run_for_ever(router)
        finally:
            # Without a pause since the store was asked, so that no queue can be handed over in between.
            del self._routers[key], self._running[key]
            self._places.leave(router.known.server.canonical)
            router.known.waiting.clear()
        if gave_way:
            self._parked[key] = StoredRouter(key, router.known.server, was_there=False)
        if self._parked:
            self.watch(next(iter(self._parked.values())))

    async def _run_for_ever(self, router: Router) -> bool:
        """A defect is logged, and silences neither this router nor the others."""
        while True:
            try:
                return await router.run()
            except (LeaseLost, StoreVanished):
                return False  # whoever took it watches it; or nobody does, and the server is about to stop
            except Exception as error:
                raise_if_cancelled()
                # The error's text may hold what the router sent, so only its kind and place are logged.
                place = "".join(traceback.format_tb(error.__traceback__))
                kind = type(error).__name__
                logger.error("%s: the subscriber failed with %s\n%s", router.known.name, kind, place)
            await asyncio.sleep(LONGEST_DELAY)

    # Subscriber

    @contextmanager
    def admission(
        self, servers: Collection[SmpServer], client: str
    ) -> Iterator[Mapping[SmpServer, ErrorType]]:
        """Which of the routers that a client names must not be watched, and why.

        The others have a place at least until the end of the block, in which they are stored and handed over.
        """
        refused: dict[SmpServer, ErrorType] = {}
        for server in servers:
            if not self._permits(server):
                refused[server] = CMD_PROHIBITED
            elif not (self._places.has_room(server, client) and self._may_name(server, client)):
                refused[server] = QUOTA
            else:
                self._places.take(server, client)
        try:
            yield refused
        finally:
            for server in servers:
                if server not in refused:
                    self._places.leave(server)

    def _may_name(self, place: SmpServer, client: str) -> bool:
        """Of routers that others may watch; those that are watched here have a place, and count by that."""
        if not self._ownership.is_shared or place in self._places:
            return True
        return self._named.allows(place, client, self._parts.clock.monotonic())

    def _brought_by(self, place: SmpServer) -> str | None:
        return self._places.brought_by(place) or self._named.named_by(place)

    def subscribe(self, server_key: ServerKey, server: SmpServer, queue: QueueRow) -> None:
        """Hand a stored queue to its router's task; before `run` it is found in the store. That of another
        daemon gets it by way of the store."""
        if self._ownership.is_shared and not self._ownership.owns(of_router(server_key)):
            return
        if (router := self.watch(StoredRouter(server_key, server, was_there=False))) is not None:
            router.subscribe(queue)

    def forget(self, queues: Sequence[DeletedSubscription]) -> None:
        """The rows are gone; a router without any is disconnected."""
        groups: dict[tuple[ServerKey, bool], list[EntityId]] = {}
        for queue in queues:
            groups.setdefault((queue.server_key, queue.associated), []).append(queue.notifier_id)
        for (key, associated), notifier_ids in groups.items():
            self.forget_ids(key, notifier_ids, associated=associated)

    def forget_ids(self, key: ServerKey, notifier_ids: Sequence[EntityId], *, associated: bool) -> None:
        """Forget deleted queues of one router, all of them associated with its service or none."""
        if (router := self._routers.get(key)) is not None:
            router.forget(notifier_ids, associated=associated)

    # The operator

    def resubscribe(self, server: str) -> bool:
        """Connect anew to the router with this address or host; False if there is none."""
        found = [
            router
            for router in self._routers.values()
            if server in (str(router.known.server), *router.known.server.hosts)
        ]
        for router in found:
            router.resubscribe()
        return bool(found)

    def status(self) -> list[RouterStatus]:
        """All routers that have subscriptions."""
        return [router.status() for router in self._routers.values()]

    def own_routers(self) -> list[tuple[KnownRouter, RouterStatus]]:
        """Those at hosts that the configuration calls ours, once they have proved who they are."""
        return [(router.known, router.status()) for router in self._routers.values() if router.known.is_own]

    def _show(self) -> None:
        statuses = [(router.known, router.status()) for router in self._routers.values()]
        WATCHED.set(len(statuses))
        PARKED.set(len(self._parked))
        SESSIONS.set(sum(status.connected for _, status in statuses))
        ACTIVE_SERVICE.show([(router, status.service_queues) for router, status in statuses])
        ACTIVE_QUEUES.show([(router, status.individual_queues) for router, status in statuses])
        PENDING_QUEUES.show([(router, status.waiting) for router, status in statuses])


def is_at(server: SmpServer, hosts: Collection[str]) -> bool:
    """Whether all hosts of a router are among these."""
    return all(canonical_host(host) in hosts for host in server.hosts)


def make_dialer(config: SubscriberConfig, clock: Clock) -> Dialer:
    guard = AddressGuard(allow_private=config.allow_private_routers, cache_time=0)
    return Dialer(network_config(config), guard=guard, now=lambda: as_datetime(clock.now()))


def network_config(config: SubscriberConfig) -> NetworkConfig:
    proxy = config.socks_proxy
    if proxy and "://" not in proxy:
        proxy = f"socks5://{proxy}"
    return NetworkConfig(
        socks_proxy=proxy or None,
        proxy_all=config.socks_mode == "always",
        prefer_onion=config.host_mode == "onion",
    )
