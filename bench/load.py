"""The whole daemon under load: thousands of clients, hundreds of routers, from NMSG to the accepted push."""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import astuple, dataclass
from pathlib import Path

from bench.devices import add_token, new_subscription
from bench.measure import Cores, Row, figure, run_on
from bench.part import Part
from bench.push_clients import make_key
from bench.server import Daemon, daemon, init, settled, sqlite_store
from ntf_demo.fake_push.program import FakePushProcess, fake_push_process
from protocol.device_token import ApnsToken, Provider
from protocol.ntf_commands import Ping, Pong
from smp_router.load import LoadQueue
from smp_router.router import Router
from tests.ntf_server.ntf_client import NtfClient

WRITTEN_AT_ONCE = 2000
OPENED_AT_ONCE = 50
LOOK = 0.02
"Seconds between looks at what the provider accepted."
DEADLINE = 300.0
CORE_RATE = 5000
"Pushes a second that one core should do."

SWITCHES = re.compile(r"ctxt_switches:\s+(\d+)")
FAULTS = 7
"Where minor faults stand in /proc's line about a process, behind its name."

Queues = Sequence[tuple[Router, LoadQueue]]


@dataclass
class Usage:
    """CPU seconds of a process so far, and what its threads did."""

    all: float
    event_loop: float
    switches: int
    faults: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        threads = {int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks}
        switches = sum(
            int(count) for task in tasks for count in SWITCHES.findall((task / "status").read_text())
        )
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return cls(sum(threads.values()), threads[pid], switches, int(stat[FAULTS]))


@dataclass
class Pushed:
    """What one load came to."""

    rate: float
    cpu: float
    "Microseconds of the daemon for each push."
    event_loop: float
    "Its share of the time."
    switches: float
    "Of its threads, for each push."
    faults: float
    "Pages of memory that it touched for the first time, for each push."
    others: float
    "Microseconds of the push service, the routers and the clients for each push, on another core."


@dataclass
class World:
    server: Daemon
    fake: FakePushProcess
    queues: Queues
    "One for each token; all others only have to be there."
    clients: Sequence[NtfClient]

    async def push(self, queues: Queues, rate: float | None) -> Pushed:
        """An NMSG of each queue, `rate` a second (None: at once), until all are pushed."""
        accepted = await self._accepted()
        before, others, started = Usage.of(self.server.process.pid), self._others(), time.perf_counter()
        by_router: dict[Router, list[LoadQueue]] = {}
        for router, queue in queues:
            by_router.setdefault(router, []).append(queue)
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(DEADLINE):
            for router, own in by_router.items():
                share = None if rate is None else rate * len(own) / len(queues)
                tasks.create_task(router.load.emit(own, len(own), share))
            while await self._accepted() - accepted < len(queues):  # noqa: ASYNC110
                await asyncio.sleep(LOOK)
        elapsed, after = time.perf_counter() - started, Usage.of(self.server.process.pid)
        used, loop = after.all - before.all, after.event_loop - before.event_loop
        each = 1e6 / len(queues)
        return Pushed(
            len(queues) / elapsed,
            used * each,
            loop / elapsed,
            (after.switches - before.switches) / len(queues),
            (after.faults - before.faults) / len(queues),
            (self._others() - others) * each,
        )

    def _others(self) -> float:
        return Usage.of(self.fake.pid).all + Usage.of(os.getpid()).all

    async def _accepted(self) -> int:
        return int((await self.fake.control())["accepted"])


async def world(
    folder: Path,
    stack: AsyncExitStack,
    clients: int,
    routers: int,
    tokens: int,
    each: int,
    recording: Sequence[str] = ("--record-limit", "0"),
) -> World:
    """A daemon with all its queues subscribed: `each` of a token, at as many routers. It has a core of its
    own. `recording`: what the push service keeps of pushes."""
    cores = Cores.divide()
    run_on(cores.others)
    init(folder)
    peers = [await stack.enter_async_context(Router.start(host="127.0.0.1")) for _ in range(routers)]
    made = await _fill(folder, peers, tokens, each)
    fake = await stack.enter_async_context(fake_push_process(folder / "fake", *recording))
    env = {
        "NTF_APNS_KEY_FILE": str(make_key(folder)),
        "NTF_APNS_KEY_ID": "KEY",
        "NTF_APNS_TEAM_ID": "TEAM",
        "NTF_APNS_ALLOW_TEST_PROVIDER": "on",
        "NTF_APNS_TEST_HOST": fake.host,
        "NTF_APNS_TEST_PORT": str(fake.port),
        "NTF_APNS_TEST_CA_FILE": fake.ca_file,
    }
    run_on(cores.daemon)
    server = await stack.enter_async_context(daemon(folder, env))
    run_on(cores.others)
    async with asyncio.timeout(DEADLINE):
        while sum(len(peer.subscribed_notifiers()) for peer in peers) < tokens * each:  # noqa: ASYNC110
            await asyncio.sleep(1)
    opened: list[NtfClient] = []
    while len(opened) < clients:
        opened += await asyncio.gather(*(NtfClient.open(server.address) for _ in range(OPENED_AT_ONCE)))
    for client in opened:
        stack.callback(client.stream.abort)
    await settled(server)
    return World(server, fake, made, opened)


