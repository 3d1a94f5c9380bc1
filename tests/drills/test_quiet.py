"""Peers that do everything oddly: none of it is worth a traceback, nor more than a few lines."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from protocol.addresses import NtfServer, SmpServer
from protocol.connection import Outgoing
from protocol.encoding import NO_ENTITY, CorrId, EntityId
from protocol.ntf_commands import Ping
from tests.drills.test_routers import snew
from tests.drills.world import World, world
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.ntf_server.push.test_webpush import Device as Browser
from tests.smp_client.peer import scripted_router
from tests.transport.chains import make_certificate
from transport.certificates import Credentials, KeyAlgorithm, make_ca, make_online
from transport.errors import TransportError

SECONDS = 5.0
PEERS = 20
ROUTERS, ADDRESSES = 30, 60
LONGEST = 250
"Bytes of an id."
DAY = timedelta(days=1)


async def be_odd(address: NtfServer, seconds: float) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number in range(PEERS):
            tasks.create_task(_peer(address, number))


async def _peer(address: NtfServer, number: int) -> None:
    oddities = (_other_protocol, _half_a_handshake, _long_ids, _gone_before_the_answer)
    while True:
        with suppress(OSError, TransportError, AssertionError):
            await oddities[number % len(oddities)](address)
        await asyncio.sleep(0.02)


async def _other_protocol(address: NtfServer) -> None:
    reader, writer = await asyncio.open_connection(address.hosts[0], address.port_number)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await reader.read()
    writer.close()


async def _half_a_handshake(address: NtfServer) -> None:
    _, writer = await asyncio.open_connection(address.hosts[0], address.port_number)
    writer.write(b"\x16\x03\x01\x02\x00\x01" + os.urandom(100))
    await writer.drain()
    writer.transport.abort()


async def _long_ids(address: NtfServer) -> None:
    client = await NtfClient.open(address)
    ids = CorrId(os.urandom(LONGEST)), EntityId(os.urandom(LONGEST))
    client.stream.write(client.connection.send([Outgoing(*ids, Ping())] * 10))
    with suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            await client.is_closed_by_server()
    client.close()


async def _gone_before_the_answer(address: NtfServer) -> None:
    client = await NtfClient.open(address)
    client.stream.write(client.connection.send([Outgoing(CorrId(bytes(24)), NO_ENTITY, Ping())] * 200))
    client.stream.abort()


async def name_odd_places(drill: World, port: int) -> None:
    """Web Push addresses that are refused, and routers whose certificates are no good."""
    client = await NtfClient.open(drill.daemon.address)
    device, browser = await drill.device(client), Browser()
    hosts = [b"127.0.0.1", b"10.0.0.1", b"no such host", b"[::1", b"a" * 60]
    phones = [Device.make(browser.token(443, hosts[number % len(hosts)])) for number in range(ADDRESSES)]
    servers = [SmpServer(("127.0.0.1",), str(port), os.urandom(32)) for _ in range(ROUTERS)]
    await client.ask_many([(snew(device, server), NO_ENTITY, device.key) for server in servers])
    for phone in phones:
        with suppress(AssertionError):
            await phone.register(client)
    client.close()


async def test_odd_peers_are_worth_a_few_lines(tmp_path: Path) -> None:
    now, algorithm = datetime.now(UTC), KeyAlgorithm.ED25519
    authority, authority_key = make_ca(algorithm, "CA", now)
    key = make_online(authority, authority_key, algorithm, "127.0.0.1", now).key
    old = make_certificate("127.0.0.1", key, "CA", authority_key, start=now - 2 * DAY, end=now - DAY)
    async with (
        scripted_router(lambda peer: asyncio.sleep(0), identity=Credentials((old, authority), key)) as router,
        world(tmp_path, seconds=SECONDS) as drill,
    ):
        odd = name_odd_places(drill, router.port_number)
        service = await drill.measure(SECONDS, attack=be_odd, beside=odd)
    print(service.row("odd peers"))
    service.check()
