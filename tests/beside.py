"""A notification server, a router and an agent in processes of their own, and what they have promised."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

from agent.duplex.database_file import KEY_VARIABLE
from agent.duplex.events import Connected
from ntf_demo.fake_push.server import FakePushServer
from protocol.addresses import NtfServer, SmpServer, parse_ntf_server, parse_smp_server
from protocol.ntf_commands import Tchk, Tkn
from protocol.smp_messages import Ok, Send
from store.database_files import beside
from tests.agent.duplex.world import Person, person
from tests.drills.world import provider, push_settings
from tests.ntf_server.conftest import null_token
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.opened_files import SQLITE
from tests.ports import free_port
from tests.smp_router.test_records import check_kept
from tests.smp_router.wire import TestQueue, connected, create_queue
from tests.test_architecture import ROOT
from tests.waiting import DEADLINE, until
from transport.errors import TransportError

PAUSE = 0.03
"Seconds between two requests of a client: there is always something to lose, and time for the commands."
MESSAGES_PER_QUEUE = 50
LONGEST = 4 * DEADLINE
"Seconds for a command on a busy machine: one of them starts Spark."
UNLIMITED = ("TOKENS_PER_CONNECTION", "ADDRESS_TOKENS_PER_DAY", "ADDRESS_VERIFICATIONS_PER_HOUR")
LOCKS = Path("/proc/locks")

needs_locks = pytest.mark.skipif(not LOCKS.exists(), reason="needs the list of locks of Linux")


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


class Programs:
    """Runs programs and sees which files they open; SQLite's own are not among them."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.opened, self.log = folder / "opened", folder / "log"
        self.opened_by_commands = folder / "opened by commands"
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), **env}

    async def start(self, module: str, *arguments: object) -> asyncio.subprocess.Process:
        """One that stays. Its log is a file."""
        with self.log.open("ab") as stderr:
            return await self._start(self.opened, stderr, module, *arguments)

    async def _start(
        self, opened: Path, stderr: int | IO[bytes], module: str, *arguments: object
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.opened_files", str(opened), module, *map(str, arguments)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=self.env,
        )

    async def run(self, module: str, *arguments: object, until_line: bool = False) -> Finished:
        """`until_line`: it is told to end as soon as it has printed one."""
        process = await self._start(self.opened_by_commands, asyncio.subprocess.PIPE, module, *arguments)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(LONGEST):
                first = b""
                if until_line:
                    first = await process.stdout.readline()
                    process.send_signal(signal.SIGTERM)
                out, err = await process.communicate()
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            raise
        assert process.returncode is not None
        return Finished(process.returncode, (first + out).decode(), err.decode())


@dataclass
class Live:
    """One of the processes, and the database that it uses."""

    process: asyncio.subprocess.Process
    database: Path
    locked: set[str]
    "What it holds locks on all the time, by the ends of the names."
    files: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def remember(self) -> None:
        self.files = {file: _identity(file) for file in beside(self.database) if file.exists()}
        self.check("its own start")

    def check(self, after: str) -> None:
        """It still uses the files that others find, and holds its locks on them."""
        pid = self.process.pid
        assert self.process.returncode is None, f"{self.database} has lost its program after {after}"
        for file, identity in self.files.items():
            assert file.exists(), f"{file} is gone after {after}"
            assert _identity(file) == identity, f"{file} is another after {after}"
        held = locked_files(pid)
        database = self.database.resolve()
        for end in self.locked:
            file = database.with_name(database.name + end)
            assert file.stat().st_ino in held, f"nobody holds a lock on {file} after {after}"
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                target = str(descriptor.readlink())
                assert not (target.startswith(str(database)) and "(deleted)" in target), (target, after)

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


