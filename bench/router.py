"""How many NMSGs a second the development router emits: `python -m bench.router [--queues N] [--count N]`.

The router runs in this process, one subscriber that decrypts and decodes every block in another. A single
subscriber with NSUB for each queue is measured first while it subscribes, then while it receives.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import secrets
import time
from multiprocessing.connection import Connection as Pipe

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
    """The other process: subscribe, tell how long it took, receive, tell how long that took."""
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
        pipe.send(time.process_time())


def run_subscriber(pipe: Pipe, server: SmpServer, queues: Subscriptions, count: int) -> None:
    asyncio.run(subscriber(pipe, server, queues, count))


async def measure(queue_count: int, count: int) -> None:
    async with Router.start() as router:
        started = time.perf_counter()
        queues = router.load.create_queues(queue_count)
        print(f"made queues      {queue_count / (time.perf_counter() - started):10,.0f} /s")
        ours, theirs = multiprocessing.Pipe()
        keys = [(queue.notifier_id, queue.notifier_key.seed) for queue in queues]
        process = multiprocessing.get_context("spawn").Process(
            target=run_subscriber, args=(theirs, router.address, keys, count), name="subscriber"
        )
        process.start()
        try:
            took = await asyncio.to_thread(ours.recv)
            print(f"NSUB answered    {queue_count / took:10,.0f} /s")
            started, cpu = time.perf_counter(), time.process_time()
            await router.load.emit(queues, count)
            subscriber_cpu = await asyncio.to_thread(ours.recv)
            took, cpu = time.perf_counter() - started, time.process_time() - cpu
            print(f"NMSG received    {count / took:10,.0f} /s")
            print(f"router's CPU     {cpu / count * 1e6:10.1f} us per NMSG")
            print(f"subscriber's CPU {subscriber_cpu:10.1f} s in all, start and NSUBs included")
        finally:
            process.join(10)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queues", type=int, default=10_000)
    parser.add_argument("--count", type=int, default=300_000)
    args = parser.parse_args()
    asyncio.run(measure(args.queues, args.count))


if __name__ == "__main__":
    main()
