"""What many connections cost when an agent starts: one by one, as a service, and in separate sessions."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import replace
from pathlib import Path

from agent.duplex.agent import DuplexAgent, DuplexConfig, open_duplex
from agent.duplex.events import ServerUp, ServiceUp
from bench.measure import Row, figure, resident_memory
from bench.part import Part
from bench.router_commands import OtherProcess

MAKERS = 100
"Who make connections at the same time, so that they share commits."


async def _make(config: DuplexConfig, connections: int) -> None:
    async with open_duplex(config) as agent:

        async def some() -> None:
            for _ in range(connections // MAKERS):
                await agent.create_address()

        await asyncio.gather(*(some() for _ in range(MAKERS)))


async def _subscribed(agent: DuplexAgent, connections: int) -> None:
    """Until the router has confirmed all of them, one by one or together."""
    found = 0
    while found < connections:
        event = await agent.next_event()
        if isinstance(event, ServerUp):
            found += len(event.connection_ids)
        elif isinstance(event, ServiceUp):
            found += event.queues.count


async def _start(name: str, config: DuplexConfig, connections: int) -> list[Row]:
    gc.collect()
    before, clock, cpu = resident_memory(), time.perf_counter(), time.process_time()
    async with open_duplex(config) as agent:
        await _subscribed(agent, connections)
        seconds, used = time.perf_counter() - clock, time.process_time() - cpu
        gc.collect()
        grown = resident_memory() - before
    return [
        figure(f"start, {name}", "s", seconds),
        figure(f"start of a connection, {name}", "us CPU", used / connections * 1e6),
        figure(f"memory of a connection, {name}", "kB", max(grown, 0) / connections / 1000),
    ]


async def measure(folder: Path, *, connections: int = 10_000, separate: int = 1000) -> list[Row]:
    with OtherProcess(None) as router:
        config = DuplexConfig(path=folder / "many.db", servers=[router.server], kem_pairs=0)
        await _make(config, connections)
        rows = await _start("one by one", config, connections)
        service = replace(config, services=True)
        rows += await _start("one by one, each becomes the service's", service, connections)
        rows += await _start("by service", service, connections)
        config = replace(config, path=folder / "few.db")
        await _make(config, separate)
        config = replace(config, separate_sessions=True)
        return rows + await _start("in a session of its own", config, separate)


CONNECTIONS = Part(
    name="connections",
    title="Many connections",
    measure=measure,
    quick={"connections": 500, "separate": 200},
    repeats=1,
    seconds=20,
    quick_seconds=5,
    why="How long an agent with ten thousand connections, a directory or a relay, is deaf after a start.",
    how="An agent with that many receive queues at one router, which runs in another process. From opening"
    " the file until the router has confirmed all queues; then the agent's memory. A tenth as many with"
    " a session for each.",
    bound="one by one: a signature and a row for each queue here, a verification at the router. By service:"
    " one command, and the hash of all ids. In sessions of their own: a connection and two handshakes"
    " for each queue, 32 at the same time.",
)
