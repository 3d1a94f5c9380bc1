"""Delays and counts of retries."""

from __future__ import annotations

import uuid

from ntf_server.push.retries import RetryPolicy, attempts_after_failure

POLICY = RetryPolicy(first_delay=2.0, longest_delay=30.0, longest_wish=100.0, jitter=0.5)
FIRST, SECOND = uuid.UUID(int=1), uuid.UUID(int=2)


def test_delays_double_up_to_a_limit() -> None:
    delays = [POLICY.delay(level, None, lambda: 0.0) for level in (1, 2, 3, 4, 5, 6, 1000)]
    assert delays == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_jitter_only_adds() -> None:
    assert POLICY.delay(1, None, lambda: 1.0) == 3.0


def test_providers_wish_is_honoured_within_reason() -> None:
    assert POLICY.delay(1, 50.0, lambda: 0.0) == 50.0
    assert POLICY.delay(5, 1.0, lambda: 0.0) == 30.0
    assert POLICY.delay(1, 1e9, lambda: 0.0) == 100.0


def test_attempts_of_the_same_push_are_counted() -> None:
    once = attempts_after_failure(None, FIRST)
    twice = attempts_after_failure(once, FIRST)
    assert (once.count, once.level, twice.count, twice.level) == (1, 1, 2, 2)


def test_new_content_counts_anew_but_waits_no_less() -> None:
    twice = attempts_after_failure(attempts_after_failure(None, FIRST), FIRST)
    other = attempts_after_failure(twice, SECOND)
    assert (other.push_id, other.count, other.level) == (SECOND, 1, 3)
