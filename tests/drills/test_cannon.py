"""Registrations of other people's devices: each makes a push to somebody who never asked for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from protocol.addresses import NtfServer
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import NO_ENTITY
from protocol.ntf_commands import IdTkn, Trpl
from tests.drills.world import DEVICES, World, connected, world
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.ntf_server.push.test_webpush import Device as Browser
from transport.errors import TransportError

SECONDS = 5.0
CONNECTIONS = 20
SHOTS = 100
"Pushes to strangers that the limit of the test leaves over; by default an address has 2,000 an hour."
ADDRESSES = 20
PER_DEVICE, PER_HOST = 30, 100
"Pushes that one device, and one host of Web Push, get in an hour, whoever asks. By default 30 and 10,000."
VICTIM = ApnsToken(Provider.APNS_TEST, b"ab" * 32)
HOST_PORT = "DRILL_WEB_PUSH_PORT"


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


async def fire_at_a_device(address: NtfServer, seconds: float) -> None:
    """From many addresses, with other keys each time."""
    await _from_everywhere(address, lambda: Device.make(VICTIM))


async def fire_at_a_host(address: NtfServer, seconds: float) -> None:
    """From many addresses, at another endpoint each time."""
    browser, port = Browser(), int(os.environ[HOST_PORT])

    def endpoint() -> Device:
        return Device.make(browser.token(port, path=b"/push/" + os.urandom(8).hex().encode()))

    await _from_everywhere(address, endpoint)


async def _from_everywhere(address: NtfServer, target: Callable[[], Device]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number in range(ADDRESSES):
            tasks.create_task(_aim(address, f"127.0.2.{number + 1}", target))


async def _aim(address: NtfServer, source: str, target: Callable[[], Device]) -> None:
    with suppress(TransportError, OSError, AssertionError):
        client = await NtfClient.open(address, sock=await connected(address, source))
        while True:
            device = target()
            await client.ask(device.tnew, NO_ENTITY, device.key)


def _hits(drill: World) -> int:
    """Pushes to devices that are nobody's here."""
    return sum(push.token not in drill.known_devices for push in drill.push.pushes)


async def test_strangers_are_pushed_to_no_more_than_allowed(tmp_path: Path) -> None:
    env = {"NTF_LIMITS_ADDRESS_VERIFICATIONS_PER_HOUR": str(DEVICES + SHOTS)}
    async with world(tmp_path, seconds=SECONDS, env=env) as drill:
        service = await drill.measure(SECONDS, attack=fire)
        hits = _hits(drill)
    print(service.row(f"registrations of strangers' devices, {hits} pushes"))
    assert 0 < hits <= SHOTS + 5  # the bucket fills by one in half a minute
    service.check()


async def test_a_device_is_pushed_to_no_more_than_allowed(tmp_path: Path) -> None:
    env = {"NTF_LIMITS_DEVICE_VERIFICATIONS_PER_HOUR": str(PER_DEVICE)}
    async with world(tmp_path, seconds=SECONDS, env=env) as drill:
        service = await drill.measure(SECONDS, attack=fire_at_a_device)
        hits = _hits(drill)
    print(service.row(f"one device registered from {ADDRESSES} addresses, {hits} pushes"))
    assert 0 < hits <= PER_DEVICE + 1
    service.check()


async def test_a_host_is_pushed_to_no_more_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {
        "NTF_LIMITS_HOST_VERIFICATIONS_PER_HOUR": str(PER_HOST),
        "NTF_WEBPUSH_ALLOW_PRIVATE_ADDRESSES": "on",
        "NTF_WEBPUSH_CA_FILE": str(tmp_path / "push" / "ca.pem"),
    }
    async with world(tmp_path, seconds=SECONDS, env=env) as drill:
        monkeypatch.setenv(HOST_PORT, str(drill.push.port))
        service = await drill.measure(SECONDS, attack=fire_at_a_host)
        hits = sum(push.api == "webpush" for push in drill.push.pushes)
    print(service.row(f"one Web Push host registered at from {ADDRESSES} addresses, {hits} pushes"))
    assert 0 < hits <= PER_HOST + 2
    service.check()
