"""Old tokens go, with their queues; others stay."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from ntf_server.clock import SECONDS_PER_DAY, SystemClock
from ntf_server.config import StoreConfig
from ntf_server.housekeeping import Deletions, Housekeeping
from protocol.addresses import SmpServer
from protocol.errors import ErrorType
from protocol.statuses import TokenInput
from store.interface import LeaseLost
from store.journal_schema import DeletionReason, JournalEvent
from store.records import DeletedSubscription, QueueRow, ServerKey
from store.rows import DELETED_PAGE
from tests.faults import StoreFaults, with_faults
from tests.ntf_server.dispatch.clock import SimulatedClock
from tests.ntf_server.dispatch.world import Device, World, make_world
from tests.store.builders import look_and_move, new_subscription
from tests.waiting import until


class Forgotten:
    """A subscriber that notes what it is to forget."""

    def __init__(self) -> None:
        self.queues: list[DeletedSubscription] = []

    def admission(
        self, servers: Collection[SmpServer], client: str
    ) -> AbstractContextManager[Mapping[SmpServer, ErrorType]]:
        return nullcontext({})

    def subscribe(self, server_key: ServerKey, server: SmpServer, queue: QueueRow) -> None: ...

    def forget(self, queues: Sequence[DeletedSubscription]) -> None:
        self.queues += queues


async def exists(world: World, device: Device) -> bool:
    return bool(await world.store.tokens_by_key([device.key]))


async def test_purges_what_is_old(slow_world: World, clock: SimulatedClock) -> None:
    world, subscriber = slow_world, Forgotten()
    dead, active, unverified = (
        await world.add_device(queues=1),
        await world.add_device(queues=1),
        await world.add_device(active=False),
    )
    await look_and_move(world.store, dead.key, TokenInput.CALLED_BAD, int(clock.now()))
    deletions = Deletions(subscriber, world.journal)
    housekeeping = Housekeeping(world.store, deletions, clock, StoreConfig())
    await housekeeping.purge()
    assert not await exists(world, unverified)  # its day is long ago
    assert await exists(world, dead)
    clock.advance(31 * SECONDS_PER_DAY)
    await housekeeping.purge()
    assert not await exists(world, dead)
    assert await exists(world, active)
    assert [queue.notifier_id for queue in subscriber.queues] == [dead.queues[0].notifier_id]
    first, second = world.journal.of(JournalEvent.TOKEN_DELETED)
    assert (first["token"], first["count"]) == (unverified.token_id, 0)
    assert (second["token"], second["count"]) == (dead.token_id, 1)
    assert first["error"] == second["error"] == DeletionReason.PURGED


async def test_zero_days_keep_for_ever(slow_world: World, clock: SimulatedClock) -> None:
    world = slow_world
    device = await world.add_device(active=False)
    config = StoreConfig(unverified_token_days=0, invalid_token_days=0)
    clock.advance(1000 * SECONDS_PER_DAY)
    await Housekeeping(world.store, Deletions(Forgotten(), world.journal), clock, config).purge()
    assert await exists(world, device)


async def test_what_deletions_leave_behind_goes_soon(tmp_path: Path) -> None:
    async with make_world(tmp_path, SystemClock()) as world:
        device = await world.add_device()
        await world.store.create_subscriptions(
            [new_subscription(device.key) for _ in range(3 * DELETED_PAGE)]
        )
        subscriber = Forgotten()
        deletions = Deletions(subscriber, world.journal)
        running = asyncio.ensure_future(
            Housekeeping(world.store, deletions, SystemClock(), StoreConfig()).run()
        )
        await asyncio.sleep(0)
        deletion = await world.store.delete_token(device.key)
        assert deletion is not None
        deletions.note(deletion, DeletionReason.REQUESTED)

        async def is_empty() -> bool:
            return (await world.store.counts()).subscriptions == 0

        await until(is_empty)
        await until(lambda: len(subscriber.queues) >= 3 * DELETED_PAGE)  # it hears of the commit later
        running.cancel()
        await asyncio.wait([running])
        assert len(subscriber.queues) == 3 * DELETED_PAGE
        (deleted,) = world.journal.of(JournalEvent.TOKEN_DELETED)
        assert (deleted["count"], deleted["error"]) == (3 * DELETED_PAGE, DeletionReason.REQUESTED)


async def test_chores_that_another_daemon_does_by_now_are_left_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_world(tmp_path, SystemClock()) as world:
        faults = StoreFaults()
        faults.fail("purge_tokens", LeaseLost("another daemon owns it by now"))
        deletions = Deletions(Forgotten(), world.journal)
        store = with_faults(world.store, faults)
        running = asyncio.ensure_future(Housekeeping(store, deletions, SystemClock(), StoreConfig()).run())

        async def was_refused() -> bool:
            return faults.failures["purge_tokens"] == 1

        await until(was_refused)
        deletions.more.set()  # it goes on, and ends the next round

        async def went_on() -> bool:
            return not deletions.more.is_set()

        await until(went_on)
        assert not running.done()
        running.cancel()
        await asyncio.wait([running])
    assert "housekeeping" not in caplog.text
