"""How much of a peer's nonsense is put up with, without input or output.

Some is normal: an answer that comes too late, a notification of a queue that was given up a moment ago.
A peer that sends little else wastes our time on purpose or is broken, and is left in peace for a while.
"""

from __future__ import annotations

from enum import StrEnum

from smp_client.errors import PeerMisbehaves

MOST = 10_000
"Transmissions without sense at once: several batches of answers that come too late."
PER_SECOND = 100.0
"And so many in the long run; for every one that makes sense, another one."


class Nonsense(StrEnum):
    UNREADABLE = "unreadable"
    "Not a message of the protocol."
    UNASKED = "unasked"
    "An answer to nothing, or too late."
    UNKNOWN = "unknown"
    "An event of a queue that we do not have."


class NonsenseBudget:
    """That with one peer, in one session."""

    def __init__(self, now: float) -> None:
        self._left = float(MOST)
        self._at = now

    def regain(self, count: int) -> None:
        self._left = min(MOST, self._left + count)

    def lose(self, count: int, now: float) -> None:
        self._left = min(MOST, self._left + (now - self._at) * PER_SECOND) - count
        self._at = now

    def check(self) -> None:
        """Raise `PeerMisbehaves` if none is left."""
        if self._left < 0:
            raise PeerMisbehaves
