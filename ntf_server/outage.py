"""What the log says of an outage: its beginning, a reminder now and then, its end with its length."""

from __future__ import annotations

import logging
from collections.abc import Callable

STORE_PAUSE = 1.0
"Seconds until a store that is unavailable is asked again by those who cannot go on without it."
REMINDER = 300.0
"Seconds between two lines about the same outage."


class Outage:
    """Of one thing. Whoever watches it tells what is wrong with it, again and again."""

    def __init__(self, name: str, now: Callable[[], float], logger: logging.Logger) -> None:
        self._name = name
        self._now = now
        self._logger = logger
        self._began: float | None = None
        self._told_at = 0.0

    def note(self, problem: str) -> None:
        """`problem` goes on where the name ends; it is empty if all is well."""
        now = self._now()
        if problem:
            self._down(problem, now)
        elif self._began is not None:
            self._logger.warning("%s is up again after %.0f s", self._name, now - self._began)
            self._began = None

    def _down(self, problem: str, now: float) -> None:
        if self._began is None:
            self._began = self._told_at = now
            self._logger.error("%s %s", self._name, problem)
        elif now - self._told_at >= REMINDER:
            self._told_at = now
            minutes = (now - self._began) / 60
            self._logger.error("%s %s (for %.0f minutes now)", self._name, problem, minutes)
