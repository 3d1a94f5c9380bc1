"""Few open files, and clients, routers and Web Push hosts that all try to use them up at once."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from protocol.addresses import NtfServer, SmpServer
from protocol.encoding import NO_ENTITY
from tests.drills.test_handshakes import OTHER_ADDRESS
from tests.drills.test_routers import silent_host, snew
from tests.drills.world import World, world
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.ntf_server.push.test_webpush import Device as Browser

SECONDS = 6.0
FILES = 300
CLIENTS, ROUTERS, HOSTS = 500, 180, 200
"Each more than there are files for."


async def hang(address: NtfServer, seconds: float) -> None:
    """Clients that connect and say nothing, and come back when they are cut off."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(_hang(address))


async def _hang(address: NtfServer) -> None:
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(
                address.hosts[0], address.port_number, local_addr=(OTHER_ADDRESS, 0)
            )
            await reader.read()
            writer.close()
        await asyncio.sleep(0.1)


async def name_silent_places(drill: World, port: int) -> None:
    """Routers, and hosts of Web Push, that accept a connection and say nothing."""
    client = await NtfClient.open(drill.daemon.address)
    device, browser = await drill.device(client), Browser()
    servers = [SmpServer(("127.0.0.1",), str(port), os.urandom(32)) for _ in range(ROUTERS)]
    await client.ask_many([(snew(device, server), NO_ENTITY, device.key) for server in servers])
    hosts = (f"127.0.1.{number}".encode() for number in range(1, HOSTS + 1))
    phones = [Device.make(browser.token(port, host)) for host in hosts]
    await client.ask_many([(phone.tnew, NO_ENTITY, phone.key) for phone in phones])
    client.close()


async def test_open_files_are_shared_out(tmp_path: Path) -> None:
    env = {"NTF_WEBPUSH_ALLOW_PRIVATE_ADDRESSES": "on"}
    wrapper = ("prlimit", f"--nofile={FILES}")
    async with (
        silent_host("0.0.0.0") as port,
        world(tmp_path, seconds=2 * SECONDS, env=env, wrapper=wrapper) as drill,
    ):
        service = await drill.measure(SECONDS, attack=hang, beside=name_silent_places(drill, port))
        print(service.row(f"{FILES} open files"))
        drill.router.faults.drop_connections()  # the honest router needs a new one
        later = await drill.measure(SECONDS / 2)
        print(later.row("afterwards, the router reconnected"))
    service.check()
    later.check()
