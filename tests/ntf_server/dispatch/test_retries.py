"""Delays and counts of retries."""

from __future__ import annotations

from ntf_server.push.lanes import (
    FIRST_RETRY,
    LONGEST_RETRY,
    LONGEST_WISH,
    RETRY_JITTER,
    failed_again,
    retry_delay,
)

FIRST, SECOND = "id 1", "id 2"


def test_delays_double_up_to_a_limit() -> None:
    delays = [retry_delay(level, None, lambda: 0.0) for level in (1, 2, 3, 20, 1000)]
    assert delays == [FIRST_RETRY, FIRST_RETRY * 2, FIRST_RETRY * 4, LONGEST_RETRY, LONGEST_RETRY]


def test_jitter_only_adds() -> None:
    assert retry_delay(1, None, lambda: 1.0) == FIRST_RETRY * (1 + RETRY_JITTER)


def test_providers_wish_is_honoured_within_reason() -> None:
    assert retry_delay(1, 50.0, lambda: 0.0) == 50.0
    assert retry_delay(20, 1.0, lambda: 0.0) == LONGEST_RETRY
    assert retry_delay(1, 1e9, lambda: 0.0) == LONGEST_WISH


def test_attempts_of_the_same_push_are_counted() -> None:
    once = failed_again(None, FIRST, counts=True)
    twice = failed_again(once, FIRST, counts=True)
    assert (once.count, once.level, twice.count, twice.level) == (1, 1, 2, 2)


def test_new_content_counts_anew_but_waits_no_less() -> None:
    twice = failed_again(failed_again(None, FIRST, counts=True), FIRST, counts=True)
    other = failed_again(twice, SECOND, counts=True)
    assert (other.push_id, other.count, other.level) == (SECOND, 1, 3)


def test_a_failure_of_the_provider_does_not_count_but_waits() -> None:
    before = failed_again(None, FIRST, counts=True)
    after = failed_again(failed_again(before, FIRST, counts=False), FIRST, counts=False)
    assert (after.count, after.level) == (1, 3)