async def _fill(folder: Path, peers: Sequence[Router], tokens: int, each: int) -> Queues:
    """Returns the first queue of each token."""
    store = sqlite_store(folder)
    await store.open()
    first: list[tuple[Router, LoadQueue]] = []
    for start in range(0, tokens, WRITTEN_AT_ONCE):
        numbers = range(start, min(start + WRITTEN_AT_ONCE, tokens))
        devices = [ApnsToken(Provider.APNS_TEST, b"%064x" % number) for number in numbers]
        records = await asyncio.gather(*(add_token(store, device) for device in devices))
        news = []
        for number, record in zip(numbers, records, strict=True):
            for turn in range(each):
                router = peers[(number + turn) % len(peers)]
                (queue,) = router.load.create_queues(1)
                named = queue.notifier_id, queue.notifier_key.der
                news.append(new_subscription(record.key, router.address, named))
                if not turn:
                    first.append((router, queue))
        await store.create_subscriptions(news)
    await store.close()
    return first


async def measure(
    folder: Path,
    *,
    clients: int = 200,
    routers: int = 20,
    tokens: int = 4_000,
    queues: int = 5,
    rate: int = 1000,
    bursts: int = 5,
) -> list[Row]:
    async with AsyncExitStack() as stack:
        ready = await world(folder, stack, clients, routers, tokens, queues)
        half = len(ready.queues) // 2
        steady = await ready.push(ready.queues[:half], rate)
        first = await ready.push(ready.queues[half:], None)
        later = [await ready.push(ready.queues, None) for _ in range(bursts)]
        usual = Pushed(*map(statistics.median, zip(*map(astuple, later), strict=True)))
        assert isinstance(await ready.clients[0].ask(Ping()), Pong)
        return [
            figure("subscriptions", "in all", tokens * queues),
            figure(f"{rate} NMSG a second: pushes accepted", "1/s", steady.rate),
            figure(f"{rate} NMSG a second: the daemon, each", "us CPU", steady.cpu),
            figure("the first burst: pushes accepted", "1/s", first.rate),
            figure("the first burst: the daemon, each", "us CPU", first.cpu),
            figure("the first burst: pages of new memory, each", "in all", first.faults),
            figure("as fast as it can: pushes accepted", "1/s", usual.rate, aim=CORE_RATE),
            figure("as fast as it can: the slowest burst", "1/s", min(burst.rate for burst in later)),
            figure("as fast as it can: the daemon, each", "us CPU", usual.cpu, aim=1e6 / CORE_RATE),
            figure("as fast as it can: event loop busy", "% of budget", usual.event_loop * 100),
            figure("as fast as it can: switches between threads, each", "in all", usual.switches),
            figure("as fast as it can: push service and routers, each", "us CPU", usual.others),
        ]


LOAD = Part(
    name="load",
    title="The whole daemon",
    measure=measure,
    quick={"clients": 50, "routers": 5, "tokens": 400, "queues": 2, "bursts": 1},
    repeats=1,
    seconds=21,
    quick_seconds=5,
    why="Everything at once: what one daemon can carry, and what gives way first.",
    how="The daemon is a process of its own on a core of its own. The push service is another, and routers"
    " and clients share a third, on the other cores. Half of the tokens get a notification each at a steady"
    " rate, the other half all at once, the first burst of the process; then five times all of them at once:"
    " the figures are the medians of these. `--set` makes it as large as you like.",
    bound="the event loop: composing, sealing and accounting for a push are Python. [Load](load.md) has the"
    " profile.",
)
