"""The table that says what follows from an answer, applied to every kind of answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ntf_server.push.composing import Composed, Push
from ntf_server.push.dispatcher import party_of
from ntf_server.push.lanes import MAX_ATTEMPTS, MAX_FAILURES, Attempts, Job, Kind
from ntf_server.push.outcomes import CONSEQUENCES, Decision, decide, meant
from ntf_server.push.provider import (
    CheckMessages,
    DeviceGone,
    ProviderDown,
    ProviderRefusesUs,
    PushError,
    PushRefused,
    RetryLater,
    TooLate,
)
from ntf_server.push.scheduler import Taken
from protocol.addresses import SmpServer
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import EntityId
from protocol.statuses import InvalidReason
from store.records import LastNotification, SubKey, TokenKey
from store.statement_records import Channel, GatewayKey, PushKey, StatementPush

ROUTER = SmpServer(("router.example",), "", b"k" * 32)
PUSH_ID = "id 7"
NOW, OLDEST = 50.0, 1000.0
ERRORS: Sequence[PushError | None] = (
    None,
    DeviceGone(InvalidReason.BAD),
    PushRefused("too large"),
    RetryLater("busy", after=9.0),
    ProviderDown("outage", after=9.0),
    ProviderRefusesUs("key"),
    TooLate("a call"),
)


def entry(number: int, received_at: int = 2000) -> LastNotification:
    return LastNotification(
        SubKey(number), number, ROUTER, EntityId(b"n" * 24), received_at, b"", b"", sent=False
    )


def push(entries: Sequence[LastNotification] = (), attempts: Attempts | None = None, **changes: Any) -> Push:
    taken = Taken(Job(Kind.MESSAGE, TokenKey(1)), True, 0.0, 0, attempts)
    composed = Composed(b"", entries, entries, **changes)
    token: Any = None
    return Push(taken, token, PUSH_ID, CheckMessages(), composed, 0.0)


def decided(what: Push, error: PushError | None) -> Decision:
    return decide(what, error, now=NOW, oldest=OLDEST, chance=lambda: 0.0)


def test_every_error_of_a_provider_has_a_rule() -> None:
    assert set(CONSEQUENCES) == {None, *PushError.__subclasses__()}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_only_what_is_about_the_device_or_the_push_drops_anything(error: PushError | None) -> None:
    often = Attempts(PUSH_ID, MAX_ATTEMPTS - 1, 20)
    old = [entry(1, received_at=0)]
    for what in (push(old), push([entry(1)], often), push(old, often)):
        decision = decided(what, error)
        dropped = isinstance(error, (PushRefused, RetryLater, TooLate))
        assert bool(decision.lost) is dropped is bool(decision.why)
        assert bool(decision.done) is (dropped or error is None)


def test_the_breaker_hears_of_failures_of_the_whole_only() -> None:
    answered = [decided(push([entry(1)]), error).ended.answered for error in ERRORS]
    assert answered == [True, True, True, True, False, False, True]


def test_retries_wait_as_long_as_they_are_asked_to() -> None:
    for error in (ERRORS[3], ERRORS[4]):
        ended = decided(push([entry(1)]), error).ended
        assert ended.retry is not None
        assert ended.retry[1] == NOW + 9.0


def test_only_the_old_part_of_a_push_is_given_up() -> None:
    old, fresh = entry(1, received_at=0), entry(2)
    decision = decided(push([old, fresh]), ERRORS[3])
    assert (decision.done, decision.lost, decision.why) == ((old,), [old], "expired")
    assert decision.ended.retry is not None


def test_what_fits_in_no_push_is_done_whatever_the_answer() -> None:
    for error in ERRORS:
        decision = decided(push([entry(1)], refused=[entry(2)]), error)
        assert (entry(2) in decision.done) is not isinstance(error, DeviceGone)
        assert entry(2) not in decision.lost


def test_the_next_push_follows_at_once() -> None:
    assert decided(push([entry(1)], more=True), None).ended.more
    assert decided(push([entry(1)], more=True), PushRefused("too large")).ended.more
    assert not decided(push([entry(1)], more=True), DeviceGone(InvalidReason.BAD)).ended.more


def verification(attempts: Attempts | None = None) -> Push:
    """To a device that never took a push."""
    taken = Taken(Job(Kind.VERIFICATION, TokenKey(1)), True, 0.0, 0, attempts)
    token: Any = None
    return Push(taken, token, PUSH_ID, CheckMessages(), None, 0.0)


ANSWERS: Sequence[PushError] = (
    DeviceGone(InvalidReason.BAD),
    PushRefused("too large", is_answer=True),
    RetryLater("busy", is_answer=True),
    ProviderDown("500", is_answer=True),
    ProviderRefusesUs("401", is_answer=True),
)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda error: type(error).__name__)
def test_only_devices_that_took_a_push_speak_for_the_provider(answer: PushError) -> None:
    assert not decided(verification(), answer).ended.tells
    assert decided(push([entry(1)]), answer).ended.tells


def test_without_an_answer_no_device_could_be_reached() -> None:
    assert decided(verification(), ProviderDown("no connection")).ended.tells
    assert decided(verification(), None).ended.tells


def test_a_call_that_took_too_long_says_nothing() -> None:
    assert not decided(push([entry(1)]), TooLate("a call")).ended.tells


def test_a_mismatch_is_about_a_device_that_never_took_a_push() -> None:
    mismatch = ProviderRefusesUs("403", is_answer=True)
    mismatch.is_mismatch = True
    gone = meant(verification(), mismatch)
    assert isinstance(gone, DeviceGone)
    assert gone.invalid is InvalidReason.BAD
    assert meant(push([entry(1)]), mismatch) is mismatch
    other = ProviderRefusesUs("401", is_answer=True)
    assert meant(verification(), other) is other


@pytest.mark.parametrize("is_proven", [True, False])
def test_of_the_gateways_devices_those_that_took_a_push_speak_for_the_provider(is_proven: bool) -> None:
    statement = StatementPush(
        key=PushKey(1),
        subscription_key=GatewayKey(1),
        subscription_id=b"s" * 16,
        client_id=b"c" * 32,
        statement_hash=b"h" * 32,
        channel=Channel.APNS,
        is_call=False,
        device_token=ApnsToken(Provider.APNS_PROD, b"a1" * 32),
        sender=b"f" * 32,
        topic=b"t" * 32,
        data=b"",
        received_at=NOW,
        signature=b"",
        expiry=b"",
        is_proven=is_proven,
    )
    job = Job(Kind.STATEMENT, TokenKey(-1))
    made = Push(Taken(job, True, 0.0, 0, None), statement, PUSH_ID, CheckMessages(), None, 0.0)
    assert made.is_to_known_device is is_proven
    assert party_of(job, statement) == (statement.client_id if is_proven else None)


@pytest.mark.parametrize("error", [ERRORS[4], ERRORS[5]])
def test_every_retry_has_a_limit(error: PushError) -> None:
    """Failures count while the destination works for others: when its breaker opens they are forgotten."""
    for what in (verification, lambda attempts: push([entry(1)], attempts)):
        assert decided(what(Attempts(PUSH_ID, 0, MAX_FAILURES - 2)), error).ended.retry is not None
        last = decided(what(Attempts(PUSH_ID, 0, MAX_FAILURES - 1)), error)
        assert (last.ended.retry, last.why) == (None, "retried")
