"""From a received NMSG to the request at the provider: store, dispatcher and APNs client together.

Three questions, each at every answer time of the fake push service:
- burst: 100 tokens x 10 queues x 5 rounds at once; until every queue's newest notification was pushed
- sustained: one notification for each of many tokens; pushes per second, CPU per push
- latency: a steady rate of single notifications; from receiving one to the request that carries it
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.devices import add_device, new_id
from bench.measure import Cores, Row, figure, run_on
from bench.part import Part
from bench.push_clients import cpu_time, make_key
from ntf_demo.fake_push.program import FakePushProcess, fake_push_process
from ntf_demo.fake_push.server import wall_clock
from ntf_server.clock import SystemClock
from ntf_server.config import ApnsConfig, PushConfig
from ntf_server.journal import EventSink
from ntf_server.memory import relax_garbage_collection
from ntf_server.push.apns import ApnsProvider, make_apns_client
from ntf_server.push.dispatcher import Dispatcher
from ntf_server.push.http2 import CurlHttp2
from ntf_server.push.provider import PushNotification, PushProvider
from protocol.addresses import SmpServer
from protocol.device_token import ApnsToken, DeviceToken, Provider
from protocol.encoding import EntityId
from store.records import Notification, ServerKey
from store.sqlite import SqliteStore

ROUTER = SmpServer(("smp.example.com",), "", bytes(32))
META = bytes(144)
BLOCK = 80
"NMSGs of one router block."
BURST_TOKENS, BURST_QUEUES, BURST_ROUNDS = 100, 10, 5
TIMEOUT = 120.0
BURST_AIMS = {0: 1.5, 50: 2.5}
"Seconds, by how many milliseconds answers take."
P99_AIMS_MS = {500: 20, 1000: 10}
"By notifications a second."
TICK = 0.001
"Seconds: what a timer of the event loop may be late because epoll counts in milliseconds."


@dataclass
class Timed:
    """A provider that notes when it was asked for what."""

    provider: PushProvider
    requests: dict[bytes, float] = field(default_factory=dict)

    async def deliver(self, token: DeviceToken, notification: PushNotification, push_id: str) -> None:
        """See PushProvider."""
        assert isinstance(token, ApnsToken)
        self.requests[token.token] = time.monotonic()
        await self.provider.deliver(token, notification, push_id)

    async def close(self) -> None:
        """See PushProvider."""
        await self.provider.close()


@dataclass
class Side:
    """A push side with a store of its own."""

    store: SqliteStore
    dispatcher: Dispatcher
    timed: Timed

    async def add_tokens(self, count: int, queues: int) -> tuple[ServerKey, list[list[EntityId]]]:
        """The router's key and the notifier ids of each token, in the order of the tokens."""
        rows = await asyncio.gather(*(self._add_token(number, queues) for number in range(count)))
        return rows[0][0], [ids for _, ids in rows]

    async def _add_token(self, number: int, queues: int) -> tuple[ServerKey, list[EntityId]]:
        ids = [new_id() for _ in range(queues)]
        device = ApnsToken(Provider.APNS_TEST, device_name(number))
        return await add_device(self.store, device, ROUTER, [(one, b"") for one in ids]), ids

    async def receive(self, key: ServerKey, ids: Sequence[EntityId]) -> None:
        """One block of NMSGs."""
        received_at = time.monotonic()
        block = [Notification(notifier_id, os.urandom(24), META) for notifier_id in ids]
        stored = await self.store.add_notifications(key, block, received_at=int(wall_clock()))
        await self.dispatcher.notify([item for item in stored if item is not None], received_at)

    async def all_sent(self) -> None:
        async with asyncio.timeout(TIMEOUT):
            while (await self.store.counts()).unsent_notifications:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def device_name(number: int) -> bytes:
    return b"%064x" % number


