"""A cancelled task ends, whatever else fails at the same moment; and a task that was not, goes on.

asyncio's task group (Python 3.11 and 3.12) has two faults here. Cancelled while a child fails, it raises
the children's errors only, and of the cancellation nothing is left but `Task.cancelling()`: a loop that
survives errors would then live for ever, and its owner wait for it as long. And a child that fails while
the group waits for its end leaves `Task.cancelling()` raised although nobody cancelled anything.
`TaskGroup` has neither fault; nobody uses asyncio's own, which the linter checks.

A clean-up that fails can replace a cancellation too. So whoever catches more than errors of its own and
goes on calls `raise_if_cancelled` first, which `tests/test_architecture.py` checks.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from types import TracebackType
from typing import Self

_LEAVES_REQUEST = sys.version_info < (3, 13)
"Whether asyncio's group forgets to take back the cancellation by which it interrupts its own waiting."


class TaskGroup(asyncio.TaskGroup):  # noqa: TID251
    """As asyncio's, but a cancellation from outside always ends in CancelledError, and is counted right."""

    _cancelled_before: int
    _parent_cancel_requested: bool

    async def __aenter__(self) -> Self:
        self._cancelled_before = current_task().cancelling()
        return await super().__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task = current_task()
        taken_back = self._parent_cancel_requested
        try:
            await super().__aexit__(kind, error, traceback)
        except ExceptionGroup:
            if _LEAVES_REQUEST and self._parent_cancel_requested and not taken_back:
                task.uncancel()
            if task.cancelling() > self._cancelled_before:
                raise asyncio.CancelledError from None
            raise


def raise_if_cancelled() -> None:
    """End the current task if somebody asked for it."""
    if current_task().cancelling():
        raise asyncio.CancelledError


def first_cause(error: BaseException) -> BaseException:
    """What a task of a group failed with."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def current_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


def stop_signal() -> asyncio.Event:
    """Set by SIGINT or SIGTERM, from now on: how programs are asked to end in order."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
