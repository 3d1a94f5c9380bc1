"""The only reader of wall time. Tests pass a clock of their own."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol

SECONDS_PER_DAY = 86_400


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """For deadlines and latencies: never goes back."""


class SystemClock:
    def now(self) -> float:
        return time.time()  # noqa: TID251

    def monotonic(self) -> float:
        return time.monotonic()


def day(seconds: float) -> int:
    """The start of the day: the only precision in which the store keeps what clients did when."""
    return int(seconds) // SECONDS_PER_DAY * SECONDS_PER_DAY


def as_datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
