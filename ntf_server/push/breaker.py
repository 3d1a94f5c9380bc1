"""When to stop pushing to a destination that is down or refuses us, and when to try again."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

FAILURES = 5
"Failures of the whole destination in a row, without any answer between them, that open the breaker."
FIRST_PAUSE = 1.0
"Seconds until the first probe; doubled after each probe that fails."
LONGEST_PAUSE = 60.0
HOST_LONGEST_PAUSE = 900.0
"Of a Web Push host: there may be thousands that will never answer again."
LONGEST_WISH = 900.0
"Seconds that a destination may ask us to stay away; a longer wish is cut to this."
JITTER = 0.2
"Up to this part of a pause is added at random."


class BreakerState(Enum):
    CLOSED = 0
    "Pushes flow."
    OPEN = 1
    "No push until `retry_at`."
    PROBING = 2
    "One push is on its way to find out."


class CircuitBreaker:
    """One destination's. Time is an argument; `random` gives numbers from 0 to 1."""

    def __init__(self, random: Callable[[], float], *, longest_pause: float = LONGEST_PAUSE) -> None:
        self._random = random
        self._longest_pause = longest_pause
        self._failures = 0
        self._openings = 0
        self.state = BreakerState.CLOSED
        self.retry_at = 0.0

    @property
    def is_closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def answered(self) -> None:
        """A push sent while the breaker was closed got an answer, whatever it said about the device."""
        self._failures = 0

    def failed(self, now: float, after: float | None = None) -> bool:
        """A push failed for a reason that concerns the whole destination. True if this opened the breaker."""
        if not self.is_closed:
            return False  # sent before the breaker opened: nothing new
        self._failures += 1
        if self._failures < FAILURES:
            return False
        self._open(now, after)
        return True

    def probe(self, now: float) -> bool:
        """Start probing if the pause is over; the caller then owes `probe_succeeded` or `probe_failed`."""
        if self.state is not BreakerState.OPEN or now < self.retry_at:
            return False
        self.state = BreakerState.PROBING
        return True

    def probe_succeeded(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = self._openings = 0

    def probe_failed(self, now: float, after: float | None = None) -> None:
        self._open(now, after)

    def _open(self, now: float, after: float | None) -> None:
        # The exponent is bounded: an outage may last for weeks.
        pause = min(FIRST_PAUSE * 2.0 ** min(self._openings, 32), self._longest_pause)
        if after is not None:
            pause = max(pause, min(after, LONGEST_WISH))
        self._openings += 1
        self.retry_at = now + pause * (1 + JITTER * self._random())
        self.state = BreakerState.OPEN
