"""How often one sender may wake one client. Pure: the window is a value, time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
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
