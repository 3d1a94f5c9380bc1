"""The daemon under commands: SCHK and SNEW per second, CPU per command, idle connections."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from bench.bare_loop import check_cost
from bench.devices import add_token, new_id, new_subscription
from bench.earlier import HERE, PROGRAM
from bench.measure import Cores, Row, beside, figure, run_on
from bench.part import Part
from protocol.addresses import NtfServer, SmpQueueNtf, SmpServer, parse_ntf_server
from protocol.connection import Block, Outgoing, Received
from protocol.crypto import AuthPrivateKey, Ed25519PrivateKey
from protocol.encoding import NO_ENTITY, CorrId, EntityId
from protocol.ntf_commands import IdSub, NtfCommand, Ping, Pong, Schk, Snew, Sub
from store.interface import NtfStore
from store.policy import RowCaps
from store.sqlite import SqliteStore
from tests.ntf_server.conftest import null_token
from tests.ntf_server.ntf_client import Device, NtfClient

ROUTER = SmpServer(("127.0.0.1",), "1", b"k" * 32)  # nobody listens there
KEY = Ed25519PrivateKey(b"k" * 32)
ENV = {
    "NTF_SUBSCRIBER_ALLOW_PRIVATE_ROUTERS": "on",
    "NTF_TRANSPORT_PORT": "0",
    "NTF_TRANSPORT_LISTEN": "127.0.0.1",
    "NTF_LIMITS_COMMANDS_PER_SECOND": "0",
    "NTF_LIMITS_ADDRESS_COMMANDS_PER_SECOND": "0",
    "NTF_LIMITS_ADDRESS_CPU_PERCENT": "0",
    "NTF_LIMITS_CONNECTIONS_PER_ADDRESS": "0",
}
SHAPES = ((1, 120), (200, 24), (200, 4))
"Connections, and commands of each that wait for their answers together; four fill a block."
VERIFICATION_SHARE = 0.6
Command = tuple[NtfCommand, EntityId, AuthPrivateKey | None]


@dataclass
class Daemon:
    process: psutil.Process
    address: NtfServer

    def cpu(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def memory(self) -> int:
        return int(self.process.memory_info().rss)


def init(folder: Path) -> None:
    where = ("--config-dir", folder / "c", "--data-dir", folder / "d")
    HERE.run("init", "--ip", "127.0.0.1", "-a", "ED25519", *where)


@asynccontextmanager
async def daemon(folder: Path, env: Mapping[str, str] = MappingProxyType({})) -> AsyncIterator[Daemon]:
    """The server in a process of its own, as an operator runs it."""
    arguments = ("start", "--config-dir", str(folder / "c"), "--log-level", "error")
    process = await asyncio.create_subprocess_exec(
        *(str(HERE.python), *PROGRAM, *arguments),
        stdout=subprocess.PIPE,
        env={**os.environ, **ENV, **env},
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        address = parse_ntf_server(line.removeprefix("Server address: ").strip())
        yield Daemon(psutil.Process(process.pid), address)
    finally:
        with suppress(ProcessLookupError):  # some are killed
            process.terminate()
        await process.wait()


async def fill(store: NtfStore, subscriptions: int) -> tuple[Device, list[EntityId]]:
    """A verified device with so many subscriptions, straight into the store."""
    device = Device.make(null_token())
    await store.open()
    token = await add_token(store, device.token, device.key.public.der)
    device.token_id = token.token_id
    news = [new_subscription(token.key, ROUTER, (new_id(), KEY.der)) for _ in range(subscriptions)]
    await store.create_subscriptions(news)
    await store.close()
    return device, [new.subscription_id for new in news]


def database(folder: Path) -> Path:
    return folder / "d" / "ntf-server.db"


def sqlite_store(folder: Path) -> SqliteStore:
    return SqliteStore(database(folder), caps=RowCaps(subscriptions_per_token=0))


@dataclass
class Load:
    """Commands of one connection, signed and packed beforehand: the client's own cost is not measured."""

    client: NtfClient
    windows: list[bytes]
    in_flight: int

    @classmethod
    def prepare(cls, client: NtfClient, commands: Sequence[Command], in_flight: int) -> Load:
        outgoing = [
            Outgoing(CorrId(os.urandom(24)), entity, command, key) for command, entity, key in commands
        ]
        starts = range(0, len(outgoing), in_flight)
        return cls(
            client, [client.connection.send(outgoing[at : at + in_flight]) for at in starts], in_flight
        )

    async def run(self, expected: type) -> None:
        for window in self.windows:
            self.client.stream.write(window)
            left = self.in_flight
            while left:
                for event in self.client.connection.receive_data(await self.client.stream.receive()):
                    assert isinstance(event, Block)
                    for item in event.items:
                        assert isinstance(item, Received)
                        assert isinstance(item.message, expected), item.message
                    left -= len(event.items)


