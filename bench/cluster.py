"""The whole server on each kind of database, and with two daemons: what routers send until it is pushed."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import NamedTuple, TypeVar

import asyncpg
import psutil

from bench.devices import Queue, add_device, add_token, new_id, new_subscription
from bench.measure import Row, beside, figure
from bench.part import Part
from bench.server import Daemon, checks, creations, daemon, fill, init, loads, measure, sqlite_store
from ntf_demo.fake_push.program import FakePushProcess, fake_push_process
from protocol.addresses import SmpServer
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import EntityId
from protocol.ntf_commands import IdSub, Sub
from smp_router.router import Router
from store.interface import NtfStore
from store.policy import RowCaps
from store.postgres import PostgresStore
from store.records import CreatedSubscription, Notification
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.postgres import PostgresCluster, running_cluster

T = TypeVar("T")
SQLITE = "SQLite"
BATCHED_ROUTER = SmpServer(("127.0.0.1",), "2", b"k" * 32)
ROUTERS = 4
"So many that both daemons own some."
BLOCK = 80
"NMSGs that come together."
GROUP = 100
"SNEWs or SCHKs that come together."
CONNECTIONS, IN_FLIGHT = 20, 24
UNLIMITED = RowCaps(subscriptions_per_token=0)
AS_INSTALLED = ("max_connections=200", "shared_buffers=128MB")
"Otherwise as Debian has it: each durable commit waits for the disk."
_SHARED = """
SELECT count(*) FILTER (WHERE owner IS NULL) = 0 AND count(DISTINCT (duty, owner)) = 2 * $1
FROM ntf.leases WHERE duty IN ('router', 'pushes')
"""


class Sizes(NamedTuple):
    queues: int
    "Of each router."
    commands: int
    stored: int


@dataclass
class Place:
    """A database, and how daemons and this program reach it."""

    name: str
    folder: Path
    env: Mapping[str, str]
    postgres: PostgresCluster | None = None
    url: str = ""

    def store(self) -> NtfStore:
        if self.postgres is None:
            return sqlite_store(self.folder)
        return PostgresStore(self.url, caps=UNLIMITED)

    def database_cpu(self) -> float:
        """Seconds of PostgreSQL's processes; SQLite runs in the daemon's."""
        if self.postgres is None:
            return 0.0
        server = psutil.Process(self.postgres.pid)
        return sum(server.cpu_times()[:4]) + sum(sum(one.cpu_times()[:2]) for one in server.children())

    async def analyze(self) -> None:
        """As its own chores do it sooner or later."""
        if self.postgres is not None:
            db = await asyncpg.connect(self.url)
            await db.execute("ANALYZE")
            await db.close()

    async def shared(self, daemons: int) -> None:
        """Until each daemon has its part of routers and pushes."""
        if self.postgres is None:
            return
        db = await asyncpg.connect(self.url)
        while not await db.fetchval(_SHARED, daemons):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await db.close()


@asynccontextmanager
async def place(
    folder: Path, postgres: PostgresCluster | None, push: FakePushProcess
) -> AsyncIterator[Place]:
    await asyncio.to_thread(init, folder)
    env = {
        "NTF_APNS_ALLOW_TEST_PROVIDER": "on",
        "NTF_APNS_TEST_PORT": str(push.port),
        "NTF_APNS_TEST_CA_FILE": push.ca_file,
        "NTF_STORE_SUBSCRIPTIONS_PER_TOKEN": "0",
    }
    if postgres is None:
        yield Place(SQLITE, folder, env)
        return
    url = postgres.new_database()
    env |= {"NTF_STORE_DATABASE": "postgres", "NTF_STORE_URL": url, "NTF_STORE_LEASE_SECONDS": "4"}
    yield Place("PostgreSQL", folder, env, postgres, url)


async def routers(pipe: Pipe, queues_each: int) -> None:
    """The other process: tells who is there, how many are subscribed, and sends the queues of a range."""
    async with AsyncExitStack() as stack:
        running = [await stack.enter_async_context(Router.start()) for _ in range(ROUTERS)]
        made = [router.load.create_queues(queues_each) for router in running]
        for router, queues in zip(running, made, strict=True):
            pipe.send((router.address, [(queue.notifier_id, queue.notifier_key.der) for queue in queues]))
        while (asked := await asyncio.to_thread(pipe.recv)) is not None:
            if asked == "subscribed":
                pipe.send(sum(len(router.subscribed_notifiers()) for router in running))
                continue
            parts = [queues[asked[0] : asked[1]] for queues in made]
            emitting = zip(running, parts, strict=True)
            await asyncio.gather(*(router.load.emit(part, len(part)) for router, part in emitting))


def run_routers(pipe: Pipe, queues_each: int) -> None:
    asyncio.run(routers(pipe, queues_each))


@asynccontextmanager
async def filled(where: Place, queues_each: int) -> AsyncIterator[Pipe]:
    """Routers, and a store that has a device for each of their queues."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_routers, args=(theirs, queues_each), name="routers")
    process.start()
    store = where.store()
    await store.open()
    for _ in range(ROUTERS):
        server, queues = await asyncio.to_thread(ours.recv)
        await asyncio.gather(*(add_device(store, new_device(), server, [queue]) for queue in queues))
    await store.close()
    await where.analyze()
    try:
        yield ours
    finally:
        ours.send(None)
        await asyncio.to_thread(process.join)


