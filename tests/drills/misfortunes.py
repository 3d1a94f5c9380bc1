"""What goes wrong around the daemon, one thing at a time: `pytest -s tests/drills/misfortunes.py`.

Each drill says what is expected, and prints a line of the table in docs/reliability.md. Some need root: they
mount a small disk, limit memory, or change what a name resolves to for the daemon alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from agent.notifications.pushes import VerificationPush, parse_push
from ntf_demo.fake_push.faults import Fault
from ntf_demo.fake_push.server import FakePushConfig, FakePushServer, wall_clock
from protocol.device_token import FcmToken
from protocol.push_messages import open_push
from tests.drills.fake_clock import fake_clock
from tests.drills.test_handshakes import storm
from tests.drills.test_providers import add_browsers, add_queues
from tests.drills.world import (
    DEADLINE,
    Asked,
    World,
    google_settings,
    push_settings,
    repeated_pushes,
    running_daemon,
    world,
)
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.transport.chains import make_certificate
from transport.certificates import Credentials, KeyAlgorithm, make_ca, make_online

SECONDS = 8.0
AWAY = 4.0
"Seconds that a misfortune lasts."
NOTICED = 300.0
"Seconds in which lost associations are found."
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can do this")
ON_THE_WAY = 0.05
"Seconds around a cut, in which the router writes one notification."
YEAR = timedelta(days=365)


def row(name: str, pushes: Asked, drill: World, note: str = "") -> None:
    lost = pushes.asked - pushes.answered
    print(f"\n| {name} | {pushes} | {lost} | {repeated_pushes(drill.push)} | {note} |")


async def suffer(drill: World, misfortune: Callable[[], Awaitable[None]]) -> Asked:
    """Notifications all the time, the misfortune after a second; everything arrives in the end.

    NMSG has no acknowledgement. One that the router wrote in the moment when its connection was cut is gone,
    and does not count as asked for.
    """
    pushes, began = Asked(), 0.0

    async def later() -> None:
        nonlocal began
        await asyncio.sleep(1.0)
        began = wall_clock()
        await misfortune()

    suffering = asyncio.create_task(later())
    sent = await drill.notify(SECONDS)
    await suffering
    missing = await drill.pushed(sent, pushes)
    pushes.asked -= sum(began - ON_THE_WAY < at < began + ON_THE_WAY for at in missing.values())
    assert drill.daemon.is_alive(), drill.daemon.log.read_text()[-4000:]
    return pushes


def nothing_lost(pushes: Asked) -> None:
    assert pushes.answered == pushes.asked


async def ready(drill: World) -> bool:
    return " 200 " in await drill.daemon.get("/health/ready")


async def until_ready(drill: World, is_ready: bool) -> None:
    async with asyncio.timeout(DEADLINE):
        while await ready(drill) != is_ready:
            await asyncio.sleep(0.1)


# Processes


async def test_killed(tmp_path: Path) -> None:
    """What was stored is pushed by the next daemon."""
    pushes = Asked()
    async with world(tmp_path, seconds=SECONDS) as drill:
        drill.push.add_fault(Fault(api="apns", status=503))  # so that something waits when it dies
        sent = await drill.notify(2.0)
        await stored(drill, len(sent))
        drill.daemon.process.kill()
        await asyncio.to_thread(drill.daemon.process.wait, DEADLINE)
        drill.push.clear_faults()
        async with running_daemon(tmp_path, push_settings(drill.push)) as drill.daemon:
            sent |= await drill.notify(2.0)
            await drill.pushed(sent, pushes)
    row("kill -9 of the daemon while the provider is down", pushes, drill)
    nothing_lost(pushes)


async def stored(drill: World, count: int) -> None:
    async with asyncio.timeout(DEADLINE):
        while await drill.daemon.metric("notifications_received") < count:
            await asyncio.sleep(0.05)


async def test_router_dies(tmp_path: Path) -> None:
    async with world(tmp_path, seconds=SECONDS) as drill:

        async def die() -> None:
            port = drill.router.port
            await drill.router.stop()
            await asyncio.sleep(AWAY)
            await drill.router.listen("127.0.0.1", port)

        pushes = await suffer(drill, die)
    row("the router dies and comes back", pushes, drill)
    nothing_lost(pushes)


async def test_half_open_connection(tmp_path: Path) -> None:
    """The router says nothing more, and its connection stays open: found by PING."""
    env = {"NTF_SUBSCRIBER_PING_INTERVAL": "1", "NTF_SUBSCRIBER_PING_TIMEOUT": "1"}
    async with world(tmp_path, seconds=SECONDS, env=env) as drill:
        before = drill.router.counts["connections"]

        async def fall_silent() -> None:
            drill.router.faults.black_hole()
            async with asyncio.timeout(DEADLINE):
                while drill.router.counts["connections"] == before:
                    await asyncio.sleep(0.05)
            drill.router.faults.black_hole(False)

        pushes = await suffer(drill, fall_silent)
        later = Asked()
        await drill.pushed(await drill.notify(1.0), later)
    swallowed = pushes.asked - pushes.answered
    row("half-open connection to the router", later, drill, f"{swallowed} written to the silent connection")
    nothing_lost(later)


async def test_forgotten_associations(tmp_path: Path) -> None:
    """A router that silently loses half of the associations is found out without a reconnection."""
    async with world(tmp_path, seconds=SECONDS) as drill:
        sent = await drill.notify(1.0)
        lost = set(drill.router.faults.lose_associations(0.5))
        began, pushes = wall_clock(), Asked()
        async with asyncio.timeout(NOTICED):
            while not drill.queues <= drill.router.subscribed_notifiers():
                await asyncio.sleep(0.5)
        healed = wall_clock() - began
        sent |= await drill.notify(2.0)
        await drill.pushed(sent, pushes)
    row(
        "the router forgets half of the associations",
        pushes,
        drill,
        f"{len(lost)} healed after {healed:.0f} s",
    )
    nothing_lost(pushes)


# Providers


@pytest.mark.parametrize(
    "fault",
    [
        Fault(api="apns", status=403, reason="InvalidProviderToken"),
        Fault(api="apns", status=503),
        Fault(api="apns", action="silence"),
        Fault(api="apns", action="reset"),
        Fault(api="apns", action="drop"),
        Fault(api="apns", action="goaway", close=True),
    ],
    ids=lambda fault: f"{fault.status} {fault.reason}".strip() if fault.action == "answer" else fault.action,
)
async def test_provider(tmp_path: Path, fault: Fault, request: pytest.FixtureRequest) -> None:
    async with world(tmp_path, seconds=SECONDS) as drill:

        async def misbehave() -> None:
            drill.push.add_fault(replace(fault))
            await asyncio.sleep(AWAY)
            drill.push.clear_faults()

        pushes = await suffer(drill, misbehave)
    row(f"provider: {request.node.callspec.id}", pushes, drill)
    nothing_lost(pushes)


async def test_one_provider_does_not_hurt_the_other(tmp_path: Path) -> None:
    """Web Push answers nothing at all; Apple's users notice nothing."""
    env = {
        "NTF_WEBPUSH_ALLOW_PRIVATE_ADDRESSES": "on",
        "NTF_WEBPUSH_CA_FILE": str(tmp_path / "push" / "ca.pem"),
    }
    async with world(tmp_path, seconds=SECONDS, env=env) as drill:
        browsers = await add_browsers(drill, 50)
        drill.push.add_fault(Fault(api="webpush", action="silence"))

        async def notify_browsers() -> None:
            await drill.router.load.emit(browsers, len(browsers), fresh=True)

        pushes = await suffer(drill, notify_browsers)
    row("Web Push is silent, APNs goes on", pushes, drill)
    nothing_lost(pushes)
    assert pushes.p99 < AWAY


