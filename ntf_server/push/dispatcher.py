"""From a token with news to its device: reads what the scheduler chose, delivers it, stores the outcome.

An entry stays unsent in the store until a push that carries it was accepted and marked there, so a crash at
any moment costs at most a repeated push. A token is in the scheduler's hands until its outcome is stored:
nothing is pushed twice in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from ntf_server.clock import Clock, day
from ntf_server.journal import EventSink
from ntf_server.push.breaker import BreakerSettings, BreakerState
from ntf_server.push.composing import Composed, compose
from ntf_server.push.payloads import padded_size
from ntf_server.push.provider import (
    CheckMessages,
    DeviceGone,
    MessageList,
    ProviderDown,
    ProviderRefusesUs,
    PushError,
    PushNotification,
    PushProvider,
    PushRefused,
    RetryLater,
    Verification,
)
from ntf_server.push.push_events import PushEvents
from ntf_server.push.retries import Attempts, RetryPolicy, attempts_after_failure
from ntf_server.push.scheduler import Added, Job, Kind, PushScheduler, SchedulerSettings, Taken
from ntf_server.randomness import random_part
from protocol.blocks import PAD_LENGTH_SIZE
from protocol.device_token import Provider
from protocol.push_messages import PUSH_PADDING, seal_push
from protocol.statuses import INPUT_FOR_REASON, TokenInput, TokenStatus
from store.interface import PushStore, StoreError
from store.records import LastNotification, SentEntry, TokenKey, TokenPush, TokenRecord
from transport.cancellation import TaskGroup, raise_if_cancelled

T = TypeVar("T")

log = logging.getLogger(__name__)

NONCE_SIZE = 24
NONCES_DRAWN = 128
PUSH_ID_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherConfig:
    coalesce: bool = True
    "Off: one push for each notification."
    interval: float = 0.4
    "Seconds between the pushes of one token, in which its notifications gather; the first one never waits."
    padding: int = PUSH_PADDING
    "Bytes of every push before encryption."
    concurrency: int = 1_000
    "Pushes under way per provider."
    queue_size: int = 32_768
    "Tokens with a push queued, under way or due soon; when so many are, whoever brings more waits."
    max_age: float = 3600.0
    "Seconds: a notification that is older is not worth a retry."
    deadline: float = 30.0
    "Seconds that a delivery may take at most; providers have shorter limits of their own."
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    commit_delay: float = 0.003
    "Seconds in which outcomes gather before they are stored together."
    sweep_page: int = 256
    "Unsent tokens read from the store at once, at start-up and after an outage."
    store_pause: float = 1.0
    "Seconds until a store that is unavailable is asked again."


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]
"Calls back after so many seconds of the clock that the dispatcher reads."


class _Attempt(NamedTuple):
    """One push on its way. Do not print."""

    taken: Taken
    token: TokenRecord
    push_id: uuid.UUID
    notification: PushNotification
    composed: Composed | None
    "None: the push carries no notifications."
    started: float

    @property
    def job(self) -> Job:
        return self.taken.job

    @property
    def unsent(self) -> Sequence[LastNotification]:
        return self.composed.unsent if self.composed else ()


class _Outcome(NamedTuple):
    """What is to be stored, and what the scheduler is told then: a retry, or the end of the push."""

    job: Job
    sent: Sequence[SentEntry] = ()
    more: bool = False
    retry: tuple[Attempts, float] | None = None


class Dispatcher:
    """The PushSink of the daemon. `run()` does the work until `stop()`."""

    def __init__(
        self,
        store: PushStore,
        providers: Mapping[Provider, PushProvider],
        config: DispatcherConfig,
        *,
        clock: Clock,
        random: Callable[[int], bytes],
        journal: EventSink,
        call_later: CallLater | None = None,
    ) -> None:
        self._store = store
        self._providers = providers
        self._config = config
        self._clock = clock
        self._random = random
        self._call_later = call_later
        self._retries = RetryPolicy(max_age=config.max_age)
        self._scheduler = PushScheduler(
            SchedulerSettings(
                coalesce=config.coalesce,
                interval=config.interval,
                max_tokens=config.queue_size,
                max_waiting=config.queue_size // 4,
                concurrency=config.concurrency,
            ),
            config.breaker,
            self._chance,
        )
        self._events = PushEvents(journal, clock.now)
        self._events.watch(self._scheduler)
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._sweep = asyncio.Event()
        self._outcomes: list[_Outcome] = []
        self._outcomes_came = asyncio.Event()
        self._stopping = False
        self._delivered_all = False
        self._work_limit: asyncio.Timeout | None = None
        self._timer: Timer | None = None
        self._nonces: list[bytes] = []
        self._ended = asyncio.Event()
        self._ended.set()

    @property
    def jobs_in_memory(self) -> int:
        return len(self._scheduler)

    def _nonce(self) -> bytes:
        """Drawn many at a time: a system call per push would also hand the interpreter to other threads."""
        if not self._nonces:
            drawn = self._random(NONCE_SIZE * NONCES_DRAWN)
            self._nonces = [drawn[i : i + NONCE_SIZE] for i in range(0, len(drawn), NONCE_SIZE)]
        return self._nonces.pop()

    def _chance(self) -> float:
        return random_part(self._random)

    # PushSink

    async def verify(self, token_key: TokenKey) -> None:
        """See PushSink."""
        await self._add(Job(Kind.VERIFICATION, token_key), self._clock.monotonic())

    async def notify(self, token_keys: Sequence[TokenKey], received_at: float) -> None:
        """See PushSink. A key that comes twice stands for two notifications."""
        for token_key in token_keys:
            await self._add(Job(Kind.MESSAGE, token_key), received_at)

    async def check_messages(self, token_key: TokenKey) -> None:
        """Wake the device of a token, so that it looks for messages by itself."""
        await self._add(Job(Kind.CHECK, token_key), self._clock.monotonic())

    async def _add(self, job: Job, since: float | None) -> None:
        while not self._stopping:
            added = self._scheduler.add(job, since)
            if added is Added.FULL:
                self._room.clear()
                await self._room.wait()
                continue
            if added is Added.QUEUED:
                self._wake.set()
            elif added is Added.DEFERRED:
                self._events.deferred()
            elif added is Added.DROPPED:
                self._events.urgent_failed(job.kind)
                log.warning("a %s push was dropped: too many wait for their provider", job.kind.name.lower())
            return

    # Life

    async def run(self) -> None:
        """Push until `stop()`; first of all what earlier runs left unsent."""
        if self._call_later is None:
            self._call_later = asyncio.get_running_loop().call_later
        self._scheduler.want_sweep(self._clock.monotonic())
        self._ended.clear()
        try:
            async with TaskGroup() as tasks:
                tasks.create_task(self._store_outcomes(), name="push outcomes")
                try:
                    await self._work()
                finally:
                    self._delivered_all = True
                    self._outcomes_came.set()
        finally:
            self._ended.set()

    async def stop(self, grace: float) -> None:
        """Take no more. Returns when the pushes under way have ended, or were cut off after `grace` seconds,
        and what became of them is stored."""
        self._stopping = True
        for event in (self._wake, self._room, self._sweep):
            event.set()
        if self._work_limit is not None:
            self._work_limit.reschedule(asyncio.get_running_loop().time() + grace)
        await self._ended.wait()

    async def _work(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as self._work_limit, TaskGroup() as tasks:
                tasks.create_task(self._sweep_when_due(), name="push sweep")
                await self._dispatch(tasks)
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
            while page := await self._next_unsent(after):
                for after in page:
                    await self._room_for_sweep()
                    await self._add(Job(Kind.MESSAGE, after), None)

    async def _next_unsent(self, after: TokenKey) -> list[TokenKey]:
        if self._stopping:
            return []
        page = partial(self._store.unsent_tokens, after=after, limit=self._config.sweep_page)
        return await self._patiently(page) or []

    async def _room_for_sweep(self) -> None:
        """A sweep uses half of the room at most: what arrives now has the rest."""
        while len(self._scheduler) > self._config.queue_size // 2 and not self._stopping:
            self._room.clear()
            await self._room.wait()

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """The result of a call to the store, however long it is unavailable; None if we are to stop."""
        while True:
            try:
                return await call()
            except StoreError as error:
                log.error("push waits for the store: %s", error)
            if self._stopping:
                return None
            await asyncio.sleep(self._config.store_pause)

    # Starting pushes

    async def _start(self, taken: Sequence[Taken], tasks: TaskGroup) -> None:
        urgent = [item.job.token_key for item in taken if item.job.urgent]
        messages = [item.job.token_key for item in taken if not item.job.urgent]
        tokens: list[TokenRecord] = []
        pushes: list[TokenPush] = []
        if urgent:
            tokens = await self._patiently(partial(self._store.tokens_by_key, urgent)) or []
        if messages:
            pushes = await self._patiently(partial(self._store.pushes, messages)) or []
        # All are encrypted before the first is sent: from then on other threads compete for the interpreter.
        for attempt in self._prepare_all(taken, tokens, pushes):
            tasks.create_task(self._deliver(attempt))
        self._room.set()

    def _prepare_all(
        self, taken: Sequence[Taken], tokens: Sequence[TokenRecord], pushes: Sequence[TokenPush]
    ) -> list[_Attempt]:
        push_of = {push.token.key: push for push in pushes}
        token_of = {token.key: token for token in tokens}
        now = self._clock.monotonic()
        attempts: list[_Attempt] = []
        for item in taken:
            key = item.job.token_key
            push = None if item.job.urgent else push_of.get(key)
            token = token_of.get(key) if item.job.urgent else push.token if push else None
            if token is None or not self._has_content(item, token, push):
                self._scheduler.idle(item.job, now)
            elif self._scheduler.may_start(item, token.device_token.provider, now):
                attempts += self._prepare(item, token, push, now)
        return attempts

    def _has_content(self, taken: Taken, token: TokenRecord, push: TokenPush | None) -> bool:
        if taken.job.kind is Kind.VERIFICATION:
            return token.status.allows_verification
        if push is None:
            return token.status is TokenStatus.ACTIVE
        return self._repeats(taken) or any(not entry.sent for entry in push.entries)

    def _repeats(self, taken: Taken) -> bool:
        return taken.arrived and not self._config.coalesce

    def _prepare(
        self, taken: Taken, token: TokenRecord, push: TokenPush | None, now: float
    ) -> Sequence[_Attempt]:
        """The push; none if all there is to say fits in no push."""
        if push is None:
            return [self._urgent_attempt(taken, token, now)]
        room = self._padding(token) - PAD_LENGTH_SIZE
        composed = compose(push.entries, room, repeat_sent=self._repeats(taken))
        if composed.refused:
            log.error("%d notifications were dropped: too long for any push", len(composed.refused))
            self._events.gave_up(token, composed.refused, "too_long")
        if composed.trimmed:
            self._events.trimmed(token, composed.trimmed)
        attempt = self._message_attempt(taken, token, composed, now)
        if not composed.entries:
            self._answered(attempt, now)
            self._finish(attempt, ())
            return []
        latency = None if taken.since is None else now - taken.since
        self._events.requested(token, latency, taken.joined)
        return [attempt]

    def _padding(self, token: TokenRecord) -> int:
        return padded_size(token.device_token.provider, self._config.padding)

    def _message_attempt(self, taken: Taken, token: TokenRecord, composed: Composed, now: float) -> _Attempt:
        nonce = self._nonce()
        boxed = seal_push(token.dh_secret, nonce, composed.text, self._padding(token))
        push_id = _message_push_id(token, composed.entries)
        return _Attempt(taken, token, push_id, MessageList(nonce, boxed), composed, now)

    def _urgent_attempt(self, taken: Taken, token: TokenRecord, now: float) -> _Attempt:
        notification: PushNotification = CheckMessages()
        if taken.job.kind is Kind.VERIFICATION:
            nonce = self._nonce()
            boxed = seal_push(token.dh_secret, nonce, token.code, self._padding(token))
            notification = Verification(nonce, boxed)
        if taken.attempts is not None and not taken.arrived:
            push_id = taken.attempts.push_id
        else:
            push_id = uuid.UUID(bytes=self._random(PUSH_ID_SIZE), version=4)
        return _Attempt(taken, token, push_id, notification, None, now)

    # Outcomes

    async def _deliver(self, attempt: _Attempt) -> None:
        token = attempt.token.device_token
        try:
            provider = self._providers.get(token.provider)
            if provider is None:
                raise ProviderRefusesUs(f"provider {token.provider.tag} is not set up")
            async with asyncio.timeout(self._config.deadline):
                await provider.deliver(token, attempt.notification, attempt.push_id)
        except DeviceGone as error:
            await self._on_token_invalid(attempt, error)
        except (RetryLater, ProviderDown, ProviderRefusesUs) as error:
            self._on_retry_later(attempt, error)
        except PushRefused as error:
            self._on_refused(attempt, error.reason)
        except TimeoutError:
            self._on_retry_later(attempt, ProviderDown("no end in time"))
        except Exception as error:
            raise_if_cancelled()
            # A fault of one push must not end all others; only its class is told, as its text may be secret.
            log.error("a push failed with %s", type(error).__name__)
            self._on_retry_later(attempt, RetryLater("internal error"))
        else:
            await self._on_accepted(attempt)

    async def _on_accepted(self, attempt: _Attempt) -> None:
        now = self._clock.monotonic()
        self._answered(attempt, now)
        if attempt.composed is not None:
            since = attempt.taken.since
            self._events.sent(
                attempt.token,
                attempt.composed.entries,
                seconds=now - attempt.started,
                latency=None if since is None else now - since,
            )
        elif attempt.job.kind is Kind.VERIFICATION:
            self._events.verification_sent(attempt.token, confirmed=await self._confirm(attempt.token))
        else:
            self._events.cron_sent(attempt.token)
        self._finish(attempt, attempt.unsent)

    def _answered(self, attempt: _Attempt, now: float) -> None:
        if self._scheduler.answered(attempt.job, now):
            self._wake.set()

    async def _confirm(self, token: TokenRecord) -> bool:
        today = day(self._clock.now())
        try:
            move = await self._store.move_token(token, TokenInput.VERIFICATION_ACCEPTED, today)
        except StoreError as error:
            log.error("a token was not confirmed: %s", error)
            return False
        return move is not None and move.after is not move.before

    async def _on_token_invalid(self, attempt: _Attempt, error: DeviceGone) -> None:
        self._answered(attempt, self._clock.monotonic())
        token = attempt.token
        try:
            today = day(self._clock.now())
            # Does nothing if the device token was replaced while the push was under way.
            if await self._store.move_token(token, INPUT_FOR_REASON[error.invalid], today):
                self._events.token_invalid(token, error.invalid)
        except StoreError as store_error:
            log.error("a token was not marked as invalid: %s", store_error)
        self._finish(attempt, ())

    def _on_refused(self, attempt: _Attempt, reason: str) -> None:
        log.error("a push was refused for good: %s", reason)
        self._answered(attempt, self._clock.monotonic())
        self._give_up(attempt, attempt.unsent, "refused")
        self._finish(attempt, attempt.unsent)

    def _on_retry_later(
        self, attempt: _Attempt, error: RetryLater | ProviderDown | ProviderRefusesUs
    ) -> None:
        now = self._clock.monotonic()
        entries = attempt.composed.entries if attempt.composed else ()
        whole = not isinstance(error, RetryLater)
        self._events.retried(attempt.token, entries, "provider" if whole else "token")
        policy = self._retries
        if not whole:
            self._answered(attempt, now)
        elif not self._is_worth_a_retry(attempt, error, now):
            return
        else:
            # Not the device's fault: however often and long, nothing is given up.
            level = 1 if attempt.taken.attempts is None else attempt.taken.attempts.level + 1
            again = Attempts(attempt.push_id, 0, level)
            self._finish(attempt, (), (again, now + policy.delay(level, error.after, self._chance)))
            return
        attempts = attempts_after_failure(attempt.taken.attempts, attempt.push_id)
        lost = attempt.unsent
        if attempts.count < policy.max_attempts:
            oldest = self._clock.now() - policy.max_age
            lost = [entry for entry in attempt.unsent if entry.received_at < oldest]
        if attempts.count >= policy.max_attempts or (lost and len(lost) == len(attempt.unsent)):
            self._give_up(attempt, lost, "retried" if attempts.count >= policy.max_attempts else "expired")
            self._finish(attempt, lost)
            return
        if lost:
            self._give_up(attempt, lost, "expired")
        self._finish(attempt, lost, (attempts, now + policy.delay(attempts.level, error.after, self._chance)))

    def _is_worth_a_retry(self, attempt: _Attempt, error: PushError, now: float) -> bool:
        """False: the whole provider is down, and the push comes back with all others."""
        provider = attempt.token.device_token.provider
        before = self._scheduler.breaker_state(provider)
        if self._scheduler.unreachable(attempt.job, now, error.after):
            return True
        if before is BreakerState.CLOSED:
            how = "refuses us" if isinstance(error, ProviderRefusesUs) else "is down"
            log.error("provider %s %s: %s", provider.tag, how, error.reason)
        self._wake.set()
        self._room.set()
        return False

    def _give_up(self, attempt: _Attempt, entries: Sequence[LastNotification], reason: str) -> None:
        if attempt.composed is None:
            self._events.urgent_failed(attempt.job.kind)
        else:
            self._events.gave_up(attempt.token, entries, reason)

    def _finish(
        self,
        attempt: _Attempt,
        done: Sequence[LastNotification],
        retry: tuple[Attempts, float] | None = None,
    ) -> None:
        """Entries in `done` are never pushed again as unsent ones; then comes the retry or the next push."""
        composed = attempt.composed
        key = attempt.token.key
        refused = composed.refused if composed else ()
        sent = [SentEntry(key, entry.sub_key, entry.seq) for entry in (*done, *refused)]
        outcome = _Outcome(attempt.job, sent, composed is not None and composed.more, retry)
        if sent:
            self._outcomes.append(outcome)
            self._outcomes_came.set()
        else:
            self._apply(outcome, self._clock.monotonic())

    async def _store_outcomes(self) -> None:
        """One write for all outcomes that came while the last one was under way."""
        while self._outcomes or not self._delivered_all:
            await self._outcomes_came.wait()
            self._outcomes_came.clear()
            if not self._delivered_all:
                await asyncio.sleep(self._config.commit_delay)
            outcomes, self._outcomes = self._outcomes, []
            if sent := [entry for outcome in outcomes for entry in outcome.sent]:
                await self._patiently(partial(self._store.set_sent, sent))
            now = self._clock.monotonic()
            for outcome in outcomes:
                self._apply(outcome, now)

    def _apply(self, outcome: _Outcome, now: float) -> None:
        if outcome.retry is not None:
            self._scheduler.retry(outcome.job, *outcome.retry)
        else:
            self._scheduler.finished(outcome.job, now, more=outcome.more)
        self._wake.set()
        self._room.set()


def _message_push_id(token: TokenRecord, entries: Sequence[LastNotification]) -> uuid.UUID:
    """Follows from the content: the same over retries, outages and restarts, and another if it changes."""
    content = b",".join([b"%d:%d" % (entry.sub_key, entry.seq) for entry in entries])
    digest = hashlib.blake2b(content, digest_size=PUSH_ID_SIZE, key=token.dh_secret)
    return uuid.UUID(bytes=digest.digest(), version=4)
