"""One message on its whole way, over real TLS and HTTP/2, with a real file under each store."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

from agent.notifications.records import Mode, SubAction
from ntf_demo.demo import playground
from protocol.statuses import TokenStatus
from tests.agent.duplex.world import connect, person
from tests.agent.notifications.world import (
    DEVICE,
    fetched,
    message_push,
    phone,
    settle,
    verified,
    watched,
)


async def test_message_wakes_the_phone_that_then_reads_it(tmp_path: Path, postgres_url: str) -> None:
    async with (
        playground(tmp_path / "servers", postgres_url=postgres_url) as world,
        person(tmp_path / "bob.db", world.router.address) as bob,
    ):
        path, router = tmp_path / "alice.db", world.router.address
        async with phone(path, router) as alice:
            hers, his = await connect(alice, bob)
            await alice.agent.send(hers, b"write when you are there")
            assert (await bob.reads()).body == b"write when you are there"
            assert await verified(world, alice.agent.notifications) is TokenStatus.ACTIVE
            await watched(world, alice)
        before = len(world.accepted())
        await bob.agent.send(his, b"hello, Alice")
        push = await message_push(world, before)
        assert push.token == DEVICE.token.decode()
        assert "hello" not in push.body
        data = json.loads(push.body)["notificationData"]
        async with phone(path, router, asleep=True) as alice:
            (info,) = await alice.agent.notifications.announced(data)
            assert await alice.agent.notifications.on_push(data) == [info.connection_id] == [hers]
            assert await fetched(alice) == [b"hello, Alice"]
            await settle(alice)
            assert not [queue for queue in world.router.state.queues if queue.messages]
            (row,) = await alice.agent.notifications.subscriptions()
            assert row.action is SubAction.NTF_CHECK


async def test_periodic_device_is_woken_without_a_word_about_queues(tmp_path: Path) -> None:
    async with (
        playground(tmp_path / "servers") as world,
        person(tmp_path / "bob.db", world.router.address) as bob,
    ):
        path, router = tmp_path / "alice.db", world.router.address
        async with phone(path, router) as alice:
            await verified(world, alice.agent.notifications, Mode.PERIODIC)
            hers, his = await connect(alice, bob, pq=False)
            await settle(alice)
            assert await alice.agent.notifications.subscriptions() == []
        await bob.agent.send(his, b"no hurry")
        await settle(bob)
        async with phone(path, router, asleep=True) as alice:
            assert await alice.agent.notifications.on_push('{"checkMessages":true}') == [hers]
            assert await fetched(alice) == [b"no hurry"]


def test_state_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    async def make() -> list[Path]:
        async with phone(tmp_path / "alice" / "agent.db") as alice:
            await settle(alice)
            return list((tmp_path / "alice").iterdir())

    files = asyncio.run(make())
    assert files
    for path in files:
        if path.exists():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
    assert stat.S_IMODE((tmp_path / "alice").stat().st_mode) == 0o700
