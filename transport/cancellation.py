"""A cancelled task ends, whatever else fails at the same moment.

A task group whose parent is cancelled while a child fails raises only the children's errors: of the
cancellation nothing is left but `Task.cancelling()`. A loop that survives errors would then live for ever,
and its owner wait for it as long. So whoever catches more than errors of its own and goes on calls this
first, which `tests/test_architecture.py` checks.
"""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """End the current task if somebody asked for it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
