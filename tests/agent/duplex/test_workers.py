"""Tasks that wait between attempts, and those who hurry them."""

from __future__ import annotations

import asyncio

from agent.duplex.workers import Wait, Workers
from tests.agent.duplex.world import DEADLINE
from transport.cancellation import TaskGroup

FOR_EVER = 1e6


async def test_a_hurry_that_comes_before_the_wait_counts() -> None:
    """As when a queue has room again before its worker has stored that it was full."""
    attempts = 0

    async def step(key: int, wait: Wait) -> bool:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            workers.wake(key, hurry=True)
            await wait.sleep(FOR_EVER)
        return attempts < 2

    async with asyncio.timeout(DEADLINE), TaskGroup() as tasks:
        workers: Workers[int] = Workers("attempts", tasks, step)
        workers.wake(1)
        await workers.idle.wait()
    assert attempts >= 2
