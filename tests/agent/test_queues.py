"""Connections over a real router: lost answers, repetitions, strangers."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path

import pytest

from agent import rows
from agent.agent import Agent, open_agent
from agent.envelopes import MAX_CONTENT, Confirmation, Content, seal_confirmation, seal_content
from agent.errors import Misused, StoreFailed, Temporary
from agent.links import parse_link
from agent.records import SendQueue
from agent.sessions import Sessions
from agent.store import STATE_FILE, AgentStore
from ntf_demo.demo import Playground
from protocol.crypto import X25519PrivateKey
from protocol.errors import QUOTA
from protocol.smp_messages import Send, SmpCommand
from smp_client.requests import Request
from smp_router.config import RouterConfig
from smp_router.router import Router
from tests.agent.proxy import lossy_proxy
from tests.agent.world import agent_config, until

NONCE = b"n" * 24
ENOUGH = 12
"More commands than a conversation has."


async def bodies(agent: Agent, connection: int) -> list[bytes]:
    return [message.body for message in await agent.store.messages(connection)]


@pytest.mark.parametrize("lost", range(ENOUGH))
async def test_any_answer_may_be_lost(tmp_path: Path, lost: int) -> None:
    """Join, send, read and answer, with one answer of the router lost: all arrives, and once."""
    async with (
        Router.start() as router,
        lossy_proxy(router.address) as proxy,
        open_agent(agent_config(tmp_path / "alice")) as alice,
        open_agent(agent_config(tmp_path / "bob")) as bob,
    ):
        address = proxy.in_front_of(router.address)
        proxy.lose(after=lost)
        at_alice = await _made(alice, alice.create_connection(address))
        at_bob = await _made(bob, bob.join(await alice.link(at_alice), reply_at=address))
        await _sent(bob, bob.send(at_bob, b"question"))
        await _read(alice, at_alice)
        await _sent(alice, alice.send(at_alice, b"answer"))
        await _read(bob, at_bob)
        assert await bodies(alice, at_alice) == [b"question"]
        assert await bodies(bob, at_bob) == [b"answer"]
        assert proxy.lost == 1


async def _made(agent: Agent, call: Awaitable[int]) -> int:
    """The connection that a call makes; after `Temporary` the agent sees to it alone."""
    try:
        return await call
    except Temporary:
        await agent.settled()
        return max(connection.connection_id for connection in await agent.connections())


async def _sent(agent: Agent, call: Awaitable[None]) -> None:
    try:
        await call
    except Temporary:
        await agent.settled()


async def _read(agent: Agent, connection: int) -> None:
    """An app that could not read tries again."""
    try:
        await agent.fetch(connection)
    except Temporary:
        await agent.fetch(connection)


async def test_same_keys_after_a_lost_answer_to_new(tmp_path: Path) -> None:
    async with (
        Router.start() as router,
        lossy_proxy(router.address) as proxy,
        open_agent(agent_config(tmp_path / "alice")) as alice,
    ):
        proxy.lose()
        with pytest.raises(Temporary):
            await alice.create_connection(proxy.in_front_of(router.address))
        await alice.settled()
        (connection,) = await alice.connections()
        assert connection.can_receive
        keys = {key.der for queue in router.state.queues for key in queue.recipient_keys}
        assert len(router.state.queues) == 2  # the router cannot know that the first one has no owner
        assert len(keys) == 1


async def test_full_queue_is_filled_up_later(tmp_path: Path) -> None:
    async with (
        Router.start(RouterConfig(quota=2)) as router,
        open_agent(agent_config(tmp_path / "alice")) as alice,
        open_agent(agent_config(tmp_path / "bob")) as bob,
    ):
        connection = await alice.create_connection(router.address)
        sender = await bob.join(await alice.link(connection))  # its confirmation is the first of two
        await bob.send(sender, b"fits")
        with pytest.raises(Temporary, match=str(QUOTA)):
            await bob.send(sender, b"waits")

        async def all_arrived() -> bool:
            await alice.fetch(connection)
            return await bodies(alice, connection) == [b"fits", b"waits"]

        await until(all_arrived)


async def _inject(sessions: Sessions, link: str, key: SendQueue, body: bytes) -> None:
    """Send what an honest agent would not."""
    target = parse_link(link)
    command: SmpCommand = Send(True, body)
    await sessions.smp.ask(target.server, Request(target.sender_id, command, key.auth_key))


async def test_only_the_first_sender_is_heard(
    world: Playground, agent: Agent, bob: Agent, sessions: Sessions
) -> None:
    connection = await agent.create_connection(world.router.address)
    link = await agent.link(connection)
    at_bob = await bob.join(link)
    await bob.send(at_bob, b"one")
    assert [m.body for m in await agent.fetch(connection)] == [b"one"]
    key = await bob.store.send_queue(at_bob)
    assert key is not None
    stranger = X25519PrivateKey(b"x" * 32)
    secret = key.e2e_key.exchange(key.recipient_key)
    for body in (
        seal_confirmation(stranger, key.recipient_key, NONCE, Confirmation(None)),
        seal_content(stranger.exchange(key.recipient_key), NONCE, Content(9, b"forged")),
        seal_content(secret, NONCE, Content(1, b"one")),  # a repetition
        b"",
        b"garbage",
    ):
        await _inject(sessions, link, key, body)
    await bob.send(at_bob, b"two")
    assert [m.body for m in await agent.fetch(connection)] == [b"two"]
    (queue,) = world.router.state.queues
    assert not queue.messages  # what cannot be opened does not block the queue


async def test_message_before_any_confirmation_is_dropped(
    world: Playground, agent: Agent, bob: Agent, sessions: Sessions
) -> None:
    connection = await agent.create_connection(world.router.address)
    at_bob = await bob.join(await agent.link(connection))
    (queue,) = world.router.state.queues
    queue.messages.clear()
    await bob.send(at_bob, b"who is it?")
    assert await agent.fetch(connection) == []


async def test_repeated_confirmation_keeps_the_keys(world: Playground, agent: Agent, bob: Agent) -> None:
    connection = await agent.create_connection(world.router.address)
    at_bob = await bob.join(await agent.link(connection), reply_at=world.router.address)
    to_alice = next(queue for queue in world.router.state.queues if queue.messages)
    to_alice.messages.append(to_alice.messages[0])
    await agent.fetch(connection)
    await agent.fetch(connection)
    await agent.send(connection, b"still the same")
    assert [m.body for m in await bob.fetch(at_bob)] == [b"still the same"]


async def test_calls_that_make_no_sense(world: Playground, agent: Agent) -> None:
    with pytest.raises(Misused):
        await agent.join("smp://nonsense")
    with pytest.raises(Misused):
        await agent.send(7, b"to nobody")
    with pytest.raises(Misused):
        await agent.fetch(7)
    with pytest.raises(Misused):
        await agent.set_notifications(7, True)
    connection = await agent.create_connection(world.router.address)
    with pytest.raises(Misused):
        await agent.send(connection, bytes(MAX_CONTENT + 1))


async def test_deleted_connection_may_be_gone_already(world: Playground, agent: Agent) -> None:
    connection = await agent.create_connection(world.router.address)
    (queue,) = world.router.state.queues
    world.router.faults.delete_queues([queue.recipient_id])
    await agent.delete_connection(connection)
    assert await agent.connections() == []


# The state file


async def test_one_agent_per_folder(tmp_path: Path) -> None:
    async with open_agent(agent_config(tmp_path)):
        with pytest.raises(StoreFailed, match="in use"):
            async with open_agent(agent_config(tmp_path)):
                pass


@pytest.mark.parametrize("content", [b"not a database at all" * 100])
async def test_broken_state_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / STATE_FILE).write_bytes(content)
    with pytest.raises(StoreFailed):
        async with open_agent(agent_config(tmp_path)):
            pass


async def test_state_of_a_newer_version(tmp_path: Path) -> None:
    async with AgentStore.open(tmp_path) as store:
        await store.write([("PRAGMA user_version = 99", ())])
    with pytest.raises(StoreFailed, match="newer"):
        async with AgentStore.open(tmp_path):
            pass


async def test_failed_write_changes_nothing(store: AgentStore) -> None:
    with pytest.raises(StoreFailed):
        await store.write([rows.put_connection(1, wants_notifications=True), ("NO SUCH STATEMENT", ())])
    assert await store.connections() == []
