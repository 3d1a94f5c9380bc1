"""Clients that name endless routers, and routers that send nonsense without end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from protocol.addresses import NtfServer, SmpQueueNtf, SmpServer
from protocol.crypto import Ed25519PrivateKey
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import NO_ENTITY, CorrId, EntityId
from protocol.ntf_commands import Err, IdSub, NtfResponse, Snew
from protocol.smp_messages import Pong
from smp_router.router import Router
from tests.drills import odd_names
from tests.drills.world import World, world
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.ports import free_port
from tests.postgres import PostgresCluster
from tests.smp_client.peer import PeerSession, scripted_router
from transport.certificates import KeyAlgorithm, load_server_files, make_ca, make_online, write_server_files
from transport.errors import TransportError

SECONDS = 8.0
CLIENTS, EACH = 13, 200
"Named routers: 2,600. Each client stays below what one token may name."
PER_ADDRESS = 1000
QUEUES = 500
FOLDER, PORT = "DRILL_ROUTER_FOLDER", "DRILL_ROUTER_PORT"


async def verified(drill: World, client: NtfClient) -> Device:
    device = Device.make(ApnsToken(Provider.APNS_TEST, os.urandom(32).hex().encode()))
    await device.register(client)
    await device.verify(client, await drill.code(device))
    return device


def snew(device: Device, server: SmpServer) -> Snew:
    queue = SmpQueueNtf(server, EntityId(os.urandom(24)))
    return Snew(device.token_id, queue, Ed25519PrivateKey(os.urandom(32)))


@asynccontextmanager
async def silent_host(address: str = "127.0.0.1") -> AsyncIterator[int]:
    """Accepts and says nothing: whoever connects waits for as long as it has patience."""

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    async with await asyncio.start_server(hang, address, 0, backlog=4096) as server:
        yield int(server.sockets[0].getsockname()[1])


async def name_routers(
    drill: World, devices: Sequence[Device], port: int, answers: list[NtfResponse]
) -> None:
    """Half of them at one place that is silent, each with an identity of its own; half are not there."""
    client = await NtfClient.open(drill.daemon.address)
    for device in devices:
        servers = [
            SmpServer(("127.0.0.1",), str(port if number % 2 else 1), os.urandom(32))
            for number in range(EACH)
        ]
        answers += await client.ask_many([(snew(device, s), NO_ENTITY, device.key) for s in servers])
    client.close()


class Size(NamedTuple):
    """Of the drill with a database."""

    env: dict[str, str]
    clients: int
    per_address: int


@pytest.fixture(params=["sqlite", "postgres"])
def size(request: pytest.FixtureRequest) -> Size:
    """With PostgreSQL, which takes its time for new routers, a small one."""
    if request.param == "sqlite":
        return Size({}, CLIENTS, PER_ADDRESS)
    cluster: PostgresCluster = request.getfixturevalue("postgres")
    env = {"NTF_STORE_DATABASE": "postgres", "NTF_STORE_URL": cluster.new_database()}
    return Size(env | {"NTF_SUBSCRIBER_ROUTERS_PER_ADDRESS": str(EACH)}, 2, EACH)


async def test_endless_routers_cost_only_those_who_name_them(tmp_path: Path, size: Size) -> None:
    answers: list[NtfResponse] = []
    async with silent_host() as port, world(tmp_path, seconds=2 * SECONDS, env=size.env) as drill:
        client = await NtfClient.open(drill.daemon.address)
        devices = [await verified(drill, client) for _ in range(size.clients)]
        client.close()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(name_routers(drill, devices, port, answers))
            service = await drill.measure(SECONDS)
        watched, files = await drill.daemon.metric("smp_routers"), drill.daemon.process.num_fds()
        print(service.row(f"endless routers, {files} open files"))
        drill.router.faults.drop_connections()  # an honest router that was there comes back at once
        later = await drill.measure(SECONDS / 2)
        print(later.row("afterwards, the router reconnected"))
    assert files < 400
    assert len(answers) == size.clients * EACH
    assert sum(isinstance(answer, IdSub) for answer in answers) <= size.per_address
    assert all(isinstance(answer, IdSub | Err) for answer in answers)
    assert watched <= size.per_address + 1
    service.check()
    later.check()


async def name_slowly(drill: World, device: Device, answers: list[NtfResponse]) -> None:
    """Routers whose names take ten seconds not to resolve."""
    client = await NtfClient.open(drill.daemon.address)
    servers = [SmpServer((f"r{number}{odd_names.SLOW_NAMES}",), "", os.urandom(32)) for number in range(EACH)]
    answers += await client.ask_many([(snew(device, s), NO_ENTITY, device.key) for s in servers])
    client.close()


async def test_names_that_resolve_slowly_hold_up_nobody(tmp_path: Path) -> None:
    answers: list[NtfResponse] = []
    program = ("-P", odd_names.__file__)
    async with world(tmp_path, seconds=2 * SECONDS, host="localhost", program=program) as drill:
        client = await NtfClient.open(drill.daemon.address)
        device = await verified(drill, client)
        client.close()
        service = await drill.measure(SECONDS, beside=name_slowly(drill, device, answers))
        print(service.row("names that resolve slowly"))
        drill.router.faults.drop_connections()  # the honest router's name is looked up as well
        later = await drill.measure(SECONDS / 2)
        print(later.row("afterwards, the router reconnected"))
    assert len(answers) == EACH
    assert all(isinstance(answer, IdSub) for answer in answers)
    service.check()
    later.check()
    assert later.pushes.p99 < odd_names.SECONDS, "its lookup waited for others"


async def test_a_router_that_notifies_without_end_delays_its_own(tmp_path: Path) -> None:
    """Its queues exist, so nothing of it is refused: what it sends waits for its turn."""
    async with Router.start() as busy, world(tmp_path, seconds=SECONDS) as drill:
        client = await NtfClient.open(drill.daemon.address)
        device = await verified(drill, client)
        queues = busy.load.create_queues(QUEUES)
        names = [SmpQueueNtf(busy.address, queue.notifier_id) for queue in queues]
        keys = [queue.notifier_key for queue in queues]
        snews = [Snew(device.token_id, name, key) for name, key in zip(names, keys, strict=True)]
        await client.ask_many([(snew, NO_ENTITY, device.key) for snew in snews])
        client.close()
        while len(busy.subscribed_notifiers()) < QUEUES:
            await asyncio.sleep(0.02)

        async def notify() -> None:
            while True:
                await busy.load.emit(queues, QUEUES, fresh=True)
                await asyncio.sleep(0)

        service = await drill.measure(SECONDS, beside=notify())
        print(service.row("a router notifies without end"))
        print(await drill.daemon.metric("notifications_received_total"), "notifications")
    assert service.lost == 0
    assert service.commands.answered == service.commands.asked
    assert service.newcomers.answered == service.newcomers.asked
    assert service.log_bytes_per_second < 10_000
    assert service.pushes.p50 < service.busy


async def flood(address: NtfServer, seconds: float) -> None:
    """A router that answers what nobody asked, as fast as it can."""

    async def script(peer: PeerSession) -> None:
        with suppress(TransportError):
            while True:
                peer.answer([(CorrId(os.urandom(24)), EntityId(os.urandom(24)), Pong())] * 150)
                await peer.stream.drain()

    identity = load_server_files(Path(os.environ[FOLDER]))
    async with scripted_router(script, identity=identity, port=int(os.environ[PORT])):
        await asyncio.sleep(seconds)


async def test_a_router_that_sends_nonsense_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    ca, ca_key = make_ca(KeyAlgorithm.ED25519, "router", now)
    online = make_online(ca, ca_key, KeyAlgorithm.ED25519, "127.0.0.1", now)
    folder, port = tmp_path / "router", free_port()
    folder.mkdir()
    write_server_files(folder, ca, ca_key, online)
    monkeypatch.setenv(FOLDER, str(folder))
    monkeypatch.setenv(PORT, str(port))
    async with world(tmp_path, seconds=SECONDS) as drill:
        client = await NtfClient.open(drill.daemon.address)
        device = await verified(drill, client)

        async def subscribe() -> None:
            server = SmpServer(("127.0.0.1",), str(port), online.identity)
            assert isinstance(await client.ask(snew(device, server), NO_ENTITY, device.key), IdSub)

        service = await drill.measure(SECONDS, attack=flood, beside=subscribe())
        client.close()
        print(service.row("a router sends nonsense"))
        assert await drill.daemon.metric("smp_misbehaviours") >= 1
    assert service.lost == 0
    assert service.commands.answered == service.commands.asked
    assert service.log_bytes_per_second < 10_000
    assert service.pushes.p50 < 0.25 * service.busy
