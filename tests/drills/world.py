"""A drill: a real daemon under attack, beside it an honest client, an honest router and an honest provider.

What the honest ones get meanwhile is the result. They live in the test's process, the daemon and the attacker
in processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from cryptography.hazmat.primitives.asymmetric import rsa

from agent.notifications.pushes import CheckPush, MessagePush, VerificationPush, parse_push
from ntf_demo.fake_push.recorder import RecordedPush
from ntf_demo.fake_push.server import FakePushConfig, FakePushServer, wall_clock
from protocol.addresses import NtfServer, SmpQueueNtf, parse_ntf_server
from protocol.device_token import ApnsToken, FcmToken, Provider
from protocol.encoding import NO_ENTITY, EntityId
from protocol.ntf_commands import IdSub, Ping, Pong, Snew
from protocol.push_messages import decode_pn_messages, open_push
from smp_router.load import LoadQueue
from smp_router.router import Router
from tests.drills.attacker import Attack, attacking
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.ntf_server.push.builders import pem
from tests.ntf_server.test_cli import ANY_PORT
from tests.ports import free_port
from transport.certificates import Credentials
from transport.errors import TransportError

DEADLINE = 60.0
PROGRAM = ("-P", "-m", "ntf_server")
DEVICES = 20
"So many that each is pushed to about once a second: the interval of coalescing is no part of the latency."
NOTIFICATIONS_PER_SECOND = 20.0
PINGS_PER_SECOND = 10.0
HONEST_ADDRESS = "127.0.0.3"
NEWCOMERS_PER_SECOND = 2.0
SNEWS_AT_ONCE = 1000
QUIET = 10_000
"Bytes of log a second that no attack may exceed."
CALM_AFTER = 1.0
"The last notifications of a drill are given this long after the attack ended."
NewToken = Callable[[], ApnsToken | FcmToken]
Address = tuple[str, int]


@dataclass
class Asked:
    """One kind of request: how many, how many were answered, and how long each took."""

    asked: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return len(self.seconds)

    @property
    def p50(self) -> float:
        return quantile(self.seconds, 0.5)

    @property
    def p99(self) -> float:
        return quantile(self.seconds, 0.99)

    def __str__(self) -> str:
        return f"{self.answered}/{self.asked}, p99 {self.p99 * 1000:.0f} ms"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not exceeded by `share` of them; infinite if there is none."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else math.inf


@dataclass
class Service:
    """What the honest ones got during a drill."""

    commands: Asked = field(default_factory=Asked)
    "PING on a connection that was open before."
    newcomers: Asked = field(default_factory=Asked)
    "A new connection with its first PING."
    liveness: Asked = field(default_factory=Asked)
    pushes: Asked = field(default_factory=Asked)
    "From the router's NMSG to the request at the provider."
    log_bytes_per_second: float = 0.0
    tracebacks: int = 0
    peak_memory: int = 0
    "Bytes above the memory before."
    busy: float = 1.0
    """How many times longer than on an idle machine the server's work took because other programs used the
    processors; limits on time are multiplied by it."""
    survived: bool = True

    @property
    def lost(self) -> int:
        return self.pushes.asked - self.pushes.answered

    def note_memory(self, size: int) -> None:
        self.peak_memory = max(self.peak_memory, size)

    def row(self, name: str) -> str:
        """A line of the tables in docs/reliability.md."""
        log, memory = f"{self.log_bytes_per_second / 1000:.1f} kB/s", f"{self.peak_memory / 1e6:+.0f} MB"
        if self.tracebacks:
            log += f", {self.tracebacks} tracebacks"
        lost = f"{self.lost}" if self.survived else f"{self.lost}; the server died"
        cells = (name, self.commands, self.newcomers, self.liveness, self.pushes, lost, log, memory)
        return f"| {' | '.join(map(str, cells))} |"

    def check(self) -> None:
        """What holds under every attack: all are answered, nothing is lost, the log is quiet."""
        assert self.survived
        assert self.lost == 0
        for asked in (self.commands, self.newcomers, self.liveness):
            assert asked.answered == asked.asked > 0
        assert self.log_bytes_per_second < QUIET
        assert not self.tracebacks


@dataclass
class Daemon:
    """The server in a process of its own."""

    process: psutil.Process
    address: NtfServer
    metrics_port: int
    log: Path

    def scheduled(self) -> tuple[int, int]:
        """Nanoseconds that its threads ran, and that they were ready to run and waited for a processor."""
        ran = waited = 0
        for file in Path(f"/proc/{self.process.pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # the thread ended
                thread_ran, thread_waited, _ = map(int, file.read_text().split())
                ran, waited = ran + thread_ran, waited + thread_waited
        return ran, waited

    def memory(self) -> int:
        """None if it is dead."""
        with suppress(psutil.NoSuchProcess):
            return int(self.process.memory_info().rss)
        return 0

    def logged(self) -> bytes:
        return self.log.read_bytes()

    def connections(self) -> set[Address]:
        """Its ends of them."""
        found = self.process.net_connections("tcp")
        return {(connection.laddr.ip, connection.laddr.port) for connection in found}

    def is_alive(self) -> bool:
        return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE

    async def get(self, path: str) -> str:
        """What its HTTP endpoint answers: the first line and the body."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.metrics_port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
            return head.partition("\r\n")[0] + "\n" + body
        finally:
            writer.close()

    async def metric(self, name: str) -> float:
        """The value of a metric, its labels included in the name; 0 if it was not counted yet."""
        for line in (await self.get("/metrics")).splitlines():
            key, _, value = line.rpartition(" ")
            if key == f"simplex_ntf_{name}":
                return float(value)
        return 0.0


