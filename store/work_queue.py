"""Many callers, few groups: operations queue up while a group runs, then all that wait run as the next group.

A trip to the database costs more than most statements, and a commit that waits for the disk more than both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, Generic, NamedTuple, TypeVar

from protocol.encoding import new_tuple
from store.interface import StoreUnavailable

Context = TypeVar("Context")
Argument = TypeVar("Argument")
Result = TypeVar("Result")

QUEUED_OPERATIONS = 8192
"Per queue; callers wait when so many are in it."

GROUP_SIZE = 2048
"Operations in one group: bounds how long the first of them waits for the last."


Batch = Callable[[Context, Sequence[Argument]], Sequence[Result] | Awaitable[Sequence[Result]]]
"Runs one kind of operation for several callers; one result for each, in order."


class Operation(NamedTuple):
    batch: Batch[Any, Any, Any]
    argument: Any
    durable: bool
    future: asyncio.Future[Any]


class Failed(NamedTuple):
    """In the place of a result."""

    error: Exception


CommitObserver = Callable[[float], None]
"Told the seconds that each committed group took, perhaps on another thread."

GroupRunner = Callable[[Sequence[Operation]], Awaitable[list[Any]]]
"Results of the operations, in order; a `Failed` for one that failed."


class WorkQueue(Generic[Context]):
    """Operations that run one group after the other. `start` and `stop` own the task that runs them."""

    def __init__(self, name: str, run_group: GroupRunner) -> None:
        self._name = name
        self._run_group = run_group
        self._queue: asyncio.Queue[Operation | None] = asyncio.Queue(QUEUED_OPERATIONS)
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._ended = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._serve(), name=self._name)

    async def stop(self) -> None:
        """Finish what is queued, then end."""
        self._closing = True
        if self._task is not None:
            await self._queue.put(None)
            await self._task
            self._task = None

    async def run(
        self,
        batch: Batch[Context, Argument, Result],
        argument: Argument,
        *,
        durable: bool = False,
    ) -> Result:
        """The operation is carried out even if the caller is cancelled while it waits for the result."""
        if self._closing:
            raise StoreUnavailable("the store is closed")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        operation = new_tuple(Operation, (batch, argument, durable, future))
        if self._queue.full():
            await self._queue.put(operation)
        else:
            self._queue.put_nowait(operation)
        if self._ended:
            # There was room only after the last group: nobody will look at the queue again.
            raise StoreUnavailable("the store is closed")
        return await future

    async def _serve(self) -> None:
        while (first := await self._queue.get()) is not None:
            group = [first]
            last = self._collect(group)
            await self._run(group)
            if last:
                break
        self._ended = True
        self._refuse_the_rest()

    def _collect(self, group: list[Operation]) -> bool:
        """Add what waits; True if the queue is to stop after this group."""
        while len(group) < GROUP_SIZE and not self._queue.empty():
            operation = self._queue.get_nowait()
            if operation is None:
                return True
            group.append(operation)
        return False

    async def _run(self, group: list[Operation]) -> None:
        try:
            results = await self._run_group(group)
        except Exception as error:
            results = [Failed(error)] * len(group)
        for operation, result in zip(group, results, strict=True):
            if operation.future.done():
                continue
            if isinstance(result, Failed):
                operation.future.set_exception(result.error)
            else:
                operation.future.set_result(result)

    def _refuse_the_rest(self) -> None:
        """Operations that came behind the end."""
        while not self._queue.empty():
            operation = self._queue.get_nowait()
            if operation is not None and not operation.future.done():
                operation.future.set_exception(StoreUnavailable("the store is closed"))


def runs(group: Sequence[Operation]) -> Iterator[tuple[Any, list[Any]]]:
    """Neighbours of one kind together: operations take effect in the order they were queued."""
    for batch, run in groupby(group, key=lambda operation: operation.batch):
        yield batch, [operation.argument for operation in run]


def regrouped(results: Sequence[Result], lists: Sequence[Sequence[Any]]) -> list[list[Result]]:
    """The results of all lists run as one, for the callers who brought one list each."""
    left = iter(results)
    return [list(islice(left, len(items))) for items in lists]
