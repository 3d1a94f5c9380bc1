"""What the push side counts and writes to the journal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ntf_server.clock import MICROSECONDS
from ntf_server.journal import EventSink
from ntf_server.metrics import LightHistogram, counter, gauge
from ntf_server.push.composing import Push, PushEntry
from ntf_server.push.lanes import Kind
from ntf_server.push.provider import Destination, ProviderRefusesUs, PushError
from ntf_server.push.scheduler import Added, PushScheduler
from protocol.device_token import Provider
from protocol.statuses import InvalidReason
from store.journal_schema import CALL_PUSH, MESSAGE_PUSH, STATEMENT_PUSH, JournalEvent
from store.records import LastNotification, TokenRecord
from store.statement_records import Channel, StatementPush

log = logging.getLogger(__name__)

DELIVERED = counter("notifications_delivered", "Message pushes that a provider accepted")
FAILED = counter("notifications_failed", "Message pushes given up")
ENTRIES_FAILED = counter("push_entries_failed", "Notifications given up", ["reason"])
STATEMENTS_DELIVERED = counter(
    "statement_pushes_delivered", "Pushes of statements that a provider accepted", ["channel"]
)
STATEMENTS_FAILED = counter("statement_pushes_failed", "Pushes of statements given up", ["reason"])
STATEMENTS_ABANDONED = counter(
    "statement_pushes_abandoned", "Pushes of statements that an earlier run may have made: not made again"
)
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
        self._down_since: dict[Provider, float] = {}

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
            self.urgent_failed(push.taken.job.kind)
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
            self.urgent_failed(kind)
            log.warning("a %s push was dropped: too many wait", kind.name.lower())

    def token_invalid(self, token: TokenRecord, reason: InvalidReason) -> None:
        TOKENS_INVALID.labels(reason.value).inc()
        self._record(
            JournalEvent.TOKEN_INVALID, token=token.token_id, provider=_tag(token), error=reason.value
        )

    def provider_down(self, provider: Provider, now: float, error: PushError) -> None:
        self._down_since[provider] = now
        reason = "refused" if isinstance(error, ProviderRefusesUs) else "down"
        self._record(JournalEvent.PROVIDER_DOWN, provider=provider.tag, error=reason)

    def provider_up(self, provider: Provider, now: float, held_back: int) -> None:
        lasted = now - self._down_since.pop(provider)
        self._record(
            JournalEvent.PROVIDER_UP,
            provider=provider.tag,
            latency_us=int(lasted * MICROSECONDS),
            count=held_back,
        )

    def statement_device_gone(self) -> None:
        STATEMENT_DEVICES_GONE.inc()

    def abandoned(self, count: int) -> None:
        STATEMENTS_ABANDONED.inc(count)

    def verification_sent(self, token: TokenRecord, *, confirmed: bool) -> None:
        VERIFICATION_DELIVERED.inc()
        if confirmed:
            self._record(JournalEvent.TOKEN_CONFIRMED, token=token.token_id, provider=_tag(token))

    def urgent_failed(self, kind: Kind) -> None:
        (VERIFICATION_FAILED if kind is Kind.VERIFICATION else CRON_FAILED).inc()

    def watch(self, scheduler: PushScheduler) -> None:
        """Gauges ask the scheduler when they are read."""
        QUEUE_LENGTH.set_function(lambda: scheduler.queue_length)
        UNDER_WAY.set_function(lambda: scheduler.under_way)
        HOSTS_DOWN.set_function(lambda: scheduler.hosts_down)
        for provider in Provider:
            value = partial(_breaker_value, scheduler, Destination(provider))
            BREAKER.labels(provider.tag).set_function(value)


def _breaker_value(scheduler: PushScheduler, destination: Destination) -> float:
    return scheduler.breaker_state(destination).value


def _about(push: Push) -> dict[str, Any]:
    token = push.token
    return {"token": token.token_id, "provider": _tag(token), "kind": _kind(token)}


def _kind(token: TokenRecord | StatementPush) -> str:
    if isinstance(token, TokenRecord):
        return MESSAGE_PUSH
    return CALL_PUSH if token.is_call or token.channel is Channel.VOIP else STATEMENT_PUSH


def _tag(token: TokenRecord | StatementPush) -> str:
    return token.device_token.provider.tag


def _server(entries: Sequence[PushEntry]) -> str | None:
    """The router of the oldest entry."""
    first = entries[0] if entries else None
    return first.server.host_port if isinstance(first, LastNotification) else None
