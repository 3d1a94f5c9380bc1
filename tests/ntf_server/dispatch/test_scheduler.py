"""The scheduler alone: jobs in, jobs out, time as an argument."""

from __future__ import annotations

from typing import Any

import pytest

from ntf_server.config import PushConfig
from ntf_server.push import lanes
from ntf_server.push.lanes import FAILURES, Attempts, BreakerState, Job, Kind, statement_job
from ntf_server.push.provider import Destination
from ntf_server.push.scheduler import PROBE_CANDIDATES, Added, Ended, PushScheduler
from protocol.device_token import Provider
from store.records import TokenKey
from store.statement_records import PushKey

APNS, FCM = Destination(Provider.APNS_PROD), Destination(Provider.FCM)
ATTEMPTS = Attempts("id 1", 1, 1)
FIRST_FAILED = 1000


def make(**changes: Any) -> PushScheduler:
    return PushScheduler(PushConfig(**changes), lambda: 0.0)


def host(number: int) -> Destination:
    return Destination(Provider.WEB_PUSH, b"%d.example" % number)


def message(number: int) -> Job:
    return Job(Kind.MESSAGE, TokenKey(number))


def verification(number: int) -> Job:
    return Job(Kind.VERIFICATION, TokenKey(number))


def start(scheduler: PushScheduler, now: float, destination: Destination = APNS) -> list[Job]:
    """Take what is there and start it."""
    return [taken.job for taken in scheduler.take(now) if scheduler.loaded(taken, destination, now) is None]


def start_all(scheduler: PushScheduler, now: float, destination: Destination = APNS) -> list[Job]:
    """More than one batch."""
    started: list[Job] = []
    while batch := start(scheduler, now, destination):
        started += batch
    return started


def accept(scheduler: PushScheduler, job: Job, now: float, *, more: bool = False) -> None:
    scheduler.ended(job, Ended(answered=True, more=more), now)


def limit(scheduler: PushScheduler, job: Job, now: float, at: float) -> None:
    """The device is to be tried again."""
    scheduler.ended(job, Ended(answered=True, retry=(ATTEMPTS, at)), now)


def fail(scheduler: PushScheduler, job: Job, now: float) -> bool:
    return scheduler.ended(job, Ended(answered=False, retry=(ATTEMPTS, now + 100.0)), now)


def fail_until_open(scheduler: PushScheduler, now: float, destination: Destination = APNS) -> None:
    jobs = [message(FIRST_FAILED + number) for number in range(FAILURES)]
    for job in jobs:
        scheduler.add(job, now)
    assert start(scheduler, now, destination) == jobs
    assert [fail(scheduler, job, now) for job in jobs] == [False] * (FAILURES - 1) + [True]


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


def test_what_arrives_while_its_token_is_read_belongs_to_the_next_push() -> None:
    scheduler = make(interval=0.5)
    scheduler.add(message(1), 0.0)
    (taken,) = scheduler.take(0.0)
    for at in (0.1, 0.2):
        assert scheduler.add(message(1), at) is Added.JOINED
    assert scheduler.loaded(taken, APNS, 0.3) is None
    accept(scheduler, message(1), 0.4)
    (taken,) = scheduler.take(0.8)
    assert (taken.since, taken.joined) == (0.1, 1)


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
    accept(scheduler, message(3), 0.0)
    assert start(scheduler, 0.0) == [message(2)]


def test_a_job_whose_destination_is_known_is_not_read_before_its_turn() -> None:
    scheduler = make(concurrency=2)
    for number in range(4):
        assert scheduler.add(message(number), 0.0, APNS) is Added.QUEUED
    assert start(scheduler, 0.0) == [message(0), message(1)]
    assert scheduler.take(0.0) == []
    accept(scheduler, message(0), 0.0)
    assert [taken.job for taken in scheduler.take(0.0)] == [message(2)]


