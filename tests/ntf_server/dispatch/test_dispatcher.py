"""From a stored notification to the fake push service, over real SQLite and real HTTP/2."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ntf_demo.fake_push.faults import Fault
from ntf_server.clock import SystemClock
from ntf_server.config import PushConfig
from protocol.addresses import SmpServer
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import EntityId
from protocol.statuses import TokenStatus
from store.journal_schema import JournalEvent
from store.records import Stored, SubKey
from tests.ntf_server.dispatch.clock import SimulatedClock
from tests.ntf_server.dispatch.world import Device, World, apns_token, make_world, running
from tests.waiting import DEADLINE, until


async def test_single_notification_reaches_its_device(world: World) -> None:
    device = await world.add_device(queues=1)
    await world.receive(device.queues[0])
    await until(lambda: bool(world.lists(device)))
    ((entry,),) = world.lists(device)
    assert entry.queue.notifier_id == device.queues[0].notifier_id
    assert world.messages(device, [entry]) == world.sent
    await until(lambda: unsent_is(world, 0))
    (event,) = world.journal.of(JournalEvent.PUSH_SENT)
    assert event["token"] == device.token_id
    assert (event["provider"], event["server"], event["count"]) == ("AT", "router.example:5223", 1)


async def unsent_is(world: World, count: int) -> bool:
    return await world.unsent() == count


async def test_burst_to_one_token_is_few_pushes(world: World) -> None:
    device = await world.add_device(queues=5)
    began = world.clock.monotonic()
    for number in range(50):
        await world.receive(device.queues[number % 5])
        await asyncio.sleep(0.015)
    await until(lambda: unsent_is(world, 0))
    pushes = len(world.lists(device))
    assert 2 <= pushes <= 2 + (world.clock.monotonic() - began) / PushConfig().interval
    assert world.messages(device, world.lists(device)[-1]) == world.sent
    assert sum(event["count"] for event in world.journal.of(JournalEvent.PUSH_COALESCED)) >= 50 - 2 * pushes


async def test_no_queue_of_many_is_skipped(world: World) -> None:
    device = await world.add_device(queues=100)
    await world.receive(*device.queues)
    await until(lambda: unsent_is(world, 0))
    lists = world.lists(device)
    assert all(len(entries) <= 6 for entries in lists)
    assert len(lists) <= 20
    assert world.all_messages(device) == world.sent


async def test_without_coalescing_each_notification_has_a_push(tmp_path: Path) -> None:
    config = PushConfig(coalesce=False)
    async with make_world(tmp_path, SystemClock(), config) as world, running(world.dispatcher):
        device = await world.add_device(queues=1)
        for _ in range(7):
            await world.receive(device.queues[0])
        await until(lambda: len(world.lists(device)) == 7)


async def test_verification_confirms_and_carries_the_code(world: World) -> None:
    device = await world.add_device(active=False)
    world.dispatcher.verify(device.key)
    await until(lambda: world.opened(device, "verification") == [device.code])
    await until(lambda: bool(world.journal.of(JournalEvent.TOKEN_CONFIRMED)))
    assert await world.status(device) is TokenStatus.CONFIRMED


async def test_verification_of_an_active_token_changes_nothing(world: World) -> None:
    device = await world.add_device()
    world.dispatcher.verify(device.key)
    await until(lambda: world.opened(device, "verification") == [device.code])
    await world.dispatcher.stop(5.0)
    assert await world.status(device) is TokenStatus.ACTIVE


async def status_is(world: World, device: Device, status: TokenStatus) -> bool:
    return await world.status(device) is status


@pytest.mark.parametrize(
    ("status", "reason", "expected"),
    [
        (400, "BadDeviceToken", TokenStatus.INVALID_BAD),
        (400, "DeviceTokenNotForTopic", TokenStatus.INVALID_TOPIC),
        (410, "ExpiredToken", TokenStatus.INVALID_EXPIRED),
        (410, "Unregistered", TokenStatus.INVALID_UNREGISTERED),
    ],
)
async def test_bad_tokens_become_invalid_and_others_are_not_disturbed(
    world: World, status: int, reason: str, expected: TokenStatus
) -> None:
    bad, good = await world.add_device(queues=1), await world.add_device(queues=1)
    world.fake.add_fault(Fault(status=status, reason=reason, token=bad.name))
    await world.receive(bad.queues[0], good.queues[0])
    await until(lambda: status_is(world, bad, expected))
    await until(lambda: len(world.lists(good)) == 1)
    assert await world.status(good) is TokenStatus.ACTIVE
    await until(lambda: bool(world.journal.of(JournalEvent.TOKEN_INVALID)))
    (event,) = world.journal.of(JournalEvent.TOKEN_INVALID)
    assert event["token"] == bad.token_id


async def test_a_token_replaced_meanwhile_stays_valid(world: World) -> None:
    device = await world.add_device(queues=1)
    world.fake.add_fault(Fault(status=410, reason="Unregistered", token=device.name, delay=0.3))
    await world.receive(device.queues[0])
    await until(lambda: world.fake.requests == 1)
    await world.store.replace_device_token(device.key, apns_token("ab" * 32), b"c" * 32, 0)
    await until(lambda: world.dispatcher.jobs_in_memory == 0 or bool(world.lists(device, 410)))
    await world.dispatcher.stop(5.0)
    assert await world.status(device) is TokenStatus.REGISTERED


async def test_a_limited_token_is_retried_with_the_same_id(slow_world: World, clock: SimulatedClock) -> None:
    world = slow_world
    limited, other = await world.add_device(queues=1), await world.add_device(queues=1)
    world.fake.add_fault(Fault(status=429, reason="TooManyRequests", token=limited.name, count=1))
    await world.receive(limited.queues[0], other.queues[0])
    await until(lambda: len(world.lists(other)) == 1)
    await until(lambda: len(world.lists(limited, 429)) == 1)
    await until(lambda: bool(world.journal.of(JournalEvent.PUSH_RETRIED)))
    clock.advance(60)
    await until(lambda: len(world.lists(limited)) == 1)
    assert len({push.push_id for push in world.fake.pushes if push.token == limited.name}) == 1


async def test_a_newer_notification_joins_the_waiting_retry(slow_world: World, clock: SimulatedClock) -> None:
    world = slow_world
    device = await world.add_device(queues=2)
    world.fake.add_fault(Fault(status=429, reason="TooManyRequests", count=1, retry_after=30))
    await world.receive(device.queues[0])
    await until(lambda: bool(world.journal.of(JournalEvent.PUSH_RETRIED)))
    clock.advance(10)
    await world.receive(device.queues[1])
    clock.advance(60)
    await until(lambda: len(world.lists(device)) == 1)
    assert world.messages(device, world.lists(device)[0]) == world.sent
    assert len({push.push_id for push in world.fake.pushes}) == 2


async def test_retries_end_by_number(slow_world: World, clock: SimulatedClock) -> None:
    world = slow_world
    device = await world.add_device(queues=1)
    world.fake.add_fault(Fault(status=429, reason="TooManyRequests"))
    await world.receive(device.queues[0])
    while not world.journal.of(JournalEvent.PUSH_FAILED):
        tries = len(world.journal.of(JournalEvent.PUSH_RETRIED))
        clock.advance(350)
        await until(lambda tries=tries: len(world.journal.of(JournalEvent.PUSH_RETRIED)) > tries)
    assert world.fake.requests == 8
    (event,) = world.journal.of(JournalEvent.PUSH_FAILED)
    assert (event["error"], event["count"]) == ("retried", 1)
    await until(lambda: unsent_is(world, 0))


async def test_retries_end_by_age_for_old_entries_only(slow_world: World, clock: SimulatedClock) -> None:
    world = slow_world
    device = await world.add_device(queues=2)
    world.fake.add_fault(Fault(status=429, reason="TooManyRequests", count=2, retry_after=600))
    await world.receive(device.queues[0])
    await until(lambda: len(world.journal.of(JournalEvent.PUSH_RETRIED)) == 1)
    clock.advance(3601)
    await world.receive(device.queues[1])
    await until(lambda: len(world.journal.of(JournalEvent.PUSH_FAILED)) == 1)
    clock.advance(1000)
    await until(lambda: unsent_is(world, 0))
    (event,) = world.journal.of(JournalEvent.PUSH_FAILED)
    assert (event["error"], event["count"]) == ("expired", 1)
    assert world.all_messages(device)[device.queues[1].notifier_id]


async def test_a_refused_push_is_given_up_and_the_next_one_goes(
    slow_world: World, clock: SimulatedClock, caplog: pytest.LogCaptureFixture
) -> None:
    world = slow_world
    device = await world.add_device(queues=1)
    world.fake.add_fault(Fault(status=413, reason="PayloadTooLarge", count=1))
    await world.receive(device.queues[0])
    await until(lambda: unsent_is(world, 0))
    assert "PayloadTooLarge" in caplog.text
    assert device.name not in caplog.text
    (event,) = world.journal.of(JournalEvent.PUSH_FAILED)
    assert event["error"] == "refused"
    clock.advance(10)
    await world.receive(device.queues[0])
    await until(lambda: len(world.lists(device)) == 1)


async def test_an_entry_too_long_for_any_push_is_dropped_and_told(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    device = await world.add_device(queues=1)
    await world.add_queue(device, SmpServer(tuple(f"{n}.{'h' * 200}" for n in range(20)), "", b"k" * 32))
    await world.receive(device.queues[1])
    await until(lambda: unsent_is(world, 0))
    assert world.fake.requests == 0
    assert "too long" in caplog.text
    await world.receive(device.queues[0])
    await until(lambda: len(world.lists(device)) == 1)


async def test_a_provider_that_never_ends_is_cut_off(tmp_path: Path, clock: SimulatedClock) -> None:
    async with (
        make_world(
            tmp_path,
            clock,
            PushConfig(response_timeout=0.1),
            call_later=clock.call_later,
            response_timeout=600.0,
        ) as world,
        running(world.dispatcher),
    ):
        world.fake.add_fault(Fault(action="silence", count=1))
        device = await world.add_device(queues=1)
        await world.receive(device.queues[0])
        await until(lambda: bool(world.journal.of(JournalEvent.PUSH_RETRIED)))
        clock.advance(60)
        await until(lambda: len(world.lists(device)) == 1)


async def test_a_provider_that_is_not_set_up_loses_nothing_and_is_named(
    slow_world: World, clock: SimulatedClock, caplog: pytest.LogCaptureFixture
) -> None:
    world = slow_world
    device = await world.add_device(queues=1, token=ApnsToken(Provider.APNS_NULL, b"00"))
    assert world.dispatcher.provider_watch.trouble() == {}
    await world.receive(device.queues[0])
    while not world.dispatcher.provider_watch.trouble():
        tries = len(world.journal.of(JournalEvent.PUSH_RETRIED))
        await until(lambda tries=tries: len(world.journal.of(JournalEvent.PUSH_RETRIED)) > tries)
        clock.advance(60)
    assert world.dispatcher.provider_watch.trouble() == {"AN": "refuses us: provider AN is not set up"}
    assert "provider AN refuses us: provider AN is not set up" in caplog.text
    assert await world.unsent() == 1


async def test_verification_is_not_delayed_by_a_flood(tmp_path: Path) -> None:
    config = PushConfig(concurrency=4)
    async with make_world(tmp_path, SystemClock(), config) as world, running(world.dispatcher):
        world.fake.delay = 0.1
        devices = [await world.add_device(queues=1) for _ in range(100)]
        await world.receive(*(device.queues[0] for device in devices))
        await until(lambda: world.fake.requests >= 4)
        fresh = await world.add_device(active=False)
        world.dispatcher.verify(fresh.key)
        await until(lambda: bool(world.opened(fresh, "verification")))
        assert len(world.fake.pushes) < 50


async def test_unsent_entries_of_an_earlier_run_are_pushed_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ntf_server.push.composing.SWEEP_PAGE", 3)
    async with make_world(tmp_path, SystemClock(), PushConfig()) as world:
        devices = [await world.add_device(queues=2) for _ in range(10)]
        await world.dispatcher.stop(0.0)
        for device in devices:
            await world.receive(*device.queues)
    folder = tmp_path / "again"
    folder.mkdir()
    (tmp_path / "ntf.db").rename(folder / "ntf.db")
    async with make_world(folder, SystemClock(), PushConfig()) as again:
        async with running(again.dispatcher):
            await until(lambda: unsent_is(again, 0))
        assert len(again.fake.pushes) == len(devices)
        assert all(len(again.lists(device)[0]) == 2 for device in devices)


async def test_stop_waits_for_pushes_and_stores_their_outcome(tmp_path: Path) -> None:
    async with make_world(tmp_path, SystemClock()) as world:
        world.fake.delay = 0.2
        device = await world.add_device(queues=1)
        async with running(world.dispatcher):
            await world.receive(device.queues[0])
            await until(lambda: world.fake.requests == 1)
        assert await world.unsent() == 0


async def test_stop_does_not_wait_for_ever(tmp_path: Path) -> None:
    async with make_world(tmp_path, SystemClock(), response_timeout=3600.0) as world:
        world.fake.add_fault(Fault(action="silence"))
        device = await world.add_device(queues=1)
        async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
            tasks.create_task(world.dispatcher.run())
            await world.receive(device.queues[0])
            await until(lambda: world.fake.requests == 1)
            await world.dispatcher.stop(0.1)
        assert await world.unsent() == 1


async def test_a_slow_provider_holds_nobody_up_and_gets_everything_in_the_end(tmp_path: Path) -> None:
    config = PushConfig(queue_size=4, interval=0.0)
    async with make_world(tmp_path, SystemClock(), config) as world, running(world.dispatcher):
        world.fake.delay = 0.2
        devices = [await world.add_device(queues=1) for _ in range(12)]
        await world.receive(*(device.queues[0] for device in devices))
        await until(lambda: world.fake.requests == 4)
        assert world.dispatcher.jobs_in_memory <= 8
        world.fake.delay = 0.0
        await until(lambda: unsent_is(world, 0))


async def test_a_notification_says_where_its_push_goes(tmp_path: Path) -> None:
    """So nobody waits for a look into the store, which a dispatcher that does not run cannot have."""
    async with make_world(tmp_path, SystemClock(), PushConfig(queue_size=2)) as world:
        devices = [await world.add_device(queues=1) for _ in range(3)]
        async with asyncio.timeout(DEADLINE):
            await world.receive(*(device.queues[0] for device in devices))
        assert world.dispatcher.jobs_in_memory == 2
        async with running(world.dispatcher):
            await until(lambda: len(world.fake.pushes) == 3)


async def test_check_messages_holds_nothing_secret(world: World) -> None:
    device = await world.add_device()
    world.dispatcher.check_messages(device.key)
    await until(lambda: bool(world.fake.pushes))
    (push,) = world.fake.pushes
    assert json.loads(push.body)["notificationData"] == {"checkMessages": True}
    await until(lambda: bool(world.journal.of(JournalEvent.CRON_SENT)))


async def test_an_unknown_token_is_no_push(world: World) -> None:
    device = await world.add_device(queues=1)
    await world.store.delete_token(device.key)
    world.dispatcher.verify(device.key)
    stored = Stored(device.key, SubKey(1), device.token_id, EntityId(b"s" * 24), Provider.APNS_TEST)
    await world.dispatcher.notify([stored], 0.0)
    await until(lambda: world.dispatcher.jobs_in_memory == 0)
    assert world.fake.requests == 0
