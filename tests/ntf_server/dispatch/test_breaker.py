"""The circuit breaker, with time as an argument."""

from __future__ import annotations

from ntf_server.push.breaker import BreakerSettings, BreakerState, CircuitBreaker

SETTINGS = BreakerSettings(failures=3, first_pause=1.0, longest_pause=8.0, longest_wish=100.0, jitter=0.0)


def opened() -> CircuitBreaker:
    breaker = CircuitBreaker(SETTINGS, lambda: 0.0)
    assert [breaker.failed(0.0) for _ in range(3)] == [False, False, True]
    return breaker


def test_opens_only_after_failures_in_a_row() -> None:
    breaker = CircuitBreaker(SETTINGS, lambda: 0.0)
    for _ in range(5):
        assert not breaker.failed(0.0)
        assert not breaker.failed(0.0)
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
    for _ in range(3):
        breaker.failed(20.0)
    assert breaker.retry_at == 21.0


def test_providers_wish_is_honoured_within_reason() -> None:
    breaker = opened()
    breaker.probe(1.0)
    breaker.probe_failed(1.0, after=50.0)
    assert breaker.retry_at == 51.0
    breaker.probe(51.0)
    breaker.probe_failed(51.0, after=1e9)
    assert breaker.retry_at == 151.0


def test_late_failures_do_not_prolong_the_pause() -> None:
    breaker = opened()
    assert not breaker.failed(0.5)
    assert breaker.retry_at == 1.0


def test_jitter_only_adds() -> None:
    breaker = CircuitBreaker(BreakerSettings(failures=1, first_pause=10.0, jitter=0.2), lambda: 0.5)
    breaker.failed(0.0)
    assert breaker.retry_at == 11.0
