"""Names with thousands of addresses; routers at the operator's own hosts, and queues at an own router."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from protocol.addresses import SmpServer
from protocol.encoding import NO_ENTITY
from protocol.ntf_commands import IdSub
from tests.drills import odd_names
from tests.drills.test_probe import Listener
from tests.drills.test_routers import snew
from tests.drills.world import Service, World, world
from tests.ntf_server.ntf_client import NtfClient
from tests.waiting import until

SECONDS = 8.0
ROUTERS, HOSTS = 60, 3
DIALS_EACH, MOST_ATTEMPTS = 4, 8
"Attempts to reach a router in this time, with their retries; connections of each."
OWN_HOST = "127.0.0.1"
READY = "HTTP/1.1 200 OK"
READY_PER_SECOND = 5.0
QUEUES_AT_ONCE, QUEUES_PER_SECOND = 100, 300.0
NAMES = ("-P", odd_names.__file__)


async def name_routers(drill: World, servers: Sequence[SmpServer]) -> None:
    client = await NtfClient.open(drill.daemon.address)
    device = await drill.device(client)
    answers = await client.ask_many([(snew(device, server), NO_ENTITY, device.key) for server in servers])
    assert all(isinstance(answer, IdSub) for answer in answers)
    client.close()
    await asyncio.Event().wait()  # they are dialled until the end of the attack


def with_many_addresses(port: int) -> list[SmpServer]:
    return [
        SmpServer(
            tuple(f"r{number}-{host}{odd_names.MANY_ADDRESSES}" for host in range(HOSTS)),
            str(port),
            os.urandom(32),
        )
        for number in range(ROUTERS)
    ]


async def many_addresses(folder: Path, seconds: float = SECONDS) -> tuple[Service, int]:
    """What the honest get, and how many connections were made."""
    listener = Listener()
    async with listener.listening(), world(folder, seconds=seconds, program=NAMES) as drill:
        naming = name_routers(drill, with_many_addresses(listener.port))
        return await drill.measure(seconds, beside=naming), listener.reached


async def test_names_with_thousands_of_addresses_cause_few_connections(tmp_path: Path) -> None:
    service, reached = await many_addresses(tmp_path)
    print(service.row(f"{ROUTERS} routers with {HOSTS} names of 4,000 addresses, {reached} connections"))
    assert 0 < reached <= ROUTERS * DIALS_EACH * MOST_ATTEMPTS
    service.check()


async def are_subscribed(drill: World) -> bool:
    """Whether the daemon knows that all queues of the honest are; until then it is not ready."""
    name = f'smp_router_queues{{server="{drill.router.address.host_port}"}}'
    return await drill.daemon.metric(name) == len(drill.queues)


async def look(drill: World, seen: set[str]) -> None:
    """What `/health/ready` answers, and why."""
    while True:
        page = await drill.daemon.get("/health/ready")
        seen.add(READY if page.startswith(READY) else page)
        await asyncio.sleep(1 / READY_PER_SECOND)


async def own_hosts(folder: Path, seconds: float = SECONDS) -> tuple[Service, set[str]]:
    """What the honest get, and what `/health/ready` answered."""
    seen: set[str] = set()

    async with world(folder, seconds=seconds, env={"NTF_SUBSCRIBER_OWN_HOSTS": OWN_HOST}) as drill:
        await until(lambda: are_subscribed(drill))

        async def name_and_look() -> None:
            own = drill.router.address
            wrong = [SmpServer((OWN_HOST,), str(port), os.urandom(32)) for port in range(1, ROUTERS)]
            impostor = SmpServer((OWN_HOST,), own.port, os.urandom(32))
            misplaced = SmpServer((OWN_HOST,), "1", own.key_hash)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(name_routers(drill, [*wrong, impostor, misplaced]))
                tasks.create_task(look(drill, seen))

        return await drill.measure(seconds, beside=name_and_look()), seen


async def test_routers_at_own_hosts_do_not_end_readiness(tmp_path: Path) -> None:
    service, seen = await own_hosts(tmp_path)
    print(service.row(f"{ROUTERS + 1} routers named at an own host"))
    assert seen == {READY}
    service.check()


async def name_queues(drill: World) -> None:
    """At a router that does not have them, without end."""
    client = await NtfClient.open(drill.daemon.address)
    device = await drill.device(client)
    while True:
        news = [snew(device, drill.router.address) for _ in range(QUEUES_AT_ONCE)]
        answers = await client.ask_many([(new, NO_ENTITY, device.key) for new in news])
        assert all(isinstance(answer, IdSub) for answer in answers)
        await asyncio.sleep(QUEUES_AT_ONCE / QUEUES_PER_SECOND)


async def unknown_queues(folder: Path, seconds: float = SECONDS) -> tuple[Service, set[str], int]:
    """What the honest get, what `/health/ready` answered, and how many sessions the router had."""
    seen: set[str] = set()
    async with world(folder, seconds=seconds, env={"NTF_SUBSCRIBER_OWN_HOSTS": OWN_HOST}) as drill:
        await until(lambda: are_subscribed(drill))

        async def name_and_look() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(name_queues(drill))
                tasks.create_task(look(drill, seen))

        service = await drill.measure(seconds, beside=name_and_look())
        return service, seen, drill.router.counts["connections"]


async def test_queues_that_an_own_router_does_not_have_end_no_session(tmp_path: Path) -> None:
    service, seen, sessions = await unknown_queues(tmp_path)
    print(service.row(f"{QUEUES_PER_SECOND:.0f} queues a second are named that an own router does not have"))
    assert (seen, sessions) == ({READY}, 1)
    service.check()