def test_verification_does_not_wait_behind_a_flood() -> None:
    scheduler = make(concurrency=10)
    for number in range(5000):
        scheduler.add(message(number), 0.0)
    for _ in range(100):
        start(scheduler, 0.0)
    assert scheduler.queue_length == 4990
    scheduler.add(verification(6000), 0.1)
    assert start(scheduler, 0.1) == [verification(6000)]


def test_full_answers_until_there_is_room() -> None:
    scheduler = make(queue_size=2, interval=0.0)
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


@pytest.mark.parametrize("comes_at", [0.1, 0.3], ids=["while it is under way", "while the device rests"])
def test_the_first_that_comes_after_a_push_began_joins_none(comes_at: float) -> None:
    scheduler = make(interval=0.5)
    scheduler.add(message(1), 0.0)
    start(scheduler, 0.0)
    if comes_at > 0.2:
        accept(scheduler, message(1), 0.2)
    scheduler.add(message(1), comes_at)
    scheduler.add(message(1), comes_at)
    if comes_at < 0.2:
        accept(scheduler, message(1), 0.2)
    (taken,) = scheduler.take(0.5)
    assert taken.joined == 1


def test_nothing_joins_where_each_has_its_own_push() -> None:
    scheduler = make(coalesce=False)
    scheduler.add(message(1), 0.0)
    scheduler.add(message(1), 0.0)
    (taken,) = scheduler.take(0.0)
    assert taken.joined == 0


def test_a_retry_waits_and_new_content_joins_it() -> None:
    scheduler = make()
    scheduler.add(message(1), 0.0)
    start(scheduler, 0.0)
    limit(scheduler, message(1), 0.0, 10.0)
    assert scheduler.add(message(1), 1.0) is Added.JOINED
    assert start(scheduler, 9.9) == []
    (taken,) = scheduler.take(10.0)
    assert taken.attempts is ATTEMPTS
    assert taken.joined == 1


def test_too_many_retries_are_left_to_the_store() -> None:
    scheduler = make(queue_size=4)
    for number in (1, 2):
        scheduler.add(message(number), 0.0)
    for job in start(scheduler, 0.0):
        limit(scheduler, job, 0.0, 10.0)
    assert len(scheduler) == 1
    assert not scheduler.sweep_due(9.0)
    assert scheduler.sweep_due(10.0)
    assert not scheduler.sweep_due(11.0)


def test_an_outage_keeps_nothing_but_probe_candidates_in_memory() -> None:
    scheduler = make()
    for number in range(50):
        scheduler.add(message(number), 0.0)
        start(scheduler, 0.0)  # so that its destination is known
    for number in range(50):
        fail(scheduler, message(number), 0.0)
    assert scheduler.breaker_state(APNS) is BreakerState.OPEN
    assert len(scheduler) == FAILURES - 1  # those that failed before it was known wait for their retry
    scheduler.take(0.9)
    assert {scheduler.add(message(number), 0.0) for number in range(FAILURES, 50)} == {Added.LEFT}
    assert len(scheduler) == FAILURES - 1


def test_a_probe_ends_the_outage_and_asks_for_a_sweep() -> None:
    scheduler = make()
    fail_until_open(scheduler, 0.0)
    assert scheduler.next_deadline() == 1.0
    (probe,) = start(scheduler, 1.0)
    assert scheduler.breaker_state(APNS) is BreakerState.PROBING
    assert scheduler.add(probe, 1.0) is Added.JOINED
    accept(scheduler, probe, 1.1)
    assert scheduler.breaker_state(APNS) is BreakerState.CLOSED
    assert scheduler.sweep_due(1.1)


def test_a_failed_probe_gives_way_to_another_token() -> None:
    scheduler = make()
    scheduler.add(message(1), 0.0)
    assert start(scheduler, 0.0) == [message(1)]
    accept(scheduler, message(1), 0.5)
    fail_until_open(scheduler, 0.5)
    assert scheduler.add(message(1), 0.9) is Added.LEFT
    (first,) = start(scheduler, 1.5)
    assert not fail(scheduler, first, 1.5)
    assert start(scheduler, 3.4) == []
    (second,) = start(scheduler, 3.5)
    assert second != first


