"""What a router or a peer does wrong, and what nobody expected, never ends the agent."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.duplex import agent as agent_module
from agent.duplex import deletion, incoming, synchronisation
from agent.duplex.agent import open_duplex
from agent.duplex.commands import CommandRunner
from agent.duplex.events import Failed
from agent.duplex.inbox import Inbox
from agent.duplex.replies import RouterRefused, TemporaryFailure
from agent.duplex.router_links import Purpose
from agent.duplex.subscribing import SessionSubscriptions
from agent.notifications import notifications, rows
from protocol.crypto import X25519PrivateKey
from protocol.encoding import EntityId
from protocol.smp_messages import Ids, New, Ok, QueueMode, SmpMessage
from smp_client.proxy import ProxyConfig, ProxyPolicy
from smp_router.router import Router
from tests.agent.duplex.world import Person, config, connect, person
from tests.smp_client.peer import PeerSession, scripted_router
from tests.waiting import until

SECRET = "what a peer sent"


async def same_ids(session: PeerSession) -> None:
    """Every queue has the ids of the first."""
    while commands := await session.receive():
        for command in commands:
            answer: SmpMessage = Ok()
            if isinstance(command.message, New):
                answer = Ids(
                    recipient_id=EntityId(b"r" * 24),
                    sender_id=EntityId(b"s" * 24),
                    dh_key=X25519PrivateKey(bytes(range(32))).public,
                    mode=QueueMode.MESSAGING,
                )
            session.answer([(command.corr_id, command.entity_id, answer)])


async def still_talk(alice: Person, hers: int, bob: Person, his: int) -> None:
    for sender, connection_id, reader in ((alice, hers, bob), (bob, his, alice)):
        await sender.agent.send(connection_id, b"still here")
        assert (await reader.reads()).body == b"still here"


async def test_a_router_that_returns_an_id_twice(tmp_path: Path) -> None:
    """The command fails; connections at other routers go on, now and after a restart."""
    async with (
        Router.start() as honest,
        scripted_router(same_ids) as strange,
        person(tmp_path / "bob", honest.address) as bob,
    ):
        async with person(tmp_path / "alice", honest.address) as alice:
            hers, his = await connect(alice, bob)
            await alice.agent.create_invitation(server=strange)
            with pytest.raises(RouterRefused):
                await alice.agent.create_invitation(server=strange)
            await still_talk(alice, hers, bob, his)
        async with person(tmp_path / "alice", honest.address) as alice:
            await still_talk(alice, hers, bob, his)


@pytest.mark.parametrize("error", [ValueError(SECRET), sqlite3.IntegrityError(SECRET), KeyError(SECRET)])
async def test_an_unexpected_error_ends_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async def fail(_runner: CommandRunner, _command: object) -> None:
        raise error

    async with Router.start() as router, person(tmp_path / "bob", router.address) as bob:
        async with person(tmp_path / "alice", router.address) as alice:
            hers, his = await connect(alice, bob)
        monkeypatch.setattr(CommandRunner, "_join", fail)
        async with person(tmp_path / "alice", router.address) as alice:
            failing = await alice.agent.join("simplex:/invitation", b"")
            assert await alice.event(Failed) == Failed(failing, "INTERNAL")
            await still_talk(alice, hers, bob, his)
    assert type(error).__name__ in caplog.text
    assert SECRET not in caplog.text


async def test_a_message_that_shows_a_defect_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take = incoming.Incoming.take

    def fail_once(message: incoming.Incoming, tx: object) -> bool:
        monkeypatch.setattr(incoming.Incoming, "take", take)
        raise ValueError(SECRET)

    async with (
        Router.start() as router,
        person(tmp_path / "alice", router.address) as alice,
        person(tmp_path / "bob", router.address) as bob,
    ):
        hers, his = await connect(alice, bob)
        monkeypatch.setattr(incoming.Incoming, "take", fail_once)
        await bob.agent.send(his, b"lost")
        assert await alice.event(Failed) == Failed(hers, "INTERNAL")
        await still_talk(alice, hers, bob, his)
    assert SECRET not in caplog.text


async def test_a_session_that_shows_a_defect_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SessionSubscriptions.run

    async def fail_once(subscriptions: SessionSubscriptions) -> None:
        monkeypatch.setattr(SessionSubscriptions, "run", run)
        raise ValueError(SECRET)

    async with Router.start() as router, person(tmp_path / "bob", router.address) as bob:
        async with person(tmp_path / "alice", router.address) as alice:
            hers, his = await connect(alice, bob)
        monkeypatch.setattr(SessionSubscriptions, "run", fail_once)
        async with person(tmp_path / "alice", router.address) as alice:
            await still_talk(alice, hers, bob, his)


async def test_an_event_that_shows_a_defect_ends_its_session_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where its session is closed by a task of the agent's own."""
    received = Inbox.received
    fails = True

    async def fail_at_first(inbox: Inbox, *arguments: Any) -> list[EntityId]:
        if fails:
            raise ValueError(SECRET)
        return await received(inbox, *arguments)

    async with (
        Router.start() as router,
        person(tmp_path / "alice", router.address) as alice,
        person(tmp_path / "bob", router.address) as bob,
    ):
        hers, his = await connect(alice, bob)
        link = alice.agent._links.link(Purpose(router.address.canonical))
        session = await link.session()
        monkeypatch.setattr(Inbox, "received", fail_at_first)
        await bob.agent.send(his, b"repeated to the next session")
        await session.wait_closed()
        await alice.agent._start(link.close(), "leaving")
        fails = False
        assert (await alice.reads()).body == b"repeated to the next session"
        await still_talk(alice, hers, bob, his)
    assert "ValueError" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("work", ["deletion.clean_up", "synchronisation.due_rounds", "rows.next_due"])
