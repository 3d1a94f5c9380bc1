"""TCRN: devices are woken at their intervals, not all at once."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ntf_server.periodic import SHARED_PAUSE, Periodic, first_due, next_due
from store.records import TokenKey
from tests.ntf_server.dispatch.clock import START, SimulatedClock
from tests.ntf_server.dispatch.world import Device, World
from tests.waiting import until

MINUTE = 60.0


@asynccontextmanager
async def periodic(task: Periodic) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(task.run())
        yield
        running.cancel()


class Woken:
    """A sink that only notes which tokens came."""

    def __init__(self) -> None:
        self.keys: list[TokenKey] = []

    def check_messages(self, token_key: TokenKey) -> None:
        self.keys.append(token_key)


def checks(world: World, device: Device) -> int:
    return sum("checkMessages" in push.body for push in world.fake.pushes if push.token == device.name)


async def pass_time(clock: SimulatedClock, seconds: float) -> None:
    """Let the one who sleeps wake up if it is time, and wait until it sleeps again."""
    clock.advance(seconds)
    for _ in range(3):  # turns of the loop that a sleeper needs to wake up
        await asyncio.sleep(0)
    await until(lambda: clock.sleepers == 1)


async def minutes_pass(clock: SimulatedClock, minutes: int) -> None:
    for _ in range(minutes):
        await pass_time(clock, MINUTE)


async def test_first_and_further_periodic_pushes(slow_world: World, clock: SimulatedClock) -> None:
    world = slow_world
    device, other = await world.add_device(), await world.add_device()
    await world.store.set_cron(device.key, 20, first_due(clock.now(), 20, os.urandom))
    task = Periodic(world.store, world.dispatcher, clock, os.urandom, sleep=clock.sleep)
    async with periodic(task):
        for expected in (1, 2, 3):
            due = await world.store.next_cron_due()
            assert due is not None
            assert due <= clock.now() + 21 * MINUTE
            await minutes_pass(clock, math.ceil((due - clock.now()) / MINUTE) - 1)  # it is not due yet
            assert checks(world, device) == expected - 1
            await minutes_pass(clock, 6)  # the rest of its minute, and one pause at most
            await until(lambda expected=expected: checks(world, device) == expected)
    assert checks(world, other) == 0


async def test_a_token_that_is_not_active_is_not_woken(slow_world: World, clock: SimulatedClock) -> None:
    device = await slow_world.add_device(active=False)
    await slow_world.store.set_cron(device.key, 20, int(clock.now()))
    woken = Woken()
    async with periodic(Periodic(slow_world.store, woken, clock, os.urandom, sleep=clock.sleep)):
        await minutes_pass(clock, 60)
    assert woken.keys == []


async def test_what_is_overdue_does_not_come_in_one_burst(
    slow_world: World, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = slow_world
    devices = await asyncio.gather(*(world.add_device() for _ in range(25)))
    for device in devices:
        await world.store.set_cron(device.key, 20, int(clock.now()) - 1000)
    woken = Woken()
    monkeypatch.setattr("ntf_server.periodic.BATCH", 10)
    monkeypatch.setattr("ntf_server.periodic.PER_SECOND", 10.0)
    async with periodic(Periodic(world.store, woken, clock, os.urandom, sleep=clock.sleep)):
        await until(lambda: clock.sleepers == 1)
        for expected in (10, 20, 25):
            assert len(woken.keys) == expected
            await pass_time(clock, 1.0)
    assert sorted(woken.keys) == sorted(device.key for device in devices)


def test_first_pushes_are_spread_over_the_interval() -> None:
    dues = {first_due(START, 20, os.urandom) for _ in range(200)}
    assert min(dues) >= START + 10 * MINUTE - 1
    assert max(dues) <= START + 20 * MINUTE
    assert len(dues) > 100


def test_next_push_is_never_early() -> None:
    dues = {next_due(START, 20, os.urandom) for _ in range(200)}
    assert min(dues) >= START + 20 * MINUTE
    assert max(dues) <= START + 21 * MINUTE
    assert len(dues) > 20


async def test_tokens_that_another_daemon_left_are_found_soon(
    slow_world: World, clock: SimulatedClock
) -> None:
    """There was nothing to wait for when it last looked."""
    device = await slow_world.add_device()
    woken = Woken()
    task = Periodic(slow_world.store, woken, clock, os.urandom, is_shared=True, sleep=clock.sleep)
    async with periodic(task):
        await until(lambda: clock.sleepers == 1)
        await slow_world.store.set_cron(device.key, 20, int(clock.now()))
        await pass_time(clock, SHARED_PAUSE)
        assert woken.keys == [device.key]
