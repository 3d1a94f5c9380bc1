"""Upgrade and roll back under load: a server of an earlier schema, built from the history, and this one.

Notifications go on all the while. Routers keep those that come while no server runs.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from bench.earlier import HERE, PROGRAM, ROOT, Version, build
from ntf_demo.fake_push.server import FakePushServer, wall_clock
from protocol.encoding import EntityId
from smp_router.router import Router
from store.migrate import STEPS, schema_version
from tests.drills.world import (
    DEADLINE,
    Asked,
    Daemon,
    World,
    provider,
    push_settings,
    running_daemon,
)
from tests.packaging.test_distribution import run
from tests.ports import free_port

DEVICES, QUEUES = 20, 2400
NEW_DEVICES, NEW_QUEUES = 2, 40
"Of each version that runs: what one wrote, the others read."
PUSHES = 60
"For so many, each version runs."


@pytest.fixture(scope="module", params=range(1, STEPS.latest), ids="schema {}".format)
def earlier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Version:
    """The last commit before the next schema."""
    folder, schema = tmp_path_factory.mktemp("earlier"), int(request.param)
    added = ("log", "--diff-filter=A", "--format=%H", "--", f"store/migrations/{schema + 1:04}_*.up.sql")
    commit = run("git", *added, cwd=ROOT).strip()
    if not commit:
        pytest.skip("needs the history of the repository")
    return build(f"{commit}^", folder)


class Traffic:
    """Notifications to all devices, until it is stopped."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stop = asyncio.Event()
        self.sent: dict[EntityId, float] = {}

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._flow())
            yield
            self._stop.set()

    async def _flow(self) -> None:
        while not self._stop.is_set():
            self.sent |= await self._world.notify(0.2)


async def test_nothing_is_lost(tmp_path: Path, earlier: Version) -> None:
    where = ("--config-dir", tmp_path / "c")
    earlier.run("init", "--ip", "127.0.0.1", *where, "--data-dir", tmp_path / "d")
    async with Router.start(host="127.0.0.1") as router, provider(tmp_path) as push:
        env = push_settings(push) | {"NTF_TRANSPORT_PORT": str(free_port())}
        async with serving(tmp_path, env, earlier) as daemon:
            world = World(daemon, router, push)
            await world.add_devices(DEVICES, QUEUES)
        traffic, asked, away = Traffic(world), Asked(), []
        async with traffic.flowing():
            for version in (earlier, HERE, earlier, HERE):
                ended = wall_clock()
                if version is earlier:  # the roll-back; a later version upgrades by itself
                    await asyncio.to_thread(HERE.run, "migrate", "--to", version.schema, "--yes", *where)
                async with serving(tmp_path, env, version) as world.daemon:
                    await subscribed(world)
                    away.append(wall_clock() - ended)
                    await world.add_devices(NEW_DEVICES, NEW_QUEUES)
                    await pushed(push, PUSHES)
        async with serving(tmp_path, env, HERE):
            missing = await world.pushed(traffic.sent, asked)
    seconds = ", ".join(f"{each:.1f}" for each in away)
    print(f"| {earlier.schema} to {HERE.schema} and back, twice | {asked} | {len(missing)} | {seconds} s |")
    assert not missing


@asynccontextmanager
async def serving(folder: Path, env: Mapping[str, str], version: Version) -> AsyncIterator[Daemon]:
    """A server of this version, stopped in order at the end."""
    async with running_daemon(folder, env, python=version.python, program=PROGRAM) as daemon:
        assert schema(folder) == version.schema
        yield daemon
        daemon.process.terminate()
        async with asyncio.timeout(DEADLINE):
            while daemon.is_alive():
                await asyncio.sleep(0.02)


def schema(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "d/ntf-server.db")) as db:
        return schema_version(db)


async def subscribed(world: World) -> None:
    async with asyncio.timeout(DEADLINE):
        while not world.queues <= world.router.subscribed_notifiers():
            await asyncio.sleep(0.02)


async def pushed(push: FakePushServer, count: int) -> None:
    """So many more."""
    wanted = len(push.pushes) + count
    async with asyncio.timeout(DEADLINE):
        while len(push.pushes) < wanted:
            await asyncio.sleep(0.02)
