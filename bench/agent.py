"""What connections cost: `python -m bench.agent` talks over real routers and TLS, all in one process."""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from agent.duplex.agent import DuplexAgent, DuplexConfig, open_duplex
from agent.duplex.events import Confirmed, Connected, MessageReceived, ServerUp
from bench.measure import Row, print_rows
from protocol.addresses import SmpServer
from smp_router.router import Router

MESSAGES = 200
HANDSHAKES = 10
CONNECTIONS = 1000


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


async def _one_way(alice: DuplexAgent, hers: int, bob: DuplexAgent) -> None:
    for number in range(MESSAGES):
        await alice.send(hers, b"%d" % number)
    await _read(bob, MESSAGES)


async def _turns(alice: DuplexAgent, hers: int, bob: DuplexAgent, his: int) -> None:
    for _ in range(MESSAGES // 4):
        await alice.send(hers, b"question")
        await _read(bob, 1)
        await bob.send(his, b"answer")
        await _read(alice, 1)


async def _timed(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Seconds of the clock, and of the processor."""
    clock, cpu = time.perf_counter(), time.process_time()
    await work()
    return time.perf_counter() - clock, time.process_time() - cpu


async def _talk(folder: Path, server: SmpServer, other: SmpServer, pq: bool) -> list[Row]:
    kind = "with PQ" if pq else "without PQ"
    config = DuplexConfig(path=folder / f"alice{pq}.db", servers=[server])
    async with (
        open_duplex(config) as alice,
        open_duplex(DuplexConfig(path=folder / f"bob{pq}.db", servers=[other])) as bob,
    ):
        hers, his = await _connect(alice, bob, pq)
        rows = []
        seconds, cpu = await _timed(lambda: _one_way(alice, hers, bob))
        rows.append(Row(f"one way, {kind}", MESSAGES / seconds, "messages/s"))
        rows.append(Row("  CPU of both agents and the router", cpu / MESSAGES * 1000, "ms"))
        seconds, _ = await _timed(lambda: _turns(alice, hers, bob, his))
        rows.append(Row(f"question and answer, {kind}", seconds / (MESSAGES // 4) * 1000, "ms"))

        async def handshakes() -> None:
            for _ in range(HANDSHAKES):
                await _connect(alice, bob, pq)

        seconds, _ = await _timed(handshakes)
        rows.append(Row(f"handshake, {kind}", seconds / HANDSHAKES * 1000, "ms"))
        return rows


async def _start(folder: Path, server: SmpServer) -> list[Row]:
    config = DuplexConfig(path=folder / "many.db", servers=[server])
    async with open_duplex(config) as agent:
        for _ in range(CONNECTIONS):
            await agent.create_invitation(pq=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock = time.perf_counter()
    async with open_duplex(config) as agent:
        await _event(agent, ServerUp)
        seconds = time.perf_counter() - clock
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return [
        Row(f"start with {CONNECTIONS} connections until all are subscribed", seconds, "s"),
        Row("  memory beyond the peak before", grown / CONNECTIONS, "kB each"),
    ]


async def run() -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with Router.start() as one, Router.start() as two:
            rows = [row for pq in (False, True) for row in await _talk(folder, one.address, two.address, pq)]
            return rows + await _start(folder, one.address)


def main() -> bool:
    return print_rows("Connections", asyncio.run(run()))


if __name__ == "__main__":
    raise SystemExit(not main())
