"""A phone that sleeps: a push tells it of messages, and it reads exactly those."""

from __future__ import annotations

from pathlib import Path

from ntf_demo.demo import Playground
from tests.agent.duplex.world import Person, connect
from tests.agent.notifications.world import (
    fetched,
    message_push,
    phone,
    settle,
    verified,
    watched,
)


async def test_a_push_wakes_the_phone(world: Playground, tmp_path: Path, bob: Person) -> None:
    path, router = tmp_path / "alice.db", world.router.address
    async with phone(path, router) as alice:
        await verified(world, alice.agent.notifications)
        _, his = await connect(alice, bob, pq=False)
        await watched(world, alice)
        await settle(alice)
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
