"""Clients that make the server check signatures, within all limits of commands."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from protocol.addresses import NtfServer
from protocol.connection import Outgoing
from protocol.crypto import Ed448PrivateKey
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import NO_ENTITY, CorrId, EntityId
from protocol.ntf_commands import IdTkn, NtfCommand, Tchk
from tests.drills.attacker import Attack, persist
from tests.drills.world import world
from tests.ntf_server.ntf_client import Device, NtfClient
from transport.errors import TransportError

Make = Callable[[NtfClient], Awaitable[Outgoing[NtfCommand]]]

SECONDS = 8.0
CONNECTIONS = 40
COMMANDS_PER_SECOND = 120
"Of each connection: all of them together stay below the limit of their address."
PER_BLOCK = 2
CALM_SECONDS = 3.0
SLOWER, ALWAYS_FINE = 8, 1.0
"So many times slower than without the attack, on the same busy machine; and seconds that are no delay."


async def replay_unknown(address: NtfServer, seconds: float) -> None:
    """TCHK of tokens that do not exist, always with the same Ed448 signature."""
    key = Ed448PrivateKey(os.urandom(57))

    async def command(_: NtfClient) -> Outgoing[NtfCommand]:
        return Outgoing(CorrId(os.urandom(24)), EntityId(os.urandom(24)), Tchk(), key)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONNECTIONS):
            tasks.create_task(_replay(address, command))


async def replay_own(address: NtfServer, seconds: float) -> None:
    """TCHK of the attacker's own tokens: nothing about it is wrong, apart from how much there is of it."""

    async def command(client: NtfClient) -> Outgoing[NtfCommand]:
        token = ApnsToken(Provider.APNS_TEST, os.urandom(32).hex().encode())
        device = Device.make(token, Ed448PrivateKey(os.urandom(57)))
        answer = await client.ask(device.tnew, NO_ENTITY, device.key)
        assert isinstance(answer, IdTkn)
        return Outgoing(CorrId(os.urandom(24)), answer.token_id, Tchk(), device.key)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONNECTIONS):
            tasks.create_task(_replay(address, command))


async def _replay(address: NtfServer, command: Make) -> None:
    clock = asyncio.get_running_loop().time

    async def replay() -> None:
        client = await NtfClient.open(address)
        data = client.connection.send([await command(client)] * PER_BLOCK)
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(_read(client))
            started, sent = clock(), 0
            while not reading.done():
                client.stream.write(data)
                await client.stream.drain()
                sent += PER_BLOCK
                await asyncio.sleep(max(0.0, started + sent / COMMANDS_PER_SECOND - clock()))

    await persist(replay)


async def _read(client: NtfClient) -> None:
    with suppress(TransportError, OSError):
        while await client.stream.receive():
            pass


async def _attacked(folder: Path, attack: Attack, name: str) -> None:
    async with world(folder, seconds=CALM_SECONDS + SECONDS) as drill:
        calm = await drill.measure(CALM_SECONDS)
        service = await drill.measure(SECONDS, attack=attack)
    print(calm.row("before the attack"))
    print(service.row(name))
    service.check()
    for mine, usual in (
        (service.commands, calm.commands),
        (service.newcomers, calm.newcomers),
        (service.pushes, calm.pushes),
    ):
        assert mine.p99 < max(ALWAYS_FINE, SLOWER * usual.p99)


async def test_signatures_for_nothing_delay_nobody(tmp_path: Path) -> None:
    await _attacked(
        tmp_path, replay_unknown, f"{CONNECTIONS} connections replay Ed448 signatures for unknown tokens"
    )


async def test_valid_signatures_in_quantity_delay_nobody(tmp_path: Path) -> None:
    await _attacked(tmp_path, replay_own, f"{CONNECTIONS} connections repeat valid Ed448 signatures")
