"""What the router does a second, in memory and stored.

The router (and for proxied commands a second one) runs in another process, the clients in this one. Bodies
have the full size that the protocol pads messages to. Stored figures include waiting for the disk at each
commit.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import NamedTuple

from bench.measure import Row, beside, figure, resident_memory
from bench.part import Part
from protocol.addresses import SmpServer, parse_smp_server
from protocol.connection import Outgoing
from protocol.encoding import CorrId
from protocol.smp_messages import Ack, Lget, LinkData, Lset, Msg, Ok, QueueMode, Send, SmpCommand, Sok, Sub
from smp_client.dialer import Dialer
from smp_client.proxy import ProxyConfig, ProxyPolicy, Sender
from smp_client.session import SmpSession, connect_smp
from smp_router.config import RouterConfig
from smp_router.router import Router, make_credentials
from smp_router.sqlite_records import stored_state
from smp_router.state import RouterState
from tests.smp_router.wire import TestQueue, WireClient, connected, create_queue

BODY = secrets.token_bytes(16_000)
CONNECTIONS = 8
IN_FLIGHT = 16
"Commands per connection that wait for their answers together."
SMALL_BODY = 1_000
CPU = "cpu"
"Asks the other process how much processor time it has used."
STORED = "stored"
MEMORY = ("memory of a queue", "memory of a message of 1000 bytes", "database for a message of 1000 bytes")
CONFIG = RouterConfig(
    quota=1_000_000, address_share_percent=100, address_cpu_percent=100, private_relays=True
)


class Amounts(NamedTuple):
    """How many there are when their memory is measured."""

    queues: int
    messages: int


async def serve(pipe: Pipe, database: Path | None) -> None:
    async with AsyncExitStack() as stack:
        state = RouterState(make_credentials("127.0.0.1"))
        if database is not None:
            state = await stack.enter_async_context(stored_state(database, state.credentials))
        router = await stack.enter_async_context(Router.start(CONFIG, state=state))
        pipe.send(str(router.address))
        while await asyncio.to_thread(pipe.recv) == CPU:
            pipe.send(time.process_time())


def run_router(pipe: Pipe, database: Path | None) -> None:
    asyncio.run(serve(pipe, database))


class OtherProcess:
    """A router while the block runs."""

    def __init__(self, database: Path | None) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=run_router, args=(theirs, database), name="router")

    def __enter__(self) -> OtherProcess:
        self._process.start()
        self.server = parse_smp_server(self._pipe.recv())
        return self

    @property
    def cpu(self) -> float:
        """Seconds of processor time it has used."""
        self._pipe.send(CPU)
        used: float = self._pipe.recv()
        return used

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join(30)


Work = Callable[[], Awaitable[int]]


async def repeat(work: Work, seconds: float) -> int:
    """How often `work` is done until the time is over, as it counts itself."""
    done, clock = 0, asyncio.get_running_loop().time
    end = clock() + seconds
    while clock() < end:
        done += await work()
    return done


class Figures(NamedTuple):
    per_second: float
    cpu: float
    "Microseconds of the router's processor time for each."


async def rate(router: OtherProcess, works: Sequence[Work], seconds: float) -> Figures:
    started, cpu = time.perf_counter(), router.cpu
    done = sum(await asyncio.gather(*(repeat(work, seconds) for work in works)))
    took = time.perf_counter() - started
    return Figures(done / took, (router.cpu - cpu) / done * 1e6)


async def ask_together(client: WireClient, command: SmpCommand, queue_ids: list[bytes]) -> int:
    batch = [
        Outgoing(CorrId(secrets.token_bytes(24)), queue_id, command)  # type: ignore[arg-type]
        for queue_id in queue_ids
    ]
    client.write(*batch)
    for outgoing in batch:
        await client.answer(outgoing.corr_id)
    return len(batch)


async def acknowledge(client: WireClient, queue: TestQueue, message: list[Msg]) -> int:
    answer = await client.ask(Ack(message[0].message_id), queue.recipient_id, queue.key)
    assert isinstance(answer, Msg), answer
    message[0] = answer
    return 1


async def measure_messages(router: OtherProcess, seconds: float) -> dict[str, Figures]:
    figures: dict[str, Figures] = {}
    server = router.server
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(server)) for _ in range(CONNECTIONS)]
        queues = [await create_queue(client) for client in clients]
        send = [
            partial(ask_together, client, Send(False, BODY), [queue.sender_id] * IN_FLIGHT)
            for client, queue in zip(clients, queues, strict=True)
        ]
        figures["SEND"] = await rate(router, send, seconds)
        firsts: list[list[Msg]] = []
        for client, queue in zip(clients, queues, strict=True):
            assert await client.ask(Sub(), queue.recipient_id, queue.key) == Sok()
            _, message = await client.event()
            assert isinstance(message, Msg)
            firsts.append([message])
        take = [
            partial(acknowledge, client, queue, first)
            for client, queue, first in zip(clients, queues, firsts, strict=True)
        ]
        figures["ACK, answered with the next MSG"] = await rate(router, take, seconds / 4)
        contact = await create_queue(clients[0], mode=QueueMode.CONTACT)
        data = LinkData(secrets.token_bytes(2048), secrets.token_bytes(13824))
        link_id = secrets.token_bytes(24)
        lset = Lset(link_id, data)  # type: ignore[arg-type]
        assert await clients[0].ask(lset, contact.recipient_id, contact.key) == Ok()
        read = [partial(ask_together, client, Lget(), [link_id] * IN_FLIGHT) for client in clients]
        figures["LGET"] = await rate(router, read, seconds)
    return figures


async def measure_proxied(router: OtherProcess, proxying: OtherProcess, seconds: float) -> Figures:
    server, proxy = router.server, proxying.server
    async with AsyncExitStack() as stack:
        owner = await stack.enter_async_context(connected(server))
        works: list[Work] = []
        for _ in range(CONNECTIONS):
            queue = await create_queue(owner)
            session = await stack.enter_async_context(await connect_smp(proxy, Dialer()))

            async def sessions(_server: SmpServer, session: SmpSession = session) -> SmpSession:
                return session

            sender = Sender(sessions, ProxyConfig(policy=ProxyPolicy.ALWAYS, proxies=(proxy,)))

            async def work(sender: Sender = sender, queue: TestQueue = queue) -> int:
                sent = [sender.request(server, queue.sender_id, Send(False, BODY)) for _ in range(IN_FLIGHT)]
                answers = set(await asyncio.gather(*sent))
                assert answers == {Ok()}, answers
                return IN_FLIGHT

            await work()
            works.append(work)
        used = proxying.cpu
        at_router = await rate(router, works, seconds)
        at_proxy = (proxying.cpu - used) / (at_router.per_second * seconds) * 1e6
        return Figures(at_router.per_second, at_router.cpu + at_proxy)


def _size(database: Path | None) -> int:
    return 0 if database is None else database.stat().st_size


async def fill(pipe: Pipe, database: Path | None, amounts: Amounts) -> None:
    """Bytes per queue, per stored message of 1000 bytes, and of the database per message."""
    async with AsyncExitStack() as stack:
        state = RouterState(make_credentials("127.0.0.1"))
        if database is not None:
            state = await stack.enter_async_context(stored_state(database, state.credentials))
        router = await stack.enter_async_context(Router.start(CONFIG, state=state))
        queues = router.load.create_queues(100)
        await state.records.durable(state.records.made)
        gc.collect()
        before = resident_memory()
        for _ in range(amounts.queues // 1000):
            router.load.create_queues(1000)
            await state.records.durable(state.records.made)
        gc.collect()
        per_queue = (resident_memory() - before) / amounts.queues
        size = _size(database)
        before = resident_memory()
        async with connected(router.address) as client:
            for first in range(0, amounts.messages, 200):
                ids = [queues[(first + i) % len(queues)].sender_id for i in range(200)]
                await ask_together(client, Send(False, os.urandom(SMALL_BODY)), list(ids))
        await state.records.maintain()
        gc.collect()
        per_message = (resident_memory() - before) / amounts.messages
        on_disk = (_size(database) - size) / amounts.messages
        pipe.send((per_queue, per_message, on_disk))


def run_fill(pipe: Pipe, database: Path | None, amounts: Amounts) -> None:
    asyncio.run(fill(pipe, database, amounts))


def measure_memory(database: Path | None, amounts: Amounts) -> tuple[float, float, float]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_fill, args=(theirs, database, amounts))
    process.start()
    figures: tuple[float, float, float] = ours.recv()
    process.join(30)
    return figures


def figures(folder: Path, seconds: float, amounts: Amounts) -> tuple[dict[str, Figures], tuple[float, ...]]:
    """Of a router without and one with a database, by the folder for it."""

    def database(name: str) -> Path | None:
        return folder / f"{name}.db" if folder.name == STORED else None

    with OtherProcess(database("one")) as router:
        found = asyncio.run(measure_messages(router, seconds))
        with OtherProcess(None) as proxy:
            found["SEND through a proxy"] = asyncio.run(measure_proxied(router, proxy, seconds))
    return found, measure_memory(database("two"), amounts)


def measure(folder: Path, *, seconds: float = 1.5, queues: int = 50_000, messages: int = 20_000) -> list[Row]:
    amounts = Amounts(queues, messages)
    (folder / STORED).mkdir()
    in_memory, sizes = figures(folder / "in memory", seconds, amounts)
    stored, stored_sizes = figures(folder / STORED, seconds, amounts)
    rows: list[Row] = []
    for name, one in in_memory.items():
        other = stored[name]
        rows += [
            figure(f"{name}, stored", "1/s", other.per_second, peer=beside("in memory", one.per_second)),
            figure(f"{name}, stored: CPU", "us CPU", other.cpu, peer=beside("in memory", one.cpu)),
        ]
    for name, plain, kept in zip(MEMORY, sizes, stored_sizes, strict=True):
        rows.append(figure(f"{name}, stored", "B", kept, peer=beside("in memory", plain) if plain else None))
    return rows


ROUTER_COMMANDS = Part(
    name="router_commands",
    title="The SMP router's commands",
    measure=measure,
    quick={"seconds": 0.4, "queues": 10_000, "messages": 4_000},
    repeats=1,
    seconds=30,
    quick_seconds=10,
    why="The router serves as one for people to run, too.",
    how="Bodies of 16,000 bytes, so each SEND and MSG fills a block; eight connections with sixteen"
    " commands under way each; clients in one process, the router in another (for proxied"
    " commands, CPU of both routers). Stored waits for the disk at every commit, which many"
    " commands share; an ACK waits for its own, as each connection has one under way.",
    bound="TLS and signatures; the disk's flush for an ACK.",
)
