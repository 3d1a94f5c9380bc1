"""Receive queues move to other routers while people talk."""

from __future__ import annotations

from pathlib import Path

from agent.duplex.events import SwitchProgress
from smp_router.router import Router
from tests.agent.duplex.world import Person, connect, person


async def exchange(alice: Person, hers: int, bob: Person, his: int, count: int) -> None:
    """All arrive, once. While two queues are in use a later message may come first: then it says so."""
    for number in range(count):
        await alice.agent.send(hers, b"a%d" % number)
        await bob.agent.send(his, b"b%d" % number)
    for reader, letter in ((bob, b"a"), (alice, b"b")):
        messages = [await reader.reads() for _ in range(count)]
        messages.sort(key=lambda message: message.sender_message_id)
        assert [message.body for message in messages] == [letter + b"%d" % n for n in range(count)]


def phase(receiving: bool, name: str):  # type: ignore[no-untyped-def]
    return lambda event: (event.receiving, event.phase) == (receiving, name)


async def test_three_rotations(tmp_path: Path) -> None:
    async with (
        Router.start() as one,
        Router.start() as two,
        person(tmp_path / "alice.db", one.address, two.address) as alice,
        person(tmp_path / "bob.db", one.address, two.address) as bob,
    ):
        hers, his = await connect(alice, bob)
        for who, connection_id, other in ((alice, hers, bob), (bob, his, alice), (alice, hers, bob)):
            await who.agent.switch(connection_id)
            await exchange(alice, hers, bob, his, 3)
            for name in ("started", "confirmed", "secured", "completed"):
                await who.event(SwitchProgress, phase(True, name))
                await other.event(SwitchProgress, phase(False, name))
            await exchange(alice, hers, bob, his, 2)


async def test_a_switch_that_is_aborted(tmp_path: Path) -> None:
    async with (
        Router.start() as one,
        Router.start() as two,
        person(tmp_path / "alice.db", one.address, two.address) as alice,
        person(tmp_path / "bob.db", one.address, two.address) as bob,
    ):
        hers, his = await connect(alice, bob)
        await alice.agent.switch(hers)
        await alice.agent.abort_switch(hers)
        await exchange(alice, hers, bob, his, 2)
        await alice.agent.switch(hers)
        await alice.event(SwitchProgress, phase(True, "completed"))
        await exchange(alice, hers, bob, his, 2)
