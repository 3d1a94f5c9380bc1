"""How fast the daemon subscribes and receives.

Routers run in another process, all in one. The store is a real file. Rates are by the clock on the wall, so
they need a machine with two free cores; CPU times are those of the daemon's process with all its threads.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from bench.devices import Queue, add_device
from bench.measure import Row, figure, resident_memory
from bench.part import Part
from ntf_server.clock import SystemClock
from ntf_server.config import SubscriberConfig
from ntf_server.journal import EventSink
from ntf_server.router import RouterStatus
from ntf_server.router_session import RECEIVED
from ntf_server.subscriber import RouterSubscriber
from protocol.addresses import SmpServer
from protocol.device_token import ApnsToken, Provider
from smp_router.load import LoadQueue
from smp_router.router import Router
from store.records import Stored, TokenKey
from store.sqlite import SqliteStore

QUEUES_PER_TOKEN = 50
CREATED_AT_ONCE = 5_000
QUEUES_PER_ROUTER = 10
NMSG_ROUNDS = 3
MEGABYTE = 1024 * 1024
CONFIG = SubscriberConfig(allow_private_routers=True)
MAX_ROUTERS = 10_000
LOOK, LOOK_AT_MANY = 0.005, 0.05
"Seconds between looks. One at 500 routers takes some 3 ms of the CPU that is measured."

Keys = list[Queue]


class CountingSink:
    """A push side with room for everything."""

    def __init__(self) -> None:
        self.notified = 0

    async def verify(self, token_key: TokenKey) -> None:
        """Nothing is registered here."""

    async def notify(self, stored: Sequence[Stored], received_at: float) -> None:
        self.notified += len(stored)


async def routers(pipe: Pipe, count: int, queues_each: int) -> None:
    """The other process: tell who is there, then emit as many NMSGs as asked for, until 0 is asked for."""
    async with AsyncExitStack() as stack:
        made: list[list[LoadQueue]] = []
        for _ in range(count):
            router = await stack.enter_async_context(Router.start())
            queues = router.load.create_queues(queues_each)
            made.append(queues)
            pipe.send((router.address, [(queue.notifier_id, queue.notifier_key.der) for queue in queues]))
        while nmsgs := await asyncio.to_thread(pipe.recv):
            await router.load.emit(made[-1], nmsgs)


def run_routers(pipe: Pipe, count: int, queues_each: int) -> None:
    asyncio.run(routers(pipe, count, queues_each))


@asynccontextmanager
async def daemon_and_routers(
    count: int, queues_each: int
) -> AsyncIterator[tuple[SqliteStore, Pipe, list[SmpServer]]]:
    """A store with all queues of routers that run elsewhere."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=run_routers, args=(theirs, count, queues_each), name="routers"
    )
    process.start()
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "ntf.db")
        await store.open()
        try:
            servers = []
            for _ in range(count):
                server, keys = await asyncio.to_thread(ours.recv)
                await fill(store, server, keys)
                servers.append(server)
            yield store, ours, servers
        finally:
            await store.close()
            ours.send(0)
            await asyncio.to_thread(process.join)


async def fill(store: SqliteStore, server: SmpServer, keys: Keys) -> None:
    for start in range(0, len(keys), CREATED_AT_ONCE):
        part = keys[start : start + CREATED_AT_ONCE]
        devices = [ApnsToken(Provider.APNS_PROD, os.urandom(32).hex().encode()) for _ in part]
        firsts = range(0, len(part), QUEUES_PER_TOKEN)
        await asyncio.gather(
            *(
                add_device(store, devices[first], server, part[first : first + QUEUES_PER_TOKEN])
                for first in firsts
            )
        )


class Daemon:
    """A running subscriber; `memory` is the most it took."""

    def __init__(self, store: SqliteStore, config: SubscriberConfig) -> None:
        self.sink = CountingSink()
        self.subscriber = RouterSubscriber(
            store, self.sink, SystemClock(), config, EventSink(), max_routers=MAX_ROUTERS
        )
        self.memory = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        gc.collect()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.subscriber.run())
            yield
            task.cancel()

    async def until(self, condition: Callable[[list[RouterStatus]], bool], every: float = LOOK) -> float:
        """Wait for a condition; the time at which it was found true."""
        while not condition(self.subscriber.status()):
            self.memory = max(self.memory, resident_memory())
            await asyncio.sleep(every)
        return time.perf_counter()


def all_connected(statuses: list[RouterStatus]) -> bool:
    return bool(statuses) and all(status.connected for status in statuses)


def all_subscribed(statuses: list[RouterStatus]) -> bool:
    return bool(statuses) and all(status.subscribed for status in statuses)


