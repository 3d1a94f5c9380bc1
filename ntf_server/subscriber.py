"""Keeps the store's subscriptions subscribed at their routers: one task per router, none blocks another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ntf_server.clock import Clock, as_datetime
from ntf_server.interfaces import PushSink
from ntf_server.journal import EventSink
from ntf_server.metrics import gauge
from ntf_server.router_watch import RouterStatus, RouterWatch, run_for_ever
from ntf_server.subscriber_config import SubscriberConfig as SubscriberConfig
from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from smp_client.dialer import Dialer
from store.interface import SubscriberStore
from store.records import DeletedSubscription, QueueRow, ServerKey
from transport.cancellation import TaskGroup

SESSIONS = gauge("smp_sessions_count", "SMP sessions count")


class _SubscriptionGauges:
    """One kind of subscriptions, in the form that existing dashboards know."""

    def __init__(self, name: str, words: str) -> None:
        self.servers_own = gauge(f"{name}server_count_own", f"{words}, own server count", ["server"])
        self.queues_own = gauge(f"{name}sub_count_own", f"{words} count for own servers", ["server"])
        self.servers_other = gauge(f"{name}server_count_other", f"{words}, other server count")
        self.queues_other = gauge(f"{name}sub_count_other", f"{words} count for other servers")

    def show(self, counts: Sequence[tuple[RouterWatch, int]]) -> None:
        others = [count for watch, count in counts if not watch.is_own and count]
        self.servers_other.set(len(others))
        self.queues_other.set(sum(others))
        for watch, count in counts:
            if watch.is_own:
                self.servers_own.labels(watch.host).set(count > 0)
                self.queues_own.labels(watch.host).set(count)


ACTIVE_SERVICE = _SubscriptionGauges("smp_service_subscription_active_", "Active SMP service subscriptions")
ACTIVE_QUEUES = _SubscriptionGauges("smp_subscription_active_", "Active SMP subscriptions")
PENDING_QUEUES = _SubscriptionGauges("smp_subscription_pending_", "Pending SMP subscriptions")


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
        dialer: Dialer | None = None,
    ) -> None:
        self._store = store
        self._push_sink = push_sink
        self._clock = clock
        self._config = config
        self._journal = journal
        self._dialer = dialer or Dialer(config.network(), now=lambda: as_datetime(clock.now()))
        self._watches: dict[ServerKey, RouterWatch] = {}
        self._tasks: TaskGroup | None = None

    async def run(self) -> None:
        """Subscribe everything stored, then whatever is handed over, until cancelled."""
        for record in await self._store.servers():
            self._watch(record.key, record.server)
        try:
            async with TaskGroup() as tasks:
                self._tasks = tasks
                for key in list(self._watches):
                    self._start(tasks, key)
                while True:
                    self._show()
                    await asyncio.sleep(self._config.status_interval)
        finally:
            self._tasks = None

    def subscribe(self, server_key: ServerKey, server: SmpServer, queue: QueueRow) -> None:
        """Hand a stored queue to its router's task; before `run` it is found in the store."""
        watch = self._watch(server_key, server)
        watch.subscribe(queue)

    def forget(self, queues: Sequence[DeletedSubscription]) -> None:
        """The rows are gone; a router without any is disconnected."""
        by_server: dict[ServerKey, list[EntityId]] = {}
        for queue in queues:
            by_server.setdefault(queue.server_key, []).append(queue.notifier_id)
        for key, notifier_ids in by_server.items():
            if (watch := self._watches.get(key)) is not None:
                watch.forget(notifier_ids)

    def resubscribe(self, server: str) -> bool:
        """Connect anew to the router with this address or host; False if there is none."""
        found = [
            watch for watch in self._watches.values() if server in (str(watch.server), *watch.server.hosts)
        ]
        for watch in found:
            watch.resubscribe()
        return bool(found)

    def status(self) -> list[RouterStatus]:
        """All routers that have subscriptions."""
        return [watch.status() for watch in self._watches.values()]

    def _watch(self, key: ServerKey, server: SmpServer) -> RouterWatch:
        watch = self._watches.get(key)
        if watch is None:
            watch = self._watches[key] = RouterWatch(
                key,
                server,
                self._store,
                self._push_sink,
                self._clock,
                self._config,
                self._journal,
                self._dialer,
            )
            if self._tasks is not None:
                self._start(self._tasks, key)
        return watch

    def _start(self, tasks: TaskGroup, key: ServerKey) -> None:
        watch = self._watches[key]
        tasks.create_task(self._run_watch(key, watch), name=f"router {watch.host}")

    async def _run_watch(self, key: ServerKey, watch: RouterWatch) -> None:
        await run_for_ever(watch, self._config.longest_delay)
        # Without a pause since the store was asked, so that no queue can be handed over in between.
        del self._watches[key]

    def _show(self) -> None:
        statuses = [(watch, watch.status()) for watch in self._watches.values()]
        SESSIONS.set(sum(status.connected for _, status in statuses))
        ACTIVE_SERVICE.show([(watch, status.service_queues) for watch, status in statuses])
        ACTIVE_QUEUES.show([(watch, status.individual_queues) for watch, status in statuses])
        PENDING_QUEUES.show([(watch, status.waiting) for watch, status in statuses])