@asynccontextmanager
async def google(folder: Path) -> AsyncIterator[tuple[FakePushServer, dict[str, str]]]:
    """A provider of its own, and the settings of a daemon that uses it."""
    async with FakePushServer(FakePushConfig(folder=folder / "google")) as fcm:
        yield fcm, google_settings(fcm, folder)


async def fcm_data(fcm: FakePushServer, device: Device, kind: str, since: float = 0.0) -> Mapping[str, str]:
    """What the first push of its kind to a device carries."""
    assert isinstance(device.token, FcmToken)
    async with asyncio.timeout(DEADLINE):
        while True:
            for message in (
                json.loads(push.body)["message"] for push in fcm.pushes if push.received >= since
            ):
                if message["token"] == device.token.token.decode() and kind in message["data"]:
                    data: Mapping[str, str] = message["data"]
                    return data
            await asyncio.sleep(0.05)


async def test_google_does_not_hurt_apple(tmp_path: Path) -> None:
    """FCM answers nothing for a while; Apple's users notice nothing, Google's get theirs afterwards."""
    async with google(tmp_path) as (fcm, env), world(tmp_path, seconds=SECONDS, env=env) as drill:
        client = await NtfClient.open(drill.daemon.address)
        devices = [Device.make(FcmToken(b"android-%d" % number)) for number in range(50)]
        for device in devices:
            await device.register(client)
            push = parse_push(await fcm_data(fcm, device, "verification"))
            assert isinstance(push, VerificationPush)
            await device.verify(client, open_push(device.secret, push.nonce, push.boxed_code))
        queues = await add_queues(drill, client, devices)
        fcm.add_fault(Fault(api="fcm", action="silence"))
        answers_again = 0.0

        async def notify_androids() -> None:
            nonlocal answers_again
            await drill.router.load.emit(queues, len(queues), fresh=True)
            await asyncio.sleep(AWAY)
            fcm.clear_faults()
            answers_again = wall_clock()

        pushes = await suffer(drill, notify_androids)
        for device in devices:
            await fcm_data(fcm, device, "message", answers_again)
    row("FCM is silent, APNs goes on", pushes, drill)
    nothing_lost(pushes)
    assert pushes.p99 < AWAY


