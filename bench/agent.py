"""What connections of agents cost over real routers and TLS, all in one process."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

from agent.duplex.agent import DuplexAgent, DuplexConfig, open_duplex
from agent.duplex.events import Confirmed, Connected, MessageReceived
from bench.measure import Row, figure
from bench.part import Part
from protocol.addresses import SmpServer
from smp_router.router import Router
from tests.agent.duplex.world import DIRECT

HANDSHAKES = 10


async def _event(agent: DuplexAgent, kind: type) -> object:
    while not isinstance(event := await agent.next_event(), kind):
        pass
    return event


async def _connect(alice: DuplexAgent, bob: DuplexAgent, pq: bool) -> tuple[int, int]:
    hers, link = await alice.create_invitation(pq=pq)
    his = await bob.join(link, b"Bob", pq=pq)
    await _event(alice, Confirmed)
    await alice.allow(hers, b"Alice")
    await _event(alice, Connected)
    await _event(bob, Connected)
    return hers, his


async def _read(agent: DuplexAgent, count: int) -> None:
    for _ in range(count):
        event = await _event(agent, MessageReceived)
        assert isinstance(event, MessageReceived)
        await agent.ack(event.connection_id, event.message_id)


async def _one_way(alice: DuplexAgent, hers: int, bob: DuplexAgent, messages: int) -> None:
    for number in range(messages):
        await alice.send(hers, b"%d" % number)
    await _read(bob, messages)


async def _turns(alice: DuplexAgent, hers: int, bob: DuplexAgent, his: int, count: int) -> None:
    for _ in range(count):
        await alice.send(hers, b"question")
        await _read(bob, 1)
        await bob.send(his, b"answer")
        await _read(alice, 1)


async def _timed(work: Awaitable[object]) -> tuple[float, float]:
    """Seconds of the clock, and of the processor."""
    clock, cpu = time.perf_counter(), time.process_time()
    await work
    return time.perf_counter() - clock, time.process_time() - cpu


async def _talk(folder: Path, server: SmpServer, other: SmpServer, pq: bool, messages: int) -> list[Row]:
    kind, turns = "with PQ" if pq else "without PQ", messages // 4
    config = DuplexConfig(path=folder / f"alice{pq}.db", servers=[server], proxy=DIRECT, private_servers=True)
    async with (
        open_duplex(config) as alice,
        open_duplex(replace(config, path=folder / f"bob{pq}.db", servers=[other])) as bob,
    ):
        hers, his = await _connect(alice, bob, pq)
        sending, cpu = await _timed(_one_way(alice, hers, bob, messages))
        talking, _ = await _timed(_turns(alice, hers, bob, his, turns))

        async def handshakes() -> None:
            for _ in range(HANDSHAKES):
                await _connect(alice, bob, pq)

        connecting, _ = await _timed(handshakes())
    return [
        figure(f"messages one way, {kind}", "1/s", messages / sending),
        figure(f"a message, both agents and routers, {kind}", "ms CPU", cpu / messages * 1000),
        figure(f"question and answer, {kind}", "ms", talking / turns * 1000),
        figure(f"handshake, {kind}", "ms", connecting / HANDSHAKES * 1000),
    ]


async def measure(folder: Path, *, messages: int = 100) -> list[Row]:
    async with Router.start() as one, Router.start() as two:
        rows: list[Row] = []
        for pq in (False, True):
            rows += await _talk(folder, one.address, two.address, pq, messages)
        return rows


AGENT = Part(
    name="agent",
    title="Connections of agents",
    measure=measure,
    quick={"messages": 60},
    repeats=2,
    seconds=25,
    quick_seconds=8,
    why="What a person at a device waits for.",
    how="Two agents and two routers in one process over loopback TLS. Every message is on the disk"
    " before it is sent and again before it is acknowledged. Question and answer: four SENDs and"
    " ACKs, two changes of direction. A handshake: from the link to both connected.",
    bound="a queue hands out one message at a time and waits for its ACK, so one connection's rate is"
    " that of the round trip and two commits, not of the processor. Of a handshake the network"
    " sees, one after the other: SKEY, NEW and SEND of the joiner, SKEY and SEND of the creator.",
)