def new_device() -> ApnsToken:
    return ApnsToken(Provider.APNS_TEST, os.urandom(32).hex().encode())


class Pushed(NamedTuple):
    """A second, and microseconds of CPU of the daemons and of the database for each."""

    rate: float
    cpu: float
    database: float


class Served:
    """Daemons on one database with all their routers, and what they do a second."""

    def __init__(self, where: Place, running: Sequence[Daemon], pipe: Pipe, push: FakePushProcess) -> None:
        self.where = where
        self.running = running
        self.pipe = pipe
        self.push = push

    @property
    def label(self) -> str:
        count = len(self.running)
        return self.where.name + (f", {count} daemon{'s' * (count > 1)}" if self.where.postgres else "")

    def cpu(self) -> float:
        return sum(one.cpu() for one in self.running)

    async def subscribed(self, queues: int) -> None:
        found = -1
        while found < queues:
            await asyncio.sleep(0.05)
            self.pipe.send("subscribed")
            found = await asyncio.to_thread(self.pipe.recv)

    async def pushes(self, first: int, last: int) -> Pushed:
        """One NMSG for each queue of a range, until the provider has accepted a push for each."""
        count = ROUTERS * (last - first)
        before = (await self.push.control())["accepted"]
        cpu, database, started = self.cpu(), self.where.database_cpu(), time.perf_counter()
        self.pipe.send((first, last))
        while (await self.push.control())["accepted"] < before + count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        seconds = time.perf_counter() - started
        used, database = self.cpu() - cpu, self.where.database_cpu() - database
        return Pushed(count / seconds, used / count * 1e6, database / count * 1e6)

    async def notifications(self, queues: int) -> list[Row]:
        await self.where.shared(len(self.running))
        await self.subscribed(ROUTERS * queues)
        half = queues // 2
        rounds = [await self.pushes(0, half), await self.pushes(half, queues)]
        return [
            figure(f"NMSG pushed: {self.label}", "1/s", *(one.rate for one in rounds)),
            *self.costs("an NMSG", [one.cpu for one in rounds], [one.database for one in rounds]),
        ]

    def costs(self, what: str, daemons: Sequence[float], database: Sequence[float]) -> list[Row]:
        """SQLite runs in the daemon: there is nothing beside it."""
        rows = [figure(f"{what}, CPU of daemons: {self.label}", "us CPU", *daemons)]
        if self.where.postgres:
            rows.append(figure(f"{what}, CPU of PostgreSQL: {self.label}", "us CPU", *database))
        return rows

    async def commands(self, device: Device, ids: Sequence[EntityId], count: int) -> list[Row]:
        """Connections spread over the daemons, as a balancer or the kernel does it."""
        addresses = [self.running[number % len(self.running)].address for number in range(CONNECTIONS)]
        clients = [await NtfClient.open(address) for address in addresses]
        amount = max(1, count // CONNECTIONS // IN_FLIGHT) * IN_FLIGHT
        rows: list[Row] = []
        for name, expected, batches in (
            ("SCHK", Sub, [checks(device, ids, amount) for _ in clients]),
            ("SNEW", IdSub, [creations(device, amount) for _ in clients]),
        ):
            database = self.where.database_cpu()
            rate, cpu, _ = await measure(self.running, loads(clients, batches, IN_FLIGHT), expected)
            database = (self.where.database_cpu() - database) / (amount * CONNECTIONS) * 1e6
            rows.append(figure(f"{name}: {self.label}", "1/s", rate))
            rows += self.costs(f"a {name}", [cpu], [database])
        for client in clients:
            client.close()
        return rows


async def batching(where: Place, amount: int) -> list[Row]:
    """What one transaction for many is worth, at the store: its callers wait for each one's commit."""
    store = where.store()
    await store.open()
    token = await add_token(store, new_device())
    ids: list[EntityId] = []
    queues = [(new_id(), b"k") for _ in range(amount)]

    async def snew(part: Sequence[Queue]) -> None:
        news = [new_subscription(token.key, BATCHED_ROUTER, one) for one in part]
        ids.extend(new.subscription_id for new in news)
        await store.create_subscriptions(news)

    async def nmsg(part: Sequence[Queue]) -> None:
        block = [Notification(queue, os.urandom(24), bytes(144)) for queue, _ in part]
        await store.add_notifications(key, block, received_at=1)

    async def schk(part: Sequence[EntityId]) -> None:
        await store.subscriptions(part)

    alone = amount // 10
    [first, *_] = await store.create_subscriptions([new_subscription(token.key, BATCHED_ROUTER, queues[0])])
    assert isinstance(first, CreatedSubscription)
    key = first.server_key
    rows = []
    more = [(new_id(), b"k") for _ in range(alone)]
    rows.append(_figure(where, "SNEW", GROUP, await _rate(snew, queues, GROUP), await _rate(snew, more, 1)))
    rate = await _rate(nmsg, queues, BLOCK)
    rows.append(_figure(where, "NMSG", BLOCK, rate, await _rate(nmsg, queues[:alone], 1)))
    rows.append(
        _figure(where, "SCHK", GROUP, await _rate(schk, ids, GROUP), await _rate(schk, ids[:alone], 1))
    )
    await store.close()
    return rows


async def _rate(work: Callable[[Sequence[T]], Awaitable[None]], items: Sequence[T], group: int) -> float:
    started = time.perf_counter()
    for at in range(0, len(items), group):
        await work(items[at : at + group])
    return len(items) / (time.perf_counter() - started)


def _figure(where: Place, what: str, group: int, together: float, alone: float) -> Row:
    peer = beside("one by one", alone)
    return figure(f"{what} in the store, {group} together: {where.name}", "1/s", together, peer=peer)


async def on(where: Place, push: FakePushProcess, daemons: Sequence[int], sizes: Sizes) -> list[Row]:
    """The same work with each number of daemons."""
    rows = await batching(where, sizes.stored)
    device, ids = await fill(where.store(), 1000)
    async with filled(where, sizes.queues) as pipe:
        for count in daemons:
            async with AsyncExitStack() as stack:
                envs = [{**where.env, "NTF_STORE_DAEMON": f"d{number}"} for number in range(count)]
                running = [await stack.enter_async_context(daemon(where.folder, env)) for env in envs]
                served = Served(where, running, pipe, push)
                rows += await served.notifications(sizes.queues)
                rows += await served.commands(device, ids, sizes.commands)
    return rows


async def cluster(
    folder: Path, *, queues: int = 800, commands: int = 5_000, stored: int = 3_000
) -> list[Row]:
    sizes = Sizes(queues, commands, stored)
    rows: list[Row] = []
    async with fake_push_process(folder / "push", "--record-limit", "0") as push:
        async with place(folder / "sqlite", None, push) as where:
            rows += await on(where, push, (1,), sizes)
        with running_cluster(settings=AS_INSTALLED) as postgres:
            async with place(folder / "postgres", postgres, push) as where:
                rows += await on(where, push, (1, 2), sizes)
    return beside_sqlite(rows)


def beside_sqlite(rows: Sequence[Row]) -> list[Row]:
    """Rates on PostgreSQL have those on SQLite beside them."""
    known = {row.name: row for row in rows}
    found = []
    for row in rows:
        what, _, where = row.name.partition(": ")
        if row.higher and row.peer is None and where != SQLITE:
            row = replace(row, peer=beside(SQLITE, *known[f"{what}: {SQLITE}"].values))
        found.append(row)
    return found


CLUSTER = Part(
    name="cluster",
    title="SQLite, PostgreSQL and two daemons",
    measure=cluster,
    quick={"queues": 200, "commands": 1_500, "stored": 800},
    repeats=1,
    seconds=60,
    quick_seconds=12,
    why="Which database, and whether a second daemon is worth it.",
    how="Daemons, four routers (one process), PostgreSQL with Debian's settings (each durable commit waits"
    " for the disk) and the fake push service are processes on the same cores, this program too. NMSG pushed:"
    " from the routers' first to the provider's last answer, a device for each. SCHK and SNEW: 20 connections"
    " with 24 in flight, spread over the daemons. In the store: a transaction for many, beside one for each.",
    bound="with two cores, two daemons share them with PostgreSQL, routers and the provider, so a second one"
    " adds little here; CPU of daemons and PostgreSQL for each NMSG tells what a machine of its own would do."
    " One by one, a commit's wait for the disk and a round trip to the database bound all else.",
)