# The machine


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@needs_root
async def test_full_disk(tmp_path: Path) -> None:
    """Not ready while it lasts; what comes meanwhile is kept and stored when there is room again."""
    with small_disk(tmp_path / "disk", "32m") as disk:
        async with world(disk, seconds=2 * SECONDS) as drill:
            filler = disk / "filler"

            async def fill() -> None:
                with filler.open("wb") as file, suppress(OSError):
                    while True:
                        file.write(bytes(65536))
                        file.flush()
                await until_ready(drill, False)
                filler.unlink()
                await until_ready(drill, True)

            pushes = await suffer(drill, fill)
    row("disk full, then room again", pushes, drill, "readiness 503 meanwhile")
    nothing_lost(pushes)


@pytest.mark.parametrize("jump", ["+3600", "-3600"])
async def test_clock_jumps(tmp_path: Path, jump: str) -> None:
    offset = tmp_path / "offset"
    offset.write_text("+0\n")
    fake = fake_clock(tmp_path, FAKETIME_TIMESTAMP_FILE=str(offset), FAKETIME_CACHE_DURATION="1")
    async with world(tmp_path, seconds=SECONDS, env=fake) as drill:

        async def turn() -> None:
            offset.write_text(f"{jump}\n")
            await asyncio.sleep(AWAY)
            offset.write_text("+0\n")

        pushes = await suffer(drill, turn)
    row(f"the clock jumps by {jump} s and back", pushes, drill)
    nothing_lost(pushes)
    assert repeated_pushes(drill.push) == 0
    assert pushes.p99 < DEADLINE / 2


@needs_root
async def test_dns_fails(tmp_path: Path) -> None:
    """The router's name does not resolve while its connection is cut: tried again until it does."""
    hosts, name = tmp_path / "hosts", "router.drill.test"
    entry = f"127.0.0.1 localhost {name}\n"
    hosts.write_text(entry)
    wrapper = ("unshare", "-m", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh")
    async with world(tmp_path, seconds=SECONDS, host=name, wrapper=wrapper) as drill:

        async def fail() -> None:
            hosts.write_text("127.0.0.1 localhost\n")
            drill.router.faults.drop_connections()
            await asyncio.sleep(AWAY)
            hosts.write_text(entry)

        pushes = await suffer(drill, fail)
    row("the router's name does not resolve for a while", pushes, drill)
    nothing_lost(pushes)


async def test_certificate_of_a_router_expires(tmp_path: Path) -> None:
    """The daemon does not talk to it until it shows a valid one; nothing that it kept is lost."""
    now, algorithm = datetime.now(UTC), KeyAlgorithm.ED25519
    authority, authority_key = make_ca(algorithm, "CA", now)
    current, key = make_online(authority, authority_key, algorithm, "127.0.0.1", now), algorithm.generate()
    old = make_certificate("127.0.0.1", key, "CA", authority_key, start=now - YEAR, end=now - YEAR / 2)
    expired = Credentials((old, authority), key)
    async with world(tmp_path, seconds=SECONDS, credentials=current) as drill:

        async def expire() -> None:
            drill.router.faults.present_certificate(expired)
            drill.router.faults.drop_connections()
            await asyncio.sleep(AWAY)
            assert not drill.router.subscribed_notifiers()
            drill.router.faults.present_certificate(None)

        pushes = await suffer(drill, expire)
    row("the router shows an expired certificate", pushes, drill)
    nothing_lost(pushes)


@contextmanager
def memory_limit(pid: int, size: int) -> Iterator[Path]:
    """A control group of version 1 or 2, with no swap."""
    old = Path("/sys/fs/cgroup/memory")
    group = (old if old.is_dir() else Path("/sys/fs/cgroup")) / f"ntf-drill-{pid}"
    try:
        group.mkdir()
        limit = "memory.limit_in_bytes" if old.is_dir() else "memory.max"
        (group / limit).write_text(str(size))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        pytest.skip(f"no control group for memory here: {error}")
    try:
        yield group
    finally:
        (group.parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()


@needs_root
async def test_little_memory(tmp_path: Path) -> None:
    """With a storm of clients it is not killed: what clients can cost is bounded."""
    async with world(tmp_path, seconds=SECONDS) as drill:
        with memory_limit(drill.daemon.process.pid, drill.daemon.memory() + (60 << 20)):
            service = await drill.measure(SECONDS, attack=storm)
    row("60 MB more than at rest, 2,000 clients at once", service.pushes, drill)
    assert service.lost == 0


async def test_few_descriptors(tmp_path: Path) -> None:
    """256 open files and 2,000 clients: routers and pushes have their share."""
    async with world(tmp_path, seconds=SECONDS, wrapper=("prlimit", "--nofile=256")) as drill:
        service = await drill.measure(SECONDS, attack=storm)
    row("256 open files, 2,000 clients at once", service.pushes, drill)
    assert service.lost == 0