@contextlib.asynccontextmanager
async def push_side(fake: FakePushProcess, key: Path) -> AsyncIterator[Side]:
    """A fresh store and a running dispatcher."""
    http = CurlHttp2()
    config = ApnsConfig(
        key_file=key,
        key_id="KEY",
        team_id="TEAM",
        test_host=fake.host,
        test_port=fake.port,
        allow_test_provider=True,
        test_ca_file=Path(fake.ca_file),
    )
    timed = Timed(ApnsProvider(config, make_apns_client(config, http), wall_clock, 10.0))
    with tempfile.TemporaryDirectory() as name:
        store = SqliteStore(Path(name) / "ntf.db")
        await store.open()
        providers = {Provider.APNS_TEST: timed}
        dispatcher = Dispatcher(
            store,
            providers,
            PushConfig(),
            clock=SystemClock(),
            random=os.urandom,
            journal=EventSink(),
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(dispatcher.run())
            yield Side(store, dispatcher, timed)
            await dispatcher.stop(10.0)
        await timed.close()
        await http.close()
        await store.close()


def blocks(ids: Sequence[EntityId]) -> list[Sequence[EntityId]]:
    return [ids[start : start + BLOCK] for start in range(0, len(ids), BLOCK)]


async def burst(side: Side) -> float:
    """Seconds until all NMSGs, given at once, are pushed."""
    key, tokens = await side.add_tokens(BURST_TOKENS, BURST_QUEUES)
    ids = [notifier_id for token in tokens for notifier_id in token]
    started = time.perf_counter()
    for _ in range(BURST_ROUNDS):
        for block in blocks(ids):
            await side.receive(key, block)
    await side.all_sent()
    return time.perf_counter() - started


async def sustained(side: Side, count: int) -> tuple[float, float]:
    """Pushes per second and CPU of each; everything is stored already when the clock starts."""
    key, tokens = await side.add_tokens(count, 1)
    received = time.monotonic()
    arrived = []
    for block in blocks([ids[0] for ids in tokens]):
        notifications = [Notification(notifier_id, os.urandom(24), META) for notifier_id in block]
        stored = await side.store.add_notifications(key, notifications, received_at=int(wall_clock()))
        arrived += [item for item in stored if item is not None]
    started, cpu = time.perf_counter(), cpu_time()
    await side.dispatcher.notify(arrived, received)
    await side.all_sent()
    seconds, cpu = time.perf_counter() - started, cpu_time() - cpu
    return count / seconds, cpu / count * 1e6


async def latency(side: Side, rate: float, seconds: float) -> tuple[float, float]:
    """Milliseconds, p50 and p99, of single notifications, each for another token.

    They come when they are due, whether or not those before them are stored: a pause of the store, or of the
    event loop, counts for all that came meanwhile. How late timers are by themselves does not."""
    count = int(rate * seconds)
    key, tokens = await side.add_tokens(count, 1)
    started, came = time.monotonic(), list[float]()
    async with asyncio.TaskGroup() as tasks:
        for number, ids in enumerate(tokens):
            due = started + number / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            came.append(min(time.monotonic(), due + TICK))
            tasks.create_task(side.receive(key, ids))
    await side.all_sent()
    delays = [side.timed.requests[device_name(number)] - at for number, at in enumerate(came)]
    cuts = statistics.quantiles(delays, n=100)
    return cuts[49] * 1000, cuts[98] * 1000


async def measure(
    folder: Path,
    *,
    tokens: int = 4_000,
    seconds: float = 3.0,
    rates: tuple[int, ...] = (500, 1000),
    delays_ms: tuple[int, ...] = (0, 50),
) -> list[Row]:
    relax_garbage_collection()  # as in the daemon
    key, rows = make_key(folder), []
    cores = Cores.divide()
    run_on(cores.others)
    async with fake_push_process(folder / "fake", "--record-limit", "0") as fake:
        run_on(cores.daemon)
        for delay in delays_ms:
            await fake.control(delay=delay / 1000)
            after = f"answers after {delay} ms"
            async with push_side(fake, key) as side:
                rows.append(figure(f"burst, {after}", "s", await burst(side), aim=BURST_AIMS.get(delay)))
            async with push_side(fake, key) as side:
                rate, cpu = await sustained(side, tokens)
                rows += [figure(f"pushes, {after}", "1/s", rate), figure(f"a push, {after}", "us CPU", cpu)]
            for rate in rates:
                async with push_side(fake, key) as side:
                    p50, p99 = await latency(side, rate, seconds)
                at = f"at {rate}/s, {after}"
                rows += [
                    figure(f"NMSG to request {at}, p50", "ms", p50),
                    figure(f"NMSG to request {at}, p99", "ms", p99, aim=P99_AIMS_MS.get(rate)),
                ]
    return rows


PUSH_PATH = Part(
    name="push_path",
    title="From notification to push",
    measure=measure,
    quick={"tokens": 1_000, "seconds": 1.0, "rates": (500,)},
    repeats=2,
    seconds=46,
    quick_seconds=9,
    why="The delay that a person sees, and how many people one daemon serves.",
    how="Store, dispatcher and APNs client in one process on one core, the fake push service in another on"
    " the others. Burst: 100 devices with 10 queues each get 5 rounds of NMSGs at once; until every queue's"
    " newest is pushed. Pushes: one for each of many devices, all of them stored already. NMSG to request:"
    " single notifications, each when it is due, whatever became of those before it; from then on, without"
    " the millisecond by which the system's timers may be late.",
    bound="the interpreter: half of a push's CPU is the event loop, a third libcurl's thread, the rest the"
    " store's. Single notifications pay for waking three threads each, some five times what one of a burst"
    " costs, and at 1,000/s so fill most of a core. [Load](load.md) has the profile.",
)
