"""A server with a gateway in a process of its own, and what reached the devices of a client."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from ntf_demo.fake_push.recorder import RecordedPush
from ntf_demo.statement_gateway import GatewayWorld, key_pair
from ntf_server.config import CONFIG_FILE, render_config
from tests.waiting import DEADLINE

ALICE, TOPIC = key_pair("alice"), b"1" * 32
DEVICES = {"apns": "a1" * 32, "voip": "b2" * 32, "fcm": "fcm:token"}


class Daemon(NamedTuple):
    process: Process
    port: int
    "Of its API."


@asynccontextmanager
async def daemon(world: GatewayWorld, name: str = "") -> AsyncIterator[Daemon]:
    """Killed at the end, unless it was before."""
    folder = world.folder / "etc"
    (folder / CONFIG_FILE).write_text(render_config(world.config))
    command = [sys.executable, "-m", "ntf_server", "start", "--config-dir", str(folder)]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"NTF_LOG_LEVEL": "error", "NTF_STORE_DAEMON": name},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE):
            while b"gateway on port" not in (line := await process.stdout.readline()):
                assert line, "the server ended"
        yield Daemon(process, int(line.split()[-1]))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def register(world: GatewayWorld, port: int, topic: bytes = TOPIC) -> None:
    bob = world.client("bob", port)
    for kind, token in DEVICES.items():
        await bob.allow(await bob.register(kind, token), (ALICE[0], topic))


def of(world: GatewayWorld, data: bytes) -> list[RecordedPush]:
    return [push for push in world.accepted if data.hex() in push.body]
