"""Queues of prepared links: whatever gets lost, the link works, or its owner is told that it never will."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agent.duplex.agent import open_duplex
from agent.duplex.events import ContactRequested, Deleted, LinkReady, ServerUp, ServiceUp
from agent.duplex.links import PreparedLink, own_request
from agent.duplex.replies import TemporaryFailure
from agent.duplex.store import Change, DuplexStore, Tx
from agent.duplex.tables import connections
from protocol.agent.connection_requests import request_text
from protocol.link_crypto import sender_id_of
from protocol.queue_uri import SMP_CLIENT_VERSIONS, QueueUri
from smp_router.router import Router
from tests.agent.duplex.simulation import Killed, Party, Routers, settle
from tests.agent.duplex.world import Person, config, person
from tests.agent.proxy import lossy_proxy
from transport.cancellation import TaskGroup

T = TypeVar("T")


def request_of(prepared: PreparedLink) -> str:
    """What is behind the link: all of it is known before the queue exists."""
    sender_id = sender_id_of(prepared.corr_id)
    key = prepared.e2e_key.public
    queue = QueueUri(SMP_CLIENT_VERSIONS, prepared.server, sender_id, key, prepared.mode)
    return request_text(own_request(queue, None))


def parties() -> tuple[Party, Party]:
    routers = Routers()
    return Party("alice", routers), Party("bob", routers)


def create(alice: Party, prepared: PreparedLink) -> bool:
    """False if she died."""
    try:
        alice.create_prepared(prepared)
        alice.command()
    except Killed:
        alice.restart()
        return False
    return True


def test_death_at_every_step() -> None:
    """What was stored is gone on with; before that nothing was sent."""
    for dies_at in range(1, 100):
        alice, bob = parties()
        alice.dies_at = dies_at
        prepared = alice.prepare()
        died = not create(alice, prepared)
        alice.dies_at = None
        if not alice.has_connection():
            assert create(alice, prepared)
        alice.connection_id = 1
        settle(alice, bob)
        bob.join(request_of(prepared))
        settle(alice, bob)
        assert len(alice.requests) == 1, f"death at step {dies_at}"
        if not died:
            assert dies_at > 5
            return
    raise AssertionError("it never ends")


def test_a_lost_answer() -> None:
    alice, bob = parties()
    prepared = alice.prepare()
    alice.create_prepared(prepared)
    alice.answer_lost = True
    assert not alice.command()
    bob.join(request_of(prepared))
    settle(bob, bob)
    settle(alice, bob)
    assert len(alice.requests) == 1


def test_a_router_that_does_not_repeat_its_answer() -> None:
    alice, bob = parties()
    alice.routers.repeat_answers = False
    alice.create_prepared(alice.prepare())
    alice.answer_lost = True
    assert not alice.command()
    settle(alice, bob)
    (error,) = alice.errors
    assert "prepare another link" in error
    assert not alice.has_connection()


def test_a_router_that_returns_the_id_of_another_queue() -> None:
    alice, bob = parties()
    alice.create_prepared(alice.prepare())
    settle(alice, bob)
    (used,) = alice.routers.queues
    alice.routers.next_recipient_id = used
    first = alice.connection_id
    alice.create_prepared(alice.prepare())
    settle(alice, bob)
    (error,) = alice.errors
    assert "prepare another link" in error
    assert [each.connection_id for each in connections(alice.db)] == [first]


def test_a_link_that_is_deleted_before_its_queue_is_known() -> None:
    alice, bob = parties()
    alice.create_prepared(alice.prepare())
    alice.answer_lost = True
    assert not alice.command()
    assert alice.delete()
    for _ in range(2):  # the queue is found, then deleted
        settle(alice, bob)
    assert alice.deleted
    assert not alice.routers.queues


async def test_a_lost_answer_of_a_real_router(tmp_path: Path) -> None:
    """Somebody writes to the published link before its owner knows the queue."""
    async with Router.start() as router, lossy_proxy(router.address) as proxy:
        address = proxy.in_front_of(router.address)
        async with (
            person(tmp_path / "alice.db", address) as alice,
            person(tmp_path / "bob.db", address) as bob,
        ):
            prepared = alice.agent.prepare_address(alice.agent.new_root_key())
            proxy.lose()
            with pytest.raises(TemporaryFailure):
                await alice.agent.create_prepared(prepared, b"profile")
            assert proxy.lost
            await bob.agent.join(prepared.link().text(), b"Bob")
            ready = await alice.event(LinkReady)
            request = await alice.event(ContactRequested)
            assert (request.connection_id, request.info) == (ready.connection_id, b"Bob")


async def test_an_invitation_whose_answer_is_lost_leaves_nothing_behind(tmp_path: Path) -> None:
    async with (
        Router.start() as router,
        lossy_proxy(router.address) as proxy,
        person(tmp_path / "alice.db", proxy.in_front_of(router.address)) as alice,
    ):
        proxy.lose()
        with pytest.raises(TemporaryFailure):
            await alice.agent.create_short_invitation(b"profile")
        await alice.event(Deleted)
        assert await alice.agent.connections() == []
        assert len(router.state.queues) == 0
        _, link = await alice.agent.create_short_invitation(b"profile")
        assert link


class LateStore(DuplexStore):
    """Stores a prepared queue only after its first message was looked at."""

    looked: asyncio.Event
    stored: asyncio.Event
    late_news = False
    "What came of the look is known only when the queue is stored."
    asked = 0

    async def run(self, change: Change[T]) -> tuple[T, Tx]:
        name, cls = change.__qualname__, type(self)
        is_creation = name.startswith("CommandRunner.create.")
        cls.asked += is_creation
        is_answered = is_creation and cls.asked == 2
        if is_answered:
            await cls.looked.wait()
        result = await super().run(change)
        if is_answered:
            cls.stored.set()
        if name.startswith("Inbox.received."):
            cls.looked.set()
            if cls.late_news:
                await cls.stored.wait()
        return result


@pytest.mark.parametrize("late_news", [False, True], ids=["known at once", "known late"])
@pytest.mark.parametrize("has_others", [False, True], ids=["first queue", "later queue"])
@pytest.mark.parametrize("services", [False, True], ids=["one by one", "service"])
async def test_a_message_that_comes_before_its_queue_is_stored(
    tmp_path: Path, services: bool, has_others: bool, late_news: bool
) -> None:
    values: dict[str, Any] = {"looked": asyncio.Event(), "stored": asyncio.Event(), "late_news": late_news}
    late = type("Late", (LateStore,), values)
    async with (
        Router.start() as router,
        open_duplex(config(tmp_path / "alice.db", router.address, services=services), late) as agent,
        person(tmp_path / "bob.db", router.address) as bob,
        TaskGroup() as tasks,
    ):
        alice = Person(agent)
        if has_others:
            await agent.create_address()
            await alice.event(ServiceUp if services else ServerUp)
        prepared = agent.prepare_address(agent.new_root_key())
        tasks.create_task(agent.create_prepared(prepared), name="creation")
        while len(router.state.queues) <= has_others:
            await asyncio.sleep(0.01)
        await bob.agent.join(prepared.link().text(), b"Bob")
        assert (await alice.event(ContactRequested)).info == b"Bob"