def test_candidates_that_are_gone_close_the_breaker() -> None:
    scheduler = make()
    fail_until_open(scheduler, 0.0)
    (taken,) = scheduler.take(1.0)
    scheduler.loaded(taken, None, 1.0)
    assert scheduler.breaker_state(APNS) is BreakerState.CLOSED
    assert scheduler.sweep_due(1.0)


def test_another_destination_is_not_disturbed_by_an_outage() -> None:
    scheduler = make()
    fail_until_open(scheduler, 0.0)
    scheduler.add(message(1), 0.0)
    assert start(scheduler, 0.0, FCM) == [message(1)]
    accept(scheduler, message(1), 0.0)
    assert scheduler.breaker_state(APNS) is BreakerState.OPEN


def test_an_outage_of_a_web_push_host_is_not_one_of_others() -> None:
    scheduler = make()
    fail_until_open(scheduler, 0.0, host(1))
    assert scheduler.hosts_down == 1
    scheduler.add(message(1), 0.0)
    assert start(scheduler, 0.0, host(2)) == [message(1)]
    assert scheduler.breaker_state(host(2)) is BreakerState.CLOSED


def test_verification_survives_an_outage_in_memory() -> None:
    scheduler = make()
    fail_until_open(scheduler, 0.0)
    for number in (FIRST_FAILED, FIRST_FAILED + 1):
        assert scheduler.add(verification(number), 0.5) is Added.LEFT
    (probe,) = start(scheduler, 1.0)
    assert not probe.urgent
    accept(scheduler, probe, 1.0)
    waiting = [verification(FIRST_FAILED), verification(FIRST_FAILED + 1)]
    assert start(scheduler, 1.0) == waiting
    for job in waiting:
        accept(scheduler, job, 1.0)


def test_urgent_jobs_kept_for_an_outage_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_URGENT", 3)
    scheduler = make()
    fail_until_open(scheduler, 0.0)
    added = [scheduler.add(verification(FIRST_FAILED + number), 0.0) for number in range(5)]
    assert added == [Added.LEFT] * 3 + [Added.DROPPED] * 2


def test_too_many_urgent_jobs_are_dropped_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntf_server.push.scheduler.MAX_URGENT", 3)
    scheduler = make()
    added = [scheduler.add(verification(number), 0.0) for number in range(5)]
    assert added == [Added.QUEUED] * 3 + [Added.DROPPED] * 2


def test_a_token_that_changed_its_provider_moves_to_the_other_lane() -> None:
    scheduler = make()
    scheduler.add(message(1), 0.0)
    start(scheduler, 0.0, APNS)
    accept(scheduler, message(1), 0.0, more=True)
    assert start(scheduler, 0.0, FCM) == [message(1)]
    accept(scheduler, message(1), 10.0)
    assert scheduler.under_way == 0


def test_the_store_says_so_does_not_repeat_what_is_here() -> None:
    scheduler = make(coalesce=False)
    scheduler.add(message(1), 0.0)
    assert scheduler.add(message(1), None) is Added.JOINED
    start(scheduler, 0.0)
    accept(scheduler, message(1), 0.0)
    assert len(scheduler) == 0


def test_what_a_full_destination_cannot_take_stays_in_the_store_and_comes_back() -> None:
    scheduler = make(queue_size=8, interval=0.0)
    first = [message(number) for number in range(8)]
    for job in first:
        scheduler.add(job, 0.0)
    assert start(scheduler, 0.0) == first
    scheduler.add(message(8), 0.0)
    (taken,) = scheduler.take(0.0)
    assert scheduler.loaded(taken, APNS, 0.0) is Added.LEFT
    assert scheduler.add(message(8), 0.0) is Added.LEFT
    for job in first[:5]:
        accept(scheduler, job, 0.0)
    assert not scheduler.sweep_due(0.0)
    accept(scheduler, first[5], 0.0)
    assert scheduler.sweep_due(0.0)


