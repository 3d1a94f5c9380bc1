"""Handshakes without end at the statement gateway: beside it, the notification server's own clients."""

from __future__ import annotations

import asyncio
import os
import ssl
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from ntf_demo.fake_node.server import FakeNode
from ntf_demo.statement_gateway import GatewayClient, key_pair
from ntf_server.statements.openapi import SUBSCRIPTIONS
from protocol.addresses import NtfServer
from tests.drills.attacker import Attack
from tests.drills.test_handshakes import FIRST_BYTE, OTHER_ADDRESS
from tests.drills.world import NEWCOMERS_PER_SECOND, Asked, gateway_settings, world
from tests.ports import free_port

SECONDS = 5.0
STORMING, STALLING = 300, 1000
MEMORY = 60_000_000
PORT = "DRILL_GATEWAY_PORT"


async def storm(address: NtfServer, seconds: float) -> None:
    """So many handshakes at once, again and again."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(STORMING):
            tasks.create_task(_come_and_go())


async def _come_and_go() -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    while True:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(
                "127.0.0.1", int(os.environ[PORT]), ssl=context, local_addr=(OTHER_ADDRESS, 0)
            )
            writer.close()


async def stall(address: NtfServer, seconds: float) -> None:
    """Handshakes that begin and do not go on."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(STALLING):
            tasks.create_task(_begin())


async def _begin() -> None:
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(os.environ[PORT]), local_addr=(OTHER_ADDRESS, 0)
            )
            writer.write(FIRST_BYTE)
            await reader.read()
            writer.close()
        await asyncio.sleep(0.1)


async def ask(port: int) -> None:
    """An honest client of the gateway, on a connection of its own."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as session:
        client = GatewayClient(session, f"https://127.0.0.1:{port}", key_pair("honest"))
        try:
            answer = await client.ask("GET", SUBSCRIPTIONS)
        except aiohttp.ClientError as error:
            raise ConnectionError from error
        assert answer.status == 200


@pytest.mark.parametrize("attack", [storm, stall])
async def test_handshakes_at_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Attack
) -> None:
    port, asked = free_port(), Asked()
    monkeypatch.setenv(PORT, str(port))
    async with FakeNode() as node:
        env = gateway_settings(node.url, port, tmp_path)
        async with world(tmp_path, seconds=SECONDS, env=env) as drill:
            asking = drill.ask(asked, NEWCOMERS_PER_SECOND, SECONDS, lambda: ask(port))
            service = await drill.measure(SECONDS, attack=attack, beside=asking)
    print(service.row(f"{getattr(attack, '__name__', '')} at the gateway, whose clients get {asked}"))
    assert asked.answered > 0
    assert service.peak_memory < MEMORY
    service.check()
