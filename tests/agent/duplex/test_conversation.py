"""Two agents over real routers: they meet, talk, and know what got lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.duplex.events import MessageSent, PeerInfo
from agent.errors import MessageTooLarge, NoConnection, Prohibited
from protocol.agent.integrity import IntegrityOk
from smp_router.router import Router
from tests.agent.duplex.world import connect, person


@pytest.mark.parametrize("pq", [False, True])
async def test_they_talk(tmp_path: Path, pq: bool) -> None:
    async with (
        Router.start() as one,
        Router.start() as two,
        person(tmp_path / "alice.db", one.address) as alice,
        person(tmp_path / "bob.db", two.address) as bob,
    ):
        hers, his = await connect(alice, bob, pq=pq)
        assert (await bob.event(PeerInfo)).info == b"Alice"
        for number in range(4):
            sent = await alice.agent.send(hers, b"question %d" % number)
            message = await bob.reads()
            assert (message.body, message.integrity) == (b"question %d" % number, IntegrityOk())
            assert (await alice.event(MessageSent)).message_id == sent
            await bob.agent.send(his, b"answer %d" % number)
            answer = await alice.reads()
            assert (answer.body, answer.integrity) == (b"answer %d" % number, IntegrityOk())
        assert answer.pq is pq


async def test_to_many_at_once(tmp_path: Path) -> None:
    """One transaction; whoever cannot be written to keeps nobody else from being."""
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
        person(tmp_path / "carol.db", router.address) as carol,
    ):
        with_bob, _ = await connect(alice, bob, pq=False)
        with_carol, _ = await connect(alice, carol, pq=False)
        nobody, _ = await alice.agent.create_invitation(pq=False)
        made = await alice.agent.send_many(
            [(with_bob, b"news"), (nobody, b"news"), (99, b"news"), (with_carol, b"x" * 20_000)]
        )
        kinds = [Prohibited, NoConnection, MessageTooLarge]
        assert [type(each) for each in made] == [int, *kinds]
        assert (await bob.reads()).body == b"news"
        with pytest.raises(Prohibited):
            await alice.agent.send_many([(with_bob, b"twice"), (with_bob, b"twice")])
        await alice.agent.send_many([(with_carol, b"more"), (with_bob, b"news")])
        assert (await carol.reads()).body == b"more"
        assert (await bob.reads()).integrity == IntegrityOk()
