"""SIGTERM while something fails in every moment: the server ends in time, and the next one has everything."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from ntf_demo.fake_push.faults import Fault
from ntf_demo.fake_push.server import wall_clock
from tests.drills.world import World, push_settings, running_daemon, world
from tests.ports import free_port
from tests.waiting import until

SECONDS = 3.0
STOPS = 3
PATIENCE = 30.0
"Seconds for a stop; the server's own patience with a provider that does not answer is ten."


async def trouble(drill: World) -> None:
    """Connections with the router are cut as soon as they are made, and the provider fails."""
    drill.push.add_fault(Fault(api="apns", status=503))
    while True:
        drill.router.faults.drop_connections()
        await asyncio.sleep(0.05)


async def test_it_stops_amid_trouble_and_loses_nothing(tmp_path: Path) -> None:
    stopped: list[float] = []
    async with AsyncExitStack() as stack:
        port = {"NTF_TRANSPORT_PORT": str(free_port())}
        drill = await stack.enter_async_context(world(tmp_path, seconds=SECONDS, env=port))
        for _ in range(STOPS):
            failing = asyncio.create_task(trouble(drill))
            await asyncio.sleep(0.2)
            began = wall_clock()
            drill.daemon.process.terminate()
            await until(lambda: not drill.daemon.is_alive(), PATIENCE)
            stopped.append(wall_clock() - began)
            failing.cancel()
            drill.push.clear_faults()
            env = push_settings(drill.push) | port
            drill.daemon = await stack.enter_async_context(running_daemon(tmp_path, env))
        service = await drill.measure(SECONDS)
        told = ", ".join(f"{each:.1f}" for each in stopped)
        print(service.row(f"stopped {STOPS} times amid failures, after {told} s; then"))
    service.check()
