"""How often one sender may wake one client. Pure: the window is a value, time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

WINDOW = 60.0
"Seconds in which at most `LIMIT` notifications of a sender reach a client."
LIMIT = 30
COOL_DOWN = 120.0
"Seconds of silence for a sender who wanted more."


@dataclass(frozen=True, slots=True)
class Window:
    """What is remembered of one sender and one client: times of accepted notifications, rising."""

    accepted: tuple[float, ...] = ()
    silent_until: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceWindow:
    """What is remembered of one device: seconds in which pushes were accepted, rising, with their numbers."""

    accepted: tuple[tuple[int, int], ...] = ()
    dropped: int = 0
    "Statements that are remembered because they were not pushed."

    def admit(self, now: float, limit: int) -> DeviceWindow | None:
        """With one more push; None: the device has had its share of the last minute."""
        second = int(now)
        recent = [item for item in self.accepted if second - WINDOW < item[0] <= second]
        if sum(count for _, count in recent) >= limit:
            return None
        if recent and recent[-1][0] == second:
            recent[-1] = second, recent[-1][1] + 1
        else:
            recent.append((second, 1))
        return replace(self, accepted=tuple(recent))


class Admission(NamedTuple):
    allowed: bool
    window: Window
    "What to remember from now on."


def decide(window: Window, now: float) -> Admission:
    """Whether one more notification is allowed. A clock that went back never makes a sender wait longer
    than the longest silence."""
    if now < window.silent_until <= now + COOL_DOWN:
        return Admission(False, window)
    recent = tuple(at for at in window.accepted if now - WINDOW < at <= now)
    if len(recent) < LIMIT:
        return Admission(True, Window((*recent, now)))
    return Admission(False, Window(recent, now + COOL_DOWN))
