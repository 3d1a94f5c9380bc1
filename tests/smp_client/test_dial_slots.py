"""Who may dial, and that nobody is forgotten."""

from __future__ import annotations

import asyncio
import random

import pytest

from smp_client.dialer import DialSlots
from transport.cancellation import TaskGroup


class Dials:
    """Who holds a slot now."""

    def __init__(self, slots: DialSlots) -> None:
        self.slots = slots
        self.under_way: list[str] = []
        self.ended: list[str] = []

    async def dial(self, owner: str, turns: int = 3) -> None:
        async with self.slots.slot(owner):
            self.under_way.append(owner)
            try:
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                self.under_way.remove(owner)
            self.ended.append(owner)


async def test_one_owner_leaves_room_for_others() -> None:
    dials = Dials(DialSlots(4, 2))
    async with TaskGroup() as tasks:
        for _ in range(10):
            tasks.create_task(dials.dial("greedy", 10))
        tasks.create_task(dials.dial("modest", 10))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sorted(dials.under_way) == ["greedy", "greedy", "modest"]
    assert len(dials.ended) == 11


@pytest.mark.parametrize("seed", range(20))
async def test_slots_are_never_lost_nor_exceeded(seed: int) -> None:
    chance = random.Random(seed)
    dials = Dials(DialSlots(3, 2))
    tasks = [asyncio.ensure_future(dials.dial(chance.choice("abc"), chance.randrange(4))) for _ in range(60)]
    while not all(task.done() for task in tasks):
        assert len(dials.under_way) <= 3
        chance.choice(tasks).cancel()
        await asyncio.sleep(0)
    async with asyncio.timeout(60):  # all slots are free again
        await asyncio.gather(*(dials.dial(owner) for owner in "aabbcc"))
    assert dials.slots._used.total() == 0
    assert not dials.slots._waiting


async def test_who_gave_up_just_now_is_passed_over() -> None:
    """Cancelled, and not yet resumed when a slot becomes free."""
    slots = DialSlots(1, 1)

    async def take(owner: str) -> str:
        async with slots.slot(owner):
            return owner

    async with slots.slot("first"):
        gives_up, waits = asyncio.ensure_future(take("gives up")), asyncio.ensure_future(take("waits"))
        await asyncio.sleep(0)
        gives_up.cancel()
    assert await waits == "waits"
    with pytest.raises(asyncio.CancelledError):
        await gives_up
    assert await take("later") == "later"
