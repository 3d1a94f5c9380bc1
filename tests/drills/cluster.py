"""Daemons that share a database, routers, a provider and devices; what may go wrong is counted.

A trigger in the database notes every status and every notification that was written for a router by another
daemon than its owner. It must note none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg

from ntf_demo.fake_push.server import FakePushConfig, FakePushServer, wall_clock
from smp_router.router import Router
from tests.drills.world import DEADLINE, Asked, Daemon, World, free_port, repeated_pushes, running_daemon

LEASE = 4.0
ROUTERS = 4
DEVICES = 2
"Of each router."
QUEUES = 340
PATIENCE = 15.0
"Seconds for what may never come."
IN_FLIGHT = 1.0
"Seconds before a daemon died: what a router sent it then may not have reached the store."

HOUR_AHEAD = (
    "-c",
    "import runpy, sys, time; real = time.time; time.time = lambda: real() + 3600;"
    " sys.argv[0] = 'ntf-server'; runpy.run_module('ntf_server', run_name='__main__')",
)

_AUDIT = """
SET search_path = ntf;
CREATE TABLE audit (writer text, owner text, what text);
CREATE FUNCTION owner_of(bigint) RETURNS text LANGUAGE sql AS
    $$ SELECT d.name FROM ntf.leases l JOIN ntf.daemons d ON d.daemon_id = l.owner
       WHERE l.duty = 'router' AND l.id = $1 $$;
CREATE FUNCTION audit_status() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.state <> OLD.state AND NEW.state <> 'PENDING' THEN
        INSERT INTO ntf.audit VALUES
            (current_setting('application_name'), ntf.owner_of(NEW.server_key), 'status');
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION audit_newer() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO ntf.audit SELECT current_setting('application_name'), ntf.owner_of(s.server_key), TG_OP
    FROM ntf.subscriptions s WHERE s.sub_key = NEW.sub_key;
    RETURN NULL;
END $$;
CREATE TRIGGER audited AFTER UPDATE ON subscriptions FOR EACH ROW EXECUTE FUNCTION audit_status();
CREATE TRIGGER audited AFTER INSERT OR UPDATE ON unsent_notifications
    FOR EACH ROW EXECUTE FUNCTION audit_newer();
