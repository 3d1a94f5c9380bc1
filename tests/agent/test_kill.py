"""Kill the agent at every commit, just before it and just after it; restart; it always completes.

Killed before a commit, the agent has done something at a server that it does not remember: what it repeats
must be what the server has seen, with the same keys.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.agent import Agent, open_agent
from agent.records import Mode, SubAction
from agent.rows import Change
from agent.store import AgentStore
from ntf_demo.demo import Playground
from protocol.device_token import ApnsToken, Provider
from protocol.statuses import TokenStatus
from tests.agent.world import agent_config, arrives, known_token, subscribed, until

MAX_MOMENTS = 60


class Killed(BaseException):
    """The process ends here."""


class MortalStore(AgentStore):
    """Counts the moments around commits; dies at one of them, and stays dead."""

    kill_at: int | None = None
    moments = 0

    async def write(self, changes: Iterable[Change]) -> None:
        self._moment()
        await super().write(changes)
        self._moment()

    def _moment(self) -> None:
        self.moments += 1
        if self.kill_at is not None and self.moments >= self.kill_at:
            raise Killed


@dataclass
class Life:
    """One device over all its restarts, and Bob, who never dies."""

    world: Playground
    folder: Path
    device: ApnsToken
    bob: Agent
    bob_connection: int | None = None

    async def start(self, kill_at: int | None = None) -> int | None:
        """One run of the app. The number of moments it had, or none if it was killed."""
        try:
            async with MortalStore.open(self.folder) as store:
                assert isinstance(store, MortalStore)
                store.kill_at = kill_at
                async with open_agent(agent_config(self.folder), store) as agent:
                    await self._live(agent)
                    return store.moments
        except Killed:
            return None

    async def _live(self, agent: Agent) -> None:
        """What an app does, from whatever state it finds."""
        pushes = len(self.world.accepted())
        if (
            await agent.register(self.device, Mode.INSTANT, self.world.server.address)
            is not TokenStatus.ACTIVE
        ):
            mine = await arrives(
                self.world,
                lambda push: '"verification"' in push.body and push.token == self.device.token.decode(),
                pushes,
            )
            await agent.on_push(mine.body)
        if not await agent.connections():
            await agent.create_connection(self.world.router.address)
        await agent.settled()
        (connection,) = await agent.connections()
        assert connection.can_receive
        await subscribed(self.world, agent, connection.connection_id)
        await self._message_once(agent, connection.connection_id)
        await self._read(agent, connection.connection_id)
        if not [c for c in await agent.connections() if c.can_send]:
            return
        if not await self._bob_heard():
            await agent.send(connection.connection_id, b"read")

    async def _message_once(self, agent: Agent, connection_id: int) -> None:
        if self.bob_connection is None:
            link = await agent.link(connection_id)
            self.bob_connection = await self.bob.join(link, reply_at=self.world.router.address)
            await self.bob.send(self.bob_connection, b"hello")

    async def _read(self, agent: Agent, connection_id: int) -> None:
        await agent.fetch(connection_id)
        bodies = [message.body for message in await agent.store.messages(connection_id)]
        assert bodies == [b"hello"]

    async def _bob_heard(self) -> bool:
        assert self.bob_connection is not None
        await self.bob.fetch(self.bob_connection)
        return bool(await self.bob.store.messages(self.bob_connection))

    async def check(self) -> None:
        """Everything is as if nobody had ever been killed."""
        async with open_agent(agent_config(self.folder)) as agent:
            await agent.settled()
            token = await known_token(agent)
            (row,) = await agent.subscriptions()
        assert (token.status, token.action) == (TokenStatus.ACTIVE, "CHECK")
        assert row.action is SubAction.NTF_CHECK
        queue = self.world.router.state.queues.by_notifier(row.notifier_id or row.token_id)
        assert queue is not None
        assert queue.notifier is not None
        assert queue.notifier.key == row.notifier_key.public
        assert not queue.messages
        assert await self._bob_heard()
        assert self.bob_connection is not None
        assert [m.body for m in await self.bob.store.messages(self.bob_connection)] == [b"read"]


def new_life(world: Playground, tmp_path: Path, bob: Agent, number: int) -> Life:
    device = ApnsToken(Provider.APNS_TEST, f"{number:064x}".encode())
    return Life(world, tmp_path / f"life{number}", device, bob)


async def test_killed_at_every_moment_it_always_completes(
    world: Playground, tmp_path: Path, bob: Agent
) -> None:
    undisturbed = new_life(world, tmp_path, bob, 0)
    moments = await undisturbed.start()
    await undisturbed.check()
    assert moments is not None
    assert 20 < moments < MAX_MOMENTS
    for moment in range(1, moments + 1):
        life = new_life(world, tmp_path, bob, moment)
        assert await life.start(kill_at=moment) is None, moment
        assert await life.start() is not None, moment
        await life.check()


async def test_killed_again_and_again_it_still_gets_on(world: Playground, tmp_path: Path, bob: Agent) -> None:
    life = new_life(world, tmp_path, bob, 0)
    for run in range(MAX_MOMENTS):
        if await life.start(kill_at=4 + run % 3) is not None:
            break
    else:
        pytest.fail("no progress")
    await life.check()


async def to_periodic(life: Life, agent: Agent) -> None:
    await agent.register(life.device, Mode.PERIODIC, life.world.server.address)


async def switch_off(life: Life, agent: Agent) -> None:
    (connection,) = await agent.connections()
    await agent.set_notifications(connection.connection_id, False)


async def give_up(life: Life, agent: Agent) -> None:
    if await agent.token() is not None:
        await agent.delete_token()


@pytest.mark.parametrize("change", [to_periodic, switch_off, give_up])
async def test_killed_while_notifications_end(
    world: Playground, tmp_path: Path, bob: Agent, change: Callable[[Life, Agent], Awaitable[None]]
) -> None:
    """Killed at every moment of it; after the next run there is no notifier anywhere."""
    for moment in range(1, MAX_MOMENTS):
        life = new_life(world, tmp_path, bob, moment)
        await life.start()
        killed = await _killed_in(life, change, moment)
        # Before the first commit nobody can know what was wanted; after it, nobody needs to say it again.
        assert not await _killed_in(life, change if moment == 1 else None, None)
        async with open_agent(agent_config(life.folder)) as agent:
            await agent.settled()
            assert await agent.store.deleted_tokens() == []
            assert await agent.subscriptions() == []
            (queue,) = await agent.store.receive_queues()
        assert queue.recipient_id is not None
        at_router = world.router.state.queues.by_recipient(queue.recipient_id)
        assert at_router is not None
        assert at_router.notifier is None
        if not killed:
            return
    pytest.fail("the change never ended")


async def _killed_in(
    life: Life, change: Callable[[Life, Agent], Awaitable[None]] | None, kill_at: int | None
) -> bool:
    try:
        async with MortalStore.open(life.folder) as store:
            assert isinstance(store, MortalStore)
            async with open_agent(agent_config(life.folder), store) as agent:
                await agent.settled()
                store.kill_at = None if kill_at is None else store.moments + kill_at
                if change is not None:
                    await change(life, agent)
                await agent.settled()
    except Killed:
        return True
    return False


async def test_waiting_mail_goes_out_after_a_restart(world: Playground, tmp_path: Path, bob: Agent) -> None:
    reader = await bob.create_connection(world.router.address, wants_notifications=False)
    folder = tmp_path / "sender"
    async with open_agent(agent_config(folder)) as sender:
        connection = await sender.join(await bob.link(reader))
        await sender.settled()
    with pytest.raises(Killed):
        async with MortalStore.open(folder) as store:
            assert isinstance(store, MortalStore)
            async with open_agent(agent_config(folder), store) as sender:
                await sender.settled()
                store.kill_at = store.moments + 2  # the message is kept, but was not sent
                await sender.send(connection, b"late")
    async with open_agent(agent_config(folder)):

        async def arrived() -> list[bytes]:
            return [message.body for message in await bob.fetch(reader)]

        assert await until(arrived) == [b"late"]
