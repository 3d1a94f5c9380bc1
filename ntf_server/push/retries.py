"""How often, how late and how long a push that was not accepted is tried again."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    first_delay: float = 2.0
    "Seconds until the first retry; doubled with each further one."
    longest_delay: float = 300.0
    longest_wish: float = 900.0
    "Seconds that a provider may ask us to wait; a longer wish is cut to this."
    jitter: float = 0.25
    "Up to this part of a delay is added at random."
    max_attempts: int = 8
    "The first one included."
    max_age: float = 3600.0
    "Seconds: a notification that is older is not worth a retry."

    def delay(self, level: int, after: float | None, random: Callable[[], float]) -> float:
        """Seconds until the next attempt of a token that failed `level` times in a row."""
        delay = min(self.first_delay * 2.0 ** min(level - 1, 32), self.longest_delay)
        if after is not None:
            delay = max(delay, min(after, self.longest_wish))
        return delay * (1 + self.jitter * random())


@dataclass(frozen=True, slots=True)
class Attempts:
    """What is remembered of a token between an attempt that failed and the next one."""

    push_id: uuid.UUID
    "Of the push that failed last; another id means another content."
    count: int
    "Attempts of that push."
    level: int
    "Failures of the token in a row: new content does not shorten its delays."


def attempts_after_failure(before: Attempts | None, push_id: uuid.UUID) -> Attempts:
    if before is None:
        return Attempts(push_id, 1, 1)
    count = before.count + 1 if before.push_id == push_id else 1
    return Attempts(push_id, count, before.level + 1)