async def measure(
    servers: Sequence[Daemon], loads: Sequence[Load], expected: type
) -> tuple[float, float, float]:
    """Commands per second, microseconds of the servers' CPU per command, and of a bare verification."""
    count = sum(len(load.windows) * load.in_flight for load in loads)
    verify = verify_microseconds()
    cpu, started = sum(server.cpu() for server in servers), time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for load in loads:
            tasks.create_task(load.run(expected))
    elapsed = time.perf_counter() - started
    used = (sum(server.cpu() for server in servers) - cpu) / count * 1e6
    return count / elapsed, used, (verify + verify_microseconds()) / 2


async def measure_checks(
    servers: Sequence[Daemon], loads: Sequence[Load], rounds: int
) -> tuple[float, float, float]:
    """`measure` of SCHKs, several times: the middle one by its cost in verifications of the same seconds."""
    measured = [await measure(servers, loads, Sub) for _ in range(rounds)]
    return sorted(measured, key=lambda one: one[1] / one[2])[rounds // 2]


def verify_microseconds(count: int = 4000) -> float:
    """CPU of one verification, now: this machine's speed changes from second to second."""
    message = os.urandom(100)
    public, signature = KEY.public, KEY.sign(message)
    started = time.process_time()
    for _ in range(count):
        public.verify(signature, message)
    return (time.process_time() - started) / count * 1e6


async def settled(server: Daemon) -> None:
    """Until the work of the start is done: marking all subscriptions of a router that is away."""
    while True:
        before = server.cpu()
        await asyncio.sleep(1)
        if server.cpu() - before < 0.05:
            return


def checks(device: Device, ids: Sequence[EntityId], count: int) -> list[Command]:
    return [(Schk(), ids[number * 7919 % len(ids)], device.key) for number in range(count)]


def creations(device: Device, count: int) -> list[Command]:
    queues = (SmpQueueNtf(ROUTER, EntityId(os.urandom(24))) for _ in range(count))
    return [(Snew(device.token_id, queue, KEY), NO_ENTITY, device.key) for queue in queues]


async def commands(folder: Path, *, commands: int = 12_000, rounds: int = 3) -> list[Row]:
    cores = Cores.divide()
    run_on(cores.daemon)
    init(folder)
    device, ids = await fill(sqlite_store(folder), 1000)
    rows = [bare_loop(folder, device, ids)]
    async with daemon(folder) as server:
        run_on(cores.others)
        for connections, in_flight in SHAPES:
            clients = [await NtfClient.open(server.address) for _ in range(connections)]
            windows = max(2, commands // connections // in_flight)
            shape = label(connections, in_flight)
            checking = [checks(device, ids, windows * in_flight) for _ in clients]
            rate, cpu, verify = await measure_checks([server], loads(clients, checking, in_flight), rounds)
            bound = beside("a verification", verify, at_least=VERIFICATION_SHARE)
            rows.append(figure(f"SCHK, {shape}", "1/s", rate))
            rows.append(figure(f"a SCHK, {shape}", "us CPU", cpu, peer=bound))
            creating = [creations(device, windows // 2 * in_flight) for _ in clients]
            rate, cpu, _ = await measure([server], loads(clients, creating, in_flight), IdSub)
            rows.append(figure(f"SNEW, {shape}", "1/s", rate, aim=2000))
            rows.append(figure(f"a SNEW, {shape}", "us CPU", cpu))
            for client in clients:
                client.close()
    return rows


def bare_loop(folder: Path, device: Device, ids: Sequence[EntityId]) -> Row:
    """What the last shape's SCHK would cost without the daemon around it."""
    verify = verify_microseconds()
    cost = check_cost(database(folder), device, ids, SHAPES[-1][0])
    bound = beside("a verification", (verify + verify_microseconds()) / 2)
    return figure(f"a SCHK in a bare loop, {label(*SHAPES[-1])}", "us CPU", cost, peer=bound)


def label(connections: int, in_flight: int) -> str:
    return f"{connections} connection{'s' * (connections > 1)}, {in_flight} in flight"


def loads(clients: Sequence[NtfClient], batches: Sequence[Sequence[Command]], in_flight: int) -> list[Load]:
    return [Load.prepare(*pair, in_flight) for pair in zip(clients, batches, strict=True)]


async def idle(folder: Path, *, connections: int = 3_000) -> list[Row]:
    init(folder)
    async with daemon(folder) as server:
        warm = [await NtfClient.open(server.address) for _ in range(50)]
        before, cpu, started = server.memory(), server.cpu(), time.perf_counter()
        clients: list[NtfClient] = []
        while len(clients) < connections:
            async with asyncio.TaskGroup() as tasks:
                opened = [tasks.create_task(NtfClient.open(server.address)) for _ in range(50)]
            clients += [task.result() for task in opened]
        elapsed, cpu = time.perf_counter() - started, server.cpu() - cpu
        each = (server.memory() - before) / len(clients) / 1024
        assert isinstance(await clients[-1].ask(Ping()), Pong)
        rows = [
            figure("idle connections held", "in all", len(clients)),
            figure("connections opened, TLS of both sides here", "1/s", len(clients) / elapsed),
            figure("a connection opened, the daemon's part", "us CPU", cpu / len(clients) * 1e6),
            figure("memory of an idle connection", "kB", each, aim=25),
        ]
        for client in (*warm, *clients):
            client.stream.abort()
    return rows


COMMANDS = Part(
    name="commands",
    title="Commands",
    measure=commands,
    quick={"commands": 4_000, "rounds": 1},
    repeats=2,
    seconds=40,
    quick_seconds=10,
    why="What clients ask the daemon, each command with a signature.",
    how="The daemon is a process of its own with a core of its own; commands are signed and packed"
    " beforehand in another, on the other cores. Only the daemon's CPU counts. Beside a SCHK: a bare"
    " Ed25519 verification in the same seconds, which no daemon can do without; of three rounds the"
    " middle one counts. The bare loop moves the same blocks through TLS and sockets, reads the same"
    " rows and verifies, with no event loop, threads, limits and parsing around it.",
    bound="the bare loop: a verification is eight tenths of what it takes. What a SCHK that shares its block"
    " with three others takes beyond that is Python: 14 us from the block to the answers with warm"
    " caches, spread over eighty calls of which none takes a tenth; the event loop's turns and wake-ups;"
    " the way to SQLite's thread. Two hundred connections in turn have no warm caches. More commands in"
    " flight share the last two.",
)
IDLE = Part(
    name="idle",
    title="Idle connections",
    measure=idle,
    quick={"connections": 500},
    repeats=1,
    seconds=12,
    quick_seconds=5,
    why="Most clients say nothing most of the time.",
    how="Resident memory of the daemon's process before and after; clients in another process.",
    bound="OpenSSL's state of a connection: 24 kB, of them 17 as soon as it exists, 6 more after the"
    " handshake with what only that needs freed, 1 for the two buffers that a block went through. Python's"
    " objects take 5 kB: a task and its coroutines 1.4, asyncio's transport with its socket 1.4, the stream"
    " and the session 1.3. Arenas and trimming of the allocators make no difference.",
)
