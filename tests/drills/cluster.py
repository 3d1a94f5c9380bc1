"""Daemons that share a database, routers, a provider and devices; what may go wrong is counted.

Three counts tell what became of notifications, each kept by somebody else: the routers know what they sent
and to which connection, a trigger in the database what was committed and by whom, the provider what was
pushed. The trigger also notes every status, of a queue or of all queues of a router at once, and every
notification that was written for a router by another daemon than its owner. It must note none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg

from ntf_demo.fake_push.server import FakePushServer, wall_clock
from protocol.addresses import SmpQueueNtf
from protocol.encoding import EntityId
from smp_router.router import Router
from tests.drills.world import (
    DEADLINE,
    Address,
    Daemon,
    World,
    provider,
    push_settings,
    repeated_pushes,
    running_daemon,
)
from tests.ntf_server.ntf_client import NtfClient
from tests.ports import free_port

LEASE = 4.0
ROUTERS = 4
DEVICES = 2
"Of each router."
QUEUES = 340
TAKEN_OVER = 30.0
IN_FLIGHT = 1.0
"Seconds that a notification may take from a router into the database while both cores are busy."


_AUDIT = """
SET search_path = ntf;
CREATE TABLE audit (writer text, owner text, what text, notifier_id bytea);
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
    INSERT INTO ntf.audit
    SELECT current_setting('application_name'), ntf.owner_of(s.server_key), TG_OP, s.notifier_id
    FROM ntf.subscriptions s WHERE s.sub_key = NEW.sub_key;
    RETURN NULL;
END $$;
CREATE FUNCTION audit_router() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO ntf.audit VALUES
        (current_setting('application_name'), ntf.owner_of(NEW.server_key), 'router');
    RETURN NULL;
END $$;
CREATE TRIGGER audited AFTER UPDATE OF lost, served, chain, service_id ON smp_servers FOR EACH ROW
    WHEN ((NEW.lost, NEW.served, NEW.chain, NEW.service_id)
        IS DISTINCT FROM (OLD.lost, OLD.served, OLD.chain, OLD.service_id))
    EXECUTE FUNCTION audit_router();
CREATE TRIGGER audited AFTER UPDATE ON subscriptions FOR EACH ROW EXECUTE FUNCTION audit_status();
CREATE TRIGGER audited AFTER INSERT OR UPDATE ON unsent_notifications
    FOR EACH ROW EXECUTE FUNCTION audit_newer();