def _identity(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_dev, status.st_ino


def locked_files(pid: int) -> set[int]:
    """Inodes that a process holds POSIX locks on."""
    lines = (line.split() for line in LOCKS.read_text().splitlines())
    return {int(line[5].rpartition(":")[2]) for line in lines if line[1] == "POSIX" and line[4] == str(pid)}


@dataclass
class Promised:
    """What clients were told is done."""

    devices: list[Device] = field(default_factory=list)
    queues: dict[bytes, tuple[TestQueue, int]] = field(default_factory=dict)
    "With the number of messages that the router has taken."
    said: list[str] = field(default_factory=list)
    "What Bob's agent has taken to be sent to Alice."


class Neighbours:
    """All of them. `start` and `kill` as often as needed; what was promised is for the whole time."""

    def __init__(self, folder: Path, push: FakePushServer, *, key: str = "", linked: bool = False) -> None:
        """`key`: of Alice's file; `linked`: all databases are links to files elsewhere."""
        self.folder, self.key, self.linked = folder, key, linked
        self.server_port, self.router_port = free_port(), free_port()
        self.programs = Programs(
            folder,
            {
                "NTF_TRANSPORT_LISTEN": "127.0.0.1",
                "NTF_TRANSPORT_PORT": str(self.server_port),
                "NTF_SUBSCRIBER_ALLOW_PRIVATE_ROUTERS": "on",
                **{f"NTF_LIMITS_{name}": "0" for name in UNLIMITED},
                "NTF_JOURNAL_ENABLED": "on",
                "NTF_JOURNAL_SEGMENT_SECONDS": "1",
                **push_settings(push),
                **({KEY_VARIABLE: key} if key else {}),
            },
        )
        self.config_dir, self.data_dir = folder / "c", folder / "d"
        self.router_dir, self.router_db = folder / "r", folder / "r" / "router.db"
        self.control = folder / "control"
        self.alice = folder / "alice"
        self.alice_db = self.alice / "connections.db"
        self.promised = Promised()
        self.live: dict[str, Live] = {}
        self.heard: dict[str, Any] = {}
        "What Alice's agent has shown, and what it said of the messages before."
        self.server: NtfServer
        self.router: SmpServer
        self._listening: asyncio.Task[None] | None = None
        self._server: asyncio.subprocess.Process

    async def make(self) -> None:
        where = ("--config-dir", self.config_dir, "--data-dir", self.data_dir)
        await self._made("ntf_server", "init", "--ip", "127.0.0.1", *where)
        await self._made("smp_router", "init", "--ip", "127.0.0.1", "--config-dir", self.router_dir)
        settings = f"[router]\nhost = 127.0.0.1\nport = {self.router_port}\n"
        (self.router_dir / "smp-router.ini").write_text(settings)
        for database in (
            (self.data_dir / "ntf-server.db", self.router_db, self.alice_db) if self.linked else ()
        ):
            place = self.folder / "elsewhere" / database.parent.name
            for folder in (place, database.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            database.symlink_to(place / database.name)

    async def _made(self, module: str, *arguments: object) -> str:
        done = await self.programs.run(module, *arguments)
        assert done.code == 0, done.err
        return done.out

    def agent_options(self) -> tuple[object, ...]:
        return ("--folder", self.alice, "--name", "Alice", "--json")

    async def start_servers(self) -> None:
        await self.start_server()
        self._live("server", self._server, self.data_dir / "ntf-server.db", {"", "-shm"})
        router = await self.programs.start(
            "smp_router", "start", "--config-dir", self.router_dir, "--store", self.router_db,
            "--control", self.control,
        )  # fmt: skip
        self.router = parse_smp_server(await self._line(router))
        self._live("router", router, self.router_db, {""})

    async def start_server(self) -> None:
        self._server = await self.programs.start("ntf_server", "start", "--config-dir", self.config_dir)
        self.server = parse_ntf_server((await self._line(self._server)).removeprefix("Server address: "))

    async def stop_server(self) -> None:
        self._server.kill()
        await self._server.wait()

    async def _line(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            line = await process.stdout.readline()
        assert line, self.programs.log.read_text()
        return line.decode().strip()

    async def invite(self) -> str:
        """Alice's link."""
        options = (*self.agent_options(), "--router", self.router)
        return str(json.loads(await self._made("agent", *options, "create"))["link"])

    async def start_agent(self) -> None:
        process = await self.programs.start("agent", *self.agent_options(), "receive", "--follow")
        self._listening = asyncio.create_task(self._listen(process), name="what Alice hears")

        def is_open() -> bool:
            files = [file for file in beside(self.alice_db) if file.exists()]
            return len(files) == 3 and files[2].stat().st_ino in locked_files(process.pid)

        await until(is_open)
        self._live("agent", process, self.alice_db, {"", "-shm"})

    def _live(self, name: str, process: asyncio.subprocess.Process, database: Path, locked: set[str]) -> None:
        self.live[name] = Live(process, database, locked)
        self.live[name].remember()

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            with suppress(ValueError):  # it was killed while it wrote
                event = json.loads(line)
                if event.get("event") == "MessageReceived":
                    self.heard.setdefault(event["body"], event["integrity"]["outcome"])

    def check(self, after: str) -> None:
        for live in self.live.values():
            live.check(after)
            for opened in (self.programs.opened, self.programs.opened_by_commands):
                files = opened.read_text().splitlines() if opened.exists() else []
                own = map(str, (live.database, *beside(live.database)))
                assert not set(files) & set(own), f"{after} opens {live.database}"

    def modes(self) -> set[tuple[Path, str]]:
        """The databases of live programs that commands opened since the last call, and how."""
        opened = self.programs.opened_by_commands
        lines = opened.read_text().splitlines() if opened.exists() else []
        opened.unlink(missing_ok=True)
        named = [line.removeprefix(SQLITE.decode()) for line in lines if line.startswith(SQLITE.decode())]
        databases = {live.database.resolve().as_uri(): live.database for live in self.live.values()}
        uris = [uri.partition("?mode=") for uri in named]
        return {(databases[uri], mode) for uri, _, mode in uris if uri in databases}

    async def kill(self) -> None:
        for live in self.live.values():
            await live.kill()
        if self._listening is not None:
            await self._listening

    # Load

    @asynccontextmanager
    async def load(self, bob: Person, connection_id: int) -> AsyncIterator[None]:
        """Clients of all three, until the block ends or the servers do."""
        work = (self._register(), self._send(), self._talk(bob, connection_id))
        tasks = [asyncio.create_task(each) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for found in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(found, asyncio.CancelledError | None):
                    raise found

    async def _register(self) -> None:
        client = await NtfClient.open(self.server)
        with suppress(TransportError, OSError):  # the server was killed
            while True:
                device = Device.make(null_token())
                await device.register(client)
                self.promised.devices.append(device)
                await asyncio.sleep(PAUSE)

    async def _send(self) -> None:
        with suppress(TransportError, OSError):
            async with connected(self.router) as client:
                while True:
                    queue = await create_queue(client)
                    for number in range(MESSAGES_PER_QUEUE):
                        assert await client.ask(Send(False, b"message"), queue.sender_id) == Ok()
                        self.promised.queues[queue.recipient_id] = (queue, number + 1)
                        await asyncio.sleep(PAUSE)

    async def _talk(self, bob: Person, connection_id: int) -> None:
        while True:
            text = f"message {len(self.promised.said) + 1}"
            await bob.agent.send(connection_id, text.encode())
            self.promised.said.append(text)
            await asyncio.sleep(5 * PAUSE)

    # What must be there

    async def check_promised(self) -> None:
        """All three have been killed and started again."""
        await self.check_devices()
        await check_kept(self.router, self.promised.queues)
        await until(lambda: self.heard.keys() >= set(self.promised.said), 2 * DEADLINE)
        assert set(self.heard.values()) == {"IntegrityOk"}

    async def check_devices(self) -> None:
        client = await NtfClient.open(self.server)
        for device in self.promised.devices:
            assert isinstance(await device.ask(client, Tchk()), Tkn)
        client.close()


@asynccontextmanager
async def neighbours(folder: Path, *, key: str = "", linked: bool = False) -> AsyncIterator[Neighbours]:
    """All three at work, and Bob writes to Alice."""
    async with AsyncExitStack() as stack:
        push = await stack.enter_async_context(provider(folder))
        made = Neighbours(folder, push, key=key, linked=linked)
        stack.push_async_callback(made.kill)
        await made.make()
        await made.start_servers()
        bob = await stack.enter_async_context(person(folder / "bob.db", made.router))
        connection_id = await bob.agent.join(await made.invite(), b"Bob")
        await made.start_agent()
        await bob.event(Connected)
        await stack.enter_async_context(made.load(bob, connection_id))
        yield made
