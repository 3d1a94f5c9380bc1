"""The limit of one sender to one client, at the edges of its window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from store.statement_rate import COOL_DOWN, LIMIT, WINDOW, Window, decide

START = 1_800_000_000.0
NOTHING = Window()


def after(times: list[float], window: Window = NOTHING) -> tuple[list[bool], Window]:
    answers = []
    for now in times:
        allowed, window = decide(window, now)
        answers.append(allowed)
    return answers, window


def test_the_thirty_first_starts_the_silence() -> None:
    answers, window = after([START] * (LIMIT + 1))
    assert answers == [True] * LIMIT + [False]
    assert window.silent_until == START + COOL_DOWN


def test_silence_ends_after_its_time_and_not_before() -> None:
    _, window = after([START] * (LIMIT + 1))
    assert not decide(window, START + COOL_DOWN - 0.001).allowed
    allowed, window = decide(window, START + COOL_DOWN)
    assert allowed
    assert window == Window((START + COOL_DOWN,))


def test_attempts_in_silence_do_not_prolong_it() -> None:
    _, window = after([START] * (LIMIT + 1))
    _, window = after([START + second for second in range(1, 120)], window)
    assert window.silent_until == START + COOL_DOWN


def test_the_window_slides() -> None:
    first = [START + second for second in range(LIMIT)]
    answers, window = after(first)
    assert all(answers)
    # The first one leaves the window exactly WINDOW later: then there is room for one more, not for two.
    assert not decide(window, START + WINDOW - 0.001).allowed
    allowed, window = decide(window, START + WINDOW)
    assert allowed
    assert not decide(window, START + WINDOW).allowed


def test_one_every_other_second_is_never_limited() -> None:
    answers, window = after([START + 2.0 * number for number in range(500)])
    assert all(answers)
    assert len(window.accepted) <= LIMIT


def test_a_clock_that_was_wrong_silences_nobody_for_long() -> None:
    future = START + 10_000_000
    _, window = after([future] * (LIMIT + 1))
    assert decide(window, START).allowed


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_never_more_than_the_limit_in_any_window(gaps: list[float]) -> None:
    now, window, accepted = START, Window(), []
    for gap in gaps:
        now += gap / 10
        allowed, window = decide(window, now)
        if allowed:
            accepted.append(now)
        assert len(window.accepted) <= LIMIT
    for at in accepted:
        assert sum(at - WINDOW < other <= at for other in accepted) <= LIMIT
