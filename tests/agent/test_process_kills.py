"""`kill -9` while the router's answer is on its way: the next command goes on from the file."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from smp_router.router import Router
from tests.agent.proxy import LossyProxy, lossy_proxy
from tests.agent.test_cli import Terminal


@asynccontextmanager
async def stage(folder: Path) -> AsyncIterator[tuple[Router, LossyProxy, Terminal]]:
    async with Router.start() as router, lossy_proxy(router.address) as proxy:
        yield router, proxy, Terminal(folder / "alice", proxy.in_front_of(router.address))


async def run_to_its_death(terminal: Terminal, proxy: LossyProxy, *arguments: str) -> None:
    """The router has carried out the command's first request."""
    process, before = await terminal.start(*arguments), proxy.lost
    proxy.on_loss = process.kill
    proxy.lose()
    await process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert proxy.lost == before + 1


async def test_creating_a_link(tmp_path: Path) -> None:
    """The queue is found, and can be deleted."""
    async with stage(tmp_path) as (router, proxy, alice):
        await run_to_its_death(alice, proxy, "create", "--short")
        assert len(router.state.queues) == 1
        await alice.run("receive")
        await alice.run("delete", "1")
        assert len(router.state.queues) == 0


async def test_deleting_a_connection(tmp_path: Path) -> None:
    async with stage(tmp_path) as (router, proxy, alice):
        await alice.run("create")
        while router.state.queues:  # on a busy machine, the first answer is that to the subscription
            await run_to_its_death(alice, proxy, "delete", "1")
        assert "Connection 1" not in await alice.run("receive")
        while "Connection 1" in await alice.run("status"):  # the router took longer than `receive` waits
            await alice.run("receive")
        assert len(router.state.queues) == 0
