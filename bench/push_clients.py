"""Pushes per second and CPU per push of both APNs clients against the fake push service."""

from __future__ import annotations

import asyncio
import os
import resource
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import repeat
from pathlib import Path
from typing import Literal

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from nacl.bindings import crypto_box_afternm

from bench.measure import Row, beside, figure, resident_memory
from bench.part import Part
from ntf_demo.fake_push.program import FakePushProcess, fake_push_process
from ntf_demo.fake_push.server import wall_clock
from ntf_server.config import ApnsConfig
from ntf_server.push.apns import ApnsProvider, make_apns_client
from ntf_server.push.http2 import CurlHttp2
from ntf_server.push.provider import MessageList
from protocol.device_token import ApnsToken, Provider

PADDED_SIZE = 3072
NONCE_SIZE = 24
SECRET = bytes(range(32))
WORKERS = 500
"Pushes under way at once."
UNANSWERED = 900
LONE_PUSHES = 100
RESPONSE_TIMEOUT = 60.0
AIM_US = 150

Client = Literal["curl", "aioapns"]


def cpu_time() -> float:
    """Seconds of CPU that this process used, all threads together."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def make_key(folder: Path) -> Path:
    """A signing key as Apple gives it out."""
    path = folder / "key.p8"
    path.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return path


async def push_many(provider: ApnsProvider, count: int, workers: int) -> None:
    """Encrypt and deliver `count` messages to different tokens."""
    numbers = iter(range(count))
    text = bytes(PADDED_SIZE)

    async def work() -> None:
        for number in numbers:
            random = os.urandom(NONCE_SIZE + 16)
            nonce, push_id = random[:NONCE_SIZE], str(uuid.UUID(bytes=random[NONCE_SIZE:], version=4))
            message = MessageList(nonce, crypto_box_afternm(text, nonce, SECRET))
            token = ApnsToken(Provider.APNS_TEST, b"%064x" % number)
            await provider.deliver(token, message, push_id)

    async with asyncio.TaskGroup() as tasks:
        for _ in repeat(None, workers):
            tasks.create_task(work())


@asynccontextmanager
async def apns_provider(client: Client, fake: FakePushProcess, key: Path) -> AsyncIterator[ApnsProvider]:
    """Pushes to the fake service."""
    http = CurlHttp2()
    config = ApnsConfig(
        key_file=key,
        key_id="KEY",
        team_id="TEAM",
        client=client,
        test_host=fake.host,
        test_port=fake.port,
        allow_test_provider=True,
        test_ca_file=Path(fake.ca_file),
    )
    provider = ApnsProvider(config, make_apns_client(config, http), wall_clock, RESPONSE_TIMEOUT)
    try:
        yield provider
    finally:
        await provider.close()
        await http.close()


async def pushing(
    client: Client, fake: FakePushProcess, key: Path, count: int, delay: float
) -> tuple[float, float, float]:
    """One client at one answer time: pushes per second, CPU of each, and growth of memory in kB."""
    await fake.control(delay=delay)
    async with apns_provider(client, fake, key) as provider:
        await push_many(provider, max(count // 10, 2 * WORKERS), WORKERS)
        memory, cpu, started = resident_memory(), cpu_time(), time.perf_counter()
        await push_many(provider, count, WORKERS)
        seconds, cpu = time.perf_counter() - started, cpu_time() - cpu
        return count / seconds, cpu / count * 1e6, (resident_memory() - memory) / 1024


async def pushing_alone(client: Client, fake: FakePushProcess, key: Path, unanswered: int) -> float:
    """CPU of pushes one after another, while others get no answer."""
    await fake.control(delay=0)
    async with apns_provider(client, fake, key) as provider:
        await push_many(provider, 1, 1)
        await fake.control(faults=[{"action": "silence", "count": unanswered}])
        requests = (await fake.control())["requests"]
        others = asyncio.ensure_future(push_many(provider, unanswered, unanswered))
        while (await fake.control())["requests"] < requests + unanswered:
            pass
        cpu = cpu_time()
        await push_many(provider, LONE_PUSHES, 1)
        cpu = cpu_time() - cpu
        others.cancel()
        await asyncio.gather(others, return_exceptions=True)
        return cpu / LONE_PUSHES * 1e6


async def measure(
    folder: Path, *, pushes: int = 2_500, delays_ms: tuple[int, ...] = (0, 50, 200), one_cpu: int = 0
) -> list[Row]:
    if one_cpu:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    key, rows = make_key(folder), []
    async with fake_push_process(folder / "fake", "--record-limit", "0") as fake:
        for delay in delays_ms:
            rate, cpu, grown = await pushing("curl", fake, key, pushes, delay / 1000)
            other_rate, other_cpu, _ = await pushing("aioapns", fake, key, pushes, delay / 1000)
            rows += [
                figure(f"answers after {delay} ms", "1/s", rate, peer=beside("aioapns", other_rate)),
                figure(
                    f"a push, answers after {delay} ms",
                    "us CPU",
                    cpu,
                    aim=AIM_US,
                    peer=beside("aioapns", other_cpu),
                ),
                figure(f"memory grown, answers after {delay} ms", "kB", grown),
            ]
        for unanswered in (0, UNANSWERED):
            cpu = await pushing_alone("curl", fake, key, unanswered)
            rows.append(figure(f"a lone push, {unanswered} others open", "us CPU", cpu))
    return rows


PUSH_CLIENTS = Part(
    name="push_clients",
    title="HTTP/2 clients",
    measure=measure,
    quick={"pushes": 1_000, "delays_ms": (0, 50)},
    repeats=2,
    seconds=25,
    quick_seconds=7,
    why="Requests to providers are most of what a push costs.",
    how="Both APNs clients with 500 pushes under way, each encrypted and put into JSON, against the"
    " fake push service in another process, which answers at once or after a while. With `--set"
    " push_clients.pushes=100000` it is also the memory test; with `push_clients.one_cpu=1`"
    " everything shares one processor. Lone pushes are sent one after another, each waking"
    " everything up for itself, while others get no answer.",
    bound="libcurl's thread takes about three fifths. Of samples of the whole process at 50 ms, before"
    " streams were spread, 35 % were in Python, 25 % in libcurl, 14 % in the C library, 10 % in the kernel,"
    " 8 % in nghttp2 and libcurl's OpenSSL; setting a request's options takes 2 us."
    " Whenever a connection can be read, libcurl looks at each of"
    " its open streams, for 2 to 3 us a push and stream: on one connection a lone push beside 900 open"
    " ones took 2.1 to 2.8 ms. So a connection gets at most 128 streams, and with many open, answers are"
    " left to gather for 10 us a stream, at most 10 ms. libcurl takes a third of what aioapns takes, so it"
    " is the default.",
)
