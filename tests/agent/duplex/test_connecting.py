"""Ways to connect: invitation, address, peers whose routers are old; and what cannot be joined."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest

from agent.duplex.agent import open_duplex
from agent.duplex.events import (
    Confirmed,
    Connected,
    ContactRequested,
    Deleted,
    Event,
    Failed,
    MessageFailed,
    MessageReceived,
)
from agent.duplex.handshake import request_received
from agent.duplex.store import Change, DuplexStore, Tx, reading
from agent.duplex.tables import connection
from agent.errors import MessageTooLarge, NoConnection, Prohibited, Stopped
from protocol.agent.envelopes import InvitationEnvelope
from protocol.smp_messages import Send
from smp_router.router import Router
from tests.agent.duplex.simulation import Party, Routers, settle
from tests.agent.duplex.world import BEFORE_SKEY, Person, config, connect, person


async def talk(alice: Person, hers: int, bob: Person, his: int) -> None:
    await alice.agent.send(hers, b"hello")
    assert (await bob.reads()).body == b"hello"
    await bob.agent.send(his, b"hello yourself")
    assert (await alice.reads()).body == b"hello yourself"


@pytest.mark.parametrize("old", [(True, True), (True, False), (False, True)])
async def test_routers_that_do_not_know_skey(tmp_path: Path, old: tuple[bool, bool]) -> None:
    """Queues are secured by their recipients, and HELLO ends the handshake."""
    hers_is_old, his_is_old = old
    async with (
        Router.start(versions=BEFORE_SKEY if hers_is_old else None) as one,
        Router.start(versions=BEFORE_SKEY if his_is_old else None) as two,
        person(tmp_path / "alice.db", one.address) as alice,
        person(tmp_path / "bob.db", two.address) as bob,
    ):
        await talk(alice, *(await connect(alice, bob))[:1], bob, 1)
    for name in ("alice.db", "bob.db"):
        with closing(sqlite3.connect(tmp_path / name)) as db:
            assert db.execute("SELECT sender_key FROM receive_queues").fetchall() == [(None,)]


T = TypeVar("T")


async def test_nothing_can_be_sent_before_a_slow_handshake_has_ended(tmp_path: Path) -> None:
    async with (
        Router.start(versions=BEFORE_SKEY) as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
    ):
        hers, link = await alice.agent.create_invitation(pq=False)
        his = await bob.agent.join(link, b"Bob")
        await alice.event(Confirmed)
        with pytest.raises(Prohibited):
            await bob.agent.send(his, b"too early")
        await alice.agent.allow(hers, b"Alice")
        await alice.event(Connected)
        await bob.event(Connected)
        await talk(alice, hers, bob, his)


@pytest.mark.parametrize(("version", "allowed"), [(6, False), (7, True)])
def test_an_old_peer_reads_nothing_before_its_user_has_let_us_in(version: int, allowed: bool) -> None:
    routers = Routers()
    alice, bob = Party("alice", routers), Party("bob", routers)
    bob.join(alice.create().replace("v=2-7", f"v=2-{version}"))
    bob.command()
    bob.deliver()
    if allowed:
        bob.send(b"early")
    else:
        with pytest.raises(Prohibited):
            bob.send(b"early")
    settle(alice, bob)
    bob.send(b"later")
    settle(alice, bob)
    assert alice.read == [b"early", b"later"][not allowed :]


async def test_an_address(tmp_path: Path) -> None:
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
        person(tmp_path / "carol.db", router.address) as carol,
    ):
        _, link = await alice.agent.create_address()
        with_bob, with_carol = await bob.agent.join(link, b"Bob"), await carol.agent.join(link, b"Carol")
        requests = {}
        for _ in range(2):
            request = await alice.event(ContactRequested)
            requests[request.info] = request.invitation_id
        await alice.agent.reject(requests[b"Carol"])
        accepted = await alice.agent.accept(requests[b"Bob"], b"Alice")
        assert (await bob.event(Confirmed)).info == b"Alice"
        await bob.agent.allow(with_bob, b"Bob again")
        await bob.event(Connected)
        await alice.event(Connected)
        await talk(alice, accepted, bob, with_bob)
        for wrong in requests.values():
            with pytest.raises(Prohibited):
                await alice.agent.accept(wrong, b"Alice")
        with pytest.raises(Prohibited):
            await carol.agent.send(with_carol, b"is anybody there?")


async def test_a_request_that_arrives_again_after_it_was_accepted(tmp_path: Path) -> None:
    """Whoever asked did not hear that it had arrived. A second connection could never be made of it."""
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
    ):
        address, link = await alice.agent.create_address()
        await bob.agent.join(link, b"Bob")
        request = await alice.event(ContactRequested)
        with reading(tmp_path / "alice.db") as db:
            ((his,),) = db.execute("SELECT link FROM invitations").fetchall()
        await alice.agent.accept(request.invitation_id, b"Alice")
        await bob.event(Confirmed)

        def again(tx: Tx) -> list[Event]:
            request_received(tx, connection(tx.db, address), InvitationEnvelope(7, his, b"Bob"))
            return tx.events

        assert await alice.agent._transact(again) == []


def test_a_request_that_is_answered_before_its_sender_hears_that_it_arrived() -> None:
    """The owner of the address joins; then the request, whose answer was lost, would be sent again."""
    routers = Routers()
    alice, bob = Party("alice", routers), Party("bob", routers)
    bob.join(alice.create_address())
    bob.loses = Send
    assert not bob.command()
    bob.loses = None
    assert alice.receive()
    alice.accept()
    alice.command()
    alice.deliver()
    bob.receive()
    settle(alice, bob)
    assert (alice.connected, bob.connected) == (True, True)
    assert (alice.errors, bob.errors) == ([], [])


async def test_what_is_too_long(tmp_path: Path) -> None:
    """Of a user's own: an error, and the agent goes on."""
    long = b"x" * 20_000
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
    ):
        hers, link = await alice.agent.create_invitation(pq=False)
        _, address = await alice.agent.create_address()
        for wrong, error in (
            (link, "the message is too long"),
            (address, "the information about us is too long"),
        ):
            await bob.agent.join(wrong, long)
            assert (await bob.event(Failed)).error == error
        hers, link = await alice.agent.create_invitation(pq=False)
        his = await bob.agent.join(link, b"Bob")
        await alice.event(Confirmed)
        await alice.agent.allow(hers, long)
        assert (await alice.event(Failed)).error == "the message is too long"
        await alice.agent.allow(hers, b"Alice")
        await alice.event(Connected)
        await talk(alice, hers, bob, his)
        own, _ = await alice.agent.create_short_invitation()
        with pytest.raises(Prohibited):
            await alice.agent.set_link_data(own, long)
        with pytest.raises(Prohibited):
            await alice.agent.create_short_invitation(long)
        with pytest.raises(Prohibited):
            alice.agent.prepare_address(alice.agent.new_root_key(), bytes(256))
        with pytest.raises(Prohibited):
            await alice.agent.join("x" * 70_000, b"Alice")


