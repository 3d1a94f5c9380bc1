"""One message on its whole way, over real TLS and HTTP/2, with a real file under each store."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest

from agent.agent import open_agent
from agent.records import Mode, SubAction
from ntf_demo.demo import playground
from protocol.statuses import TokenStatus
from tests.agent.world import DEVICE, agent_config, arrives, subscribed, verified
from tests.postgres import PostgresCluster


@pytest.fixture(params=["sqlite", "postgres"])
def postgres_url(request: pytest.FixtureRequest) -> str:
    """Empty: the server keeps its data in a file."""
    if request.param == "sqlite":
        return ""
    cluster: PostgresCluster = request.getfixturevalue("postgres")
    return cluster.new_database()


async def test_message_wakes_the_device_that_then_reads_it(tmp_path: Path, postgres_url: str) -> None:
    async with (
        playground(tmp_path / "servers", postgres_url=postgres_url) as world,
        open_agent(agent_config(tmp_path / "alice")) as alice,
        open_agent(agent_config(tmp_path / "bob")) as bob,
    ):
        assert await verified(world, alice) is TokenStatus.ACTIVE
        connection = await alice.create_connection(world.router.address)
        await subscribed(world, alice, connection)

        sending = await bob.join(await alice.link(connection))
        await bob.send(sending, b"hello, Alice")
        push = await arrives(world, lambda push: '"message"' in push.body)
        assert push.token == DEVICE.token.decode()
        assert "hello" not in push.body

        data = json.loads(push.body)["notificationData"]
        (info,) = await alice.notification_connections(data)
        assert info.connection_id == connection
        (message,) = await alice.on_push(data)
        assert message.body == b"hello, Alice"
        assert message.message_id == info.meta.message_id
        assert message.broker_ts == info.meta.timestamp

        assert await alice.on_push(data) == []  # acknowledged: the router has nothing more
        (queue,) = world.router.state.queues
        assert not queue.messages
        (row,) = await alice.subscriptions()
        assert row.action is SubAction.NTF_CHECK


async def test_both_sides_write_and_are_notified(tmp_path: Path) -> None:
    async with (
        playground(tmp_path / "servers") as world,
        open_agent(agent_config(tmp_path / "alice")) as alice,
        open_agent(agent_config(tmp_path / "bob")) as bob,
    ):
        await verified(world, alice)
        at_alice = await alice.create_connection(world.router.address)
        await subscribed(world, alice, at_alice)
        at_bob = await bob.join(await alice.link(at_alice), reply_at=world.router.address)
        assert await alice.fetch(at_alice) == []  # the confirmation, with the queue for answers
        await alice.send(at_alice, b"welcome")
        (welcome,) = await bob.fetch(at_bob)
        assert welcome.body == b"welcome"
        await bob.send(at_bob, b"thank you")
        push = await arrives(world, lambda push: '"message"' in push.body)
        (thanks,) = await alice.on_push(push.body)
        assert thanks.body == b"thank you"


async def test_periodic_device_is_woken_without_a_word_about_queues(tmp_path: Path) -> None:
    async with (
        playground(tmp_path / "servers") as world,
        open_agent(agent_config(tmp_path / "alice")) as alice,
        open_agent(agent_config(tmp_path / "bob")) as bob,
    ):
        await verified(world, alice, Mode.PERIODIC)
        connection = await alice.create_connection(world.router.address)
        await alice.settled()
        assert await alice.subscriptions() == []
        await bob.send(await bob.join(await alice.link(connection)), b"no hurry")
        (message,) = await alice.on_push('{"checkMessages":true}')
        assert message.body == b"no hurry"


def test_state_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    async def make() -> list[Path]:
        async with open_agent(agent_config(tmp_path / "alice")) as alice:
            await alice.settled()
            return list((tmp_path / "alice").iterdir())

    for path in asyncio.run(make()):
        if path.exists():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
    assert stat.S_IMODE((tmp_path / "alice").stat().st_mode) == 0o700
