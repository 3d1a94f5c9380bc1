"""How often two people go to routers until they are connected, and how long that takes over a distance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.duplex.agent import DuplexAgent, DuplexConfig, open_duplex
from agent.duplex.events import Confirmed, Connected, ContactRequested
from bench.measure import Row, figure
from bench.part import Part
from protocol.versions import VersionRange
from smp_router.router import Router
from tests.agent.duplex.world import BEFORE_SKEY, DIRECT
from tests.agent.tunnel import Tunnel, tunnel
from transport.cancellation import TaskGroup

FAR = 0.05
"Seconds to a router and back."

LOOK_AGAIN = 0.002

Link = Callable[[DuplexAgent], Awaitable[tuple[int, str]]]


@dataclass
class Side:
    agent: DuplexAgent
    tunnel: Tunnel


@asynccontextmanager
async def _side(path: Path, router: Router) -> AsyncIterator[Side]:
    async with tunnel() as passage:
        config = DuplexConfig(
            path=path,
            servers=[router.address],
            network=passage.network,
            proxy=DIRECT,
            private_servers=True,
            kem_pairs=0,
        )
        async with open_duplex(config) as agent:
            yield Side(agent, passage)


async def _until_connected(agent: DuplexAgent) -> None:
    """Everybody is let in."""
    while not isinstance(event := await agent.next_event(), Connected):
        if isinstance(event, Confirmed):
            await agent.allow(event.connection_id, b"me")
        elif isinstance(event, ContactRequested):
            await agent.accept(event.invitation_id, b"me")


class Meeting:
    """Two people at two routers."""

    def __init__(self, routers: tuple[Router, Router], creator: Side, joiner: Side, make: Link) -> None:
        self._routers = routers
        self.sides = creator, joiner
        self._make = make

    async def connect(self) -> float:
        """Seconds from the link to both connected; returns when every message is acknowledged."""
        creator, joiner = self.sides
        _, link = await self._make(creator.agent)
        await self._settled()
        for side in self.sides:
            side.tunnel.blocks = 0
        clock = time.perf_counter()
        async with TaskGroup() as tasks:
            await joiner.agent.join(link, b"me")
            for side in self.sides:
                tasks.create_task(_until_connected(side.agent), name="until connected")
        seconds = time.perf_counter() - clock
        await self._settled()
        return seconds

    async def _settled(self) -> None:
        for side in self.sides:
            await side.agent.settled()
        while self._is_waiting():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_AGAIN)

    def _is_waiting(self) -> bool:
        """Whether a router has a message that is not acknowledged."""
        return any(queue.messages for router in self._routers for queue in router.state.queues)


async def _measured(name: str, folder: Path, make: Link, versions: VersionRange | None) -> list[Row]:
    async with (
        Router.start(versions=versions) as one,
        Router.start(versions=versions) as two,
        _side(folder / f"{name} creator.db", one) as creator,
        _side(folder / f"{name} joiner.db", two) as joiner,
    ):
        meeting = Meeting((one, two), creator, joiner, make)
        await meeting.connect()  # from here on all connections to routers are open
        near = await meeting.connect()
        blocks = [side.tunnel.blocks for side in meeting.sides]
        for side in meeting.sides:
            side.tunnel.delay = FAR / 2
        far = await meeting.connect()
    return [
        figure(f"{name}: requests of the creator", "times", blocks[0]),
        figure(f"{name}: requests of the joiner", "times", blocks[1]),
        figure(name, "ms", near * 1000),
        figure(f"{name}, {FAR * 1000:.0f} ms to routers and back", "ms", far * 1000),
    ]


WAYS: dict[str, tuple[Link, VersionRange | None]] = {
    "invitation": (DuplexAgent.create_invitation, None),
    "invitation, slow handshake": (DuplexAgent.create_invitation, BEFORE_SKEY),
    "short link": (DuplexAgent.create_short_invitation, None),
    "address": (DuplexAgent.create_address, None),
}


async def measure(folder: Path) -> list[Row]:
    rows: list[Row] = []
    for name, (make, versions) in WAYS.items():
        rows += await _measured(name, folder, make, versions)
    return rows


HANDSHAKES = Part(
    name="handshakes",
    title="Making a connection",
    measure=measure,
    repeats=3,
    seconds=15,
    quick_seconds=5,
    why="What two people wait for when one of them uses the link of the other.",
    how="Two agents and two routers in one process, with connections to the routers that are open"
    " already. From the link to both connected; both accept at once. Requests: blocks with commands, also"
    " ACKs. The last figure is with a proxy that holds up everything, each way half of the time.",
    bound="invitation: SKEY, NEW and SEND of the joiner, SKEY and SEND of the creator, one after the other,"
    " and half a way for each message that a router hands on. A short link is read first: with LKEY, which"
    " takes the place of SKEY. To an address the joiner sends an invitation of his own, which its owner"
    " joins. Slow handshake: recipients secure their queues with KEY, and both say HELLO.",
)