def apple_token() -> ApnsToken:
    return ApnsToken(Provider.APNS_TEST, os.urandom(32).hex().encode())


def google_token() -> FcmToken:
    return FcmToken(b"android:" + os.urandom(16).hex().encode())


def read_push(recorded: RecordedPush) -> VerificationPush | MessagePush | CheckPush:
    """What a device finds in it."""
    if recorded.api == "fcm":
        return parse_push(json.loads(recorded.body)["message"]["data"])
    return parse_push(recorded.body)


@dataclass
class World:
    daemon: Daemon
    router: Router
    push: FakePushServer
    new_token: NewToken = apple_token
    "Of an honest device."
    _secrets: dict[str, bytes] = field(default_factory=dict)
    unused: list[LoadQueue] = field(default_factory=list)
    "Queues of the devices. Each is notified once, so that no notification replaces another."
    queues: set[EntityId] = field(default_factory=set)
    "Notifiers of all of them."
    receivers: dict[EntityId, Address | None] = field(default_factory=dict)
    "To which connection each notification was sent, by the queue's notifier; None: the router kept it."
    dead: set[Address] = field(default_factory=set)
    "Connections of a server that ended: what was sent to them and was not stored never comes."
    _read: int = 0

    async def measure(
        self,
        seconds: float,
        *,
        attack: Attack | None = None,
        beside: Awaitable[None] | None = None,
    ) -> Service:
        """Serve for so long while `attack` runs in another process, or `beside` in this one."""
        service = Service()
        memory, logged = self.daemon.memory(), self.daemon.logged()
        ran, waited = self.daemon.scheduled()
        async with AsyncExitStack() as stack:
            client = await self._honest_client()
            stack.callback(client.close)
            if attack is not None:
                await stack.enter_async_context(attacking(attack, self.daemon.address, seconds))
            async with asyncio.TaskGroup() as tasks:
                hostile = None if beside is None else tasks.create_task(_waited(beside))
                work = (
                    self.ask(service.commands, PINGS_PER_SECOND, seconds, lambda: _ping(client)),
                    self.ask(service.newcomers, NEWCOMERS_PER_SECOND, seconds, self._newcomer),
                    self.ask(service.liveness, NEWCOMERS_PER_SECOND, seconds, self._live),
                )
                running = [tasks.create_task(each) for each in work]
                sent = await self.notify(seconds, lambda: service.note_memory(self.daemon.memory() - memory))
                await asyncio.wait(running)
                if hostile is not None:
                    hostile.cancel()
        sent |= await self.notify(CALM_AFTER)
        await self.pushed(sent, service.pushes)
        ran_then, waited_then = self.daemon.scheduled()
        service.busy += max(0, waited_then - waited) / max(1, ran_then - ran)
        log = self.daemon.logged()[len(logged) :]
        service.log_bytes_per_second, service.tracebacks = len(log) / seconds, log.count(b"Traceback")
        service.survived = self.daemon.is_alive()
        return service

    async def add_devices(self, count: int, queues: int) -> None:
        """Register and verify devices and subscribe `queues` queues in all, as real clients do."""
        client = await NtfClient.open(self.daemon.address)
        new = [await self.device(client) for _ in range(count)]
        made = self.router.load.create_queues(queues)
        owners = [new[number % count] for number in range(queues)]
        snews = [
            (Snew(device.token_id, SmpQueueNtf(self.router.address, queue.notifier_id), queue.notifier_key),
             NO_ENTITY, device.key)
            for device, queue in zip(owners, made, strict=True)
        ]  # fmt: skip
        for start in range(0, len(snews), SNEWS_AT_ONCE):
            answers = await client.ask_many(snews[start : start + SNEWS_AT_ONCE])
            assert all(isinstance(answer, IdSub) for answer in answers)
        client.close()
        self.unused += made
        self.queues |= {queue.notifier_id for queue in made}
        wanted = {queue.notifier_id for queue in made}
        async with asyncio.timeout(DEADLINE):
            while not wanted <= self.router.subscribed_notifiers():
                await asyncio.sleep(0.02)

    async def device(self, client: NtfClient) -> Device:
        """One that is registered and verified."""
        device = Device.make(self.new_token())
        await device.register(client)
        await device.verify(client, await self.code(device))
        return device

    @property
    def known_devices(self) -> frozenset[str]:
        """The honest clients' device tokens."""
        return frozenset(self._secrets)

    async def code(self, device: Device) -> bytes:
        """What the device reads from its verification push."""
        assert isinstance(device.token, ApnsToken | FcmToken)
        async with asyncio.timeout(DEADLINE):
            while True:
                for recorded in self.push.pushes:
                    if recorded.token == device.token.token.decode() and recorded.status < 300:
                        verification = read_push(recorded)
                        assert isinstance(verification, VerificationPush)
                        self._secrets[recorded.token] = device.secret
                        return open_push(device.secret, verification.nonce, verification.boxed_code)
                await asyncio.sleep(0.01)

    async def ask(
        self, asked: Asked, rate: float, seconds: float, request: Callable[[], Awaitable[None]]
    ) -> None:
        """Ask at a steady rate, one after the other; a failure is a request without an answer."""
        clock = asyncio.get_running_loop().time
        started = clock()
        while clock() - started < seconds:
            asked.asked += 1
            at = clock()
            with suppress(OSError, TransportError, AssertionError):
                async with asyncio.timeout(DEADLINE):
                    await request()
                asked.seconds.append(clock() - at)
            await asyncio.sleep(max(0.0, at + 1 / rate - clock()))

    async def _honest_client(self) -> NtfClient:
        """What an address may do in a second is for all who share it: the honest have one of their own."""
        address = self.daemon.address
        return await NtfClient.open(address, sock=await connected(address, HONEST_ADDRESS))

    async def _newcomer(self) -> None:
        client = await self._honest_client()
        try:
            await _ping(client)
        finally:
            client.close()

    async def _live(self) -> None:
        assert " 200 " in await self.daemon.get("/health/live")

    async def notify(
        self, seconds: float, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[EntityId, float]:
        """Notifications at a steady rate; when each was sent, by the queue's notifier."""
        clock = asyncio.get_running_loop().time
        started, sent = clock(), dict[EntityId, float]()
        while clock() - started < seconds:
            assert self.unused, "the world was made with too few queues"
            queue = self.unused.pop()
            sent[queue.notifier_id] = wall_clock()
            self.receivers[queue.notifier_id] = self.router.receiver(queue.notifier_id)
            await self.router.load.emit([queue], 1, fresh=True)
            meanwhile()
            await asyncio.sleep(max(0.0, started + len(sent) / NOTIFICATIONS_PER_SECOND - clock()))
        return sent

    async def pushed(self, sent: Mapping[EntityId, float], asked: Asked) -> dict[EntityId, float]:
        """Wait until all of it arrived at the provider that was not sent to the dead; what did not."""
        asked.asked += len(sent)
        missing = dict(sent)
        with suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE):
                while any(self.receivers.get(notifier_id) not in self.dead for notifier_id in missing):
                    asked.seconds += self.take_pushes(missing)
                    await asyncio.sleep(0.02)
        return missing

    def take_pushes(self, missing: dict[EntityId, float]) -> list[float]:
        """Open the pushes that came since the last call, as the devices do; how long what they carry took."""
        pushes = self.push.pushes[self._read :]
        self._read += len(pushes)
        return [
            recorded.received - missing.pop(notifier_id)
            for recorded in pushes
            for notifier_id in self.notifiers(recorded)
            if notifier_id in missing
        ]

    def notifiers(self, recorded: RecordedPush) -> list[EntityId]:
        """Whose messages a push announces; none if it is not for these devices, or was not accepted."""
        secret = self._secrets.get(recorded.token)
        push = read_push(recorded) if secret is not None and recorded.status < 300 else None
        if secret is None or not isinstance(push, MessagePush):
            return []
        return [e.queue.notifier_id for e in decode_pn_messages(open_push(secret, push.nonce, push.boxed))]