"""
_STRANGERS = """
SELECT count(*) FROM ntf.audit WHERE writer IS DISTINCT FROM owner AND what <> 'INSERT'
"""
_WRITERS = "SELECT DISTINCT writer FROM ntf.audit"


@dataclass
class Outcome:
    """What a drill counted."""

    pushes: Asked = field(default_factory=Asked)
    in_flight: int = 0
    "Sent by a router to a daemon that died before it stored them."
    strangers: int = 0
    "Statuses and notifications written for a router by another daemon than its owner."
    repeated: int = 0
    "Pushes that the provider got twice."
    taken_over: float = 0.0
    "Seconds from the fault until all queues were subscribed again."

    @property
    def lost(self) -> int:
        return self.pushes.asked - self.pushes.answered - self.in_flight

    def row(self, name: str) -> str:
        """A line of the table in docs/reliability.md."""
        cells = (
            name, f"{self.taken_over:.1f} s", f"{self.pushes.answered}/{self.pushes.asked}", self.in_flight,
            self.lost, self.strangers, self.repeated,
        )  # fmt: skip
        return f"| {' | '.join(map(str, cells))} |"


@dataclass
class Cluster:
    daemons: list[Daemon]
    worlds: list[World]
    "One for each router."
    url: str
    push: FakePushServer
    fault_at: float = 0.0

    async def suffer(
        self, seconds: float, fault: Callable[[], Awaitable[None]], *, dies: bool = False
    ) -> Outcome:
        """Notifications for so long, and a second after their begin the fault."""
        outcome = Outcome()

        async def later() -> None:
            await asyncio.sleep(1.0)
            self.fault_at = wall_clock()
            await fault()
            await self.subscribed()
            outcome.taken_over = wall_clock() - self.fault_at

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(later())
            sending = [tasks.create_task(world.notify(seconds)) for world in self.worlds]
        for world, sent in zip(self.worlds, sending, strict=True):
            patience = PATIENCE if dies else DEADLINE
            missing = await world.pushed(sent.result(), outcome.pushes, patience)
            if dies:
                outcome.in_flight += sum(self._was_in_flight(at) for at in missing.values())
        outcome.repeated = repeated_pushes(self.push)
        outcome.strangers = await self.ask(_STRANGERS)
        return outcome

    def _was_in_flight(self, at: float) -> bool:
        return self.fault_at - IN_FLIGHT < at < self.fault_at + 0.1

    async def subscribed(self) -> None:
        """Until every queue of every router is."""
        async with asyncio.timeout(DEADLINE):
            while not all(world.queues <= world.router.subscribed_notifiers() for world in self.worlds):
                await asyncio.sleep(0.02)

    async def ask(self, query: str) -> int:
        async with _connected(self.url) as db:
            return int(await db.fetchval(query))

    async def writers(self) -> set[str]:
        async with _connected(self.url) as db:
            return {row[0] for row in await db.fetch(_WRITERS)}

    async def owned_by(self, daemon: Daemon) -> None:
        """Until it owns all routers."""
        async with asyncio.timeout(DEADLINE):
            while await daemon.metric('leases_owned{duty="router"}') < len(self.worlds):
                await asyncio.sleep(0.1)

    async def shared(self) -> None:
        """Until every daemon owns routers and pushes."""
        async with asyncio.timeout(DEADLINE):
            for daemon in self.daemons:
                for duty in ("router", "pushes"):
                    while not await daemon.metric(f'leases_owned{{duty="{duty}"}}'):
                        await asyncio.sleep(0.1)


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    db = await asyncpg.connect(url)
    try:
        yield db
    finally:
        await db.close()


@asynccontextmanager
async def cluster(
    folder: Path,
    url: str,
    *,
    urls: Sequence[str] = (),
    programs: Mapping[int, Sequence[str]] | None = None,
    daemons: int = 2,
) -> AsyncIterator[Cluster]:
    """`urls`: how each daemon reaches the database, if not directly."""
    config = FakePushConfig(folder=folder / "push", record_limit=1_000_000)
    config.folder.mkdir()
    async with AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(Router.start(host="127.0.0.1")) for _ in range(ROUTERS)]
        push = await stack.enter_async_context(FakePushServer(config))
        running = []
        for number in range(daemons):
            env = {
                "NTF_APNS_ALLOW_TEST_PROVIDER": "on",
                "NTF_APNS_TEST_PORT": str(push.port),
                "NTF_APNS_TEST_CA_FILE": str(push.ca_file),
                "NTF_TRANSPORT_PORT": str(free_port()),
                "NTF_STORE_DATABASE": "postgres",
                "NTF_STORE_URL": urls[number] if urls else url,
                "NTF_STORE_LEASE_SECONDS": str(LEASE),
            }
            program = (programs or {}).get(number, ("-m", "ntf_server"))
            starting = running_daemon(folder, env, log=f"log-{number}", program=program)
            running.append(await stack.enter_async_context(starting))
            if not number:
                async with _connected(url) as db:
                    await db.execute(_AUDIT)
        worlds = [World(running[n % daemons], router, push) for n, router in enumerate(routers)]
        made = Cluster(running, worlds, url, push)
        for world in worlds:
            await world.add_devices(DEVICES, QUEUES)
        await made.shared()
        await made.subscribed()
        yield made


class DatabaseProxy:
    """Between a daemon and its database. It cuts connections, or swallows what the database tells unasked."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.port = 0
        self.cut_at: bytes = b""
        "Every connection on which the client says this is cut before it arrives."
        self.cuts = 0
        self.is_deaf = False
        self._writers: set[asyncio.StreamWriter] = set()

    def url(self, url: str) -> str:
        return url.replace(f":{self._port}/", f":{self.port}/") + "?sslmode=disable"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[DatabaseProxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
            self._writers |= {writer, back}
            try:
                await asyncio.gather(self._ask(reader, back), self._answer(there, writer))
            finally:
                self._writers -= {writer, back}
                writer.transport.abort()
                back.transport.abort()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self.cut_at and self.cut_at in data:
                self.cuts += 1
                raise ConnectionResetError
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readexactly(5)
            body = await reader.readexactly(int.from_bytes(head[1:], "big") - 4)
            if not (self.is_deaf and head[:1] == b"A"):
                writer.write(head + body)
                await writer.drain()