def test_a_full_provider_does_not_fill_another() -> None:
    scheduler = make(queue_size=8)
    for number in range(8):
        scheduler.add(message(number), 0.0)
    start(scheduler, 0.0, APNS)
    for number in range(20, 28):
        assert scheduler.add(message(number), 0.0) is Added.QUEUED
    assert len(start(scheduler, 0.0, FCM)) == 8


def test_a_slow_host_has_few_places_and_others_their_own() -> None:
    scheduler = make(concurrency=4, host_concurrency=2)
    for number in range(10):
        scheduler.add(message(number), 0.0)
    assert len(start_all(scheduler, 0.0, host(1))) == 2
    for number in range(10, 20):
        scheduler.add(message(number), 0.0)
    assert len(start_all(scheduler, 0.0, host(2))) == 2
    for number in range(20, 30):
        scheduler.add(message(number), 0.0)
    assert start_all(scheduler, 0.0, host(3)) == []  # all places of hosts that were never fast are taken


def test_hosts_that_were_fast_do_not_wait_for_slow_ones() -> None:
    scheduler = make(concurrency=2, host_concurrency=2, interval=0.0)
    scheduler.add(message(1), 0.0)
    start(scheduler, 0.0, host(1))
    accept(scheduler, message(1), 0.1)
    for number in (2, 3, 4):
        scheduler.add(message(number), 1.0)
    assert len(start_all(scheduler, 1.0, host(2))) == 2
    scheduler.add(message(1), 1.0)
    assert start(scheduler, 1.0, host(1)) == [message(1)]
    accept(scheduler, message(2), 5.0)
    assert start(scheduler, 5.0, host(2)) == [message(4)]


def test_the_rate_of_a_host_is_bounded() -> None:
    scheduler = make(host_rate=10, host_concurrency=1000)
    for number in range(50):
        scheduler.add(message(number), 0.0)
    assert len(start_all(scheduler, 0.0, host(1))) == 10
    assert start(scheduler, 0.05, host(1)) == []
    assert len(start_all(scheduler, 1.05, host(1))) == 10


def test_hosts_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_HOSTS", 3)
    scheduler = make(interval=0.0)
    for number in range(4):
        scheduler.add(message(number), 0.0)
    started = []
    for number, taken in enumerate(scheduler.take(0.0)):
        started.append(scheduler.loaded(taken, host(number), 0.0))
    assert started == [None, None, None, Added.LEFT]
    accept(scheduler, message(0), 0.0)
    assert scheduler.add(message(3), 0.0) is Added.QUEUED
    assert start(scheduler, 0.0, host(3)) == [message(3)]
    assert not scheduler.sweep_due(0.0)
    assert scheduler.sweep_due(60.0)


def test_many_slow_hosts_leave_room_for_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "FAIR_SIZE", 4)
    scheduler = make(queue_size=40)
    number = 0
    for slow in range(20):
        for _ in range(5):
            number += 1
            scheduler.add(message(number), 0.0)
            for taken in scheduler.take(0.0):
                scheduler.loaded(taken, host(slow), 0.0)
    scheduler.add(message(1000), 0.0)
    assert start(scheduler, 0.0, host(1000)) == [message(1000)]
    assert len(scheduler) <= 40 + 20 * 4


def unknown(number: int) -> Job:
    """A statement for a device that never took a push."""
    return statement_job(PushKey(number))


def start_statement(scheduler: PushScheduler, job: Job, now: float, party: bytes | None) -> Added | None:
    scheduler.add(job, now)
    (taken,) = [taken for taken in scheduler.take(now) if taken.job == job]
    return scheduler.loaded(taken, APNS, now, party)