async def test_what_an_agent_does_by_itself_shows_a_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, work: str
) -> None:
    for module, pause in (
        (agent_module, "FIRST_CLEANING"),
        (agent_module, "CLEANING_INTERVAL"),
        (agent_module, "SYNC_INTERVAL"),
        (notifications, "PAUSE_AFTER_DEFECT"),
    ):
        monkeypatch.setattr(module, pause, 0.001)
    name, _, function = work.partition(".")
    module = {"deletion": deletion, "synchronisation": synchronisation, "rows": rows}[name]
    good, attempts = getattr(module, function), 0

    def fail_twice(*arguments: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise ValueError(SECRET)
        return good(*arguments)

    async with Router.start() as router, person(tmp_path / "bob", router.address) as bob:
        monkeypatch.setattr(module, function, fail_twice)
        async with person(tmp_path / "alice", router.address) as alice:
            await until(lambda: attempts > 2)
            hers, his = await connect(alice, bob)
            await still_talk(alice, hers, bob, his)
    assert "failed with ValueError" in caplog.text
    assert SECRET not in caplog.text


async def test_peers_cannot_lead_an_agent_into_its_own_network(tmp_path: Path) -> None:
    """A router that is named in a link, for example as localhost, is not connected to; ours are."""
    async with Router.start() as ours, Router.start() as inside:
        async with person(tmp_path / "bob", inside.address) as bob:
            prepared = bob.agent.prepare_address(bob.agent.new_root_key())
            _, link = await bob.agent.create_prepared(prepared, b"welcome")
        before = inside.counts["connections"]
        alices = config(tmp_path / "alice", ours.address)
        async with open_duplex(replace(alices, private_servers=False)) as alice:
            await alice.create_invitation()
            with pytest.raises(TemporaryFailure, match="no public address"):
                await alice.link_data(link)
        assert inside.counts["connections"] == before
        async with open_duplex(alices) as alice:
            assert await alice.link_data(link) == b"welcome"


async def test_by_default_strangers_routers_do_not_learn_our_address(tmp_path: Path) -> None:
    async with Router.start() as ours, Router.start() as other:
        standard = replace(config(tmp_path / "alice", ours.address), proxy=None)
        assert standard.sending == ProxyConfig(
            policy=ProxyPolicy.UNKNOWN, proxies=(ours.address,), known=(ours.address,)
        )
        assert standard.sending.wants_proxy(other.address)
        assert not standard.sending.wants_proxy(ours.address)
