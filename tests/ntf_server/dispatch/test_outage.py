"""A provider that is down for long, and a store that is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from ntf_demo.fake_push.faults import REFUSED_STREAM, Fault
from ntf_server.clock import SystemClock
from ntf_server.push.lanes import JITTER, LONGEST_PAUSE
from store.journal_schema import JournalEvent
from tests.ntf_server.dispatch.clock import SimulatedClock
from tests.ntf_server.dispatch.world import World, make_world, running
from tests.waiting import until

DEVICES, QUEUES = 500, 2
BLOCKS, BLOCK = 100, 100
OUTAGE = 600.0
MEMORY_LIMIT = 2 * BLOCK
"Jobs: those of a block may just be on their way through."


async def unsent_is(world: World, count: int) -> bool:
    return await world.unsent() == count


async def deliver_all(world: World, clock: SimulatedClock) -> None:
    """Let time pass until nothing is unsent."""

    async def step() -> bool:
        clock.advance(1.0)
        return await world.unsent() == 0

    await until(step)


async def test_ten_minutes_without_the_provider(slow_world: World, clock: SimulatedClock) -> None:
    world = slow_world
    devices = await asyncio.gather(*(world.add_device(queues=QUEUES) for _ in range(DEVICES)))
    queues = [queue for device in devices for queue in device.queues]
    world.fake.add_fault(Fault(status=503, reason="ServiceUnavailable"))
    most = 0
    for block in range(BLOCKS):
        start = block * BLOCK % len(queues)
        await world.receive(*queues[start : start + BLOCK])
        clock.advance(OUTAGE / BLOCKS)
        await asyncio.sleep(0.005)
        if block > 5:
            most = max(most, world.dispatcher.jobs_in_memory)
    assert most <= MEMORY_LIMIT
    requests = world.fake.requests
    assert requests < 5 * BLOCK  # a few before the breaker opened, then probes only
    assert await world.unsent() == len(queues)
    world.fake.clear_faults()
    await deliver_all(world, clock)
    for device in devices:
        assert world.all_messages(device) == {q.notifier_id: world.sent[q.notifier_id] for q in device.queues}
    # One push per device was enough, as each has few queues.
    assert world.fake.requests - requests <= DEVICES + 10
    (down,) = world.journal.of(JournalEvent.PROVIDER_DOWN)
    (up,) = world.journal.of(JournalEvent.PROVIDER_UP)
    assert (down["provider"], down["error"], up["provider"]) == ("AT", "down", "AT")
    assert 0.8 * OUTAGE <= up["latency_us"] / 1e6 <= OUTAGE + LONGEST_PAUSE * (1 + JITTER)
    assert (
        0.9 * BLOCKS * BLOCK <= up["count"] <= BLOCKS * BLOCK
    )  # what came before the breaker opened waited too


@pytest.mark.parametrize(
    ("status", "reason"),
    [(403, "InvalidProviderToken"), (403, "ExpiredProviderToken"), (400, "TopicDisallowed"), (403, "New")],
)
async def test_a_provider_that_refuses_us_loses_nothing(
    slow_world: World, clock: SimulatedClock, caplog: pytest.LogCaptureFixture, status: int, reason: str
) -> None:
    """Not even what is old: whatever the reason, the devices have not caused it."""
    world = slow_world
    devices = await asyncio.gather(*(world.add_device(queues=2) for _ in range(20)))
    world.fake.add_fault(Fault(status=status, reason=reason))
    for _ in range(10):
        for device in devices:
            await world.receive(*device.queues)
        clock.advance(1000)
        await asyncio.sleep(0.02)
    await until(lambda: "refuses us" in caplog.text)
    assert f"{status} {reason}: check [APNS] key_file" in caplog.text
    assert caplog.text.count("read again by itself\n") == 1  # the others are reminders
    assert world.fake.requests < 200
    world.fake.clear_faults()
    await deliver_all(world, clock)
    assert world.journal.of(JournalEvent.PUSH_FAILED) == []
    for device in devices:
        assert world.all_messages(device) == {q.notifier_id: world.sent[q.notifier_id] for q in device.queues}


async def test_verifications_wait_for_the_end_of_an_outage(
    slow_world: World, clock: SimulatedClock, caplog: pytest.LogCaptureFixture
) -> None:
    world = slow_world
    devices = [await world.add_device(active=False) for _ in range(20)]
    world.fake.add_fault(Fault(status=503, reason="ServiceUnavailable"))
    for device in devices:
        world.dispatcher.verify(device.key)
    await until(lambda: "is down" in caplog.text)
    world.fake.clear_faults()

    async def all_verified() -> bool:
        clock.advance(5)
        return all(world.opened(device, "verification") == [device.code] for device in devices)

    await until(all_verified)


FAULTS = [
    Fault(status=500, reason="InternalServerError", count=7),
    Fault(status=503, count=2),
    Fault(status=429, reason="TooManyRequests", count=7, split=True),
    Fault(action="reset", count=7),
    Fault(action="reset", error_code=REFUSED_STREAM, count=7),
    Fault(action="drop", count=2),
    Fault(action="goaway", count=2),
    Fault(action="goaway", count=2, close=True, processed=True),
    Fault(action="silence", count=7),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.action}-{fault.status}-{fault.count}")
async def test_faults_neither_lose_nor_repeat(tmp_path: Path, clock: SimulatedClock, fault: Fault) -> None:
    async with (
        make_world(tmp_path, clock, call_later=clock.call_later, response_timeout=1.0) as world,
        running(world.dispatcher),
    ):
        devices = await asyncio.gather(*(world.add_device(queues=1) for _ in range(30)))
        world.fake.add_fault(replace(fault))
        await world.receive(*(device.queues[0] for device in devices))
        await deliver_all(world, clock)
        times = [len(world.lists(device)) for device in devices]
        # With a connection, the answers to other pushes on it are lost: those come again, under the same id.
        assert all(count >= 1 if fault.action == "drop" else count == 1 for count in times)
        assert len({push.push_id for push in world.fake.pushes}) == len(devices)
        assert world.journal.of(JournalEvent.PUSH_FAILED) == []


async def test_a_store_that_is_full_delays_marks_but_repeats_no_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ntf_server.push.composing.STORE_PAUSE", 0.01)
    async with make_world(tmp_path, SystemClock()) as world:
        world.faults.break_down("set_sent")
        device = await world.add_device(queues=1)
        async with running(world.dispatcher):
            await world.receive(device.queues[0])
            await until(lambda: world.faults.failures["set_sent"] >= 3)
            world.faults.repair("set_sent")
            await until(lambda: unsent_is(world, 0))
        assert world.fake.requests == 1


async def test_stop_ends_even_if_the_store_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntf_server.push.composing.STORE_PAUSE", 0.01)
    async with make_world(tmp_path, SystemClock()) as world:
        world.faults.break_down("set_sent")
        device = await world.add_device(queues=1)
        async with asyncio.timeout(60), running(world.dispatcher):
            await world.receive(device.queues[0])
            await until(lambda: world.faults.failures["set_sent"] >= 1)
        assert await world.unsent() == 1
