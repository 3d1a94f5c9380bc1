"""A time limit for thousands of tasks at the price of one timer."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from transport.cancellation import current_task


class TimeLimit:
    """As `asyncio.timeout`, but shared: every task in it has the same limit, and is in it once.

    Who came first is due first, so one timer is enough: that of the task that is in it longest.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends: dict[asyncio.Task[Any], float] = {}
        "When each task is due, in the order in which they came."
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        task = current_task()
        loop = task.get_loop()
        self._ends[task] = end = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(end, self._cut_off, loop)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task = current_task()
        was_cut_off = self._ends.pop(task, None) is None
        # A task that somebody else cancelled as well stays cancelled.
        if was_cut_off and task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _cut_off(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for task, end in list(self._ends.items()):
            if end > now:
                self._timer = loop.call_at(end, self._cut_off, loop)
                return
            del self._ends[task]
            task.cancel()