async def test_what_cannot_be_joined(tmp_path: Path) -> None:
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
        person(tmp_path / "carol.db", router.address) as carol,
    ):
        _, link = await alice.agent.create_invitation()
        for wrong, error in (
            ("https://example.org/", "A_LINK"),
            ("\udcff", "A_LINK"),
            (link.replace("v=2-7", "v=8-9"), "A_VERSION"),
            (link.replace("e2e=v%3D2-3", "e2e=v%3D4-5"), "A_VERSION"),
        ):
            connection_id = await bob.agent.join(wrong, b"Bob")
            failed = await bob.event(Failed)
            assert (failed.connection_id, failed.error) == (connection_id, error)
        await carol.agent.join(link, b"Carol")
        await alice.event(Confirmed)
        await bob.agent.join(link, b"Bob is late")
        assert (await bob.event(Failed)).error == "SMP AUTH"


async def test_calls_that_make_no_sense(tmp_path: Path) -> None:
    async with Router.start() as router, person(tmp_path / "alice.db", router.address) as alice:
        hers, _ = await alice.agent.create_invitation()
        with pytest.raises(Prohibited):
            await alice.agent.allow(hers, b"nobody")
        with pytest.raises(Prohibited):
            await alice.agent.send(hers, b"nobody")
        with pytest.raises(Prohibited):
            await alice.agent.ack(hers, 1)
        with pytest.raises(Prohibited):
            await alice.agent.switch(hers)
        with pytest.raises(Prohibited):
            await alice.agent.abort_switch(hers)
        with pytest.raises(Prohibited):
            await alice.agent.sync(hers)
        with pytest.raises(Prohibited):
            await alice.agent.reject(1)
        with pytest.raises(NoConnection):
            await alice.agent.send(99, b"nobody")


async def test_the_end_of_a_connection(tmp_path: Path) -> None:
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
    ):
        hers, his = await connect(alice, bob)
        with pytest.raises(MessageTooLarge):
            await alice.agent.send(hers, b"x" * 13574)
        await alice.agent.send(hers, b"x" * 13573)
        await alice.agent.delete(hers, wait=True)
        assert len((await bob.event(MessageReceived)).body) == 13573
        assert (await alice.event(Deleted)).connection_id == hers
        assert await alice.agent.connections() == []
        with pytest.raises(NoConnection):
            await alice.agent.send(hers, b"more")
        await bob.agent.send(his, b"are you there?")
        assert "AUTH" in (await bob.event(MessageFailed)).error


async def test_a_call_that_the_end_of_the_agent_overtakes_ends_too(tmp_path: Path) -> None:
    begun, opened = asyncio.Event(), False

    class SlowStore(DuplexStore):
        async def run(self, change: Change[T]) -> tuple[T, Tx]:
            if not opened:
                return await super().run(change)
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError

    async with Router.start() as router:
        async with open_duplex(config(tmp_path / "alice.db", router.address), SlowStore) as alice:
            opened = True
            call = asyncio.create_task(alice.create_invitation())
            await begun.wait()
        await asyncio.wait([call], timeout=5.0)
    assert call.done()
    assert isinstance(call.exception(), Stopped)
