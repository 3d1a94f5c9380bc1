"""Tasks that work something off: one per key, started when there is work, gone when there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

from agent.duplex.defects import survive
from protocol.agent.retry import FAST, first
from transport.cancellation import TaskGroup, raise_if_cancelled

Key = TypeVar("Key", bound=Hashable)


class Wait:
    """How a worker waits between attempts: until its time, or until somebody hurries it."""

    def __init__(self, resting: Callable[[bool], None]) -> None:
        self._more = False
        self._hurry = asyncio.Event()
        self._resting = resting
        self._retry = first(FAST)

    def wake(self, *, hurry: bool) -> None:
        self._more = True
        if hurry:
            self._hurry.set()

    def more(self) -> bool:
        """Whether there was a call since the last look."""
        more, self._more = self._more, False
        return more

    async def after_failure(self) -> None:
        """Longer each time, until an attempt succeeds."""
        retry, self._retry = self._retry, self._retry.next(FAST)
        await self.sleep(retry.seconds)

    def succeeded(self) -> None:
        self._retry = first(FAST)

    async def sleep(self, seconds: float) -> None:
        """Not at all if somebody was in a hurry during the attempt before it."""
        self._resting(True)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._hurry.wait()
        finally:
            self._hurry.clear()
            self._resting(False)


Step = Callable[[Key, Wait], Awaitable[bool]]
"Does one thing for a key; False if there was nothing to do."


class WorkerTasks(Generic[Key]):
    """`idle` is set while nobody works; with `rest_is_idle`, also while all wait for another attempt."""

    def __init__(self, name: str, tasks: TaskGroup, step: Step[Key], *, rest_is_idle: bool = False) -> None:
        self._name = name
        self._tasks = tasks
        self._step = step
        self._rest_is_idle = rest_is_idle
        self._waits: dict[Key, Wait] = {}
        self._resting = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def wake(self, key: Key, *, hurry: bool = False) -> None:
        wait = self._waits.get(key)
        if wait is None:
            wait = self._waits[key] = Wait(self._rest)
            self._note()
            self._start(key, wait)
        wait.wake(hurry=hurry)

    def _start(self, key: Key, wait: Wait) -> None:
        work = self._work(key, wait)
        try:
            self._tasks.create_task(work, name=f"{self._name} {key}")
        except RuntimeError:  # the agent is at its end: what is stored is for its next run
            work.close()
            del self._waits[key]
            self._note()

    def _rest(self, begins: bool) -> None:
        self._resting += 1 if begins else -1
        self._note()

    def _note(self) -> None:
        if len(self._waits) == (self._resting if self._rest_is_idle else 0):
            self.idle.set()
        else:
            self.idle.clear()

    async def _work(self, key: Key, wait: Wait) -> None:
        try:
            while wait.more():
                while await self._attempt(key, wait):
                    pass
        finally:
            del self._waits[key]
            self._note()

    async def _attempt(self, key: Key, wait: Wait) -> bool:
        """A defect is a failure like others: it is tried again after some time."""
        try:
            return await self._step(key, wait)
        except Exception as defect:
            raise_if_cancelled()
            survive(defect, self._name)
            await wait.after_failure()
            return True
