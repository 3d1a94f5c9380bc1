"""How many NMSGs a second the development router emits.

The router runs in this process, one subscriber that decrypts and decodes every block in another. A single
subscriber with NSUB for each queue is measured first while it subscribes, then while it receives.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import secrets
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from bench.measure import Row, figure
from bench.part import Part
from protocol.addresses import SmpServer
from protocol.connection import Block, Outgoing
from protocol.crypto import Ed25519PrivateKey
from protocol.encoding import CorrId, EntityId
from protocol.smp_messages import Nsub
from smp_router.router import Router
from tests.smp_router.wire import WireClient, connected

Subscriptions = list[tuple[EntityId, bytes]]
SUBSCRIBE_BATCH = 1000


async def receive(client: WireClient, count: int) -> None:
    """Read until `count` messages came: answers to NSUB, or NMSGs."""
    while count > 0:
        data = await client.stream.receive()
        if not data:
            raise ConnectionResetError
        for event in client.connection.receive_data(data):
            if isinstance(event, Block):
                count -= len(event.items)


async def subscriber(pipe: Pipe, server: SmpServer, queues: Subscriptions, count: int) -> None:
    """The other process: subscribe, tell how long it took, receive, tell when it is over."""
    async with connected(server) as client:
        started = time.perf_counter()
        for first in range(0, len(queues), SUBSCRIBE_BATCH):
            batch = queues[first : first + SUBSCRIBE_BATCH]
            client.write(
                *(
                    Outgoing(CorrId(secrets.token_bytes(24)), queue_id, Nsub(), Ed25519PrivateKey(seed))
                    for queue_id, seed in batch
                )
            )
            await receive(client, len(batch))
        pipe.send(time.perf_counter() - started)
        await receive(client, count)
        pipe.send(None)


def run_subscriber(pipe: Pipe, server: SmpServer, queues: Subscriptions, count: int) -> None:
    asyncio.run(subscriber(pipe, server, queues, count))


async def measure(_: Path, *, queues: int = 10_000, nmsgs: int = 200_000) -> list[Row]:
    async with Router.start() as router:
        started = time.perf_counter()
        made = router.load.create_queues(queues)
        creating = time.perf_counter() - started
        ours, theirs = multiprocessing.Pipe()
        keys = [(queue.notifier_id, queue.notifier_key.seed) for queue in made]
        process = multiprocessing.get_context("spawn").Process(
            target=run_subscriber, args=(theirs, router.address, keys, nmsgs), name="subscriber"
        )
        process.start()
        try:
            subscribing = await asyncio.to_thread(ours.recv)
            started, cpu = time.perf_counter(), time.process_time()
            await router.load.emit(made, nmsgs)
            await asyncio.to_thread(ours.recv)
            took, cpu = time.perf_counter() - started, time.process_time() - cpu
        finally:
            process.join(10)
    return [
        figure("queues made", "1/s", queues / creating),
        figure("NSUB answered", "1/s", queues / subscribing),
        figure("NMSG received by one subscriber", "1/s", nmsgs / took, aim=20_000),
        figure("an NMSG, at the router", "us CPU", cpu / nmsgs * 1e6),
    ]


ROUTER = Part(
    name="router",
    title="The SMP router emitting",
    measure=measure,
    quick={"queues": 2_000, "nmsgs": 50_000},
    quick_repeats=2,
    seconds=15,
    quick_seconds=6,
    why="Tests and benchmarks need a router that is faster than what they measure.",
    how="The router in one process, in another a subscriber that decrypts and decodes every block.",
    bound="the subscriber: the router spends a few microseconds of CPU on each.",
)
