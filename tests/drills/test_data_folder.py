"""Other commands on the data of a running server, and a database that is taken away from under it."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from ntf_demo.fake_push.server import wall_clock
from tests.drills.world import (
    DEADLINE,
    NOTIFICATIONS_PER_SECOND,
    PROGRAM,
    Daemon,
    World,
    push_settings,
    running_daemon,
    world,
)
from tests.ntf_server.test_cli import ANY_PORT
from tests.ports import free_port
from tests.waiting import until

SECONDS = 4.0
PATIENCE = 20.0
"Seconds for a server that should end: then an operator ends it."
STARTED = b"Server address"
IN_FLIGHT = 1.0
"Seconds: what a router wrote shortly before its connection was cut may have been read by nobody."
COMMANDS = {
    "start": ("start",),
    "migrate": ("migrate", "--to", "0", "--yes"),
    "delete": ("delete", "--yes"),
    "import": ("import", "--url", "postgresql://127.0.0.1:1/deployed"),
}
REFUSED = 2
"Exit code."


class Tried(NamedTuple):
    code: int | None
    "None: it served, and had to be killed."
    said: str


async def tried(folder: Path, drill: World, *arguments: str) -> Tried:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *PROGRAM, *arguments, "--config-dir", str(folder / "c")),
        stdout=PIPE,
        stderr=PIPE,
        env=os.environ | ANY_PORT | push_settings(drill.push),
    )
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE):
        is_serving = STARTED in await process.stdout.readline()
        if is_serving:
            process.kill()
        _, said = await process.communicate()
    return Tried(None if is_serving else process.returncode, said.decode())


@pytest.mark.parametrize("name", COMMANDS)
async def test_the_data_of_a_running_server_is_its_own(tmp_path: Path, name: str) -> None:
    async with world(tmp_path, seconds=2 * SECONDS) as drill:
        async with asyncio.TaskGroup() as tasks:
            misuse = tasks.create_task(tried(tmp_path, drill, *COMMANDS[name]))
            service = await drill.measure(SECONDS)
        outcome = misuse.result()
        print(service.row(f"`{name}` beside a running server: exit {outcome.code}"))
        later = await drill.measure(SECONDS / 2)
        print(later.row("afterwards"))
        pid = drill.daemon.process.pid
    assert outcome.code == REFUSED
    assert f"is in use by process {pid}: stop it first" in outcome.said
    service.check()
    later.check()


def _remove(database: Path, kept: Path) -> None:
    for file in database.parent.glob(f"{database.name}*"):
        os.link(file, kept / file.name)
    database.unlink()


def _empty(database: Path, kept: Path) -> None:
    for file in database.parent.glob(f"{database.name}*"):
        shutil.copy(file, kept / file.name)
    os.truncate(database, 0)


LOSSES: dict[str, Callable[[Path, Path], None]] = {
    "removed": _remove,
    "emptied": _empty,
}


class Story(NamedTuple):
    noticed: float
    "Seconds until the server ended."
    start: Tried
    "Without the database."


async def lose_and_restore(
    folder: Path, drill: World, loss: str, restart: Callable[[], Awaitable[Daemon]]
) -> Story:
    """The database goes, a start is tried; then the operator puts the database back and starts again."""
    database, kept, began = folder / "d" / "ntf-server.db", folder / "kept", wall_clock()
    kept.mkdir()
    drill.dead |= drill.daemon.connections()
    LOSSES[loss](database, kept)
    await ended(drill.daemon)
    noticed = wall_clock() - began
    outcome = await tried(folder, drill, "start")
    for file in database.parent.glob(f"{database.name}*"):
        file.unlink()
    for file in kept.iterdir():
        file.rename(database.parent / file.name)
    drill.daemon = await restart()
    return Story(noticed, outcome)


async def ended(daemon: Daemon) -> None:
    """By itself, or by an operator who notices that something is wrong."""
    try:
        await until(lambda: not daemon.is_alive(), PATIENCE)
    except TimeoutError:
        daemon.process.kill()


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_database_that_vanishes_is_noticed(tmp_path: Path, loss: str) -> None:
    async with AsyncExitStack() as stack:
        port = {"NTF_TRANSPORT_PORT": str(free_port())}
        drill = await stack.enter_async_context(world(tmp_path, seconds=2 * SECONDS, env=port))

        async def restart() -> Daemon:
            return await stack.enter_async_context(running_daemon(tmp_path, push_settings(drill.push) | port))

        async with asyncio.TaskGroup() as tasks:
            story = tasks.create_task(lose_and_restore(tmp_path, drill, loss, restart))
            during = await drill.measure(SECONDS)
        noticed, start = story.result()
        print(during.row(f"the database is {loss}, noticed after {noticed:.1f} s, `start` {start.code}"))
        later = await drill.measure(SECONDS)
        print(later.row("put back"))
    assert noticed < PATIENCE
    if loss == "removed":  # what was emptied may be whole again: SQLite's log still had all of it
        assert start.code == REFUSED
        assert "is missing or empty" in start.said
    assert during.lost <= (noticed + IN_FLIGHT) * NOTIFICATIONS_PER_SECOND
    assert not during.tracebacks
    later.check()
