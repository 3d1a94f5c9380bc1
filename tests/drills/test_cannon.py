"""Registrations of other people's devices: each makes a push to somebody who never asked for it."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from protocol.addresses import NtfServer
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import NO_ENTITY
from protocol.ntf_commands import IdTkn, Trpl
from tests.drills.world import DEVICES, World, world
from tests.ntf_server.ntf_client import Device, NtfClient
from transport.errors import TransportError

SECONDS = 5.0
CONNECTIONS = 20
SHOTS = 100
"Pushes to strangers that the limit of the test leaves over; by default an address has 2,000 an hour."


def _stranger() -> ApnsToken:
    return ApnsToken(Provider.APNS_TEST, os.urandom(32).hex().encode())


async def fire(address: NtfServer, seconds: float) -> None:
    """TNEW for strangers' devices, and TRPL from one stranger's device to the next, over many connections."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONNECTIONS):
            tasks.create_task(_gunner(address))


async def _gunner(address: NtfServer) -> None:
    while True:
        with suppress(TransportError, OSError, AssertionError):
            client = await NtfClient.open(address)
            while True:
                device = Device.make(_stranger())
                answer = await client.ask(device.tnew, NO_ENTITY, device.key)
                if isinstance(answer, IdTkn):
                    device.token_id = answer.token_id
                    for _ in range(5):
                        await device.ask(client, Trpl(_stranger()))


def _hits(drill: World) -> int:
    """Pushes to devices that are nobody's here."""
    return sum(push.token not in drill.known_devices for push in drill.push.pushes)


async def test_strangers_are_pushed_to_no_more_than_allowed(tmp_path: Path) -> None:
    env = {"NTF_LIMITS_ADDRESS_VERIFICATIONS_PER_HOUR": str(DEVICES + SHOTS)}
    async with world(tmp_path, seconds=SECONDS, env=env) as drill:
        service = await drill.measure(SECONDS, attack=fire)
        hits = _hits(drill)
    print(service.row("registrations of strangers' devices"))
    assert 0 < hits <= SHOTS + 5  # the bucket fills by one in half a minute
    assert service.lost == 0
    assert service.commands.answered == service.commands.asked
    assert service.newcomers.answered == service.newcomers.asked
    assert service.log_bytes_per_second < 10_000
