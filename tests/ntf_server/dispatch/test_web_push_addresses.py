"""Web Push addresses that clients made up: no traceback, few log lines, and nothing lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ntf_server.config import WebPushConfig
from ntf_server.push.credentials import make_vapid_key
from ntf_server.push.http2 import CurlHttp2
from ntf_server.push.webpush import WebPushProvider
from protocol.device_token import Provider, WebPushToken
from protocol.statuses import TokenStatus
from store.journal_schema import JournalEvent
from tests.ntf_server.dispatch.clock import SimulatedClock
from tests.ntf_server.dispatch.world import World, make_world, running
from tests.ntf_server.push.test_webpush import Device as Browser
from tests.waiting import until

IMPOSSIBLE = [
    *(b"", b"..", b"-", b"a b", b"h\xc3\xb6st", b"\xff" * 255, b"x/y", b"0x7f000001", b"127.1"),
    *(b"127.0.0.1", b"::1", b"10.1.2.3", b"[::1]", b"::ffff:127.0.0.1", b"169.254.169.254", b"user@host"),
]
UNUSABLE = [
    b"localhost",
    b"a..b",
    b"a" * 64 + b".example",
    b"a" * 255,
    b"no.such.name.invalid",
    b"a" * 63 + b".b",
]
"Names that resolve to nothing, or to nothing public: that may change."


@pytest.fixture
async def world(tmp_path: Path, clock: SimulatedClock) -> AsyncIterator[World]:
    key = tmp_path / "vapid.pem"
    make_vapid_key(key)
    http = CurlHttp2()
    web_push = WebPushProvider(WebPushConfig(vapid_key_file=key, subject="https://x"), http, clock.now, 5.0)
    others = {Provider.WEB_PUSH: web_push}
    async with (
        make_world(tmp_path, clock, call_later=clock.call_later, others=others) as world,
        running(world.dispatcher),
    ):
        yield world
    await web_push.close()
    await http.close()


def endpoint(host: bytes) -> WebPushToken:
    return Browser().token(443, host=host)


async def test_impossible_addresses_are_bad_devices(world: World, caplog: pytest.LogCaptureFixture) -> None:
    devices = [await world.add_device(active=False, token=endpoint(host)) for host in IMPOSSIBLE]
    for device in devices:
        world.dispatcher.verify(device.key)
    for device in devices:
        await until(lambda device=device: has_status(world, device, TokenStatus.INVALID_BAD))
    assert caplog.records == []


async def has_status(world: World, device: object, status: TokenStatus) -> bool:
    return await world.status(device) is status  # type: ignore[arg-type]


async def test_unusable_names_cost_few_lines_and_lose_nothing(
    world: World, clock: SimulatedClock, caplog: pytest.LogCaptureFixture
) -> None:
    devices = [await world.add_device(queues=1, token=endpoint(host)) for host in UNUSABLE]
    for _ in range(12):
        await world.receive(*(device.queues[0] for device in devices))
        clock.advance(400)
        await asyncio.sleep(0.05)
    assert await world.unsent() == len(devices)
    assert world.journal.of(JournalEvent.PUSH_FAILED) == []
    assert all(record.exc_info is None for record in caplog.records)
    assert len(caplog.records) <= len(UNUSABLE)  # that its breaker opened, once for each host
    assert not any(host.decode() in caplog.text for host in UNUSABLE)
    for device in devices:
        assert await world.status(device) is TokenStatus.ACTIVE
