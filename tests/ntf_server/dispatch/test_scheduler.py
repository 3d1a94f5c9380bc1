"""The scheduler alone: jobs in, jobs out, time as an argument."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from ntf_server.push.breaker import BreakerSettings, BreakerState
from ntf_server.push.retries import Attempts
from ntf_server.push.scheduler import Added, Job, Kind, PushScheduler, SchedulerSettings
from protocol.device_token import Provider
from store.records import TokenKey

APNS, FCM = Provider.APNS_PROD, Provider.FCM
BREAKER = BreakerSettings(failures=3, first_pause=1.0, longest_pause=60.0, jitter=0.0)
ATTEMPTS = Attempts(uuid.UUID(int=1), 1, 1)


def make(**changes: Any) -> PushScheduler:
    return PushScheduler(SchedulerSettings(**changes), BREAKER, lambda: 0.0)


def message(number: int) -> Job:
    return Job(Kind.MESSAGE, TokenKey(number))


def verification(number: int) -> Job:
    return Job(Kind.VERIFICATION, TokenKey(number))


def start(scheduler: PushScheduler, now: float, provider: Provider = APNS) -> list[Job]:
    """Take what is there and start it."""
    return [taken.job for taken in scheduler.take(now) if scheduler.may_start(taken, provider, now)]


def accept(scheduler: PushScheduler, job: Job, now: float, *, more: bool = False) -> None:
    scheduler.answered(job, now)
    scheduler.finished(job, now, more=more)


def fail_until_open(scheduler: PushScheduler, now: float) -> None:
    for number in range(1000, 1003):
        scheduler.add(message(number), now)
    outcomes = [scheduler.unreachable(job, now, None) for job in start(scheduler, now)]
    assert outcomes == [True, True, False]
    for number in (1000, 1001):
        scheduler.finished(message(number), now + 10.0, more=False)


def test_a_single_notification_is_pushed_at_once() -> None:
    scheduler = make()
    assert scheduler.add(message(1), 0.0) is Added.QUEUED
    assert start(scheduler, 0.0) == [message(1)]


def test_what_arrives_while_queued_joins() -> None:
    scheduler = make()
    scheduler.add(message(1), 0.0)
    assert scheduler.add(message(1), 0.1) is Added.JOINED
    (taken,) = scheduler.take(0.2)
    assert (taken.since, taken.joined) == (0.0, 1)
    assert scheduler.take(0.2) == []


def test_what_arrives_while_under_way_is_pushed_after_the_interval() -> None:
    scheduler = make(interval=0.5)
    scheduler.add(message(1), 0.0)
    start(scheduler, 0.0)
    assert scheduler.add(message(1), 0.1) is Added.JOINED
    accept(scheduler, message(1), 0.2)
    assert start(scheduler, 0.3) == []
    assert scheduler.next_deadline() == pytest.approx(0.5)
    assert start(scheduler, 0.5) == [message(1)]


def test_a_token_that_rested_is_forgotten_and_pushed_at_once_again() -> None:
    scheduler = make(interval=0.5)
    scheduler.add(message(1), 0.0)
    start(scheduler, 0.0)
    accept(scheduler, message(1), 0.1)
    assert len(scheduler) == 1
    assert start(scheduler, 0.5) == []
    assert len(scheduler) == 0
    scheduler.add(message(1), 0.6)
    assert start(scheduler, 0.6) == [message(1)]


def test_more_unsent_entries_follow_at_once() -> None:
    scheduler = make()
    scheduler.add(message(1), 0.0)
    start(scheduler, 0.0)
    accept(scheduler, message(1), 0.01, more=True)
    assert start(scheduler, 0.01) == [message(1)]


def test_without_coalescing_each_notification_has_its_push() -> None:
    scheduler = make(coalesce=False)
    for _ in range(3):
        scheduler.add(message(1), 0.0)
    pushes = 0
    while start(scheduler, 0.0):
        pushes += 1
        accept(scheduler, message(1), 0.0)
    assert pushes == 3
    assert len(scheduler) == 0


def test_first_come_first_served() -> None:
    scheduler = make(concurrency=2)
    for number in (3, 1, 2):
        scheduler.add(message(number), 0.0)
    assert start(scheduler, 0.0) == [message(3), message(1)]
    scheduler.answered(message(3), 0.0)
    assert start(scheduler, 0.0) == [message(2)]


def test_verification_does_not_wait_behind_a_flood() -> None:
    scheduler = make(concurrency=10)
    for number in range(5000):
        scheduler.add(message(number), 0.0)
    start(scheduler, 0.0)
    assert scheduler.queue_length == 4990
    scheduler.add(verification(6000), 0.1)
    assert start(scheduler, 0.1) == [verification(6000)]


def test_full_answers_until_there_is_room() -> None:
    scheduler = make(max_tokens=2, interval=0.0)
    assert [scheduler.add(message(number), 0.0) for number in range(3)] == [
        Added.QUEUED,
        Added.QUEUED,
        Added.FULL,
    ]
    assert scheduler.add(message(0), 0.0) is Added.JOINED
    assert scheduler.add(verification(9), 0.0) is Added.QUEUED
    start(scheduler, 0.0)
    accept(scheduler, message(1), 0.0)
    assert scheduler.add(message(2), 0.0) is Added.QUEUED


def test_a_slow_provider_does_not_take_anothers_places() -> None:
    scheduler = make(concurrency=2)
    for number in range(4):
        scheduler.add(message(number), 0.0)
    assert start(scheduler, 0.0, APNS) == [message(0), message(1)]
    assert start(scheduler, 0.0, APNS) == []
    for number in (10, 11):
        scheduler.add(message(number), 0.0)
    assert start(scheduler, 0.0, FCM) == [message(10), message(11)]


def test_a_retry_waits_and_new_content_joins_it() -> None:
    scheduler = make()
    scheduler.add(message(1), 0.0)
    start(scheduler, 0.0)
    scheduler.answered(message(1), 0.0)
    scheduler.retry(message(1), ATTEMPTS, 10.0)
    assert scheduler.add(message(1), 1.0) is Added.JOINED
    assert start(scheduler, 9.9) == []
    (taken,) = scheduler.take(10.0)
    assert taken.attempts is ATTEMPTS
    assert taken.joined == 1


def test_too_many_retries_are_left_to_the_store() -> None:
    scheduler = make(max_waiting=1)
    for number in (1, 2):
        scheduler.add(message(number), 0.0)
    for job in start(scheduler, 0.0):
        scheduler.answered(job, 0.0)
        scheduler.retry(job, ATTEMPTS, 10.0)
    assert len(scheduler) == 1
    assert not scheduler.sweep_due(9.0)
    assert scheduler.sweep_due(10.0)
    assert not scheduler.sweep_due(11.0)


def test_an_outage_keeps_nothing_but_probe_candidates_in_memory() -> None:
    scheduler = make()
    for number in range(50):
        scheduler.add(message(number), 0.0)
        start(scheduler, 0.0)  # so that its provider is known
    for number in range(3):
        scheduler.unreachable(message(number), 0.0, None)
    assert scheduler.breaker_state(APNS) is BreakerState.OPEN
    for number in range(3, 50):
        assert not scheduler.unreachable(message(number), 0.0, None)
    for number in (0, 1):
        scheduler.finished(message(number), 10.0, more=False)
    assert len(scheduler) == 0
    assert {scheduler.add(message(number), 0.0) for number in range(50)} == {Added.DEFERRED}
    assert len(scheduler) == 0


def test_a_probe_ends_the_outage_and_asks_for_a_sweep() -> None:
    scheduler = make()
    fail_until_open(scheduler, 0.0)
    assert scheduler.next_deadline() is not None
    (probe,) = start(scheduler, 1.0)
    assert scheduler.breaker_state(APNS) is BreakerState.PROBING
    assert scheduler.add(probe, 1.0) is Added.JOINED
    accept(scheduler, probe, 1.1)
    assert scheduler.breaker_state(APNS) is BreakerState.CLOSED
    assert scheduler.sweep_due(1.1)


def test_a_failed_probe_gives_way_to_another_token() -> None:
    scheduler = make()
    fail_until_open(scheduler, 0.0)
    assert scheduler.add(message(1000), 0.9) is Added.DEFERRED
    (first,) = start(scheduler, 1.0)
    assert not scheduler.unreachable(first, 1.0, None)
    assert start(scheduler, 2.9) == []
    (second,) = start(scheduler, 3.0)
    assert second != first


def test_candidates_that_are_gone_close_the_breaker() -> None:
    scheduler = make()
    fail_until_open(scheduler, 0.0)
    (taken,) = scheduler.take(1.0)
    scheduler.idle(taken.job, 1.0)
    assert scheduler.breaker_state(APNS) is BreakerState.CLOSED
    assert scheduler.sweep_due(1.0)


def test_another_provider_is_not_disturbed_by_an_outage() -> None:
    scheduler = make()
    fail_until_open(scheduler, 0.0)
    scheduler.add(message(1), 0.0)
    assert start(scheduler, 0.0, FCM) == [message(1)]
    accept(scheduler, message(1), 0.0)
    assert scheduler.breaker_state(APNS) is BreakerState.OPEN


def test_verification_survives_an_outage_in_memory() -> None:
    scheduler = make()
    fail_until_open(scheduler, 0.0)
    for number in (1000, 1001):
        assert scheduler.add(verification(number), 0.5) is Added.DEFERRED
    assert start(scheduler, 1.0) == [verification(1000)]
    assert not scheduler.unreachable(verification(1000), 1.0, None)
    assert start(scheduler, 3.0) == [verification(1001)]
    accept(scheduler, verification(1001), 3.0)
    assert start(scheduler, 3.0) == [verification(1000)]
    accept(scheduler, verification(1000), 3.0)
    assert len(scheduler) == 0


def test_urgent_jobs_kept_for_an_outage_are_bounded() -> None:
    scheduler = make(max_urgent=3)
    for number in range(1000, 1010):
        scheduler.add(message(number), 0.0)
    started = start(scheduler, 0.0)
    for job in started:
        if scheduler.unreachable(job, 0.0, None):
            scheduler.finished(job, 0.0, more=False)
    added = [scheduler.add(verification(number), 0.0) for number in range(1000, 1005)]
    assert added == [Added.DEFERRED] * 3 + [Added.DROPPED] * 2


def test_a_token_that_changed_its_provider_moves_to_the_other_lane() -> None:
    scheduler = make()
    scheduler.add(message(1), 0.0)
    start(scheduler, 0.0, APNS)
    accept(scheduler, message(1), 0.0, more=True)
    assert start(scheduler, 0.0, FCM) == [message(1)]
    scheduler.answered(message(1), 0.0)
    scheduler.finished(message(1), 10.0, more=False)
    assert scheduler.under_way == 0


def test_the_store_says_so_does_not_repeat_what_is_here() -> None:
    scheduler = make(coalesce=False)
    scheduler.add(message(1), 0.0)
    assert scheduler.add(message(1), None) is Added.JOINED
    start(scheduler, 0.0)
    accept(scheduler, message(1), 0.0)
    assert len(scheduler) == 0
