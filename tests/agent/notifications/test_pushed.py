"""A phone that sleeps: a push tells it of messages, and it reads exactly those."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent.duplex.events import (
    Confirmed,
    Connected,
    ContactRequested,
    Failed,
    Fetched,
    MessageReceived,
    SwitchProgress,
)
from ntf_demo.demo import Playground
from ntf_demo.fake_push.recorder import RecordedPush
from smp_router.router import Router
from tests.agent.duplex.world import Person, connect
from tests.agent.notifications.world import (
    fetched,
    message_push,
    phone,
    settle,
    until,
    verified,
    watched,
)
from tests.agent.proxy import lossy_proxy

ALL_QUEUES = '{"checkMessages":true}'


async def meet(world: Playground, path: Path, bob: Person, *others: Router) -> int:
    """Alice's phone is registered, knows Bob, and sleeps; Bob's id of the connection."""
    async with phone(path, world.router.address, *(router.address for router in others)) as alice:
        hers, link = await alice.agent.create_invitation(server=world.router.address, pq=False)
        his = await bob.agent.join(link, b"Bob", pq=False)
        await alice.event(Confirmed)
        await alice.agent.allow(hers, b"Alice")
        await alice.event(Connected)
        await bob.event(Connected)
        await verified(world, alice.agent.notifications)
        await watched(world, alice)
        await settle(alice)
    return his


async def test_exactly_the_new_messages(world: Playground, tmp_path: Path, bob: Person) -> None:
    path, router = tmp_path / "alice.db", world.router.address
    his = await meet(world, path, bob)
    before = len(world.accepted())
    async with phone(path, router, asleep=True) as alice:
        await bob.agent.send(his, b"one")
        first = await message_push(world, before)
        await alice.agent.notifications.on_push(first.body)
        assert await fetched(alice) == [b"one"]
        before = len(world.accepted())
        for body in (b"two", b"three", b"four"):
            await bob.agent.send(his, body)
        await settle(bob)
        await alice.agent.notifications.on_push((await message_push(world, before)).body)
        assert await fetched(alice) == [b"two", b"three", b"four"]
        assert await alice.agent.notifications.on_push(first.body) != []  # its last entry is never left out
        assert await fetched(alice) == []


async def test_every_message_costs_one_get_and_one_ack(
    world: Playground, tmp_path: Path, bob: Person
) -> None:
    async with lossy_proxy(world.router.address) as proxy:
        path, router = tmp_path / "alice.db", proxy.in_front_of(world.router.address)
        async with phone(path, router) as alice:
            _, his = await connect(alice, bob, pq=False)
            await settle(alice)
        for body in (b"one", b"two"):
            await bob.agent.send(his, body)
        await settle(bob)
        async with phone(path, router, asleep=True) as alice:
            before = proxy.commands
            await alice.agent.notifications.on_push(ALL_QUEUES)
            assert await fetched(alice) == [b"one", b"two"]
            assert proxy.commands - before == len(["GET", "ACK", "GET", "ACK", "GET"])


async def test_queues_that_a_push_does_not_name_are_left_alone(
    world: Playground, tmp_path: Path, bob: Person
) -> None:
    path, router = tmp_path / "alice.db", world.router.address
    async with phone(path, router) as alice:
        quiet, to_quiet = await connect(alice, bob, pq=False)
        noisy, to_noisy = await connect(alice, bob, pq=False)
        await alice.agent.notifications.set_wanted(quiet, False)
        await verified(world, alice.agent.notifications)
        await watched(world, alice)
        await settle(alice)
    before = len(world.accepted())
    await bob.agent.send(to_quiet, b"unheard")
    await settle(bob)
    await bob.agent.send(to_noisy, b"heard")
    push = await message_push(world, before)
    async with phone(path, router, asleep=True) as alice:
        assert await alice.agent.notifications.on_push(push.body) == [noisy]
        assert await fetched(alice) == [b"heard"]
        assert [len(queue.messages) for queue in world.router.state.queues if queue.messages] == [1]


async def test_somebody_joins_while_the_phone_sleeps(world: Playground, tmp_path: Path, bob: Person) -> None:
    path, router = tmp_path / "alice.db", world.router.address
    async with phone(path, router, asleep=True) as alice:
        await verified(world, alice.agent.notifications)
        hers, link = await alice.agent.create_invitation(pq=False)
        _, address = await alice.agent.create_address()
        await watched(world, alice, 2)
        before = len(world.accepted())
        await bob.agent.join(link, b"Bob", pq=False)
        await alice.agent.notifications.on_push((await message_push(world, before)).body)
        await alice.event(Confirmed)
        await alice.agent.allow(hers, b"Alice")
        await alice.event(Connected)
        await bob.event(Connected)
        await alice.event(Fetched)
        before = len(world.accepted())
        await bob.agent.join(address, b"Bob again", pq=False)
        await alice.agent.notifications.on_push((await message_push(world, before)).body)
        assert (await alice.event(ContactRequested)).info == b"Bob again"
        await alice.event(Fetched)
        assert not [event for event in alice.unseen if isinstance(event, Failed)]
        assert not [queue for queue in world.router.state.queues if queue.messages]


async def test_one_that_is_awake_reads_nothing_twice(world: Playground, bob: Person, alice: Person) -> None:
    """Its messages come by themselves; a queue that is subscribed must not be asked with GET."""
    await verified(world, alice.agent.notifications)
    hers, his = await connect(alice, bob, pq=False)
    await watched(world, alice)
    before = len(world.accepted())
    await bob.agent.send(his, b"hello")
    push = await message_push(world, before)
    assert await alice.agent.notifications.on_push(push.body) == []
    assert [info.connection_id for info in await alice.agent.notifications.announced(push.body)] == [hers]
    assert (await alice.reads()).body == b"hello"
    await settle(alice)
    assert not [event for event in alice.unseen + alice.agent.unread() if isinstance(event, Failed | Fetched)]


async def test_router_that_is_away_is_asked_when_it_is_back(
    world: Playground, tmp_path: Path, bob: Person
) -> None:
    path, router = tmp_path / "alice.db", world.router.address
    his = await meet(world, path, bob)
    before = len(world.accepted())
    await bob.agent.send(his, b"patience")
    push = await message_push(world, before)
    async with phone(path, router, asleep=True) as alice:
        world.router.faults.refuse()
        world.router.faults.drop_connections()
        await alice.agent.notifications.on_push(push.body)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await alice.agent.next_event()
        world.router.faults.refuse(False)
        assert await fetched(alice) == [b"patience"]


async def test_deleted_connection_is_not_waited_for(world: Playground, tmp_path: Path, bob: Person) -> None:
    path, router = tmp_path / "alice.db", world.router.address
    his = await meet(world, path, bob)
    before = len(world.accepted())
    await bob.agent.send(his, b"good-bye")
    push = await message_push(world, before)
    async with phone(path, router, asleep=True) as alice:
        (connection,) = await alice.agent.notifications.on_push(push.body)
        await alice.event(MessageReceived)
        await alice.agent.delete(connection)  # instead of an ACK
        await alice.event(Fetched)


async def test_rotation_goes_on_while_the_phone_sleeps(world: Playground, tmp_path: Path) -> None:
    """What no push tells of is read with what one tells of, from the queue that goes and from the new one."""
    async with Router.start() as other:
        hers, his = tmp_path / "alice.db", tmp_path / "bob.db"
        servers = world.router.address, other.address
        async with phone(his, *servers) as bob:
            number = await meet(world, hers, bob, other)
            (old_queue,) = [queue for queue in world.router.state.queues if queue.notifier is not None]
            async with phone(hers, *servers, asleep=True) as alice:
                (connection,) = await alice.agent.connections()
                await alice.agent.switch(connection.connection_id)
                await watched_at(other, alice)
            await bob.event(SwitchProgress, lambda event: event.phase == "confirmed")
            push = await sent(world, bob, number, b"one")
        assert await read(world, hers, push) == [b"one"]
        async with phone(his, *servers, asleep=True) as bob:
            await bob.agent.send(number, b"quietly", notification=False)  # knows of the old queue only
            await settle(bob)
        async with phone(his, *servers) as bob:
            await bob.event(SwitchProgress, lambda event: event.phase == "completed")
            push = await sent(world, bob, number, b"two")
            assert sorted(await read(world, hers, push)) == [b"quietly", b"two"]
        assert world.router.state.queues.by_recipient(old_queue.recipient_id) is None


async def sent(world: Playground, bob: Person, connection_id: int, body: bytes) -> RecordedPush:
    """The push that tells of it."""
    before = len(world.accepted())
    await bob.agent.send(connection_id, body)
    return await message_push(world, before)


async def read(world: Playground, path: Path, push: RecordedPush) -> list[bytes]:
    async with phone(path, world.router.address, asleep=True) as alice:
        await alice.agent.notifications.on_push(push.body)
        bodies = await fetched(alice)
        await settle(alice)
    return bodies


async def watched_at(router: Router, person: Person) -> None:
    """One of the person's queues is at this router, and the notification server knows it."""

    async def is_watched() -> bool:
        rows = await person.agent.notifications.subscriptions()
        return bool({row.notifier_id for row in rows} & router.subscribed_notifiers())

    await until(is_watched)


async def test_rotation_moves_the_notifier(world: Playground, tmp_path: Path, bob: Person) -> None:
    async with Router.start() as other:
        path, router = tmp_path / "alice.db", world.router.address
        his = await meet(world, path, bob, other)
        (old_queue,) = [queue for queue in world.router.state.queues if queue.notifier is not None]
        async with phone(path, router, other.address) as alice:
            (connection,) = await alice.agent.connections()
            await alice.agent.switch(connection.connection_id)
            await alice.event(SwitchProgress, lambda event: event.phase == "completed")
            await settle(alice)
            assert world.router.state.queues.by_recipient(old_queue.recipient_id) is None

            async def moved() -> bool:
                rows = await alice.agent.notifications.subscriptions()
                return {row.notifier_id for row in rows} == other.subscribed_notifiers()

            await until(moved)
            assert len(await alice.agent.notifications.subscriptions()) == 1
        before = len(world.accepted())
        await bob.agent.send(his, b"to the new router")
        push = await message_push(world, before)
        async with phone(path, router, other.address, asleep=True) as alice:
            await alice.agent.notifications.on_push(push.body)
            assert await fetched(alice) == [b"to the new router"]
