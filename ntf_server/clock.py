"""The only reader of wall time. Tests pass a clock of their own."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol

SECONDS_PER_DAY = 86_400
MICROSECONDS = 1_000_000
"In a second."


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """For deadlines and latencies: never goes back."""


class SystemClock:
    now = staticmethod(time.time)  # noqa: TID251
    monotonic = staticmethod(time.monotonic)


class SharedClock:
    """Wall time as the database tells it: what daemons write there is compared by others, and the clock of
    one machine may be wrong."""

    def __init__(self, own: Clock) -> None:
        self._own = own
        self.monotonic = own.monotonic
        self.ahead = 0.0
        "Seconds by which this machine's clock is before the database's."

    def now(self) -> float:
        return self._own.now() - self.ahead

    def told(self, now: float, took: float) -> None:
        """The database's clock showed this just now, or up to `took` seconds ago. What is known already
        stays, unless it cannot be right."""
        most = self._own.now() - now
        if not most - took <= self.ahead <= most:
            self.ahead = most - took / 2


def day(seconds: float) -> int:
    """The start of the day: the only precision in which the store keeps what clients did when."""
    return int(seconds) // SECONDS_PER_DAY * SECONDS_PER_DAY


def as_datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def utc_now() -> datetime:
    """For commands, which have no clock of their own."""
    return as_datetime(SystemClock().now())