async def start_up(_: Path, *, queues: int = 20_000) -> list[Row]:
    async with daemon_and_routers(1, queues) as (store, _pipe, _servers):
        before = resident_memory()
        daemon = Daemon(store, replace(CONFIG, use_service_credentials=False))
        individually, individual_cpu = await subscribe_all(daemon, queues)
        memory = daemon.memory
        daemon = Daemon(store, CONFIG)
        associating, service_cpu = await subscribe_all(daemon, queues)
        daemon = Daemon(store, CONFIG)
        async with daemon.running():
            connected = await daemon.until(all_connected)
            restarted = await daemon.until(all_subscribed) - connected
            daemon.subscriber.resubscribe("127.0.0.1")
            await daemon.until(lambda statuses: not all_connected(statuses))
            connected = await daemon.until(all_connected)
            reconnected = await daemon.until(all_subscribed) - connected
    return [
        figure("NSUB one by one", "1/s", individually, aim=5_000),
        figure("an NSUB, one by one", "us CPU", individual_cpu),
        figure("NSUB associating with a service", "1/s", associating),
        figure("an NSUB, associating with a service", "us CPU", service_cpu),
        figure("memory grown", "MB", (memory - before) / MEGABYTE, aim=100),
        figure("by service, restarted: connected to ready", "s", restarted, aim=2),
        figure("by service, connection lost: connected to ready", "s", reconnected, aim=2),
    ]


async def subscribe_all(daemon: Daemon, queues: int) -> tuple[float, float]:
    """Queues a second, from connected to all of them confirmed; and microseconds of CPU for each."""
    async with daemon.running():
        connected = await daemon.until(all_connected)
        cpu = time.process_time()
        took = await daemon.until(all_subscribed) - connected
        cpu = time.process_time() - cpu
    return queues / took, cpu / queues * 1e6


async def many_routers(_: Path, *, routers: int = 500) -> list[Row]:
    async with daemon_and_routers(routers, QUEUES_PER_ROUTER) as (store, _pipe, _servers):
        before, cpu = resident_memory(), time.process_time()
        daemon = Daemon(store, CONFIG)
        async with daemon.running():
            started = time.perf_counter()
            took = await daemon.until(all_subscribed, LOOK_AT_MANY) - started
            cpu = time.process_time() - cpu
    return [
        figure("all routers connected and subscribed", "s", took),
        figure("a router", "ms CPU", cpu / routers * 1e3),
        figure("memory of a router", "kB", (daemon.memory - before) / routers / 1024),
    ]


async def receiving(_: Path, *, queues: int = 10_000, nmsgs: int = 60_000) -> list[Row]:
    async with daemon_and_routers(1, queues) as (store, pipe, _servers):
        daemon = Daemon(store, CONFIG)
        async with daemon.running():
            await daemon.until(all_subscribed)
            rounds = [await one_round(daemon, pipe, nmsgs) for _ in range(NMSG_ROUNDS)]
    return [
        figure("an NMSG up to its commit", "us CPU", *(cpu / nmsgs * 1e6 for cpu, _ in rounds), aim=40),
        figure("NMSG received and stored", "1/s", *(nmsgs / wall for _, wall in rounds)),
    ]


async def one_round(daemon: Daemon, pipe: Pipe, nmsgs: int) -> tuple[float, float]:
    """CPU and time for so many NMSGs, counted after their commits."""
    goal = RECEIVED._value.get() + nmsgs
    cpu, started = time.process_time(), time.perf_counter()
    pipe.send(nmsgs)
    finished = await daemon.until(lambda _: RECEIVED._value.get() >= goal)
    return time.process_time() - cpu, finished - started


START_UP = Part(
    name="start_up",
    title="Subscribing to queues",
    measure=start_up,
    quick={"queues": 5_000},
    repeats=2,
    seconds=34,
    quick_seconds=6,
    why="After a restart no notification comes until the queues are subscribed.",
    how="The subscriber with its store in one process, a router in another. One by one, associating"
    " each with the service, and then with one command for the whole service.",
    bound="two thirds of an NSUB are signatures, two with a service; by service there is one for all queues.",
)
ROUTERS = Part(
    name="routers",
    title="Many routers",
    measure=many_routers,
    quick={"routers": 100},
    repeats=1,
    seconds=12,
    quick_seconds=5,
    why="Queues are spread over as many routers as people choose.",
    how="The subscriber in one process, all routers in another, ten queues each.",
    bound="two TLS handshakes for each, one of them with the router's, on the other core.",
)
RECEIVING = Part(
    name="receiving",
    title="Notifications received",
    measure=receiving,
    quick={"queues": 2_000, "nmsgs": 20_000},
    repeats=1,
    seconds=15,
    quick_seconds=6,
    why="Every message that anybody gets is one of these.",
    how="From the socket to the commit: TLS, decrypting, decoding, finding the subscription, storing."
    " The router is another process; three rounds.",
    bound="the store takes most. Appended notifications change few pages, and a block of 80 is one"
    " transaction.",
)
