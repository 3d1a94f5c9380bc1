"""What follows from the answer to a push: for its entries, its token, its destination's breaker, the metrics
and the journal.

`CONSEQUENCES` is the table, `decide` applies it to a push, `Outcomes` stores the result, tells the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple

from ntf_server.clock import MICROSECONDS, Clock, day
from ntf_server.config import PushConfig
from ntf_server.journal import EventSink
from ntf_server.metrics import LightHistogram, counter, gauge
from ntf_server.outage import Outage
from ntf_server.push.composing import Device, Patience, Push, PushEntry
from ntf_server.push.lanes import (
    FAILURES as FAILURES_IN_A_ROW,
)
from ntf_server.push.lanes import (
    MAX_ATTEMPTS,
    MAX_FAILURES,
    BreakerState,
    Kind,
    failed_again,
    retry_delay,
)
from ntf_server.push.provider import (
    Destination,
    DeviceGone,
    ProviderDown,
    ProviderRefusesUs,
    PushError,
    PushRefused,
    RetryLater,
    TooLate,
)
from ntf_server.push.scheduler import Added, Ended, PushScheduler
from protocol.device_token import Provider
from protocol.statuses import INPUT_FOR_REASON, InvalidReason, TokenInput
from store.interface import DeliveryStore, StoreError
from store.journal_schema import CALL_PUSH, MESSAGE_PUSH, STATEMENT_PUSH, JournalEvent
from store.records import LastNotification, SentEntry, TokenMove, TokenRecord
from store.statement_records import DeviceRegistration, StatementPush

log = logging.getLogger(__name__)

COMMIT_DELAY = 0.02
"Seconds in which outcomes gather before they are stored together: a crash repeats the pushes of so long."

DELIVERED = counter("notifications_delivered", "Message pushes that a provider accepted")
FAILED = counter("notifications_failed", "Message pushes given up")
ENTRIES_FAILED = counter("push_entries_failed", "Notifications given up", ["reason"])
STATEMENTS_DELIVERED = counter(
    "statement_pushes_delivered", "Pushes of statements that a provider accepted", ["channel"]
)
STATEMENTS_FAILED = counter("statement_pushes_failed", "Pushes of statements given up", ["reason"])
STATEMENT_DEVICES_GONE = counter(
    "statement_devices_gone", "Subscriptions to statements deleted because their device is gone"
)
CRON_DELIVERED = counter("periodic_delivered", "Check-messages pushes that a provider accepted")
CRON_FAILED = counter("periodic_failed", "Check-messages pushes given up")
VERIFICATION_DELIVERED = counter("verifications_delivered", "Verification pushes that a provider accepted")
VERIFICATION_FAILED = counter("verifications_failed", "Verification pushes given up")
QUEUE_LENGTH = gauge("apns_push_queue_length", "Tokens that wait for their push, all providers together")
UNDER_WAY = gauge("push_under_way", "Pushes that wait for the answer of a provider")
PUSH_SECONDS = LightHistogram("push_seconds", "From a request to a provider to its acceptance", "provider")
NMSG_TO_PUSH_SECONDS = LightHistogram(
    "nmsg_to_push_seconds", "From receiving an NMSG to the request that carries it"
).labelled()
COALESCED = counter("push_coalesced", "Notifications that joined a push instead of having their own")
TRIMMED = counter("push_trimmed", "Notifications left out of a push because it was full")
RETRIES = counter("push_retries", "Pushes to be tried again", ["provider", "reason"])
TOKENS_INVALID = counter("push_tokens_invalid", "Tokens that a provider called invalid", ["reason"])
DEFERRED = counter("push_deferred", "Pushes put off because their provider was down or had too many")
FAILURES = counter("push_failures", "Pushes given up, of any kind", ["provider", "kind", "reason"])
BREAKER = gauge("push_breaker_state", "0: pushes flow, 1: provider is down, 2: trying again", ["provider"])

HOSTS_DOWN = gauge("push_hosts_down", "Web Push hosts that are down or refuse us")


class PushEvents:
    """Metrics and journal in one place: each method is one thing that happened."""

    def __init__(self, journal: EventSink, wall_time: Callable[[], float]) -> None:
        self._record = journal.record
        self._is_journal_on = journal.is_on
        self._wall_time = wall_time
        self._push_seconds = {p: PUSH_SECONDS.labelled(p.tag).observe for p in Provider}

    def composed(self, push: Push) -> None:
        """A message push is about to be handed to its provider."""
        composed, taken = push.composed, push.taken
        if composed is None:
            return
        if composed.refused:
            log.error("%d notifications were dropped: too long for any push", len(composed.refused))
            self.gave_up(push, composed.refused, "too_long")
        if composed.trimmed:
            TRIMMED.inc(composed.trimmed)
            self._record(JournalEvent.PUSH_TRIMMED, **_about(push), count=composed.trimmed)
        if composed.entries and taken.since is not None and isinstance(push.token, TokenRecord):
            NMSG_TO_PUSH_SECONDS.observe(push.started - taken.since)
        if composed.entries and taken.joined:
            COALESCED.inc(taken.joined)
            self._record(JournalEvent.PUSH_COALESCED, **_about(push), count=taken.joined)

    def accepted(self, push: Push, now: float) -> None:
        """Any but a verification."""
        if push.composed is None:
            CRON_DELIVERED.inc()
            self._record(JournalEvent.CRON_SENT, token=push.token.token_id, provider=_tag(push.token))
            return
        token, entries = push.token, push.composed.entries
        if not entries:
            return  # it was too long for any push
        if isinstance(token, StatementPush):
            STATEMENTS_DELIVERED.labels(token.channel.value).inc()
        else:
            DELIVERED.inc()
        provider = token.device_token.provider
        self._push_seconds[provider](now - push.started)
        if not self._is_journal_on:
            return
        if push.taken.since is not None:
            latency = now - push.taken.since
        else:  # it came before this process started
            latency = max(0.0, self._wall_time() - entries[0].received_at)
        self._record(
            JournalEvent.PUSH_SENT,
            token=token.token_id,
            provider=provider.tag,
            kind=_kind(token),
            server=_server(entries),
            latency_us=int(latency * MICROSECONDS),
            count=len(push.composed.unsent),
            total=len(entries),
        )

    def gave_up(self, push: Push, entries: Sequence[PushEntry], reason: str) -> None:
        """`reason` is a class of reasons, fit for a label."""
        FAILURES.labels(_tag(push.token), push.taken.job.kind.name.lower(), reason).inc()
        if push.composed is None:
            _urgent_failed(push.taken.job.kind)
            return
        if isinstance(push.token, StatementPush):
            STATEMENTS_FAILED.labels(reason).inc()
        else:
            FAILED.inc()
            ENTRIES_FAILED.labels(reason).inc(len(entries))
        self._record(
            JournalEvent.PUSH_FAILED,
            **_about(push),
            server=_server(entries),
            error=reason,
            count=len(entries),
        )

    def retried(self, push: Push, reason: str) -> None:
        RETRIES.labels(_tag(push.token), reason).inc()
        if push.entries:
            server = _server(push.entries)
            self._record(JournalEvent.PUSH_RETRIED, **_about(push), server=server, error=reason)

    def not_started(self, kind: Kind, added: Added | None) -> None:
        """What the scheduler said about a job that is not pushed now; None: nothing."""
        if added is Added.LEFT:
            DEFERRED.inc()
        elif added is Added.DROPPED:
            _urgent_failed(kind)
            log.warning("a %s push was dropped: too many wait", kind.name.lower())

    def token_invalid(self, token: TokenRecord, reason: str) -> None:
        TOKENS_INVALID.labels(reason).inc()
        self._record(JournalEvent.TOKEN_INVALID, token=token.token_id, provider=_tag(token), error=reason)

    def verification_sent(self, push: Push, *, confirmed: bool) -> None:
        VERIFICATION_DELIVERED.inc()
        if confirmed:
            token = push.token
            self._record(JournalEvent.TOKEN_CONFIRMED, token=token.token_id, provider=_tag(token))

    def watch(self, scheduler: PushScheduler) -> None:
        """Gauges ask the scheduler when they are read."""
        QUEUE_LENGTH.set_function(lambda: scheduler.queue_length)
        UNDER_WAY.set_function(lambda: scheduler.under_way)
        HOSTS_DOWN.set_function(lambda: scheduler.hosts_down)
        for provider in Provider:
            value = partial(_breaker_value, scheduler, Destination(provider))
            BREAKER.labels(provider.tag).set_function(value)


def _urgent_failed(kind: Kind) -> None:
    (CRON_FAILED if kind is Kind.CHECK else VERIFICATION_FAILED).inc()


def _breaker_value(scheduler: PushScheduler, destination: Destination) -> float:
    return scheduler.breaker_state(destination).value


def _about(push: Push) -> dict[str, Any]:
    token = push.token
    return {"token": token.token_id, "provider": _tag(token), "kind": _kind(token)}


def _kind(token: Device) -> str:
    if not isinstance(token, StatementPush):
        return MESSAGE_PUSH
    return CALL_PUSH if token.is_for_call else STATEMENT_PUSH


def _tag(token: Device) -> str:
    return token.device_token.provider.tag


def _server(entries: Sequence[PushEntry]) -> str | None:
    """The router of the oldest entry."""
    first = entries[0] if entries else None
    return first.server.host_port if isinstance(first, LastNotification) else None


class Fate(Enum):
    """What becomes of the entries that a push carried."""

    SENT = "marked as sent"
    KEPT = "stay unsent; a token that is gone has no further pushes"
    GIVEN_UP = "never pushed again"
    RETRIED = "pushed again, but not too often and not when they are old"
    RETRIED_ALWAYS = "pushed again, however late, for a day at least"


class Consequence(NamedTuple):
    fate: Fate
    answered: bool
    "For the breaker: the destination works. If not, several in a row open it."


CONSEQUENCES: Final[Mapping[type[PushError] | None, Consequence]] = {
    None: Consequence(Fate.SENT, answered=True),
    DeviceGone: Consequence(Fate.KEPT, answered=True),
    PushRefused: Consequence(Fate.GIVEN_UP, answered=True),
    TooLate: Consequence(Fate.GIVEN_UP, answered=True),
    RetryLater: Consequence(Fate.RETRIED, answered=True),
    ProviderDown: Consequence(Fate.RETRIED_ALWAYS, answered=False),
    ProviderRefusesUs: Consequence(Fate.RETRIED_ALWAYS, answered=False),
}
"By what `deliver` raised; None: accepted. A failure that is not the device's never drops anything."


class Decision(NamedTuple):
    """Entries in `done` are never pushed again; those in `lost` reached nobody, because of `why`."""

    ended: Ended
    done: Sequence[PushEntry] = ()
    lost: Sequence[PushEntry] = ()
    why: str = ""


def meant(push: Push, error: PushError | None) -> PushError | None:
    """What an answer means for this device. Who never took a push of ours and belongs to another sender is
    no device of ours."""
    if isinstance(error, ProviderRefusesUs) and error.is_mismatch and not push.is_to_known_device:
        return DeviceGone(InvalidReason.BAD)
    return error


def decide(
    push: Push,
    error: PushError | None,
    *,
    now: float,
    oldest: float,
    chance: Callable[[], float],
) -> Decision:
    """Pure. `now` is of the scheduler's clock; entries received before the wall time `oldest` are too old for
    another try."""
    decision = _decide(push, error, now=now, oldest=oldest, chance=chance)
    if not isinstance(error, TooLate) and (error is None or not error.is_answer or push.is_to_known_device):
        return decision
    return decision._replace(ended=decision.ended._replace(tells=False))


def _decide(
    push: Push,
    error: PushError | None,
    *,
    now: float,
    oldest: float,
    chance: Callable[[], float],
) -> Decision:
    fate, answered = CONSEQUENCES[None if error is None else type(error)]
    refused = push.composed.refused if push.composed else ()
    more = push.composed is not None and push.composed.more
    if error is None:
        return Decision(Ended(answered, more), (*push.unsent, *refused))
    if fate is Fate.KEPT:
        return Decision(Ended(answered))
    if fate is Fate.GIVEN_UP:
        why = "late" if isinstance(error, TooLate) else "refused"
        return Decision(Ended(answered, more), (*push.unsent, *refused), push.unsent, why)
    attempts = failed_again(push.taken.attempts, push.push_id, counts=fate is Fate.RETRIED)
    retry = attempts, now + retry_delay(attempts.level, error.after, chance)
    if fate is Fate.RETRIED_ALWAYS and attempts.level < MAX_FAILURES:
        return Decision(Ended(answered, retry=retry, after=error.after), refused)
    if attempts.count >= MAX_ATTEMPTS or fate is Fate.RETRIED_ALWAYS:
        return Decision(Ended(answered, more), (*push.unsent, *refused), push.unsent, "retried")
    old = [entry for entry in push.unsent if entry.received_at < oldest]
    if old and len(old) == len(push.unsent):
        return Decision(Ended(answered), (*old, *refused), old, "expired")
    return Decision(Ended(answered, retry=retry), (*old, *refused), old, "expired" if old else "")


class Outcomes:
    """Takes what providers say. `tell` hears of each push once its outcome is stored."""

    def __init__(
        self,
        store: DeliveryStore,
        events: PushEvents,
        config: PushConfig,
        clock: Clock,
        chance: Callable[[], float],
        tell: Callable[[Push, Ended, PushError | None], None],
        patience: Patience,
    ) -> None:
        self._store = store
        self._events = events
        self._config = config
        self._clock = clock
        self._chance = chance
        self._tell = tell
        self._patience = patience
        self._waiting: list[tuple[Push, Decision, PushError | None]] = []
        self._came = asyncio.Event()
        self._complete = False

    async def ended(self, push: Push, error: PushError | None) -> None:
        """A push was accepted (None) or not."""
        now, wall_time = self._clock.monotonic(), self._clock.now()
        error = meant(push, error)
        decision = decide(push, error, now=now, oldest=wall_time - self._config.max_age, chance=self._chance)
        if error is None and push.taken.job.kind not in (Kind.VERIFICATION, Kind.DEVICE):
            self._events.accepted(push, now)
        elif error is None:
            await self._verification_sent(push)
        elif isinstance(error, DeviceGone):
            await self._device_gone(push, error)
        elif isinstance(error, PushRefused):
            log.error("a push was refused for good: %s", error.reason)
        elif not isinstance(error, TooLate):
            self._events.retried(push, "token" if decision.ended.answered else "provider")
        if decision.why:
            self._events.gave_up(push, decision.lost, decision.why)
        if decision.done or isinstance(push.token, StatementPush):
            self._waiting.append((push, decision, error))
            self._came.set()
        else:
            self._tell(push, decision.ended, error)

    def close(self) -> None:
        """No more will come: `run` ends when everything is stored."""
        self._complete = True
        self._came.set()

    async def run(self) -> None:
        """One write for all outcomes that came while the last one was under way."""
        while self._waiting or not self._complete:
            await self._came.wait()
            self._came.clear()
            if not self._complete:
                await asyncio.sleep(COMMIT_DELAY)
            stored, self._waiting = self._waiting, []
            sent = [
                SentEntry(push.token.key, entry.sub_key, entry.seq)
                for push, decision, _ in stored
                if isinstance(push.token, TokenRecord)
                for entry in decision.done
                if isinstance(entry, LastNotification)
            ]
            if sent:
                await self._patience.ask(partial(self._store.set_sent, sent))
            await self._store_statements(stored)
            for push, decision, error in stored:
                self._tell(push, decision.ended, error)

    async def _store_statements(self, stored: Sequence[tuple[Push, Decision, PushError | None]]) -> None:
        ended = [
            (push.token.key, bool(decision.done), error)
            for push, decision, error in stored
            if isinstance(push.token, StatementPush)
        ]
        if ended:
            store = partial(
                self._store.end_statement_pushes,
                sent=[key for key, _, error in ended if error is None],
                given_up=[key for key, done, error in ended if done and error is not None],
                again=[key for key, done, _ in ended if not done],
                now=int(self._clock.now()),
            )
            await self._patience.ask(store)

    async def _verification_sent(self, push: Push) -> None:
        move = await self._move(push, TokenInput.VERIFICATION_ACCEPTED)
        self._events.verification_sent(push, confirmed=move is not None and move.after is not move.before)

    async def _device_gone(self, push: Push, error: DeviceGone) -> None:
        if isinstance(push.token, StatementPush | DeviceRegistration):
            await self._subscription_gone(push.token)
        elif await self._move(push, INPUT_FOR_REASON[error.invalid]) is not None:
            self._events.token_invalid(push.token, error.invalid.value)

    async def _subscription_gone(self, push: StatementPush | DeviceRegistration) -> None:
        try:
            if isinstance(push, DeviceRegistration):
                await self._store.delete_registration(push.key)
            elif await self._store.delete_gone_device(push):
                STATEMENT_DEVICES_GONE.inc()
        except StoreError as error:
            log.error("a subscription of a device that is gone was not deleted: %s", error)

    async def _move(self, push: Push, event: TokenInput) -> TokenMove | None:
        """Does nothing if the token has another device or code by now: the push was for the former one."""
        if not isinstance(push.token, TokenRecord):
            return None
        try:
            return await self._store.move_token(push.token, event, day(self._clock.now()))
        except StoreError as error:
            log.error("a token was not marked as %s: %s", event.name, error)
            return None


class ProviderWatch:
    """Hears of every push that ended; says so once when a provider goes down, and once when it is back."""

    def __init__(self, scheduler: PushScheduler, journal: EventSink, monotonic: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._journal = journal
        self._monotonic = monotonic
        self._down: dict[Provider, tuple[float, str]] = {}
        "Since when, and what is wrong."
        self._outages = {p: Outage(f"provider {p.tag}", monotonic, log) for p in Provider}
        self._used: set[Provider] = set()
        self._first_failures: dict[Provider, int] = dict.fromkeys(Provider, 0)
        "Before the first push that the provider took: nothing else would say that it takes none."

    def trouble(self) -> dict[str, str]:
        """Providers that take no pushes now, by tag, and why. Single hosts of Web Push are not named."""
        return {provider.tag: problem for provider, (_, problem) in self._down.items()}

    def in_use(self) -> frozenset[str]:
        """Tags of the providers that a push was meant for since the start."""
        return frozenset(provider.tag for provider in self._used)

    def ended(self, provider: Provider, error: PushError | None, *, opened: bool) -> None:
        """A push was accepted (None) or not, and perhaps `opened` its destination's breaker."""
        self._used.add(provider)
        if error is None:
            self._first_failures.pop(provider, None)
        elif provider in self._first_failures and isinstance(error, (ProviderDown, ProviderRefusesUs)):
            self._first_failures[provider] += 1
        if provider is Provider.WEB_PUSH:
            if opened and error is not None:
                log.warning("a Web Push host %s: %s", _how(error), error.reason)
        elif error is not None or self._down:  # nothing to note while all is well
            self._note(provider, error)

    def _note(self, provider: Provider, error: PushError | None) -> None:
        destination, now = Destination(provider), self._monotonic()
        is_up = self._first_failures.get(provider, 0) < FAILURES_IN_A_ROW
        if is_up and self._scheduler.breaker_state(destination) is BreakerState.CLOSED:
            if provider in self._down:
                since, _ = self._down.pop(provider)
                self._outages[provider].note("")
                self._journal.record(
                    JournalEvent.PROVIDER_UP,
                    provider=provider.tag,
                    latency_us=int((now - since) * MICROSECONDS),
                    count=self._scheduler.held_back(destination),
                )
        elif isinstance(error, (ProviderDown, ProviderRefusesUs)):
            since, _ = self._down.get(provider, (now, ""))
            problem = f"{_how(error)}: {error.reason}"
            if provider not in self._down:
                reason = "refused" if isinstance(error, ProviderRefusesUs) else "down"
                self._journal.record(JournalEvent.PROVIDER_DOWN, provider=provider.tag, error=reason)
            self._down[provider] = since, problem
            self._outages[provider].note(problem)


def _how(error: PushError) -> str:
    return "refuses us" if isinstance(error, ProviderRefusesUs) else "is down"
