"""One time limit for many tasks."""

from __future__ import annotations

import asyncio

import pytest

from ntf_server.push.dispatcher import TimeLimit
from transport.cancellation import TaskGroup

SOON = 0.02
NEVER = 60.0


async def wait(limit: TimeLimit, event: asyncio.Event) -> str:
    try:
        with limit:
            await event.wait()
    except TimeoutError:
        return "cut off"
    return "ended"


async def test_who_takes_too_long_is_cut_off_and_others_are_not() -> None:
    limit, hangs, ends = TimeLimit(SOON), asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(NEVER), TaskGroup() as tasks:
        first = tasks.create_task(wait(limit, hangs))
        quick = tasks.create_task(wait(limit, ends))
        second = tasks.create_task(wait(limit, hangs))
        await asyncio.sleep(0)
        ends.set()
        assert await quick == "ended"
        assert [await first, await second] == ["cut off", "cut off"]
        assert await asyncio.create_task(wait(limit, ends)) == "ended"


async def test_who_comes_later_has_as_much_time() -> None:
    limit, hangs = TimeLimit(SOON), asyncio.Event()
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(NEVER), TaskGroup() as tasks:
        first = tasks.create_task(wait(limit, hangs))
        await asyncio.sleep(SOON / 2)
        started = loop.time()
        later = tasks.create_task(wait(limit, hangs))
        assert await first == "cut off"
        assert await later == "cut off"
        assert loop.time() - started >= SOON


async def test_a_task_that_was_cut_off_goes_on_uncancelled() -> None:
    with pytest.raises(TimeoutError), TimeLimit(0.0):
        await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_cancellation_from_outside_stays_one() -> None:
    limit = TimeLimit(NEVER)
    task = asyncio.create_task(wait(limit, asyncio.Event()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cut_off_and_cancelled_at_once_is_cancelled() -> None:
    limit = TimeLimit(0.0)
    task = asyncio.create_task(wait(limit, asyncio.Event()))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(task.cancel)  # in the same turn as the limit's timer
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_is_told_as_it_is() -> None:
    with pytest.raises(KeyError), TimeLimit(NEVER):
        raise KeyError
