"""An agent that dies before or after any of its commits goes on from its file; nothing is lost or doubled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agent.duplex.store import Change, DuplexStore, Tx
from agent.errors import Stopped
from smp_router.router import Router
from tests.agent.duplex.world import Chat, chat
from transport.cancellation import TaskGroup

T = TypeVar("T")

COMMITS = range(1, 16)


class Killed(Stopped):
    pass


class MortalStore(DuplexStore):
    """Stops to work at a commit: what comes later does not happen."""

    lives_for = 0
    dies_before_commit = False
    used = 0
    dead: asyncio.Event

    async def run(self, change: Change[T]) -> tuple[T, Tx]:
        cls = type(self)
        cls.used += 1
        if cls.used < cls.lives_for:
            return await super().run(change)
        cls.dead.set()
        if not cls.dies_before_commit and cls.used == cls.lives_for:
            await super().run(change)
        raise Killed


def mortal(commits: int, before: bool) -> type[MortalStore]:
    values: dict[str, Any] = {"lives_for": commits, "dies_before_commit": before, "used": 0}
    return type("Mortal", (MortalStore,), values | {"dead": asyncio.Event()})


async def until_dead(kind: type[MortalStore], script: Any) -> None:
    """Run a script as far as it gets."""
    try:
        async with TaskGroup() as tasks:
            work = tasks.create_task(script, name="script")
            end = tasks.create_task(kind.dead.wait(), name="death")
            await asyncio.wait([work, end], return_when=asyncio.FIRST_COMPLETED)
            work.cancel()
            end.cancel()
    except* (Killed, Stopped):
        pass


async def conversation(mine: Chat, my_id: int, theirs: Chat, their_id: int) -> None:
    for number in range(3):
        await mine.say(my_id, b"mine %d" % number)
        await theirs.has_read(b"mine %d" % number)
        await theirs.say(their_id, b"theirs %d" % number)
        await mine.has_read(b"theirs %d" % number)


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("commits", COMMITS)
async def test_the_joiner_dies(tmp_path: Path, commits: int, before: bool) -> None:
    async with Router.start() as router, chat(tmp_path / "alice.db", router.address) as alice:
        hers, link = await alice.agent.create_invitation(pq=False)
        kind, read = mortal(commits, before), list[bytes]()

        async def script(bob: Chat) -> None:
            his = await bob.agent.join(link, b"Bob", pq=False)
            await conversation(bob, his, alice, hers)

        try:
            async with chat(tmp_path / "bob.db", router.address, store=kind) as bob:
                await until_dead(kind, script(bob))
                read = bob.bodies
        except* (Killed, Stopped):
            pass
        assert kind.dead.is_set()
        async with chat(tmp_path / "bob.db", router.address) as bob:
            known = await bob.agent.connections()
            his = known[0].connection_id if known else await bob.agent.join(link, b"Bob", pq=False)
            await bob.say(his, b"after death")
            await alice.say(hers, b"welcome back")
            await alice.has_read(b"after death")
            await bob.has_read(b"welcome back")
            assert len(alice.bodies) == len(set(alice.bodies))
            again = set(read) & set(bob.bodies)
            assert len(again) <= 1, "only the one whose ACK died may be shown again"


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("commits", COMMITS)
async def test_the_creator_dies(tmp_path: Path, commits: int, before: bool) -> None:
    async with Router.start() as router, chat(tmp_path / "bob.db", router.address) as bob:
        async with chat(tmp_path / "alice.db", router.address) as alice:
            hers, link = await alice.agent.create_invitation(pq=False)
        kind = mortal(commits, before)
        his = await bob.agent.join(link, b"Bob", pq=False)
        try:
            async with chat(tmp_path / "alice.db", router.address, store=kind) as alice:
                await until_dead(kind, conversation(alice, hers, bob, his))
        except* (Killed, Stopped):
            pass
        assert kind.dead.is_set()
        async with chat(tmp_path / "alice.db", router.address) as alice:
            await alice.say(hers, b"after death")
            await bob.say(his, b"welcome back")
            await bob.has_read(b"after death")
            await alice.has_read(b"welcome back")
            assert len(bob.bodies) == len(set(bob.bodies))
