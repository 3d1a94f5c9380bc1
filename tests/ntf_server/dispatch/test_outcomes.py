"""The table that says what follows from an answer, applied to every kind of answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ntf_server.push.composing import Composed, Push
from ntf_server.push.lanes import MAX_ATTEMPTS, Attempts, Job, Kind
from ntf_server.push.outcomes import CONSEQUENCES, Decision, decide
from ntf_server.push.provider import (
    CheckMessages,
    DeviceGone,
    ProviderDown,
    ProviderRefusesUs,
    PushError,
    PushRefused,
    RetryLater,
)
from ntf_server.push.scheduler import Taken
from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from protocol.statuses import InvalidReason
from store.records import LastNotification, SubKey, TokenKey

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
        dropped = isinstance(error, (PushRefused, RetryLater))
        assert bool(decision.lost) is dropped is bool(decision.why)
        assert bool(decision.done) is (dropped or error is None)


def test_the_breaker_hears_of_failures_of_the_whole_only() -> None:
    answered = [decided(push([entry(1)]), error).ended.answered for error in ERRORS]
    assert answered == [True, True, True, True, False, False]


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