def test_devices_that_never_took_a_push_do_not_open_the_breaker() -> None:
    scheduler = make()
    for number in range(3 * FAILURES):
        job = unknown(number + 1)
        assert start_statement(scheduler, job, 0.0, None) is None
        assert not scheduler.ended(job, Ended(answered=False, tells=False), 0.0)
    assert scheduler.breaker_state(APNS) is BreakerState.CLOSED


def test_nor_do_they_keep_it_closed() -> None:
    scheduler = make()
    for number in range(FAILURES):
        scheduler.add(message(number + 1), 0.0)
        assert start(scheduler, 0.0) == [message(number + 1)]
        fail(scheduler, message(number + 1), 0.0)
        if scheduler.breaker_state(APNS) is BreakerState.CLOSED:
            assert start_statement(scheduler, unknown(number + 1), 0.0, None) is None
            scheduler.ended(unknown(number + 1), Ended(answered=True, tells=False), 0.0)
    assert scheduler.breaker_state(APNS) is BreakerState.OPEN


def test_they_are_no_probes_while_there_are_others() -> None:
    scheduler = make()
    fail_until_open(scheduler, 0.0)
    for number in range(100):
        assert start_statement(scheduler, unknown(number + 1), 0.5, None) is Added.LEFT
    (probe,) = start(scheduler, 1.0)
    assert probe.kind is Kind.MESSAGE


def test_one_that_told_nothing_gives_way() -> None:
    scheduler = make()
    fail_until_open(scheduler, 0.0)
    (first,) = start(scheduler, 1.0)
    for number in (1, 2):
        assert start_statement(scheduler, unknown(number), 1.0, b"client %d" % number) is Added.LEFT
    scheduler.ended(first, Ended(answered=False, tells=False), 1.0)
    assert scheduler.breaker_state(APNS) is BreakerState.PROBING
    while scheduler.breaker_state(APNS) is BreakerState.PROBING:
        (probe,) = start(scheduler, 1.0)
        scheduler.ended(probe, Ended(answered=False, tells=False), 1.0)
    assert scheduler.breaker_state(APNS) is BreakerState.CLOSED  # nobody can tell: it is tried


def test_no_party_occupies_the_probes() -> None:
    """One client with a thousand pushes has one candidate; of many clients a random choice is kept."""
    scheduler = make()
    fail_until_open(scheduler, 0.0)
    for number in range(1000):
        start_statement(scheduler, unknown(number + 1), 0.5, b"loud")
    for number in range(3):
        start_statement(scheduler, unknown(2000 + number), 0.5, b"honest %d" % number)
    probes: list[Job] = []
    now = 1.0
    while len(probes) < 6:
        started = start(scheduler, now)
        for job in started:
            fail(scheduler, job, now)
        probes += started
        deadline = scheduler.next_deadline()
        assert deadline is not None
        now = max(now, deadline)
    loud = [job for job in probes if job.kind is Kind.STATEMENT and job.push_key <= 1000]
    assert len(loud) == 1
    assert {unknown(2000 + number) for number in range(3)} & set(probes)


def test_candidates_are_few_and_a_loud_party_displaces_none() -> None:
    scheduler = make()
    fail_until_open(scheduler, 0.0)
    quiet = [unknown(number + 1) for number in range(PROBE_CANDIDATES)]
    for number, job in enumerate(quiet):
        start_statement(scheduler, job, 0.5, b"client %d" % number)
    for number in range(1000):
        start_statement(scheduler, unknown(PROBE_CANDIDATES + number + 1), 0.5, b"client 0")
    probes = start(scheduler, 1.0)
    while scheduler.breaker_state(APNS) is BreakerState.PROBING:
        scheduler.ended(probes[-1], Ended(answered=False, tells=False), 1.0)
        probes += start(scheduler, 1.0)
    assert sorted(probes) == sorted(quiet)
