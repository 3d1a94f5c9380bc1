"""What the push side counts and writes to the journal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ntf_server.journal import EventSink
from ntf_server.metrics import counter, gauge, histogram
from ntf_server.push.scheduler import Kind, PushScheduler
from protocol.device_token import Provider
from protocol.statuses import InvalidReason
from store.journal_schema import MESSAGE_PUSH, JournalEvent
from store.records import LastNotification, TokenRecord

DELIVERED = counter("notifications_delivered", "Message pushes that a provider accepted")
FAILED = counter("notifications_failed", "Message pushes given up")
ENTRIES_FAILED = counter("push_entries_failed", "Notifications given up", ["reason"])
CRON_DELIVERED = counter("periodic_delivered", "Check-messages pushes that a provider accepted")
CRON_FAILED = counter("periodic_failed", "Check-messages pushes given up")
VERIFICATION_DELIVERED = counter("verifications_delivered", "Verification pushes that a provider accepted")
VERIFICATION_FAILED = counter("verifications_failed", "Verification pushes given up")
QUEUE_LENGTH = gauge("apns_push_queue_length", "Tokens that wait for their push, all providers together")
UNDER_WAY = gauge("push_under_way", "Pushes that wait for the answer of a provider")
PUSH_SECONDS = histogram("push_seconds", "From a request to a provider to its acceptance", ["provider"])
NMSG_TO_PUSH_SECONDS = histogram(
    "nmsg_to_push_seconds", "From receiving an NMSG to the request that carries it"
)
COALESCED = counter("push_coalesced", "Notifications that joined a push instead of having their own")
TRIMMED = counter("push_trimmed", "Notifications left out of a push because it was full")
RETRIES = counter("push_retries", "Pushes to be tried again", ["provider", "reason"])
TOKENS_INVALID = counter("push_tokens_invalid", "Tokens that a provider called invalid", ["reason"])
DEFERRED = counter("push_deferred", "Pushes put off because their provider was down")
BREAKER = gauge("push_breaker_state", "0: pushes flow, 1: provider is down, 2: trying again", ["provider"])

MICROSECONDS = 1_000_000


class PushEvents:
    """Metrics and journal in one place: each method is one thing that happened."""

    def __init__(self, journal: EventSink, wall_time: Callable[[], float]) -> None:
        self._record = journal.record
        self._wall_time = wall_time
        self._push_seconds = {p: PUSH_SECONDS.labels(p.tag).observe for p in Provider}

    def requested(self, token: TokenRecord, latency: float | None, joined: int) -> None:
        """A message push was handed to its provider, `latency` seconds after its oldest new entry came."""
        if latency is not None:
            NMSG_TO_PUSH_SECONDS.observe(latency)
        if joined:
            COALESCED.inc(joined)
            self._record(
                JournalEvent.PUSH_COALESCED,
                token=token.token_id,
                provider=_tag(token),
                kind=MESSAGE_PUSH,
                count=joined,
            )

    def trimmed(self, token: TokenRecord, count: int) -> None:
        TRIMMED.inc(count)
        self._record(
            JournalEvent.PUSH_TRIMMED,
            token=token.token_id,
            provider=_tag(token),
            kind=MESSAGE_PUSH,
            count=count,
        )

    def sent(
        self,
        token: TokenRecord,
        entries: Sequence[LastNotification],
        *,
        seconds: float,
        latency: float | None,
    ) -> None:
        """A message push was accepted after `seconds`; `latency` as known in this process."""
        DELIVERED.inc()
        self._push_seconds[token.device_token.provider](seconds)
        if latency is None and entries:
            latency = max(0.0, self._wall_time() - entries[0].received_at)
        self._record(
            JournalEvent.PUSH_SENT,
            token=token.token_id,
            provider=_tag(token),
            server=_server(entries),
            kind=MESSAGE_PUSH,
            latency_us=None if latency is None else int(latency * MICROSECONDS),
            count=sum(not entry.sent for entry in entries),
            total=len(entries),
        )

    def gave_up(self, token: TokenRecord, entries: Sequence[LastNotification], reason: str) -> None:
        """`reason` is a class of reasons, fit for a label."""
        FAILED.inc()
        ENTRIES_FAILED.labels(reason).inc(len(entries))
        self._record(
            JournalEvent.PUSH_FAILED,
            token=token.token_id,
            provider=_tag(token),
            server=_server(entries),
            kind=MESSAGE_PUSH,
            error=reason,
            count=len(entries),
        )

    def retried(self, token: TokenRecord, entries: Sequence[LastNotification], reason: str) -> None:
        RETRIES.labels(_tag(token), reason).inc()
        self._record(
            JournalEvent.PUSH_RETRIED,
            token=token.token_id,
            provider=_tag(token),
            server=_server(entries),
            kind=MESSAGE_PUSH,
            error=reason,
        )

    def deferred(self) -> None:
        DEFERRED.inc()

    def token_invalid(self, token: TokenRecord, reason: InvalidReason) -> None:
        TOKENS_INVALID.labels(reason.value).inc()
        self._record(
            JournalEvent.TOKEN_INVALID, token=token.token_id, provider=_tag(token), error=reason.value
        )

    def verification_sent(self, token: TokenRecord, *, confirmed: bool) -> None:
        VERIFICATION_DELIVERED.inc()
        if confirmed:
            self._record(JournalEvent.TOKEN_CONFIRMED, token=token.token_id, provider=_tag(token))

    def cron_sent(self, token: TokenRecord) -> None:
        CRON_DELIVERED.inc()
        self._record(JournalEvent.CRON_SENT, token=token.token_id, provider=_tag(token))

    def urgent_failed(self, kind: Kind) -> None:
        (VERIFICATION_FAILED if kind is Kind.VERIFICATION else CRON_FAILED).inc()

    def watch(self, scheduler: PushScheduler) -> None:
        """Gauges ask the scheduler when they are read."""
        QUEUE_LENGTH.set_function(lambda: scheduler.queue_length)
        UNDER_WAY.set_function(lambda: scheduler.under_way)
        for provider in Provider:
            BREAKER.labels(provider.tag).set_function(partial(_breaker_value, scheduler, provider))


def _breaker_value(scheduler: PushScheduler, provider: Provider) -> float:
    return scheduler.breaker_state(provider).value


def _tag(token: TokenRecord) -> str:
    return token.device_token.provider.tag


def _server(entries: Sequence[LastNotification]) -> str | None:
    """The router of the oldest entry."""
    return entries[0].server.host_port if entries else None
