"""How much of what our own routers hold is subscribed. All queues of one that is down are pending."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import NamedTuple

from ntf_server.metrics import gauge
from ntf_server.outage import Outage
from ntf_server.router import RouterStatus
from ntf_server.router_session import KnownRouter
from ntf_server.subscriber import RouterSubscriber
from store.interface import StoreError, SubscriberStore
from store.records import ServerKey
from transport.cancellation import TaskGroup

logger = logging.getLogger(__name__)

SHOW_INTERVAL = 5.0
MOST_SHOWN = 1000
"Each has labels of its own in metrics."
COUNT_INTERVAL = 60.0
"Counting the queues of a router reads all of its part of an index."

UP = gauge("smp_router_up", "Whether there is a session with an own router", ["server"])
QUEUES = gauge("smp_router_queues", "Queues of an own router that are subscribed", ["server"])
PENDING = gauge(
    "smp_router_pending", "Queues of an own router that are stored and not subscribed", ["server"]
)


class OwnRouter(NamedTuple):
    name: str
    "Host and port."
    up: bool
    queues: int
    pending: int
    missing: int
    "Of these, all but queues that clients have just named: strangers may name as many as they like."
    problem: str | None


class OwnRouters:
    """`run` keeps the counts and gauges; `now` is what is known at this moment."""

    def __init__(
        self, store: SubscriberStore, subscriber: RouterSubscriber, now: Callable[[], float]
    ) -> None:
        self._store = store
        self._subscriber = subscriber
        self._now = now
        self._stored: dict[ServerKey, int] = {}
        self._outages: dict[str, Outage] = {}

    def now(self) -> list[OwnRouter]:
        own = self._subscriber.own_routers()[:MOST_SHOWN]
        return [self._own_router(known, status) for known, status in own]

    async def run(self) -> None:
        async with TaskGroup() as tasks:
            tasks.create_task(self._count_for_ever(), name="count of own queues")
            while True:
                self._show()
                await asyncio.sleep(SHOW_INTERVAL)

    async def _count_for_ever(self) -> None:
        while True:
            with contextlib.suppress(StoreError):
                await self.count()
            await asyncio.sleep(COUNT_INTERVAL if self._stored else SHOW_INTERVAL)

    async def count(self) -> None:
        """Ask the store how many queues each has."""
        keys = [known.key for known, _ in self._subscriber.own_routers()[:MOST_SHOWN]]
        self._stored = {key: await self._store.subscription_count(key) for key in keys}

    def _own_router(self, known: KnownRouter, status: RouterStatus) -> OwnRouter:
        queues = status.service_queues + status.individual_queues
        pending, missing = status.waiting, status.put_off
        if not status.subscribed:  # else what is stored and not subscribed has ended: nothing waits for it
            pending = missing = max(pending, self._stored.get(known.key, 0) - queues)
        return OwnRouter(known.name, status.connected, queues, pending, missing, status.last_error)

    def _show(self) -> None:
        for each in (UP, QUEUES, PENDING):
            each.clear()
        routers = self.now()
        for gone in self._outages.keys() - {router.name for router in routers}:
            del self._outages[gone]
        for router in routers:
            UP.labels(router.name).set(router.up)
            QUEUES.labels(router.name).set(router.queues)
            PENDING.labels(router.name).set(router.pending)
            self._note(router)

    def _note(self, router: OwnRouter) -> None:
        """The router's own lines are written once; of ours, somebody is reminded."""
        outage = self._outages.setdefault(router.name, Outage(f"own router {router.name}", self._now, logger))
        if router.up or router.problem:  # else it is connecting for the first time
            outage.note("" if router.up else f"is down: {router.problem}")
