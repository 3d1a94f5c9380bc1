"""kill -9 while pushes are under way: nothing reaches a device twice, and what was not sent is."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

from ntf_demo.fake_push.faults import Fault
from ntf_demo.fake_push.recorder import RecordedPush
from ntf_demo.statement_gateway import GatewayWorld, gateway_parts, key_pair, signed_statement
from ntf_server.config import CONFIG_FILE, render_config

DEADLINE = 60.0
ALICE, TOPIC = key_pair("alice"), b"1" * 32
DEVICES = {"apns": "a1" * 32, "voip": "b2" * 32, "fcm": "fcm:token"}


@asynccontextmanager
async def daemon(world: GatewayWorld) -> AsyncIterator[int]:
    """A server of its own process, killed at the end; the port of its API."""
    folder = world.folder / "etc"
    (folder / CONFIG_FILE).write_text(render_config(world.config))
    command = [sys.executable, "-m", "ntf_server", "start", "--config-dir", str(folder)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env=os.environ | {"NTF_LOG_LEVEL": "error"}
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE):
            while b"gateway on port" not in (line := await process.stdout.readline()):
                assert line, "the server ended"
        yield int(line.split()[-1])
    finally:
        process.kill()
        await process.wait()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.01)


async def register(world: GatewayWorld, port: int) -> None:
    bob = world.client("bob", port)
    for kind, token in DEVICES.items():
        await bob.allow(await bob.register(kind, token), (ALICE[0], TOPIC))


def of(world: GatewayWorld, data: bytes) -> list[RecordedPush]:
    return [push for push in world.accepted if data.hex() in push.body]


async def waiting_are(world: GatewayWorld, count: int, unknown: int) -> None:
    """So many pushes are to be made, and of so many of them nobody knows whether they were.

    One connection: one that is closed takes a lock, and the server would wait for it again and again."""
    sql = "SELECT count(*), count(*) FILTER (WHERE attempted) FROM pending_statements"
    with closing(sqlite3.connect(world.folder / "data" / "ntf-server.db")) as db:
        await until(lambda: db.execute(sql).fetchone() == (count, unknown))


async def test_a_push_without_an_answer_is_not_seen_twice(tmp_path: Path) -> None:
    async with gateway_parts(tmp_path) as world:
        for api in ("apns", "fcm"):
            world.push.add_fault(Fault(api=api, action="silence", processed=True))
        async with daemon(world) as port:
            await register(world, port)
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"first"))
            await until(lambda: len(of(world, b"first")) == 3)
        await waiting_are(world, 3, 2)
        world.push.clear_faults()
        async with daemon(world):
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"second"))
            await until(lambda: len(of(world, b"second")) == 3 and len(of(world, b"first")) == 4)
    first = of(world, b"first")
    assert Counter(push.token for push in first) == Counter(DEVICES.values()) + Counter([DEVICES["apns"]])
    alerts = [push for push in first if push.token == DEVICES["apns"]]
    assert len({push.push_id for push in alerts}) == 1
    assert len({push.headers["apns-collapse-id"] for push in alerts}) == 1


async def test_what_a_provider_refused_is_pushed_after_a_kill(tmp_path: Path) -> None:
    async with gateway_parts(tmp_path) as world:
        for api in ("apns", "fcm"):
            world.push.add_fault(Fault(api=api, status=503, reason="Shutdown"))
        async with daemon(world) as port:
            await register(world, port)
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"first"))
            await until(lambda: len(world.push.pushes) >= 3)
            await waiting_are(world, 3, 0)
        world.push.clear_faults()
        async with daemon(world):
            await until(lambda: len(of(world, b"first")) == 3)
    assert Counter(push.token for push in of(world, b"first")) == Counter(DEVICES.values())
