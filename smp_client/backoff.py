"""Growing delays between attempts."""

from __future__ import annotations

from collections.abc import Callable

GROWTH = 1.6
JITTER = 0.25  # peers that lost the same router at the same moment do not come back together


class Backoff:
    """Delays from `first` growing to `longest` seconds, each up to a quarter shorter by chance."""

    def __init__(self, first: float, longest: float, chance: Callable[[], float]) -> None:
        """`chance` gives numbers from 0 to 1."""
        self._first = first
        self._longest = longest
        self._chance = chance
        self._delay = first

    def next(self) -> float:
        """The delay before the next attempt."""
        delay = self._delay
        self._delay = min(self._longest, delay * GROWTH)
        return delay * (1 - JITTER * self._chance())

    def reset(self) -> None:
        """The last attempt was a success that lasted."""
        self._delay = self._first
