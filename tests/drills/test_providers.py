"""Push providers that refuse this server, and one slow Web Push host beside Apple's users."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path

from agent.notifications.pushes import VerificationPush, parse_push
from ntf_demo.fake_push.faults import Fault
from protocol.addresses import SmpQueueNtf
from protocol.encoding import NO_ENTITY
from protocol.ntf_commands import IdSub, Snew
from protocol.push_messages import open_push
from smp_router.load import LoadQueue
from tests.drills.world import DEADLINE, World, world
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.ntf_server.push.test_webpush import Device as Browser

SECONDS = 8.0
REFUSING = 4.0
BROWSERS = 150
SLOW = 9.0
"Seconds that the host takes: just within the server's patience."
PROVIDER_DOWN = 'push_breaker_state{provider="AT"}'


async def test_a_provider_that_refuses_us_loses_nothing(tmp_path: Path) -> None:
    """A revoked key: the provider answers 403 to everything, until somebody puts it right."""
    breaker: list[float] = []

    async with world(tmp_path, seconds=SECONDS) as drill:

        async def refuse() -> None:
            drill.push.add_fault(Fault(api="apns", status=403, reason="InvalidProviderToken"))
            await asyncio.sleep(REFUSING)
            breaker.append(await drill.daemon.metric(PROVIDER_DOWN))
            drill.push.clear_faults()

        service = await drill.measure(SECONDS, beside=refuse())
        failed = await drill.daemon.metric("notifications_failed")
        breaker.append(await drill.daemon.metric(PROVIDER_DOWN))
        log = drill.daemon.log.read_text()
    print(service.row("a provider that refuses us"))
    assert service.lost == failed == 0
    assert service.commands.answered == service.commands.asked
    assert breaker[0] > 0.0
    assert breaker[1] == 0.0
    assert log.count("refuses us: APNs answered 403 InvalidProviderToken: check [APNS] key_file") == 1


async def test_a_slow_web_push_host_hurts_only_its_own_users(tmp_path: Path) -> None:
    """Its devices are more than there is room for, and each push to them takes seconds."""
    env = {
        "NTF_WEBPUSH_ALLOW_PRIVATE_ADDRESSES": "on",
        "NTF_WEBPUSH_CA_FILE": str(tmp_path / "push" / "ca.pem"),
        "NTF_PUSH_QUEUE_SIZE": "100",
    }
    async with world(tmp_path, seconds=SECONDS, env=env) as drill:
        slow = await add_browsers(drill, BROWSERS)
        drill.push.add_fault(Fault(api="webpush", status=201, delay=SLOW))

        async def be_slow() -> None:
            while True:
                await drill.router.load.emit(slow, len(slow), fresh=True)
                await asyncio.sleep(0.5)

        service = await drill.measure(SECONDS, beside=be_slow())
    print(service.row("a slow Web Push host"))
    assert service.lost == 0
    assert service.pushes.p99 < SLOW / 2
    assert service.commands.answered == service.commands.asked
    assert service.newcomers.answered == service.newcomers.asked


async def add_browsers(drill: World, count: int) -> list[LoadQueue]:
    """Web Push devices at the fake provider, verified, each with a queue."""
    browser = Browser()
    client = await NtfClient.open(drill.daemon.address)
    devices = [
        Device.make(browser.token(drill.push.port, path=b"/push/%d" % number)) for number in range(count)
    ]
    for device in devices:
        await device.register(client)
    for number, device in enumerate(devices):
        await device.verify(client, await code_of(drill, browser, device, f"/push/{number}"))
    return await add_queues(drill, client, devices)


async def add_queues(drill: World, client: NtfClient, devices: Sequence[Device]) -> list[LoadQueue]:
    """One for each device, subscribed; the client is closed."""
    queues = drill.router.load.create_queues(len(devices))
    snews = [
        (Snew(device.token_id, SmpQueueNtf(drill.router.address, queue.notifier_id), queue.notifier_key),
         NO_ENTITY, device.key)
        for device, queue in zip(devices, queues, strict=True)
    ]  # fmt: skip
    assert all(isinstance(answer, IdSub) for answer in await client.ask_many(snews))
    client.close()
    async with asyncio.timeout(DEADLINE):
        while not {queue.notifier_id for queue in queues} <= drill.router.subscribed_notifiers():
            await asyncio.sleep(0.02)
    return queues


async def code_of(drill: World, browser: Browser, device: Device, path: str) -> bytes:
    async with asyncio.timeout(DEADLINE):
        while True:
            for recorded in drill.push.pushes:
                if recorded.api == "webpush" and recorded.headers[":path"] == path:
                    text = browser.decrypt(base64.urlsafe_b64decode(recorded.body))
                    push = parse_push(text.decode())
                    assert isinstance(push, VerificationPush)
                    return open_push(device.secret, push.nonce, push.boxed_code)
            await asyncio.sleep(0.01)
