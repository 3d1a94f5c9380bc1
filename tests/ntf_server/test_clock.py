"""Wall time of several daemons is the database's."""

from __future__ import annotations

import pytest

from ntf_server.clock import SharedClock

NOW = 1_000_000.0
HOUR = 3600.0


class Own:
    """The clock of a machine."""

    def __init__(self, now: float) -> None:
        self.value = now

    def now(self) -> float:
        return self.value

    def monotonic(self) -> float:
        return 7.0


def test_with_nobody_to_ask_it_is_the_machines() -> None:
    clock = SharedClock(Own(NOW))
    assert (clock.now(), clock.monotonic()) == (NOW, 7.0)


@pytest.mark.parametrize("wrong", [HOUR, -HOUR])
def test_a_wrong_clock_is_put_right_and_stays_right(wrong: float) -> None:
    own = Own(NOW + wrong)
    clock = SharedClock(own)
    clock.told(NOW - 0.1, took=0.2)
    assert clock.now() == pytest.approx(NOW)
    own.value += 10
    assert clock.now() == pytest.approx(NOW + 10)
    own.value += wrong  # somebody sets it
    clock.told(NOW + 10 - 0.1, took=0.2)
    assert clock.now() == pytest.approx(NOW + 10)


@pytest.mark.parametrize("told", [NOW, NOW - 0.5])
def test_what_may_be_right_stays(told: float) -> None:
    """An answer that took long says little."""
    clock = SharedClock(Own(NOW))
    clock.told(told, took=0.5)
    assert clock.ahead == 0
