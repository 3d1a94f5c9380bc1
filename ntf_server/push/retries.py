"""How often and how late a push that was not accepted is tried again."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from ntf_server.push.breaker import LONGEST_WISH

FIRST_DELAY = 2.0
"Seconds until the first retry; doubled with each further one."
LONGEST_DELAY = 300.0
JITTER = 0.25
"Up to this part of a delay is added at random."
MAX_ATTEMPTS = 8
"The first one included."


@dataclass(frozen=True, slots=True)
class Attempts:
    """What is remembered of a token between an attempt that failed and the next one."""

    push_id: uuid.UUID
    "Of the push that failed last; another id means another content."
    count: int
    "Attempts of that push that failed because of its device."
    level: int
    "Failures of the token in a row, whatever their cause: new content does not shorten its delays."


def failed_again(before: Attempts | None, push_id: uuid.UUID, *, counts: bool) -> Attempts:
    """`counts`: the device is the cause."""
    if before is None:
        return Attempts(push_id, int(counts), 1)
    same = before.count if before.push_id == push_id else 0
    return Attempts(push_id, same + counts, before.level + 1)


def retry_delay(level: int, after: float | None, random: Callable[[], float]) -> float:
    """Seconds until the next attempt of a token that failed `level` times in a row."""
    delay = min(FIRST_DELAY * 2.0 ** min(level - 1, 32), LONGEST_DELAY)
    if after is not None:
        delay = max(delay, min(after, LONGEST_WISH))
    return delay * (1 + JITTER * random())
