"""One attempt for all who want the same thing at the same time.

    relay = await attempts.share(key, lambda: connect(key))

Whoever comes while it is under way waits for its outcome, be it a failure; who gives up does not disturb the
others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SharedAttempts(Generic[K, T]):
    def __init__(self, name: str) -> None:
        self._name = name
        self._under_way: dict[K, asyncio.Task[T]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, key: K) -> bool:
        return key in self._under_way

    async def share(self, key: K, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(attempt(), name=self._name)
            self._under_way[key] = task
            task.add_done_callback(lambda done: self._end(key, done))
        return await asyncio.shield(task)

    def _end(self, key: K, done: asyncio.Task[T]) -> None:
        del self._under_way[key]
        if not done.cancelled():
            done.exception()  # it is told to those who wait; if nobody does, it is no news

    async def close(self) -> None:
        """End what is under way; those who wait are cancelled."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
