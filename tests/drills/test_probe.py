"""SNEW as a probe: a client names places in the server's own network, and learns what answers there."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import random
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

from protocol.addresses import SmpQueueNtf, SmpServer
from protocol.crypto import Ed25519PrivateKey
from protocol.encoding import NO_ENTITY, EntityId
from protocol.ntf_commands import Err, NtfResponse, Snew
from smp_router.router import Router
from tests.drills.world import World, provider, push_settings, queues_for, running_daemon
from tests.ntf_server.ntf_client import NtfClient
from tests.smp_client.test_dialer import SocksProxy

SECONDS = 5.0
NAMED = 1500
BATCH = 100
ONION = "a" * 56 + ".onion"
"The honest router: the only one in a network of tests that is no private one, because a proxy finds it."
NETWORKS = [
    ipaddress.ip_network(text)
    for text in ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16")
]
NAMES = ("localhost", "LocalHost.", "ip6-localhost", "169.254.169.254", "[fd00:ec2::254]", "0.0.0.0", "[::]")


def spellings(number: int) -> Iterator[str]:
    """Of an IPv4 address, as one resolver or another understands them."""
    text = str(ipaddress.IPv4Address(number))
    first, second, third, last = text.split(".")
    yield from (
        text,
        f"{text}.",
        f"{first}.{second}.{(int(third) << 8) + int(last)}",
        str(number),
        hex(number),
    )
    yield f"0{int(first):o}.{second}.{third}.{last}"
    yield f"{first}.{second}.{third}.0x{int(last):x}"
    yield from (f"[::ffff:{text}]", f"[::ffff:{number >> 16:x}:{number & 0xFFFF:x}]", f"[::{text}]")
    yield from (f"[64:ff9b::{text}]", f"[2002:{number >> 16:x}:{number & 0xFFFF:x}::1]", f"::ffff:{text}")


def hosts(seed: int = 1) -> Iterator[str]:
    """Without end; the listener's own address most often."""
    chance = random.Random(seed)
    yield from (*NAMES, "[::1]", "::1", "[::1%lo]", "[0:0:0:0:0:0:0:1]", socket.gethostname())
    while True:
        network = chance.choice(NETWORKS)
        yield from spellings(int(ipaddress.ip_address("127.0.0.1")))
        yield from spellings(int(network[chance.randrange(network.num_addresses)]))


class Listener:
    """Something in the server's own network, at all its addresses."""

    def __init__(self) -> None:
        self.reached = 0
        self.port = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._accept, "0.0.0.0", 0, backlog=4096) as server:
            self.port = server.sockets[0].getsockname()[1]
            async with await asyncio.start_server(self._accept, "::", self.port, backlog=4096):
                yield

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reached += 1
        writer.close()


async def probe(drill: World, port: int) -> dict[str, NtfResponse]:
    """What is answered to each name."""
    answers: dict[str, NtfResponse] = {}
    client = await NtfClient.open(drill.daemon.address)
    device = await drill.device(client)
    named = hosts()
    for _ in range(NAMED // BATCH):
        names = list(islice(named, BATCH))
        servers = [SmpServer((name,), str(port), os.urandom(32)) for name in names]
        queues = [SmpQueueNtf(server, EntityId(os.urandom(24))) for server in servers]
        snews = [Snew(device.token_id, queue, Ed25519PrivateKey(os.urandom(32))) for queue in queues]
        asked = await client.ask_many([(snew, NO_ENTITY, device.key) for snew in snews])
        answers |= zip(names, asked, strict=True)
    client.close()
    return answers


@asynccontextmanager
async def world_with_a_proxy(folder: Path) -> AsyncIterator[World]:
    """As operators run it: routers in private networks are refused."""
    async with Router.start(host=ONION, listen="127.0.0.1") as router, provider(folder) as push:
        proxy = SocksProxy(router.address.port_number)
        async with await asyncio.start_server(proxy.handle, "127.0.0.1", 0) as server:
            env = push_settings(push) | {
                "NTF_SUBSCRIBER_ALLOW_PRIVATE_ROUTERS": "off",
                "NTF_SUBSCRIBER_SOCKS_PROXY": f"127.0.0.1:{server.sockets[0].getsockname()[1]}",
            }
            async with running_daemon(folder, env) as daemon:
                made = World(daemon, router, push)
                await made.add_devices(20, queues_for(SECONDS))
                yield made


async def test_nothing_in_the_own_network_is_reached(tmp_path: Path) -> None:
    listener = Listener()
    async with listener.listening(), world_with_a_proxy(tmp_path) as drill, asyncio.TaskGroup() as tasks:
        probing = tasks.create_task(probe(drill, listener.port))
        service = await drill.measure(SECONDS)
        answers = await probing
    print(service.row(f"{NAMED} places named, {listener.reached} connections made"))
    assert listener.reached == 0
    allowed = {name for name, answer in answers.items() if not isinstance(answer, Err)}
    assert allowed <= {"ip6-localhost", socket.gethostname()}, "names are looked up first"
    service.check()
