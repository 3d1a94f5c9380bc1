"""Bad routers: connections dropped, answers lost, silence, restarts. Nothing is lost or shown twice."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from agent.errors import Prohibited
from smp_router.router import Router
from tests.agent.duplex.world import Chat, chat
from transport.cancellation import TaskGroup

MESSAGES = 60


async def storm(routers: list[Router], chance: random.Random) -> None:
    """Until it is cancelled; then the weather is good again, whatever it was."""
    while True:
        faults = chance.choice(routers).faults
        spell = chance.choice((None, faults.lose_answers, faults.black_hole, faults.refuse))
        try:
            if spell is not None:
                spell(True)
                await asyncio.sleep(0.1)
                faults.drop_connections()
                await asyncio.sleep(0.1)
        finally:
            if spell is not None:
                spell(False)
            faults.drop_connections()
        await asyncio.sleep(0.3)


async def switches(who: Chat, connection_id: int) -> None:
    for _ in range(3):
        while True:
            try:
                await who.agent.switch(connection_id)
                break
            except Prohibited:
                await asyncio.sleep(0.2)
        await asyncio.sleep(0.5)


async def test_a_storm(tmp_path: Path) -> None:
    async with (
        Router.start() as one,
        Router.start() as two,
        Router.start() as three,
        chat(tmp_path / "alice.db", one.address, two.address) as alice,
        chat(tmp_path / "bob.db", two.address, three.address) as bob,
    ):
        hers, link = await alice.agent.create_invitation()
        his = await bob.agent.join(link, b"Bob")
        await alice.say(hers, b"first")
        await bob.has_read(b"first")
        async with TaskGroup() as tasks:
            bad = tasks.create_task(storm([one, two, three], random.Random(5)), name="storm")
            rotation = tasks.create_task(switches(alice, hers), name="rotation")
            for number in range(MESSAGES):
                await alice.say(hers, b"a%d" % number)
                await bob.say(his, b"b%d" % number)
            await asyncio.sleep(2)
            bad.cancel()
            await alice.has_read(*(b"b%d" % number for number in range(MESSAGES)), within=120)
            await bob.has_read(*(b"a%d" % number for number in range(MESSAGES)), within=120)
            rotation.cancel()
        for who in (alice, bob):
            assert len(who.bodies) == len(set(who.bodies))