def repeated_pushes(push: FakePushServer) -> int:
    """Pushes of messages that the provider accepted more than once."""
    pushes = [p for p in push.pushes if p.api == "apns" and p.status < 300]
    messages = [p.push_id for p in pushes if isinstance(parse_push(p.body), MessagePush)]
    return sum(count - 1 for count in Counter(messages).values())


async def _ping(client: NtfClient) -> None:
    assert await client.ask(Ping()) == Pong()


async def _waited(attack: Awaitable[None]) -> None:
    """A server that cuts the attacker off, or dies, is part of the result."""
    with suppress(OSError, TransportError):
        await attack


async def connected(address: NtfServer, source: str) -> socket.socket:
    """From one of this machine's many addresses."""
    sock = socket.socket(proto=socket.IPPROTO_TCP)  # so that asyncio sends at once, as our own agent does
    sock.bind((source, 0))
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (address.hosts[0], address.port_number))
    except BaseException:
        sock.close()
        raise
    return sock


def command(
    folder: Path,
    *arguments: object,
    python: str | Path = sys.executable,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Another command of the same server."""
    return subprocess.run(
        [str(python), *PROGRAM, *map(str, arguments), "--config-dir", str(folder / "c")],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=os.environ | ANY_PORT | dict(env or {}),
        check=False,
    )


@asynccontextmanager
async def running_daemon(
    folder: Path,
    env: Mapping[str, str] | None = None,
    *,
    log: str = "log",
    python: str | Path = sys.executable,
    program: Sequence[str] = PROGRAM,
    wrapper: Sequence[str] = (),
) -> AsyncIterator[Daemon]:
    """`ntf-server init` (once) and `start`, with `env` as `NTF_<SECTION>_<KEY>`; its log is a file, in which
    there is no traceback in the end.

    `python`: of the environment that the server is installed in. `wrapper`: a command that runs it.
    """
    if not (folder / "c").exists():
        made = command(folder, "init", "--ip", "127.0.0.1", "--data-dir", folder / "d", python=python)
        assert made.returncode == 0, made.stderr
    metrics_port = free_port()
    defaults = {
        **ANY_PORT,
        "NTF_SUBSCRIBER_ALLOW_PRIVATE_ROUTERS": "on",
        "NTF_METRICS_PORT": str(metrics_port),
    }
    log_file = folder / log
    with log_file.open("ab") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(*wrapper, str(python), *program, "start", "--config-dir", str(folder / "c")),
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | defaults | dict(env or {}),
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("Server address: "), log_file.read_text()
        address = parse_ntf_server(line.removeprefix("Server address: ").strip())
        yield Daemon(psutil.Process(process.pid), address, metrics_port, log_file)
        assert "Traceback" not in log_file.read_text(), log_file.read_text()[-4000:]
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def queues_for(seconds: float) -> int:
    """So many are needed to measure for so long."""
    return math.ceil((seconds + 2 * CALM_AFTER) * NOTIFICATIONS_PER_SECOND)


def push_settings(push: FakePushServer) -> dict[str, str]:
    """The provider that a daemon is to use."""
    return {
        "NTF_APNS_ALLOW_TEST_PROVIDER": "on",
        "NTF_APNS_TEST_PORT": str(push.port),
        "NTF_APNS_TEST_CA_FILE": str(push.ca_file),
    }


def google_settings(push: FakePushServer, folder: Path) -> dict[str, str]:
    """The same for Google's."""
    origin = f"https://127.0.0.1:{push.port}"
    key = pem(rsa.generate_private_key(65537, 2048)).decode()
    account = {"client_email": "a@b.example", "project_id": "proj", "private_key_id": "k1"}
    file = folder / "account.json"
    file.write_text(json.dumps(account | {"private_key": key, "token_uri": f"{origin}/token"}))
    return {
        "NTF_FCM_SERVICE_ACCOUNT_FILE": str(file),
        "NTF_FCM_ENDPOINT": origin,
        "NTF_FCM_CA_FILE": str(push.ca_file),
    }


def gateway_settings(node: str, port: int, folder: Path) -> dict[str, str]:
    """A daemon in `folder` with a statement gateway at a port; `node`: the URL of its node."""
    return {
        "NTF_STATEMENTS_ENABLED": "on",
        "NTF_STATEMENTS_NODE": node,
        "NTF_STATEMENTS_PORT": str(port),
        "NTF_STATEMENTS_APNS": "test",
        "NTF_STATEMENTS_CERT_FILE": str(folder / "c" / "server.crt"),
        "NTF_STATEMENTS_KEY_FILE": str(folder / "c" / "server.key"),
    }


@asynccontextmanager
async def provider(folder: Path) -> AsyncIterator[FakePushServer]:
    config = FakePushConfig(folder=folder / "push", record_limit=10_000_000)
    config.folder.mkdir()
    async with FakePushServer(config) as push:
        yield push


@asynccontextmanager
async def world(
    folder: Path,
    *,
    seconds: float,
    devices: int = DEVICES,
    env: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
    credentials: Credentials | None = None,
    program: Sequence[str] = PROGRAM,
    wrapper: Sequence[str] = (),
    new_token: NewToken = apple_token,
) -> AsyncIterator[World]:
    """All of them on this machine; queues for `seconds` of measuring. `host`, `credentials`: the router's."""
    async with (
        Router.start(host=host, listen="127.0.0.1", credentials=credentials) as router,
        provider(folder) as push,
    ):
        settings = push_settings(push) | dict(env or {})
        if new_token is google_token:
            settings |= google_settings(push, folder)
        async with running_daemon(folder, settings, program=program, wrapper=wrapper) as daemon:
            made = World(daemon, router, push, new_token)
            await made.add_devices(devices, queues_for(seconds))
            yield made
