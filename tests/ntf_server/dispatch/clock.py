"""Time that moves only when a test says so."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

START = 1_700_000_000.0


class SimulatedTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class SimulatedClock:
    """A Clock, and the timers that follow it."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.sleepers = 0
        self._timers: list[tuple[float, int, SimulatedTimer]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return START + self.passed

    def monotonic(self) -> float:
        return self.passed

    def call_later(self, seconds: float, callback: Callable[[], None]) -> SimulatedTimer:
        timer = SimulatedTimer(callback)
        heapq.heappush(self._timers, (self.passed + seconds, next(self._numbers), timer))
        return timer

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self.call_later(seconds, woken.set)
        self.sleepers += 1
        try:
            await woken.wait()
        finally:
            self.sleepers -= 1

    def advance(self, seconds: float) -> None:
        """Let time pass and ring what is due."""
        self.passed += seconds
        while self._timers and self._timers[0][0] <= self.passed:
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                timer.callback()