"""
# What a former owner was sent before is added beneath anything newer: that is no write as owner.
_STRANGERS = """
SELECT count(*) FROM ntf.audit WHERE writer IS DISTINCT FROM owner AND what <> 'INSERT'
"""
_WRITERS = "SELECT DISTINCT writer FROM ntf.audit"
_COMMITTED = "SELECT DISTINCT notifier_id FROM ntf.audit WHERE notifier_id IS NOT NULL"


@dataclass
class Outcome:
    """What a drill counted."""

    sent: int = 0
    committed: int = 0
    pushed: int = 0
    in_flight: int = 0
    "Sent on a connection of a daemon that was killed, and never committed: SMP has no acknowledgement."
    oldest_in_flight: float = 0.0
    "Seconds before that daemon was killed."
    lost: int = 0
    "All others that were not pushed."
    strangers: int = 0
    "Statuses and notifications written for a router by another daemon than its owner."
    repeated: int = 0
    "Pushes that the provider got twice."
    taken_over: float = 0.0
    "Seconds from the fault until all queues were subscribed again."

    def check(self, name: str) -> None:
        print(self.row(name))
        assert self.lost == 0
        assert self.strangers == 0
        assert self.taken_over < TAKEN_OVER
        assert self.oldest_in_flight < IN_FLIGHT

    def row(self, name: str) -> str:
        """A line of the table in docs/reliability.md."""
        cells = (
            name, f"{self.taken_over:.1f} s", self.sent, self.committed, self.pushed, self.in_flight,
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
    killed_at: float = 0.0
    ended: list[Daemon] = field(default_factory=list)
    "On purpose."
    connections_of_the_dead: set[Address] = field(default_factory=set)

    async def suffer(self, seconds: float, fault: Callable[[], Awaitable[None]]) -> Outcome:
        """Notifications for so long, and a second after their begin the fault."""
        outcome = Outcome()

        async def later() -> None:
            await asyncio.sleep(1.0)
            began = wall_clock()
            await fault()
            await self.subscribed()
            outcome.taken_over = wall_clock() - began

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(later())
            sending = [tasks.create_task(world.notify(seconds)) for world in self.worlds]
        await self._count([task.result() for task in sending], outcome)
        for daemon in self.daemons:
            assert daemon in self.ended or daemon.is_alive(), daemon.log.read_text()[-4000:]
        return outcome

    async def stop(self, daemon: Daemon) -> None:
        self.ended.append(daemon)
        daemon.process.terminate()
        await asyncio.to_thread(daemon.process.wait, DEADLINE)

    def kill(self, daemon: Daemon) -> None:
        """What is under way to it now will never be stored."""
        self.ended.append(daemon)
        self.connections_of_the_dead |= daemon.connections()
        daemon.process.kill()
        self.killed_at = wall_clock()

    async def _count(self, sent: Sequence[Mapping[EntityId, float]], outcome: Outcome) -> None:
        """Wait for the pushes of all that was committed, or can still be."""
        missing = {queue: at for each in sent for queue, at in each.items()}
        outcome.sent = len(missing)
        committed: set[EntityId] = set()
        with suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE):
                while any(queue in committed or not self._went_to_the_dead(queue) for queue in missing):
                    await asyncio.sleep(0.1)
                    committed = await self.committed()
                    for world in self.worlds:
                        world.take_pushes(missing)
        outcome.committed = sum(queue in committed for each in sent for queue in each)
        outcome.pushed = outcome.sent - len(missing)
        gone = [
            at for queue, at in missing.items() if queue not in committed and self._went_to_the_dead(queue)
        ]
        outcome.in_flight = len(gone)
        outcome.oldest_in_flight = max((self.killed_at - at for at in gone), default=0.0)
        outcome.lost = outcome.sent - outcome.pushed - outcome.in_flight
        outcome.repeated = repeated_pushes(self.push)
        outcome.strangers = await self.ask(_STRANGERS)

    def _went_to_the_dead(self, queue: EntityId) -> bool:
        return any(world.receivers.get(queue) in self.connections_of_the_dead for world in self.worlds)

    async def subscribed(self) -> None:
        """Until every queue of every router is."""
        async with asyncio.timeout(DEADLINE):
            while not all(world.queues <= world.router.subscribed_notifiers() for world in self.worlds):
                await asyncio.sleep(0.02)

    async def handed_over(self, world: World, count: int) -> list[float]:
        """Subscribe so many queues, one after the other, at a daemon that does not own their router; seconds
        from each answer until the queue was subscribed."""
        receiver = world.router.receiver(next(iter(world.queues)))
        (other,) = [daemon for daemon in self.daemons if receiver not in daemon.connections()]
        client = await NtfClient.open(other.address)
        device = await world.device(client)
        clock, seconds = asyncio.get_running_loop().time, []
        for queue in world.router.load.create_queues(count):
            await device.subscribe(
                client, SmpQueueNtf(world.router.address, queue.notifier_id), queue.notifier_key
            )
            answered = clock()
            async with asyncio.timeout(DEADLINE):
                while queue.notifier_id not in world.router.subscribed_notifiers():
                    await asyncio.sleep(0.005)
            seconds.append(clock() - answered)
        client.close()
        return seconds

    async def ask(self, query: str) -> int:
        async with _connected(self.url) as db:
            return int(await db.fetchval(query))

    async def writers(self) -> set[str]:
        async with _connected(self.url) as db:
            return {row[0] for row in await db.fetch(_WRITERS)}

    async def committed(self) -> set[EntityId]:
        """Notifiers of the queues with a notification that was ever stored."""
        async with _connected(self.url) as db:
            return {EntityId(row[0]) for row in await db.fetch(_COMMITTED)}

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
    env_of: Mapping[int, Mapping[str, str]] | None = None,
    daemons: int = 2,
    routers: int = ROUTERS,
    queues: int = QUEUES,
) -> AsyncIterator[Cluster]:
    """`urls`: how each daemon reaches the database, if not directly. `queues`: of each router."""
    async with AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(Router.start(host="127.0.0.1")) for _ in range(routers)]
        push = await stack.enter_async_context(provider(folder))
        running = []
        for number in range(daemons):
            env = {
                **push_settings(push),
                "NTF_TRANSPORT_PORT": str(free_port()),
                "NTF_STORE_DATABASE": "postgres",
                "NTF_STORE_URL": urls[number] if urls else url,
                "NTF_STORE_LEASE_SECONDS": str(LEASE),
            }
            env |= (env_of or {}).get(number, {})
            starting = running_daemon(folder, env, log=f"log-{number}")
            running.append(await stack.enter_async_context(starting))
            if not number:
                async with _connected(url) as db:
                    await db.execute(_AUDIT)
        worlds = [World(running[n % daemons], router, push) for n, router in enumerate(peers)]
        made = Cluster(running, worlds, url, push)
        for world in worlds:
            await world.add_devices(DEVICES, queues)
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
        self._passes = asyncio.Event()
        self._passes.set()
        self._refuses = False
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

    @asynccontextmanager
    async def away(self, *, is_silent: bool) -> AsyncIterator[None]:
        """Nothing passes: connections are refused, or nobody is told anything."""
        self._passes.clear()
        if not is_silent:
            self._refuses = True
            self.cut()
        yield
        self._refuses = False
        self._passes.set()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
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
            await self._passes.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readexactly(5)
            body = await reader.readexactly(int.from_bytes(head[1:], "big") - 4)
            await self._passes.wait()
            if not (self.is_deaf and head[:1] == b"A"):
                writer.write(head + body)
                await writer.drain()
