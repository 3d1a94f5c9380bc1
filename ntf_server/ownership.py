"""Several daemons on one database: this one's part of the routers, the pushes, the statements and the chores.

Three things go on at once, so that none waits for another: signs of life, the end of all that could not be
renewed in time, and the look at what is free, too much, or was handed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ntf_server.clock import SharedClock
from ntf_server.metrics import counter, gauge
from ntf_server.push.dispatcher import Dispatcher
from ntf_server.subscriber import RouterSubscriber
from protocol.encoding import EntityId
from store.interface import LeaseLost, StoreError
from store.leases import (
    FORGET,
    FORGET_UNASSOCIATED,
    FREED,
    HANDED_AT_ONCE,
    HANDED_OVER,
    PUSH,
    PUSH_STATEMENTS,
    RENEWALS,
    RESUBSCRIBE,
    Changes,
    Duty,
    Lease,
    Leases,
    Notice,
    TimeTold,
    of_router,
)
from store.records import ServerKey, TokenKey
from store.statement_records import PushKey
from transport.cancellation import TaskGroup

log = logging.getLogger(__name__)

LOOK_INTERVAL = 0.5
"Seconds between looks for what was handed over, if nobody says anything: it is subscribed within a second."
BALANCE_INTERVAL = 2.0
"Between looks for what dead daemons left."
SWEEP_INTERVAL = 10.0
"Between looks for tokens whose pushes are ours and of which nobody told us."
LATE_READING = 5.0
"At most, for which a daemon reads on at a router that another one owns by now: nothing sent before is lost."
LATE_LOOK = 0.1
WRONG_CLOCK = 2.0
"Seconds: more is worth a word."
RETIRE_TIMEOUT = 10.0
"For that, in a daemon that stops."
DRAIN_TIMEOUT = 30.0
"For pushes under way, before their part goes to another daemon."

OWNED = gauge("leases_owned", "What this daemon owns", ["duty"])
GAINED = counter("leases_gained", "Leases that this daemon took", ["duty"])
GIVEN_BACK = counter("leases_given_back", "Leases given back to be shared with other daemons", ["duty"])
LAPSED = counter(
    "leases_lapsed", "Times this daemon had to give everything up because it was cut off or hung"
)
CLOCK_AHEAD = gauge("clock_ahead_seconds", "Seconds by which this machine's clock is ahead of the database's")
HANDED = counter("queues_handed_over", "Queues that other daemons stored for routers of this one")


class OwnershipLoop:
    """Takes leases and gives them back; starts and stops what depends on them."""

    def __init__(
        self,
        leases: Leases,
        subscriber: RouterSubscriber,
        dispatcher: Dispatcher,
        clock: SharedClock,
        *,
        lease_seconds: float,
    ) -> None:
        self._leases = leases
        self._clock = clock
        self._subscriber = subscriber
        self._dispatcher = dispatcher
        self._renew_interval = lease_seconds / RENEWALS
        self._balance_at = self._sweep_at = 0.0
        self._tasks: TaskGroup | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._leaving: set[ServerKey] = set()
        self._begun_anew: set[ServerKey] = set()
        "Of these, those that are ours again."

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[None]:
        """One of the daemons from now on. At the end everything is given back, when nothing uses it any
        more."""
        self._note_time(await self._leases.join())
        async with TaskGroup() as tasks:
            self._renewing = tasks.create_task(self._renew(), name="lease renewal")
            try:
                yield
            finally:
                self._renewing.cancel()
                await self._leases.leave()

    async def run(self) -> None:
        async with TaskGroup() as self._tasks:
            tasks = self._tasks
            tasks.create_task(self._watch_time(), name="lease watch")
            tasks.create_task(self._tell(), name="words for other daemons")
            while True:
                try:
                    await self._look()
                except StoreError as error:
                    log.error("leases wait for the store: %s", error)
                self._show()
                for notice in await self._leases.notices(LOOK_INTERVAL):
                    await self._hear(notice)

    # Life

    async def _renew(self) -> None:
        while True:
            try:
                self._note_time(await self._leases.renew())
            except LeaseLost as error:
                log.warning("all routers and pushes begin anew: %s", error)
                LAPSED.inc()
            except StoreError as error:
                log.error("leases are not renewed: %s", error)
                await asyncio.sleep(min(1.0, self._renew_interval))
                continue
            await asyncio.sleep(self._renew_interval)

    def _note_time(self, told: TimeTold) -> None:
        was_wrong = abs(self._clock.ahead) >= WRONG_CLOCK
        self._clock.told(*told)
        ahead = self._clock.ahead
        CLOCK_AHEAD.set(ahead)
        if abs(ahead) >= WRONG_CLOCK and not was_wrong:
            how = "ahead of" if ahead > 0 else "behind"
            log.warning(
                "this machine's clock is %.0f s %s the database's: that one is believed", abs(ahead), how
            )

    async def _watch_time(self) -> None:
        """Stop before another daemon begins, whatever the reason why nothing could be renewed. Routers are
        read from until it is known that another daemon has them."""
        while True:
            left = self._leases.seconds_left()
            if left > 0:
                await asyncio.sleep(left)
                continue
            if self._leases.owned():
                log.error("cut off from the database for too long: all routers and pushes are given up")
                LAPSED.inc()
                self._leases.lapse()
            await asyncio.sleep(LOOK_INTERVAL)

    def _let_go(self) -> None:
        """End what goes on for routers that are not ours any more. What they sent before is read and kept."""
        for key in self._subscriber.watched():
            if not self._leases.owns(of_router(key)):
                self._start_leaving(key)

    def _start_leaving(self, key: ServerKey) -> None:
        assert self._tasks is not None
        if key not in self._leaving:
            self._leaving.add(key)
            self._tasks.create_task(self._leave(key), name="leaving a router")

    async def _leave(self, key: ServerKey) -> None:
        try:
            await self._read_on([key])
            if key in self._begun_anew or not self._leases.owns(of_router(key)):
                await self._subscriber.unwatch(key)
        finally:
            self._leaving.discard(key)
            self._begun_anew.discard(key)
            self._sweep_at = 0.0  # it may be ours again

    async def _read_on(self, keys: Sequence[ServerKey]) -> None:
        """Until these routers have ended their sessions: their queues are the new owner's then. Time in which
        the store keeps us from reading does not count."""
        left = LATE_READING
        while left > 0 and set(keys) & set(self._subscriber.watched()):
            await asyncio.sleep(LATE_LOOK)
            if not self._subscriber.is_storing(keys):
                left -= LATE_LOOK

    # Shares

    async def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._balance_at:
            self._balance_at = now + BALANCE_INTERVAL
            changes = await self._leases.balance()
            if changes.gained:
                self._balance_at = 0.0  # there may be more
                self._begin(changes)
            if changes.surplus:
                await self._give_back(changes.surplus)
            self._let_go()
        await self._take_handed_over()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_INTERVAL
            await self._watch_all()
            self._dispatcher.sweep()

    def _begin(self, changes: Changes) -> None:
        """A session in which another daemon took the queues away is of no use any more."""
        self._sweep_at = 0.0
        watched = set(self._subscriber.watched())
        for lease in changes.gained:
            GAINED.labels(lease.duty).inc()
            key = ServerKey(lease.id)
            if lease.duty is Duty.ROUTER and key in watched and lease not in changes.resumed:
                self._begun_anew.add(key)
                self._start_leaving(key)

    async def _watch_all(self) -> None:
        """Every router of ours that has queues, whatever went wrong before."""
        ours = {ServerKey(lease.id) for lease in self._leases.owned() if lease.duty is Duty.ROUTER}
        if new := list(ours.difference(self._subscriber.watched())):
            for router in await self._leases.routers(new):
                self._subscriber.watch(router)

    async def _take_handed_over(self) -> None:
        while True:
            handed = await self._leases.handed_over()
            ours = [each for each in handed if self._leases.owns(of_router(each.router.key))]
            for each in ours:
                HANDED.inc()
                self._subscriber.subscribe(each.router.key, each.router.server, each.queue)
            if ours:
                await self._leases.taken(ours)
            if not ours or len(handed) < HANDED_AT_ONCE:
                return

    async def _give_back(self, surplus: Sequence[Lease]) -> None:
        """Pushes under way have ended before another daemon begins. The connections of routers are closed a
        little after: the router moves its queues to the new owner's, and what it sent before is read."""
        self._leases.suspend([lease for lease in surplus if lease.duty is not Duty.ROUTER])
        parts = {lease.id for lease in surplus if lease.duty is Duty.PUSHES}
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT):
                await self._dispatcher.drained(parts)
        except TimeoutError:
            log.warning("pushes take long: another daemon may repeat some")
        for lease in surplus:
            GIVEN_BACK.labels(lease.duty).inc()
        await self._leases.give_back(surplus)
        self._let_go()

    async def retire(self) -> None:
        """Before the end, when `run` and all pushes have ended: others take everything at once, while this
        daemon reads on at its routers."""
        routers = [ServerKey(lease.id) for lease in self._leases.owned() if lease.duty is Duty.ROUTER]
        with contextlib.suppress(StoreError, TimeoutError):
            is_alone = len(await self._leases.daemons()) == 1
            if self._renewing is not None:
                self._renewing.cancel()
            await self._leases.leave()
            if not is_alone:
                async with asyncio.timeout(RETIRE_TIMEOUT):
                    await self._read_on(routers)

    # Words of other daemons, and for them

    async def _tell(self) -> None:
        while True:
            try:
                await self._leases.tell()
            except StoreError as error:
                log.warning("other daemons find by themselves what is to be pushed: %s", error)

    async def _hear(self, notice: Notice) -> None:
        if notice.verb == FREED or notice == Notice(HANDED_OVER, ("0",)):
            self._balance_at = 0.0
        elif notice.verb == PUSH:
            await self._dispatcher.notify_stored([TokenKey(int(word)) for word in notice.words])
        elif notice.verb == PUSH_STATEMENTS:
            await self._dispatcher.notify_stored_statements([PushKey(int(word)) for word in notice.words])
        elif notice.verb in (FORGET, FORGET_UNASSOCIATED):
            key, *words = notice.words
            ids = [EntityId(bytes.fromhex(word)) for word in words]
            self._subscriber.forget_ids(ServerKey(int(key)), ids, associated=notice.verb == FORGET)
        elif notice.verb == RESUBSCRIBE:
            self._subscriber.resubscribe(" ".join(notice.words))

    def _show(self) -> None:
        owned = self._leases.owned()
        for duty in Duty:
            OWNED.labels(duty).set(sum(lease.duty is duty for lease in owned))
