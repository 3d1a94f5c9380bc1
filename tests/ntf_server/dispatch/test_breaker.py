"""The circuit breaker, with time as an argument."""

from __future__ import annotations

from ntf_server.push.lanes import FAILURES, JITTER, LONGEST_WISH, BreakerState, CircuitBreaker


def make() -> CircuitBreaker:
    return CircuitBreaker(lambda: 0.0, longest_pause=8.0)


def opened() -> CircuitBreaker:
    breaker = make()
    assert [breaker.failed(0.0) for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    return breaker


def test_opens_only_after_failures_in_a_row() -> None:
    breaker = make()
    for _ in range(5):
        assert not any(breaker.failed(0.0) for _ in range(FAILURES - 1))
        breaker.answered()
    assert breaker.is_closed


def test_probes_after_its_pause_and_closes() -> None:
    breaker = opened()
    assert not breaker.probe(0.9)
    assert breaker.probe(1.0)
    assert breaker.state is BreakerState.PROBING
    assert not breaker.probe(1.0)
    breaker.probe_succeeded()
    assert breaker.is_closed
    assert not breaker.failed(2.0)


def test_pauses_double_up_to_a_limit() -> None:
    breaker = opened()
    pauses = []
    now = 0.0
    for _ in range(50):
        pauses.append(breaker.retry_at - now)
        now = breaker.retry_at
        assert breaker.probe(now)
        breaker.probe_failed(now)
    assert pauses[:5] == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert pauses[-1] == 8.0


def test_first_pause_again_after_a_recovery() -> None:
    breaker = opened()
    breaker.probe(1.0)
    breaker.probe_failed(1.0)
    breaker.probe(10.0)
    breaker.probe_succeeded()
    for _ in range(FAILURES):
        breaker.failed(20.0)
    assert breaker.retry_at == 21.0


def test_providers_wish_is_honoured_within_reason() -> None:
    breaker = opened()
    breaker.probe(1.0)
    breaker.probe_failed(1.0, after=50.0)
    assert breaker.retry_at == 51.0
    breaker.probe(51.0)
    breaker.probe_failed(51.0, after=1e9)
    assert breaker.retry_at == 51.0 + LONGEST_WISH


def test_late_failures_do_not_prolong_the_pause() -> None:
    breaker = opened()
    assert not breaker.failed(0.5)
    assert breaker.retry_at == 1.0


def test_jitter_only_adds() -> None:
    breaker = CircuitBreaker(lambda: 0.5)
    for _ in range(FAILURES):
        breaker.failed(0.0)
    assert breaker.retry_at == 1.0 + JITTER / 2
