"""Decisions about subscriptions: pure, so every case can be named."""

from __future__ import annotations

import asyncio
import os
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.encoding import EntityId
from protocol.errors import AUTH, CRYPTO, INTERNAL, QUOTA, SERVICE_ERRORS, store_error
from protocol.ids_hash import ids_hash
from protocol.smp_messages import Err, Ok, Pong, QueueSet, SmpMessage, Sok
from protocol.statuses import SubEvent, SubInput
from smp_client import subscriptions
from smp_client.backoff import Backoff
from smp_client.errors import BadAnswer, CannotSend, ClientError, RequestTimeout, SessionClosed
from smp_client.requests import Batch
from smp_client.subscriptions import (
    ENDED,
    REFUSED,
    SERVICE_REFUSED,
    Balance,
    Flight,
    ServiceBalance,
    WaitingQueues,
    WaitingRoom,
    sort_outcomes,
)

SERVICE_ID = EntityId(b"our service")
A, B, C = EntityId(b"a"), EntityId(b"b"), EntityId(b"c")


class Row(NamedTuple):
    notifier_id: EntityId


ROW_A, ROW_B, ROW_C = Row(A), Row(B), Row(C)


def test_waiting_queues_come_in_order_and_once() -> None:
    waiting: WaitingQueues[Row] = WaitingQueues(10)
    for queue in (ROW_A, ROW_B, ROW_A, ROW_C):
        waiting.add(queue)
    assert waiting.take(2, 0) == [ROW_A, ROW_B]
    assert waiting.take(2, 0) == [ROW_C]
    assert waiting.take(2, 0) == []


def test_waiting_queues_put_off() -> None:
    waiting: WaitingQueues[Row] = WaitingQueues(10)
    waiting.add_later([ROW_A, ROW_B], 5.0)
    waiting.add_later([ROW_C], 3.0)
    assert waiting.next_at() == 3.0
    assert waiting.take(9, 2.9) == []
    assert waiting.take(9, 3.0) == [ROW_C]
    waiting.add(ROW_A)  # asked for anew: no reason to wait
    assert waiting.take(9, 3.1) == [ROW_A]
    waiting.discard(B)
    assert waiting.take(9, 99.0) == []
    assert waiting.next_at() is None


@given(st.lists(st.tuples(st.sampled_from(["add", "later", "take", "discard"]), st.integers(0, 30))))
def test_waiting_queues_are_bounded_and_lose_nothing_silently(steps: list[tuple[str, int]]) -> None:
    waiting: WaitingQueues[Row] = WaitingQueues(8)
    expected: set[Row] = set()
    for kind, number in steps:
        queue = Row(EntityId(bytes([number])))
        if kind == "add":
            waiting.add(queue)
            expected.add(queue)
        elif kind == "later":
            waiting.add_later([queue], 0.0)
            expected.add(queue)
        elif kind == "take":
            expected -= set(waiting.take(number % 4 + 1, 1.0))
        else:
            waiting.discard(queue.notifier_id)
            expected.discard(queue)
        assert len(waiting) <= 8
    assert waiting.overflowed or set(waiting.take(99, 1.0)) == expected


def rows(start: int, count: int) -> list[Row]:
    return [Row(EntityId(bytes([number]))) for number in range(start, start + count)]


def test_what_had_no_room_is_due_when_the_earliest_of_it_is() -> None:
    waiting = WaitingQueues[Row](1)
    waiting.add_later(rows(0, 2), 10.0)
    waiting.add_later(rows(2, 1), 20.0)
    assert [waiting.is_overflow_due(now) for now in (9.0, 10.0)] == [False, True]
    waiting.add_later(rows(3, 1), 5.0)
    assert waiting.next_at() == 5.0
    waiting.add(rows(4, 1)[0])
    assert waiting.is_overflow_due(0.0)
    waiting.clear()
    assert not waiting.is_overflow_due(99.0)


