"""Clients that send blocks of nonsense, clients that never read, and clients that waste records of TLS."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from protocol.addresses import NtfServer
from protocol.blocks import pad
from protocol.connection import Outgoing
from protocol.encoding import NO_ENTITY, CorrId
from protocol.ntf_commands import Ping
from protocol.versions import NTF_BLOCK_SIZE
from tests.drills.attacker import Attack
from tests.drills.world import world
from tests.ntf_server.ntf_client import NtfClient
from tests.transport.key_updates import UpdatingClient
from transport.errors import TransportError

SECONDS = 5.0
FLOODERS, DEAF, UPDATERS, WHISPERERS = 8, 60, 8, 40
RECORDS_AT_ONCE = 500
EMPTIES = bytes([254]) + bytes(2 * 254)
"254 transmissions in 512 bytes, none of which is one."


async def flood(address: NtfServer, seconds: float) -> None:
    """Nonsense as fast as the server takes it; whoever is cut off comes back."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(FLOODERS):
            tasks.create_task(_flooder(address))


async def _flooder(address: NtfServer) -> None:
    data = pad(EMPTIES, NTF_BLOCK_SIZE) * 100
    while True:
        with suppress(TransportError, OSError):
            client = await NtfClient.open(address)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_write(client, data))
                tasks.create_task(_read(client))


async def deaf(address: NtfServer, seconds: float) -> None:
    """Clients that write nonsense and commands, and read nothing."""
    async with asyncio.TaskGroup() as tasks:
        for number in range(DEAF):
            tasks.create_task(_deaf(address, nonsense=number % 2 == 0))


async def _deaf(address: NtfServer, *, nonsense: bool) -> None:
    with suppress(TransportError, OSError):
        client = await NtfClient.open(address)
        client.stream.read_limit = 1
        pings = [Outgoing(CorrId(bytes(24)), NO_ENTITY, Ping()) for _ in range(3000)]
        await _write(
            client, pad(EMPTIES, NTF_BLOCK_SIZE) * 100 if nonsense else client.connection.send(pings)
        )


async def update_keys(address: NtfServer, seconds: float) -> None:
    """Key updates of TLS as fast as the server takes them; their answers are not read."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(UPDATERS):
            tasks.create_task(_updater(address))


async def _updater(address: NtfServer) -> None:
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(address.hosts[0], address.port_number)
            client = UpdatingClient()
            writer.write(client.shake_hands())
            while not client.is_connected:
                writer.write(client.shake_hands(await reader.read(1 << 16)))
            while True:
                writer.write(b"".join(client.update() for _ in range(RECORDS_AT_ONCE)))
                await writer.drain()


async def whisper(address: NtfServer, seconds: float) -> None:
    """Ordinary commands, far fewer than allowed, but with a byte in each record of TLS."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(WHISPERERS):
            tasks.create_task(_whisperer(address))


async def _whisperer(address: NtfServer) -> None:
    while True:
        with suppress(TransportError, OSError):
            client = await NtfClient.open(address)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_read(client))
                tasks.create_task(_whisper(client))


async def _whisper(client: NtfClient) -> None:
    with suppress(TransportError):
        while True:
            for byte in client.connection.send([Outgoing(CorrId(bytes(24)), NO_ENTITY, Ping())]):
                client.stream.write(bytes([byte]))
            await client.stream.drain()
            await asyncio.sleep(0)


async def _read(client: NtfClient) -> None:
    with suppress(TransportError, TimeoutError):
        await client.is_closed_by_server()


async def _write(client: NtfClient, data: bytes) -> None:
    with suppress(TransportError):
        while True:
            client.stream.write(data)
            await client.stream.drain()


async def test_nonsense_costs_only_those_who_send_it(tmp_path: Path) -> None:
    async with world(tmp_path, seconds=SECONDS) as drill:
        service = await drill.measure(SECONDS, attack=flood)
        print(service.row("blocks of nonsense"))
        assert await drill.daemon.metric('clients_dropped{reason="nonsense"}') > 0
    assert service.lost == 0
    assert service.commands.answered == service.commands.asked
    assert service.newcomers.answered == service.newcomers.asked
    assert service.log_bytes_per_second < 10_000
    assert service.pushes.p50 < 2 * service.busy


async def test_clients_that_do_not_read_cost_little(tmp_path: Path) -> None:
    env = {"NTF_LIMITS_SEND_TIMEOUT": "3"}
    async with world(tmp_path, seconds=SECONDS, env=env) as drill:
        service = await drill.measure(SECONDS, attack=deaf)
        print(service.row("clients that do not read"))
    assert service.lost == 0
    assert service.commands.answered == service.commands.asked
    assert service.peak_memory < DEAF * 500_000
    assert service.log_bytes_per_second < 10_000


@pytest.mark.parametrize("attack", [update_keys, whisper])
async def test_records_with_hardly_any_data_cost_little(tmp_path: Path, attack: Attack) -> None:
    async with world(tmp_path, seconds=SECONDS) as drill:
        service = await drill.measure(SECONDS, attack=attack)
        print(service.row(getattr(attack, "__name__", "")))
    assert service.lost == 0
    assert service.commands.answered == service.commands.asked
    assert service.newcomers.answered == service.newcomers.asked
    assert service.peak_memory < 20_000_000
    assert service.pushes.p50 < service.busy
    assert service.log_bytes_per_second < 10_000
