"""Thousands of clients that connect at once, and peers that connect and say nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from protocol.addresses import NtfServer
from tests.drills.world import world
from tests.ntf_server.ntf_client import NtfClient
from transport.errors import TransportError

SECONDS = 8.0
AT_ONCE = 2000
SILENT = 3000
OTHER_ADDRESS = "127.0.0.2"
FIRST_BYTE = bytes([22])
"Of a record of TLS's handshake."
STALL_WITHIN = 2.0
"Seconds for a newcomer, in the middle."
LIVE_WITHIN = 2.0
"Seconds; 0.26 were seen on a machine that had other things to do."


async def storm(address: NtfServer, seconds: float) -> None:
    """So many clients at once, again and again."""
    while True:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(_come_and_go(address))


async def _come_and_go(address: NtfServer) -> None:
    with suppress(TransportError, OSError, AssertionError):
        client = await NtfClient.open(address)
        client.close()


async def silence(address: NtfServer, seconds: float) -> None:
    """Connections without a word, opened again when they are closed."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(SILENT):
            tasks.create_task(_say_nothing(address))


async def _say_nothing(address: NtfServer) -> None:
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(address.hosts[0], address.port_number)
            await reader.read()
            writer.close()
        await asyncio.sleep(0.1)


async def stall(address: NtfServer, seconds: float) -> None:
    """Handshakes that begin and do not go on, from another address of this machine."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(SILENT):
            tasks.create_task(_begin(address))


async def _begin(address: NtfServer) -> None:
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(
                address.hosts[0], address.port_number, local_addr=(OTHER_ADDRESS, 0)
            )
            writer.write(FIRST_BYTE)
            await reader.read()
            writer.close()
        await asyncio.sleep(0.1)


async def test_a_storm_of_handshakes_delays_nobody_for_long(tmp_path: Path) -> None:
    async with world(tmp_path, seconds=SECONDS) as drill:
        service = await drill.measure(SECONDS, attack=storm)
    print(service.row("2,000 handshakes at once"))
    assert service.lost == 0
    assert service.commands.answered == service.commands.asked
    assert service.liveness.answered == service.liveness.asked
    assert service.liveness.p99 < LIVE_WITHIN * service.busy
    assert service.pushes.p50 < 2 * service.busy
    assert service.log_bytes_per_second < 10_000


async def test_silent_connections_keep_nobody_out(tmp_path: Path) -> None:
    async with world(tmp_path, seconds=SECONDS) as drill:
        service = await drill.measure(SECONDS, attack=silence)
    print(service.row("3,000 silent connections"))
    assert service.lost == 0
    assert service.newcomers.answered == service.newcomers.asked
    assert service.log_bytes_per_second < 10_000


async def test_handshakes_that_stall_keep_nobody_else_out(tmp_path: Path) -> None:
    async with world(tmp_path, seconds=SECONDS) as drill:
        service = await drill.measure(SECONDS, attack=stall)
    print(service.row("3,000 handshakes that stall"))
    assert service.lost == 0
    assert service.newcomers.answered == service.newcomers.asked
    assert service.newcomers.p50 < STALL_WITHIN * service.busy
    assert service.log_bytes_per_second < 10_000
