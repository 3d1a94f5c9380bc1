"""Old tokens go, with their queues; others stay."""

from __future__ import annotations

from collections.abc import Sequence

from ntf_server.clock import SECONDS_PER_DAY, day
from ntf_server.housekeeping import Housekeeping, HousekeepingConfig
from protocol.addresses import SmpServer
from protocol.statuses import TokenStatus
from store.records import LiveQueue, QueueRow, ServerKey
from tests.ntf_server.dispatch.clock import SimulatedClock
from tests.ntf_server.dispatch.world import Device, World


class Forgotten:
    """A subscriber that notes what it is to forget."""

    def __init__(self) -> None:
        self.queues: list[LiveQueue] = []

    def subscribe(self, server_key: ServerKey, server: SmpServer, queue: QueueRow) -> None: ...

    def forget(self, queues: Sequence[LiveQueue]) -> None:
        self.queues += queues


async def exists(world: World, device: Device) -> bool:
    return bool(await world.store.tokens_by_key([device.key]))


async def test_purges_what_is_old(slow_world: World, clock: SimulatedClock) -> None:
    world, subscriber = slow_world, Forgotten()
    today = day(clock.now())
    dead, active, unverified = (
        await world.add_device(queues=1),
        await world.add_device(queues=1),
        await world.add_device(active=False),
    )
    await world.store.set_token_status(dead.key, TokenStatus.INVALID_BAD, updated_on=today)
    housekeeping = Housekeeping(world.store, subscriber, clock)
    await housekeeping.purge()
    assert not await exists(world, unverified)  # its day is long ago
    assert await exists(world, dead)
    clock.advance(31 * SECONDS_PER_DAY)
    await housekeeping.purge()
    assert not await exists(world, dead)
    assert await exists(world, active)
    assert [queue.notifier_id for queue in subscriber.queues] == [dead.queues[0].notifier_id]


async def test_zero_days_keep_for_ever(slow_world: World, clock: SimulatedClock) -> None:
    world, subscriber = slow_world, Forgotten()
    device = await world.add_device(active=False)
    config = HousekeepingConfig(unverified_days=0, invalid_days=0)
    clock.advance(1000 * SECONDS_PER_DAY)
    await Housekeeping(world.store, subscriber, clock, config).purge()
    assert await exists(world, device)
