"""Two agents over real routers: they meet, talk, and know what got lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.duplex.events import MessageSent, PeerInfo
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
