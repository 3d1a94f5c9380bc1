"""Full queues, routers that refuse or are away: how long a message is tried, and what is said about it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from agent.duplex.agent import open_duplex
from agent.duplex.delivery import MESSAGE_TIME
from agent.duplex.events import (
    Failed,
    MessageDelayed,
    MessageFailed,
    MessageReceived,
    MessageSent,
    QueueContinued,
    ServerDown,
)
from protocol.errors import ErrorType
from smp_client.requests import SessionConfig
from smp_router.config import RouterConfig
from smp_router.router import Router
from tests.agent.duplex.world import Person, config, connect, person


async def test_a_full_queue_goes_on_when_it_is_read(tmp_path: Path) -> None:
    """The next attempt would be in five minutes: the reader's agent tells that there is room."""
    async with (
        Router.start(RouterConfig(quota=3)) as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
    ):
        _, his = await connect(alice, bob, pq=False)
        for number in range(7):
            await bob.agent.send(his, b"%d" % number)
        assert "QUOTA" in (await bob.event(MessageDelayed)).error
        assert [(await alice.reads()).body for _ in range(7)] == [b"%d" % number for number in range(7)]
        await bob.event(QueueContinued)


async def test_a_router_that_refuses(tmp_path: Path) -> None:
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
    ):
        _, his = await connect(alice, bob, pq=False)
        router.faults.answer_errors("SEND", ErrorType(b"AUTH"), 1)
        lost = await bob.agent.send(his, b"lost")
        failed = await bob.event(MessageFailed)
        assert (failed.message_id, failed.error) == (lost, "SMP AUTH")
        await bob.agent.send(his, b"arrives")
        message = await alice.reads()
        assert message.body == b"arrives"
        assert type(message.integrity).__name__ == "Skipped"


async def test_a_confirmation_that_is_refused(tmp_path: Path) -> None:
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
    ):
        _, link = await alice.agent.create_invitation(pq=False)
        router.faults.answer_errors("SEND", ErrorType(b"AUTH"), 1)
        await bob.agent.join(link, b"Bob", pq=False)
        assert (await bob.event(Failed)).error == "CONN NOT_AVAILABLE"


async def test_messages_that_waited_too_long(tmp_path: Path) -> None:
    ahead = 0.0

    def now() -> float:
        return datetime.now(UTC).timestamp() + ahead

    async with (
        Router.start() as one,
        Router.start() as two,
        person(tmp_path / "alice.db", one.address) as alice,
        open_duplex(replace(config(tmp_path / "bob.db", two.address), now=now)) as agent,
    ):
        bob = Person(agent)
        _, his = await connect(alice, bob, pq=False)
        one.faults.refuse(True)
        one.faults.drop_connections()
        old = [await bob.agent.send(his, b"%d" % number) for number in range(2)]
        await asyncio.sleep(0.1)
        ahead = MESSAGE_TIME + 10.0
        new = await bob.agent.send(his, b"new")
        assert [(await bob.event(MessageFailed)).message_id for _ in old] == old
        one.faults.refuse(False)
        assert (await bob.event(MessageSent)).message_id == new
        assert (await alice.reads()).body == b"new"


async def test_an_ack_that_gets_lost(tmp_path: Path) -> None:
    """The router waits for it, and we for the next message: another session starts again with that one."""
    session = SessionConfig(connect=15.0, answer=0.5)
    async with Router.start() as router, person(tmp_path / "bob.db", router.address) as bob:
        made = replace(config(tmp_path / "alice.db", router.address), session=session)
        async with open_duplex(made) as agent:
            alice = Person(agent)
            _, his = await connect(alice, bob, pq=False)
            await bob.agent.send(his, b"one")
            await bob.agent.send(his, b"two")
            await bob.agent.settled()
            first = await alice.event(MessageReceived)
            router.faults.lose_answers(True)
            await alice.agent.ack(first.connection_id, first.message_id)
            await alice.event(ServerDown)
            router.faults.lose_answers(False)
            assert (await alice.reads()).body == b"two"