def test_all_routers_share_a_room_but_each_has_some_places() -> None:
    room = WaitingRoom(places=6, share=2)
    greedy, modest = WaitingQueues[Row](8, room), WaitingQueues[Row](8, room)
    for row in rows(0, 8):
        greedy.add(row)
    assert (len(greedy), greedy.overflowed, room.taken) == (6, True, 6)
    modest.add_later(rows(10, 3), 0.0)
    assert (len(modest), modest.overflowed, room.taken) == (2, True, 8)
    assert greedy.take(4, 0.0) == rows(0, 4)
    modest.add(Row(A))
    assert room.taken == 5
    greedy.discard(rows(4, 1)[0].notifier_id)
    greedy.clear()
    modest.clear()
    assert room.taken == 0
    alone = WaitingQueues[Row](8, WaitingRoom(places=99, share=99))
    for row in rows(0, 9):
        alone.add(row)
    assert (len(alone), alone.overflowed) == (8, True)


def test_outcomes() -> None:
    answers: dict[bytes, SmpMessage | ClientError] = {
        b"associated": Sok(SERVICE_ID),
        b"individual": Sok(),
        b"old router": Ok(),
        b"auth": Err(AUTH),
        b"error": Err(CRYPTO),
        b"busy": Err(INTERNAL),
        b"full": Err(QUOTA),
        b"store": Err(store_error("disk full")),
        b"nonsense": Pong(),
        b"garbage": BadAnswer("unreadable"),
        b"impossible": CannotSend("no key"),
        b"slow": RequestTimeout(),
        b"lost": SessionClosed("gone"),
    }
    outcomes = sort_outcomes([EntityId(name) for name in answers], list(answers.values()), SERVICE_ID)
    assert outcomes.associated == [b"associated"]
    assert outcomes.individual == [b"individual", b"old router"]
    assert outcomes.retried == [b"busy", b"full", b"store", b"slow", b"lost"]
    assert dict(outcomes.changed) == {
        b"auth": REFUSED,
        b"error": SubEvent.failed("CRYPTO"),
        b"nonsense": SubEvent.failed("unexpected answer"),
        b"garbage": SubEvent.failed("unreadable"),
        b"impossible": SubEvent.failed("no key"),
    }
    assert not outcomes.service_failed


def test_a_refused_service_or_another_one_is_a_failure_of_the_service() -> None:
    refusals: list[SmpMessage] = [Err(error) for error in SERVICE_ERRORS]
    for answer in [*refusals, Sok(EntityId(b"somebody else"))]:
        outcomes = sort_outcomes([A], [answer], SERVICE_ID)
        assert outcomes.service_failed
        assert outcomes.changed == [(A, SERVICE_REFUSED)]
        assert not outcomes.associated
    assert sort_outcomes([A], [Sok(SERVICE_ID)], None).service_failed, "a service although there is none"


async def test_events_that_overtake_a_batch() -> None:
    batch: Batch[SmpMessage] = Batch(2, asyncio.get_running_loop().create_future())
    flight = Flight([A, B], batch)
    assert not flight.absorbs(C, ENDED), "not in this batch"
    batch.settle(1, Sok())
    assert flight.absorbs(A, ENDED), "the answer to come decides"
    assert flight.absorbs(B, ENDED)
    assert flight.overtaken == [(B, ENDED)]


def queue_set(queues: list[EntityId]) -> QueueSet:
    return QueueSet(len(queues), ids_hash(queues))


def test_balance() -> None:
    balance = ServiceBalance()
    assert balance.compare(queue_set([A, B]), queue_set([A, B])) is Balance.EQUAL
    assert balance.compare(queue_set([A, B]), queue_set([A])) is Balance.DRIFTED
    assert balance.compare(queue_set([A, B]), queue_set([A, C])) is Balance.DRIFTED, (
        "same count, other queues"
    )
    assert balance.compare(queue_set([A, B]), QueueSet(2)) is Balance.UNCERTAIN, "old routers tell no hash"
    assert balance.compare(queue_set([A, B]), QueueSet(3)) is Balance.DRIFTED


