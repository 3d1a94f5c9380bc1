"""The life of the push side: takes work, lets the scheduler choose, starts deliveries, stops in order.

What a push carries is made in `composing.py`, what follows from its answer in `outcomes.py`.

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
from typing import NamedTuple, Protocol, TypeVar

from ntf_server.clock import Clock
from ntf_server.config import PushConfig
from ntf_server.journal import EventSink
from ntf_server.outage import Outage
from ntf_server.push.breaker import BreakerState
from ntf_server.push.composing import Composer, Push
from ntf_server.push.lanes import Job, Kind, statement_job
from ntf_server.push.outcomes import Outcomes
from ntf_server.push.patience import Patience
from ntf_server.push.provider import (
    WHOLE,
    Destination,
    ProviderDown,
    ProviderRefusesUs,
    PushError,
    PushProvider,
    RetryLater,
    destination_of,
)
from ntf_server.push.push_events import PushEvents
from ntf_server.push.scheduler import ANY_NUMBER, Added, Ended, PushScheduler, Taken
from ntf_server.push.time_limit import TimeLimit
from ntf_server.randomness import random_part
from protocol.device_token import Provider
from store.interface import DeliveryStore, LeaseLost
from store.leases import SOLE_OWNER, STATEMENTS, Duty, Lease, Ownership, of_pushes
from store.records import Stored, TokenKey, TokenPush, TokenRecord
from store.statement_records import PushKey, StatementPush
from transport.cancellation import TaskGroup, raise_if_cancelled

log = logging.getLogger(__name__)

T = TypeVar("T")

DELIVERY_STEPS = 3
"A delivery may have to renew its credentials and be sent again; each step has its own time limit."
COMPOSED_AT_ONCE = 64
"Pushes: bounds how long encrypting them holds up everything else."
SWEEP_PAGE = 256
"Unsent tokens read from the store at once."


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]
"Calls back after so many seconds of the clock that the dispatcher reads."


class Found(NamedTuple):
    """What was read about the jobs whose turn it is. Do not print."""

    tokens: Mapping[TokenKey, TokenRecord]
    messages: Mapping[TokenKey, TokenPush]
    statements: Mapping[PushKey, StatementPush]


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
    ) -> None:
        """`title` is what alerts of statements show; `web_pushes` may be under way at once."""
        self._store = store
        self._ownership = ownership
        self._under_way: Counter[Lease] = Counter()
        self._statements_term: int | None = None
        self._taking_over = asyncio.Lock()
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
        self._outcomes = Outcomes(store, self._events, config, clock, chance, self._ended, self._patience)
        self._trouble: dict[Provider, str] = {}
        self._outages = {p: Outage(f"provider {p.tag}", clock.monotonic, log) for p in Provider}
        self._used: set[Provider] = set()
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

    def trouble(self) -> dict[str, str]:
        """Providers that take no pushes now, by tag, and why. Single hosts of Web Push are not named."""
        return {provider.tag: reason for provider, reason in self._trouble.items()}

    def in_use(self) -> frozenset[str]:
        """Tags of the providers that a push was meant for since the start."""
        return frozenset(provider.tag for provider in self._used)

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

    def _own(self, stored: Sequence[Stored]) -> Sequence[Stored]:
        """Those whose pushes this daemon sends; the daemons of the others are told."""
        own = [entry for entry in stored if self._owns(entry.token_key)]
        if len(own) < len(stored):
            keys = {entry.token_key for entry in stored}
            self._ownership.push_elsewhere({key for key in keys if not self._owns(key)})
        return own

    @property
    def _owns_statements(self) -> bool:
        """One daemon pushes all of them: the one that watches."""
        return self._ownership.owns(STATEMENTS)

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
            self._room.clear()
            await self._room.wait()

    async def notify_statements(self, push_keys: Sequence[PushKey], received_at: float) -> None:
        """There are statements to be pushed."""
        for push_key in push_keys:
            await self._add_when_there_is_room(statement_job(push_key), received_at)

    def check_messages(self, token_key: TokenKey) -> None:
        """See PushSink."""
        self._add(Job(Kind.CHECK, token_key), self._clock.monotonic())

    async def _add_when_there_is_room(self, job: Job, since: float | None) -> None:
        while self._add(job, since) is Added.FULL and not self._stopping:
            self._room.clear()
            await self._room.wait()

    def _add(self, job: Job, since: float | None, destination: Destination | None = None) -> Added:
        added = self._scheduler.add(job, since, destination)
        if added is Added.QUEUED:
            self._wake.set()
        else:
            self._note(job, added)
        return added

    def _note(self, job: Job, added: Added) -> None:
        if added is Added.LEFT:
            self._events.left()
        elif added is Added.DROPPED:
            self._events.urgent_failed(job.kind)
            log.warning("a %s push was dropped: too many wait", job.kind.name.lower())

    # Life

    async def _take_statements_over(self) -> None:
        """Before anything is claimed: what an earlier run, or another daemon, handed to a provider and has no
        answer for is not pushed again."""
        async with self._taking_over:
            term = self._ownership.term(STATEMENTS)
            if term == self._statements_term:
                return
            count = await self._patience.ask(partial(_unless_lost, self._store.abandon_claimed_pushes))
            if count is None:
                return
            self._statements_term = term
            if count:
                log.warning("%d pushes of statements have an unknown end: they are not made again", count)
                self._events.abandoned(count)

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
        self._patience.end()
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
        """Add the tokens that only the store knows as unsent."""
        while not self._stopping:
            await self._sweep.wait()
            self._sweep.clear()
            after = TokenKey(0)
            while page := await self._next(partial(self._store.unsent_tokens, after=after)):
                for after in page:
                    await self._sweep_in(Job(Kind.MESSAGE, after))
            await self._sweep_statements()

    async def _sweep_statements(self) -> None:
        if not self._owns_statements:
            return
        await self._take_statements_over()
        last = PushKey(0)
        while pushes := await self._next(partial(self._store.unsent_statement_pushes, after=last)):
            for last in pushes:
                await self._sweep_in(statement_job(last))

    async def _sweep_in(self, job: Job) -> None:
        await self._room_for_sweep()
        await self._add_when_there_is_room(job, None)

    async def _next(self, read: Callable[..., Awaitable[list[T]]]) -> list[T]:
        if self._stopping:
            return []
        return await self._patience.ask(partial(read, limit=SWEEP_PAGE)) or []

    async def _room_for_sweep(self) -> None:
        """A sweep uses half of the room at most: what arrives now has the rest."""
        while self._scheduler.to_look_up > self._config.queue_size // 2 and not self._stopping:
            self._room.clear()
            await self._room.wait()

    # Pushes

    async def _start(self, taken: Sequence[Taken], tasks: TaskGroup) -> None:
        found = await self._read(taken)
        for start in range(0, len(taken), COMPOSED_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            await self._start_some(taken[start : start + COMPOSED_AT_ONCE], found, tasks)

    async def _read(self, taken: Sequence[Taken]) -> Found:
        """What the store knows about them, in one read for each kind."""
        messages = [item.job.token_key for item in taken if item.job.kind is Kind.MESSAGE]
        if self._ownership.is_shared:
            messages = [key for key in messages if self._owns(key)]
        urgent = [item.job.token_key for item in taken if item.job.urgent]
        statements = [item.job.push_key for item in taken if item.job.kind is Kind.STATEMENT]
        tokens: list[TokenRecord] = []
        pushes: list[TokenPush] = []
        to_tell: list[StatementPush] = []
        if urgent:
            tokens = await self._patience.ask(partial(self._store.tokens_by_key, urgent)) or []
        if messages:
            pushes = await self._patience.ask(partial(self._store.pushes, messages)) or []
        if statements and self._owns_statements:
            await self._take_statements_over()
            to_tell = await self._patience.ask(partial(self._store.statement_pushes, statements)) or []
        return Found(
            {token.key: token for token in tokens},
            {push.token.key: push for push in pushes},
            {push.key: push for push in to_tell},
        )

    async def _start_some(self, taken: Sequence[Taken], found: Found, tasks: TaskGroup) -> None:
        # All are encrypted before the first is sent: from then on other threads compete for the interpreter.
        composed = self._compose_all(taken, found) + self._compose_statements(taken, found)
        gone = await self._claim(composed)
        for push in composed:
            if push.taken.job in gone:
                self._scheduler.ended(push.taken.job, Ended(answered=True), self._clock.monotonic())
            else:
                self._count(push, 1)
                tasks.create_task(self._deliver(push))
        self._room.set()

    def _count(self, push: Push, change: int) -> None:
        """For `drained`, which nobody calls while this daemon is the only one."""
        if self._ownership.is_shared:
            self._under_way[_lease(push)] += change

    async def _claim(self, composed: Sequence[Push]) -> set[Job]:
        """Returns those that are not to be pushed any more. Those of statements are marked: should this
        process die, nobody knows whether they were sent, and none is to be made twice."""
        once = {push.token.key: push.taken.job for push in composed if isinstance(push.token, StatementPush)}
        if not once:
            return set()
        claim = partial(self._store.claim_statement_pushes, list(once))
        claimed = await self._patience.ask(partial(_unless_lost, claim)) or set()
        return {job for key, job in once.items() if key not in claimed}

    def _compose_statements(self, taken: Sequence[Taken], found: Found) -> list[Push]:
        now = self._clock.monotonic()
        composed: list[Push] = []
        for item in taken:
            if item.job.kind is not Kind.STATEMENT:
                continue
            push = found.statements.get(item.job.push_key)
            destination = None if push is None else destination_of(push.device_token)
            added = self._scheduler.loaded(item, destination, now)
            if added is not None or push is None:
                self._note(item.job, added or Added.JOINED)
            else:
                composed.append(self._composer.statement(item, push, now))
        return composed

    def _compose_all(self, taken: Sequence[Taken], found: Found) -> list[Push]:
        tokens, pushes, is_shared = found.tokens, found.messages, self._ownership.is_shared
        now = self._clock.monotonic()
        composed: list[Push] = []
        for item in taken:
            kind, key = item.job
            if kind is Kind.STATEMENT:
                continue
            stored = pushes.get(key) if kind is Kind.MESSAGE else None
            if is_shared and not self._owns(key):
                stored = None  # another daemon took it over while it was read
            token = tokens.get(key) if kind is not Kind.MESSAGE else stored.token if stored else None
            destination = None
            if token is not None and self._composer.has_content(item, token, stored):
                destination = destination_of(token.device_token)
            added = self._scheduler.loaded(item, destination, now)
            if added is not None or token is None:
                self._note(item.job, added or Added.JOINED)
            elif stored is not None:
                composed.append(self._composer.message(item, stored, now))
            else:
                composed.append(self._composer.urgent(item, token, now))
        return composed

    async def _deliver(self, push: Push) -> None:
        self._events.composed(push)
        error: PushError | None = None
        try:
            if push.composed is None or push.composed.entries:
                provider, device = self._provider(push), push.token.device_token
                with self._time_limit:
                    await provider.deliver(device, push.notification, push.push_id)
        except PushError as refusal:
            error = refusal.with_traceback(None)  # or it would hold itself, through this frame, and the push
        except TimeoutError:
            error = ProviderDown("no end in time")
        except Exception as failure:
            raise_if_cancelled()
            # A fault of one push must not end all others; only its class is told, as its text may be secret.
            log.error("a push failed with %s", type(failure).__name__)
            error = RetryLater("internal error")
        await self._outcomes.ended(push, error)

    def _provider(self, push: Push) -> PushProvider:
        provider = push.token.device_token.provider
        if provider not in self._providers:
            raise ProviderRefusesUs(f"provider {provider.tag} is not set up")
        return self._providers[provider]

    def _ended(self, push: Push, ended: Ended, error: PushError | None) -> None:
        """What became of a push is stored."""
        self._count(push, -1)
        provider = push.token.device_token.provider
        self._used.add(provider)
        opened = self._scheduler.ended(push.taken.job, ended, self._clock.monotonic())
        if provider is Provider.WEB_PUSH:
            if opened and error is not None:
                log.warning("a Web Push host %s: %s", _how(error), error.reason)
        elif error is not None or self._trouble:  # nothing to note while all is well
            self._note_provider(provider, error)
        self._wake.set()
        self._room.set()

    def _note_provider(self, provider: Provider, error: PushError | None) -> None:
        destination = Destination(provider)
        if self._scheduler.breaker_state(destination) is BreakerState.CLOSED:
            if self._trouble.pop(provider, None) is not None:
                self._outages[provider].note("")
                self._events.provider_up(
                    provider, self._clock.monotonic(), self._scheduler.held_back(destination)
                )
        elif isinstance(error, (ProviderDown, ProviderRefusesUs)):
            if provider not in self._trouble:
                self._events.provider_down(provider, self._clock.monotonic(), error)
            self._trouble[provider] = problem = f"{_how(error)}: {error.reason}"
            self._outages[provider].note(problem)


async def _unless_lost(call: Callable[[], Awaitable[T]]) -> T | None:
    """None: another daemon pushes statements by now."""
    try:
        return await call()
    except LeaseLost:
        return None


def _lease(push: Push) -> Lease:
    return STATEMENTS if isinstance(push.token, StatementPush) else of_pushes(push.token.key)


def _how(error: PushError) -> str:
    return "refuses us" if isinstance(error, ProviderRefusesUs) else "is down"
