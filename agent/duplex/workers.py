"""Tasks that work something off: one per key, started when there is work, gone when there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from transport.cancellation import TaskGroup


class Wait:
    """How a worker waits between attempts: until its time, or until somebody hurries it."""

    def __init__(self) -> None:
        self._more = False
        self._hurry = asyncio.Event()

    def wake(self, *, hurry: bool) -> None:
        self._more = True
        if hurry:
            self._hurry.set()

    def more(self) -> bool:
        """Whether there was a call since the last look."""
        more, self._more = self._more, False
        return more

    async def sleep(self, seconds: float) -> None:
        self._hurry.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()


Step = Callable[[int, Wait], Awaitable[bool]]
"Does one thing for a key; False if there was nothing to do."


class Workers:
    def __init__(self, name: str, tasks: TaskGroup, step: Step) -> None:
        self._name = name
        self._tasks = tasks
        self._step = step
        self._waits: dict[int, Wait] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    def wake(self, key: int, *, hurry: bool = False) -> None:
        wait = self._waits.get(key)
        if wait is None:
            wait = self._waits[key] = Wait()
            self.idle.clear()
            self._tasks.create_task(self._work(key, wait), name=f"{self._name} {key}")
        wait.wake(hurry=hurry)

    async def _work(self, key: int, wait: Wait) -> None:
        try:
            while wait.more():
                while await self._step(key, wait):
                    pass
        finally:
            del self._waits[key]
            if not self._waits:
                self.idle.set()