def test_what_was_given_up_is_no_drift() -> None:
    balance = ServiceBalance()
    balance.given_up([C])
    assert balance.compare(queue_set([A, B]), queue_set([A, B, C])) is Balance.EQUAL
    assert balance.compare(queue_set([A, B]), QueueSet(3)) is Balance.UNCERTAIN
    assert balance.compare(queue_set([A, B]), queue_set([A, C])) is Balance.DRIFTED
    assert balance.compare(queue_set([A, B]), queue_set([A, B])) is Balance.EQUAL, (
        "the router lost it at last"
    )
    assert balance.compare(queue_set([A, B]), queue_set([A, B, C])) is Balance.DRIFTED


def test_surplus_that_the_router_deletes_or_that_is_ours_again(monkeypatch: pytest.MonkeyPatch) -> None:
    balance = ServiceBalance()
    balance.given_up([A, B, C])
    assert balance.no_surplus([A, EntityId(b"unknown")]) == 1
    assert balance.no_surplus([A]) == 0
    assert balance.compare(queue_set([]), queue_set([B, C])) is Balance.EQUAL
    assert balance.compare(queue_set([]), queue_set([C])) is Balance.DRIFTED
    balance.settle(queue_set([]), queue_set([]))
    assert balance.no_surplus([B]) == 0
    monkeypatch.setattr(subscriptions, "SURPLUS_IDS", 2)
    balance.given_up([A, B, C])
    assert balance.no_surplus([A, B, C]) == 2, "the first one only counts"
    assert balance.compare(queue_set([]), queue_set([A])) is Balance.EQUAL


def test_what_may_explain_that_the_router_has_more() -> None:
    balance = ServiceBalance()
    assert balance.explains(1), "deleted before the start"
    assert not balance.explains(0)
    balance.compare(queue_set([A]), queue_set([A]))
    balance.given_up([B, C])
    assert [balance.explains(surplus) for surplus in (-1, 1, 2, 3)] == [False, True, True, False]


@given(st.sets(st.binary(min_size=1, max_size=3)), st.sets(st.binary(min_size=1, max_size=3)))
def test_a_settled_surplus_is_equal_from_then_on(ours: set[bytes], more: set[bytes]) -> None:
    mine = [EntityId(queue) for queue in ours]
    routers = [EntityId(queue) for queue in ours | more]
    balance = ServiceBalance()
    balance.settle(queue_set(mine), queue_set(routers))
    assert balance.compare(queue_set(mine), queue_set(routers)) is Balance.EQUAL
    new = EntityId(os.urandom(24))
    assert balance.compare(queue_set([*mine, new]), queue_set([*routers, new])) is Balance.EQUAL
    assert balance.compare(queue_set([*mine, new]), queue_set(routers)) is Balance.DRIFTED or not more - ours


def test_statuses_of_errors_stay_readable() -> None:
    outcomes = sort_outcomes([A], [Err(CRYPTO)], None)
    assert outcomes.changed == [(A, SubEvent(SubInput.FAILED, "CRYPTO"))]


def test_backoff_grows_to_its_limit_and_starts_again() -> None:
    backoff = Backoff(1.0, 10.0, lambda: 0.0)
    delays = [backoff.next() for _ in range(8)]
    assert delays[0] == 1.0
    assert delays == sorted(delays)
    assert delays[-1] == 10.0
    backoff.reset()
    assert backoff.next() == 1.0


@given(st.floats(0, 1))
def test_jitter_only_shortens(chance: float) -> None:
    backoff = Backoff(1.0, 10.0, lambda: chance)
    assert all(0.75 * 1.0 <= backoff.next() <= 10.0 for _ in range(10))
