"""The life of the push side: takes work, lets the scheduler choose, starts deliveries, stops in order.

What a push carries is read and made in `composing.py`, what follows from its answer in `outcomes.py`.

An entry stays unsent in the store until a push that carries it was accepted and marked there, so a crash at
any moment costs at most a repeated push. A token is in the scheduler's hands until its outcome is stored:
nothing is pushed twice in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from ntf_server.clock import Clock
from ntf_server.config import PushConfig
from ntf_server.journal import EventSink
from ntf_server.push.composing import Composer, Content, Patience, Push, PushReader
from ntf_server.push.lanes import Job, Kind, Party, device_job, statement_job
from ntf_server.push.outcomes import Outcomes, ProviderWatch, PushEvents
from ntf_server.push.provider import (
    WHOLE,
    Destination,
    ProviderDown,
    ProviderRefusesUs,
    PushError,
    PushProvider,
    RetryLater,
    TooLate,
    detached,
)
from ntf_server.push.scheduler import ANY_NUMBER, Added, Ended, PushScheduler, Taken
from ntf_server.randomness import random_part
from protocol.device_token import Provider
from store.interface import DeliveryStore
from store.leases import SOLE_OWNER, STATEMENTS, Duty, Lease, Ownership, of_pushes
from store.records import Stored, TokenKey
from store.statement_records import (
    DEFAULT_LIMITS,
    DeviceRegistration,
    PushKey,
    PushLimits,
    RegistrationKey,
    StatementPush,
)
from transport.cancellation import TaskGroup, raise_if_cancelled

log = logging.getLogger(__name__)

DELIVERY_STEPS = 3
"A delivery may have to renew its credentials and be sent again; each step has its own time limit."
COMPOSED_AT_ONCE = 64
"Pushes: bounds how long encrypting them holds up everything else."


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]
"Calls back after so many seconds of the clock that the dispatcher reads."


class Dispatcher:
    """The PushSink of the daemon. `run()` does the work until `stop()`."""

    def __init__(
        self,
        store: DeliveryStore,
        providers: Mapping[Provider, PushProvider],
        config: PushConfig,
        *,
        clock: Clock,
        random: Callable[[int], bytes],
        journal: EventSink,
        call_later: CallLater | None = None,
        ownership: Ownership = SOLE_OWNER,
        title: str = "",
        web_pushes: int = ANY_NUMBER,
        statement_limits: PushLimits = DEFAULT_LIMITS,
    ) -> None:
        """`title` is what alerts of statements show; `web_pushes` may be under way at once."""
        self._call_age = statement_limits.call_age
        self._ownership = ownership
        self._under_way: Counter[Lease] = Counter()
        self._providers = providers
        self._config = config
        self._clock = clock
        self._call_later = call_later
        chance = partial(random_part, random)
        self._scheduler = PushScheduler(config, chance, web_pushes=web_pushes)
        self._composer = Composer(config, random, title)
        self._events = PushEvents(journal, clock.now)
        self._events.watch(self._scheduler)
        self._time_limit = TimeLimit(config.response_timeout * DELIVERY_STEPS)
        self._patience = Patience()
        self._reader = PushReader(store, ownership, self._patience, clock.now, statement_limits)
        self._outcomes = Outcomes(store, self._events, config, clock, chance, self._ended, self._patience)
        self.provider_watch = ProviderWatch(self._scheduler, journal, clock.monotonic)
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._sweep = asyncio.Event()
        self._stopping = False
        self._work_limit: asyncio.Timeout | None = None
        self._timer: Timer | None = None
        self._finished = asyncio.Event()
        self._finished.set()

    @property
    def jobs_in_memory(self) -> int:
        return len(self._scheduler)

    # PushSink

    def verify(self, token_key: TokenKey) -> None:
        """See PushSink."""
        self._add(Job(Kind.VERIFICATION, token_key), self._clock.monotonic())

    async def notify(self, stored: Sequence[Stored], received_at: float) -> None:
        """See PushSink. A token that comes twice stands for two notifications."""
        if self._ownership.is_shared:
            stored = self._own(stored)
        for entry in stored:
            job = Job(Kind.MESSAGE, entry.token_key)
            if self._add(job, received_at, WHOLE.get(entry.provider)) is Added.FULL:
                await self._add_when_there_is_room(job, received_at)

    async def notify_stored(self, token_keys: Sequence[TokenKey]) -> None:
        """Tokens with notifications that another daemon stored; those of a third one are not for us."""
        now = self._clock.monotonic()
        for token_key in token_keys:
            if self._owns(token_key):
                await self._add_when_there_is_room(Job(Kind.MESSAGE, token_key), now)

    async def notify_stored_statements(self, push_keys: Sequence[PushKey]) -> None:
        """Statements that another daemon accepted; if a third one pushes them, they are not for us."""
        if self._ownership.owns(STATEMENTS):
            await self.notify_statements(push_keys, self._clock.monotonic())

    def _own(self, stored: Sequence[Stored]) -> Sequence[Stored]:
        """Those whose pushes this daemon sends; the daemons of the others are told."""
        own = [entry for entry in stored if self._owns(entry.token_key)]
        if len(own) < len(stored):
            keys = {entry.token_key for entry in stored}
            self._ownership.push_elsewhere({key for key in keys if not self._owns(key)})
        return own

    def _owns(self, token_key: TokenKey) -> bool:
        return self._ownership.owns(of_pushes(token_key))

    def sweep(self) -> None:
        """Look into the store for tokens of which nobody told."""
        self._scheduler.want_sweep(self._clock.monotonic())
        self._wake.set()

    async def drained(self, parts: Collection[int]) -> None:
        """Return when no push of these parts of the tokens is under way."""
        leases = [Lease(Duty.PUSHES, part) for part in parts]
        while any(self._under_way[lease] for lease in leases):
            await self._more_room()

    async def notify_statements(self, push_keys: Sequence[PushKey], received_at: float) -> None:
        """There are statements to be pushed, by this daemon or by another one."""
        if not self._ownership.owns(STATEMENTS):
            self._ownership.push_statements_elsewhere(push_keys)
            return
        for push_key in push_keys:
            await self._add_when_there_is_room(statement_job(push_key), received_at)

    def verify_device(self, registration_key: RegistrationKey) -> None:
        """Push its code to a device that was registered at the statement gateway."""
        self._add(device_job(registration_key), self._clock.monotonic())

    def check_messages(self, token_key: TokenKey) -> None:
        """See PushSink."""
        self._add(Job(Kind.CHECK, token_key), self._clock.monotonic())

    async def _add_when_there_is_room(self, job: Job, since: float | None) -> None:
        while self._add(job, since) is Added.FULL and not self._stopping:
            await self._more_room()

    async def _more_room(self) -> None:
        self._room.clear()
        await self._room.wait()

    def _add(self, job: Job, since: float | None, destination: Destination | None = None) -> Added:
        added = self._scheduler.add(job, since, destination)
        if added is Added.QUEUED:
            self._wake.set()
        else:
            self._events.not_started(job.kind, added)
        return added

    # Life

    async def run(self) -> None:
        """Push until `stop()`; first of all what earlier runs left unsent."""
        if self._call_later is None:
            self._call_later = asyncio.get_running_loop().call_later
        self._scheduler.want_sweep(self._clock.monotonic())
        self._finished.clear()
        try:
            async with TaskGroup() as tasks:
                tasks.create_task(self._outcomes.run(), name="push outcomes")
                try:
                    await self._work()
                finally:
                    self._outcomes.close()
        finally:
            self._finished.set()

    async def stop(self, grace: float) -> None:
        """Take no more. Returns when the pushes under way have ended, or were cut off after `grace` seconds,
        and what became of them is stored."""
        self._stopping = True
        self._patience.ended = True
        for event in (self._wake, self._room, self._sweep):
            event.set()
        if self._work_limit is not None:
            self._work_limit.reschedule(asyncio.get_running_loop().time() + grace)
        await self._finished.wait()

    async def _work(self) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None) as self._work_limit, TaskGroup() as tasks:
                    tasks.create_task(self._sweep_when_due(), name="push sweep")
                    await self._dispatch(tasks)
        finally:
            self._work_limit = None
            if self._timer is not None:
                self._timer.cancel()

    async def _dispatch(self, tasks: TaskGroup) -> None:
        while not self._stopping:
            self._wake.clear()
            now = self._clock.monotonic()
            if self._scheduler.sweep_due(now):
                self._sweep.set()
            if taken := self._scheduler.take(now):
                await self._start(taken, tasks)
            else:
                self._set_timer(now)
                await self._wake.wait()

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._scheduler.next_deadline()
        if deadline is not None:
            assert self._call_later is not None
            self._timer = self._call_later(max(0.0, deadline - now), self._wake.set)

    async def _sweep_when_due(self) -> None:
        """Add what only the store knows as unsent."""
        while True:
            await self._sweep.wait()
            self._sweep.clear()
            if self._stopping:
                return
            async for job in self._reader.unsent():
                # A sweep uses half of the room at most: what arrives now has the rest.
                while self._scheduler.to_look_up > self._config.queue_size // 2 and not self._stopping:
                    await self._more_room()
                if self._stopping:
                    return
                await self._add_when_there_is_room(job, None)

    # Pushes

    async def _start(self, taken: Sequence[Taken], tasks: TaskGroup) -> None:
        found = await self._reader.read([item.job for item in taken])
        for start in range(0, len(taken), COMPOSED_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            # Encrypted before the first is sent: from then on other threads compete for the interpreter.
            composed = self._compose(taken[start : start + COMPOSED_AT_ONCE], found)
            gone = await self._reader.claim(composed)
            for push in composed:
                if push.taken.job in gone:
                    ended = Ended(answered=True, tells=False, more=gone[push.taken.job])
                    self._scheduler.ended(push.taken.job, ended, self._clock.monotonic())
                else:
                    self._count(push, 1)
                    tasks.create_task(self._deliver(push))
            self._room.set()

    def _compose(self, taken: Sequence[Taken], found: Mapping[Job, Content]) -> list[Push]:
        """The pushes that start now; whatever else becomes of a job is up to the scheduler."""
        now = self._clock.monotonic()
        composed: list[Push] = []
        if self._ownership.is_shared:
            ours = self._reader.ours([item.job for item in taken])
            found = {job: found[job] for job in ours if job in found}
        for item in taken:
            content = found.get(item.job)
            destination = None if content is None else self._composer.destination(item, content)
            party = None if content is None else party_of(item.job, content)
            added = self._scheduler.loaded(item, destination, now, party)
            if content is None or added is not None:
                self._events.not_started(item.job.kind, added)
            else:
                composed.append(self._composer.compose(item, content, now))
        return composed

    def _count(self, push: Push, change: int) -> None:
        """For `drained`, which nobody calls while this daemon is the only one."""
        if self._ownership.is_shared and (lease := _lease(push)) is not None:
            self._under_way[lease] += change

    async def _deliver(self, push: Push) -> None:
        self._events.composed(push)
        error: PushError | None = None
        try:
            if push.composed is None or push.composed.entries:
                device = push.token.device_token
                if device.provider not in self._providers:
                    raise ProviderRefusesUs(f"provider {device.provider.tag} is not set up")
                provider = self._providers[device.provider]
                delivery: Awaitable[None] = provider.deliver(device, push.notification, push.push_id)
                with self._time_limit:
                    if isinstance(push.token, StatementPush) and push.token.is_for_call:
                        delivery = self._in_time(push.token, delivery)
                    await delivery
        except PushError as refusal:
            error = detached(refusal)
        except TimeoutError:
            error = ProviderDown("no end in time")
        except Exception as failure:
            raise_if_cancelled()
            # A fault of one push must not end all others; only its class is told, as its text may be secret.
            log.error("a push failed with %s", type(failure).__name__)
            error = RetryLater("internal error")
        await self._outcomes.ended(push, error)

    async def _in_time(self, call: StatementPush, delivery: Awaitable[None]) -> None:
        """A phone must not ring later."""
        left = call.received_at + self._call_age - self._clock.now()
        try:
            async with asyncio.timeout(max(0.0, left)) as limit:
                await delivery
        except TimeoutError:
            if limit.expired():
                raise TooLate("no answer while the call was fresh") from None
            raise

    def _ended(self, push: Push, ended: Ended, error: PushError | None) -> None:
        """What became of a push is stored."""
        self._count(push, -1)
        opened = self._scheduler.ended(push.taken.job, ended, self._clock.monotonic())
        self.provider_watch.ended(push.token.device_token.provider, error, opened=opened)
        self._wake.set()
        self._room.set()


def party_of(job: Job, content: Content) -> Party | None:
    """Whose device it is, if it took a push before."""
    if isinstance(content, StatementPush):
        return content.client_id if content.is_proven else None
    return job.party


def _lease(push: Push) -> Lease | None:
    """None: any daemon may send it."""
    if isinstance(push.token, DeviceRegistration):
        return None
    return STATEMENTS if isinstance(push.token, StatementPush) else of_pushes(push.token.key)


class TimeLimit:
    """As `asyncio.timeout`, but for thousands of tasks at the price of one timer: every task in it has the
    same limit, and is in it once.

    Who came first is due first, so one timer is enough: that of the task that is in it longest.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends: dict[asyncio.Task[Any], float] = {}
        "When each task is due, in the order in which they came."
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = task.get_loop()
        self._ends[task] = end = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(end, self._cut_off, loop)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        was_cut_off = self._ends.pop(task, None) is None
        # A task that somebody else cancelled as well stays cancelled.
        if was_cut_off and task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _cut_off(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for task, end in list(self._ends.items()):
            if end > now:
                self._timer = loop.call_at(end, self._cut_off, loop)
                return
            del self._ends[task]
            task.cancel()
