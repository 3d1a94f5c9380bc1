"""Delays between attempts: constant for a while, then half as long again each time, up to a limit."""

from __future__ import annotations

from dataclasses import dataclass

SECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class RetryInterval:
    """In microseconds."""

    initial: int
    grows_after: int
    maximum: int


@dataclass(frozen=True, slots=True)
class Retry:
    """Where a series of attempts stands: stored with what is attempted, so a restart goes on from there."""

    delay: int
    elapsed: int = 0

    @property
    def seconds(self) -> float:
        """Until the next attempt."""
        return self.delay / SECOND

    def next(self, interval: RetryInterval) -> Retry:
        """After another attempt has failed and `delay` has passed."""
        elapsed = self.elapsed + self.delay
        if elapsed < interval.grows_after:
            return Retry(self.delay, elapsed)
        return Retry(min(self.delay * 3 // 2, interval.maximum), elapsed)


FAST = RetryInterval(2 * SECOND, 10 * SECOND, 120 * SECOND)
"Temporary failures of deliveries and commands."
SLOW = RetryInterval(300 * SECOND, 60 * SECOND, 21600 * SECOND)
"Full queues."
RECONNECT = RetryInterval(2 * SECOND, 10 * SECOND, 180 * SECOND)


def first(interval: RetryInterval) -> Retry:
    return Retry(interval.initial)
