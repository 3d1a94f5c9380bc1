"""Cancellation wins over any failure that comes with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from transport.cancellation import TaskGroup, raise_if_cancelled

STEPS = 6
"Turns of the loop within which all the races below are decided."


async def fail_when_cancelled() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise ValueError("a fault while stopping")


async def fail_late() -> None:
    """A child that takes some turns to stop, and fails then."""
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        raise ValueError("a fault while stopping")


async def fail_now() -> None:
    raise ValueError("a fault")


async def alone(work: Callable[[], Awaitable[None]]) -> None:
    await work()


async def in_a_group(work: Callable[[], Awaitable[None]]) -> None:
    async with TaskGroup() as tasks:
        tasks.create_task(work())  # type: ignore[arg-type]
        await asyncio.Event().wait()


async def in_a_group_with_a_deadline(work: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.timeout(0), TaskGroup() as tasks:
        tasks.create_task(work())  # type: ignore[arg-type]


async def in_nested_groups(work: Callable[[], Awaitable[None]]) -> None:
    async with TaskGroup() as tasks:
        tasks.create_task(fail_late())
        async with TaskGroup() as inner:
            inner.create_task(work())  # type: ignore[arg-type]


async def in_a_group_that_waits(work: Callable[[], Awaitable[None]]) -> None:
    async with TaskGroup() as tasks:
        tasks.create_task(work())  # type: ignore[arg-type]


async def with_a_clean_up_that_fails(work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    finally:
        raise ValueError("a fault while cleaning up")


SHAPES = [
    alone,
    in_a_group,
    in_a_group_that_waits,
    in_a_group_with_a_deadline,
    in_nested_groups,
    with_a_clean_up_that_fails,
]


async def survive(step: Callable[[], Awaitable[None]]) -> None:
    """What the loops of the daemon look like."""
    while True:
        try:
            await step()
        except Exception:
            raise_if_cancelled()
        await asyncio.sleep(0)


@pytest.mark.parametrize("turns", range(STEPS))
@pytest.mark.parametrize("work", [fail_when_cancelled, fail_late, fail_now])
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_cancelled_task_ends(
    shape: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
    work: Callable[[], Awaitable[None]],
    turns: int,
) -> None:
    task = asyncio.ensure_future(survive(lambda: shape(work)))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=10)
    if not done:  # not left behind for ever by a test that failed
        task.cancel()
    assert task.cancelled()


async def test_without_a_cancellation_nothing_happens() -> None:
    raise_if_cancelled()


@pytest.mark.parametrize("shape", [in_a_group, in_a_group_that_waits, in_nested_groups])
async def test_a_group_that_fails_leaves_no_trace_of_a_cancellation(
    shape: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
) -> None:
    async def fail_soon() -> None:
        await asyncio.sleep(0)
        raise ValueError("a fault")

    task = asyncio.current_task()
    assert task is not None
    for work in (fail_now, fail_soon):
        with pytest.raises(ExceptionGroup):
            await shape(work)
        assert not task.cancelling()
        raise_if_cancelled()


@pytest.mark.parametrize("shape", [in_a_group, in_a_group_that_waits])
async def test_a_cancellation_wins_in_the_group_itself(
    shape: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
) -> None:
    task = asyncio.ensure_future(shape(fail_late))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
