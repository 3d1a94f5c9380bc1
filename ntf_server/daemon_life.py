"""What the journal knows of the daemon itself: when it started, lived and stopped, what was lost.

The wall clock may be wrong or set while the daemon runs. So these events also tell how long the process has
run by the monotonic clock, from which the reports learn which times to believe.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from ntf_server.clock import MICROSECONDS, Clock
from ntf_server.journal import Journal
from ntf_server.metrics import AskedCounter
from ntf_server.router import RouterStatus
from protocol.addresses import parse_smp_server
from protocol.statuses import SubState
from store.interface import ControlStore, StoreError
from store.journal_schema import JournalEvent
from transport.cancellation import TaskGroup

RECORDED = AskedCounter("journal_events", "Events written to the journal or about to be")
DROPPED = AskedCounter("journal_dropped", "Events lost because the journal could not be written for too long")
REJECTED = AskedCounter("journal_rejected", "Events left out of the journal because they broke its contract")

ALIVE_INTERVAL = 60.0
BEATS_PER_SAMPLE = 60


class DaemonLife:
    """Records starts, signs of life and stops of one process, under a name that outlives it."""

    def __init__(
        self,
        journal: Journal,
        store: ControlStore,
        clock: Clock,
        daemon: str,
        routers: Callable[[], Sequence[RouterStatus]],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._journal = journal
        self._store = store
        self._clock = clock
        self._daemon = daemon
        self._routers = routers
        self._sleep = sleep
        self._began = clock.monotonic()
        self._told = {"dropped": 0, "rejected": 0}
        RECORDED.ask = lambda: journal.recorded
        DROPPED.ask = lambda: journal.dropped
        REJECTED.ask = lambda: journal.rejected

    @asynccontextmanager
    async def recorded(self) -> AsyncIterator[None]:
        """The journal is written, and says that the daemon runs, from now until the end."""
        async with TaskGroup() as tasks:
            tasks.create_task(self._journal.run(), name="journal")
            try:
                self._record(JournalEvent.SERVER_STARTED, count=await self._store.subscribable_count())
                beats = tasks.create_task(self._run(), name="journal's signs of life")
                yield
                beats.cancel()
                self._tell_losses()
                self._record(JournalEvent.SERVER_STOPPED)
            finally:
                self._journal.stop()

    async def _run(self) -> None:
        seen = self._losses()
        for beat in itertools.count():
            await self._sleep(ALIVE_INTERVAL)
            with contextlib.suppress(StoreError):
                counts = await self._store.counts()
                part, whole = counts.active_subscriptions, counts.subscriptions
                self._record(JournalEvent.SERVER_ALIVE, count=part, total=whole)
            before, seen = seen, self._losses()
            if seen == before:  # while events are being lost, so would be what is told of them
                self._tell_losses()
            if beat % BEATS_PER_SAMPLE == 0:
                self._sample()

    def _sample(self) -> None:
        """How many queues each router has for us: what else the journal says of them are changes."""
        for router in self._routers():
            server = parse_smp_server(router.server).host_port
            subscribed = router.service_queues + router.individual_queues
            for status, count in ((SubState.ACTIVE, subscribed), (SubState.PENDING, router.waiting)):
                self._journal.record(
                    JournalEvent.SMP_SAMPLED, server=server, status_to=status.value, count=count
                )

    def _losses(self) -> dict[str, int]:
        return {"dropped": self._journal.dropped, "rejected": self._journal.rejected}

    def _tell_losses(self) -> None:
        """Losses are part of what happened: reports over a journal with holes must say so."""
        losses = self._losses()
        for reason, total in losses.items():
            if lost := total - self._told[reason]:
                self._journal.record(JournalEvent.EVENTS_LOST, error=reason, count=lost)
        self._told = losses

    def _record(self, event: JournalEvent, *, count: int | None = None, total: int | None = None) -> None:
        uptime = int((self._clock.monotonic() - self._began) * MICROSECONDS)
        self._journal.record(event, daemon=self._daemon, uptime_us=uptime, count=count, total=total)
