"""Devices that anybody may register at the statement gateway: of a foreign project, and of somebody else.

The honest ones use the same push provider: Google's, or Apple's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from ntf_demo.fake_node.server import FakeNode
from ntf_demo.fake_push.faults import Fault
from ntf_demo.statement_gateway import GatewayClient, key_pair, signed_statement
from tests.drills.world import (
    NewToken,
    Service,
    World,
    apple_token,
    gateway_settings,
    google_token,
    world,
)
from tests.ports import free_port

SECONDS = 8.0
FOREIGN, PER_CLIENT = 40, 20
SENDERS, RINGS_PER_SECOND = 12, 120
VICTIM = "a1" * 32
TOPIC = b"1" * 32
PER_MINUTE = 40
"Pushes that a device gets; by default 60."


@asynccontextmanager
async def gateway(folder: Path, seconds: float, new_token: NewToken) -> AsyncIterator[tuple[World, Clients]]:
    port = free_port()
    async with (
        FakeNode() as node,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as session,
    ):
        env = gateway_settings(node.url, port, folder) | {
            "NTF_STATEMENTS_REQUESTS_PER_MINUTE": "10000",
            "NTF_STATEMENTS_DEVICE_PUSHES_PER_MINUTE": str(PER_MINUTE),
        }
        async with world(folder, seconds=seconds, env=env, new_token=new_token) as drill:
            yield drill, Clients(node, session, f"https://127.0.0.1:{port}")


class Clients:
    """The attacker's, and the node that takes its statements."""

    def __init__(self, node: FakeNode, session: aiohttp.ClientSession, url: str) -> None:
        self._node = node
        self._session = session
        self._url = url

    def client(self, name: str) -> GatewayClient:
        return GatewayClient(self._session, self._url, key_pair(name))

    async def submit(self, sender: str) -> None:
        await self._node.submit(signed_statement(key_pair(sender), TOPIC, data=os.urandom(16)))


async def foreign_project(folder: Path, seconds: float = SECONDS) -> tuple[Service, int]:
    """What Google's honest devices get, and how many pushes were made to those of a foreign project."""
    async with gateway(folder, seconds, google_token) as (drill, clients):
        tokens = [f"foreign:{number}" for number in range(FOREIGN)]
        for token in tokens:
            drill.push.add_fault(Fault(api="fcm", token=token, status=403, reason="SENDER_ID_MISMATCH"))

        async def attack() -> None:
            for number, token in enumerate(tokens):
                client = clients.client(f"mallory {number // PER_CLIENT}")
                one = await client.register("fcm", token)
                await client.replace_rules(one, (key_pair("sender")[0], TOPIC))
            while True:
                await clients.submit("sender")
                await asyncio.sleep(0.5)

        service = await drill.measure(seconds, beside=attack())
        return service, sum(push.token in tokens for push in drill.push.pushes)


async def test_devices_of_a_foreign_project_delay_nobody(tmp_path: Path) -> None:
    service, asked = await foreign_project(tmp_path)
    print(service.row(f"{FOREIGN} devices of a foreign Firebase project, {asked} pushes to them"))
    assert asked == FOREIGN
    service.check()


async def rings(folder: Path, seconds: float = SECONDS) -> tuple[Service, int]:
    """What Apple's honest devices get, and how often one device of somebody else rang."""
    async with gateway(folder, seconds, apple_token) as (drill, clients):
        senders = [f"sender {number}" for number in range(SENDERS)]

        async def attack() -> None:
            client = clients.client("mallory")
            one = await client.register("voip", VICTIM)
            await client.replace_rules(one, *((key_pair(sender)[0], TOPIC) for sender in senders))
            while True:
                for sender in senders:
                    await clients.submit(sender)
                    await asyncio.sleep(1 / RINGS_PER_SECOND)

        service = await drill.measure(seconds, beside=attack())
        return service, sum(push.token == VICTIM for push in drill.push.pushes)


async def test_a_device_that_many_senders_ring_delays_nobody(tmp_path: Path) -> None:
    service, rang = await rings(tmp_path)
    print(service.row(f"{SENDERS} senders ring one device {RINGS_PER_SECOND} times a second, {rang} rings"))
    assert 0 < rang <= 2 * PER_MINUTE  # a minute may end meanwhile
    service.check()
