"""Pushes per second and CPU per push of both APNs clients against the fake push service.

Run: python -m bench.push_clients [--count 20000] [--clients curl aioapns] [--delays 0 0.05] [--one-cpu]
CPU times are only comparable on an otherwise idle machine. With --one-cpu the fake service never runs at the
same time as what is measured, at about half the rate.
A long run (--count 100000) is also the memory soak: resident memory is shown after a tenth and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
import time
import uuid
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Literal

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from nacl.bindings import crypto_box_afternm

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
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Measured:
    """One run."""

    client: str
    delay: float
    count: int
    seconds: float
    cpu: float
    early_memory: int
    final_memory: int

    def line(self) -> str:
        """A row of the table."""
        growth = (self.final_memory - self.early_memory) / 1024
        return (
            f"{self.client:8} {self.delay * 1000:6.0f} ms {self.count:8} {self.count / self.seconds:10.0f}/s "
            f"{self.cpu / self.count * 1e6:8.0f} us {self.final_memory / 2**20:8.1f} MiB {growth:+8.0f} KiB"
        )


def resident_memory() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


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
            nonce, push_id = random[:NONCE_SIZE], uuid.UUID(bytes=random[NONCE_SIZE:], version=4)
            message = MessageList(nonce, crypto_box_afternm(text, nonce, SECRET))
            token = ApnsToken(Provider.APNS_TEST, b"%064x" % number)
            await provider.deliver(token, message, push_id)

    async with asyncio.TaskGroup() as tasks:
        for _ in repeat(None, workers):
            tasks.create_task(work())


async def measure(
    client: Literal["curl", "aioapns"],
    fake: FakePushProcess,
    key: Path,
    args: argparse.Namespace,
    delay: float,
) -> Measured:
    """Run one client at one answer time."""
    await fake.control(delay=delay)
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
    provider = ApnsProvider(config, make_apns_client(config, http), wall_clock, 10.0)
    try:
        await push_many(provider, max(args.count // 10, 1), args.workers)
        early_memory, cpu, started = resident_memory(), cpu_time(), time.perf_counter()
        await push_many(provider, args.count, args.workers)
        seconds, cpu = time.perf_counter() - started, cpu_time() - cpu
        return Measured(client, delay, args.count, seconds, cpu, early_memory, resident_memory())
    finally:
        await provider.close()
        await http.close()


async def run(args: argparse.Namespace) -> None:
    """Measure everything that was asked for."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        key = make_key(folder)
        async with fake_push_process(folder / "fake", "--record-limit", "0") as fake:
            print("client   answer after    count     pushes/s  CPU/push       memory     growth")
            for client in args.clients:
                for delay in args.delays:
                    print((await measure(client, fake, key, args, delay)).line(), flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20_000, help="pushes per run")
    parser.add_argument("--workers", type=int, default=500, help="pushes under way at once")
    parser.add_argument("--clients", nargs="+", choices=["curl", "aioapns"], default=["curl", "aioapns"])
    parser.add_argument(
        "--delays", nargs="+", type=float, default=[0.0, 0.05], help="answer times in seconds"
    )
    parser.add_argument("--one-cpu", action="store_true", help="run everything on one CPU")
    args = parser.parse_args()
    if args.one_cpu:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
