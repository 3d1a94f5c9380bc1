"""An agent is killed after any TLS record that it sends or gets, and goes on from its file.

`python -m tests.agent.network_kills` tells every story once for each of its records.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from agent.duplex.agent import DuplexAgent, open_duplex
from agent.duplex.events import Confirmed, ContactRequested, Event, Failed, MessageFailed, MessageReceived
from agent.duplex.records import ConnectionKind
from agent.duplex.replies import TemporaryFailure
from agent.duplex.store import reading
from agent.errors import Prohibited, Stopped
from agent.notifications.records import Mode
from ntf_demo.demo import Playground, playground
from protocol.addresses import SmpServer
from protocol.agent.integrity import IntegrityOk
from protocol.statuses import TokenStatus
from protocol.versions import VersionRange
from smp_router.router import Router
from tests.agent.duplex.test_kill import Killed, mortal
from tests.agent.duplex.world import BEFORE_SKEY, DEADLINE, config
from tests.agent.notifications.world import DEVICE, verification
from tests.agent.tunnel import Tunnel, tunnel
from transport.cancellation import TaskGroup

NEVER = 1_000_000
"Commits: here it is the network that kills."
LOOK_AGAIN = 0.005
STORED = "SELECT 1 FROM sent_messages WHERE kind = 'A_MSG'"
WATCHED = "SELECT 1 FROM ntf_subscriptions WHERE action = 'NTF_CHECK'"
ALL_QUEUES = '{"checkMessages":true}'


class Life:
    """One person over all restarts of the agent; as an application, it knows what it has dealt with."""

    def __init__(self, name: str, folder: Path, servers: list[SmpServer], passage: Tunnel) -> None:
        self.name = name
        self.path = folder / f"{name}.db"
        self.tunnel = passage
        self.world: Playground | None = None
        self.other = self
        self.link: str | None = None
        "Ours, when the other one may have seen it."
        self.said: list[bytes] = []
        self.read: dict[int, bytes] = {}
        self.out_of_turn: set[bytes] = set()
        "What said so itself."
        self.troubles: list[Event] = []
        self.done: set[str] = set()
        "Things that are to be done once."
        self.starts = 0
        self._config = replace(config(self.path, *servers), network=passage.network)
        self._agent: DuplexAgent | None = None
        self._kind = mortal(NEVER, True)

    @property
    def agent(self) -> DuplexAgent:
        assert self._agent is not None
        return self._agent

    def _die(self) -> None:
        self._kind.lives_for = 0
        self._kind.dead.set()

    async def live(self, script: Script, ended: Callable[[], bool], *, asleep: bool = False) -> None:
        """Again from the beginning of the script after each death: it skips what is done."""
        is_over = False
        while not is_over:
            try:
                async with self._alive(asleep):
                    await script(self)
                    await self.until(ended)
                    is_over = True
            except* (Killed, Stopped, TemporaryFailure):
                assert self.tunnel.is_cut
                self.tunnel.mend()

    @asynccontextmanager
    async def _alive(self, asleep: bool) -> AsyncIterator[None]:
        self._kind, self.tunnel.on_cut = mortal(NEVER, True), self._die
        self.starts += 1
        made = replace(self._config, subscribe=not asleep)
        async with open_duplex(made, self._kind) as self._agent, TaskGroup() as tasks:
            work = tasks.create_task(self._attend(self._agent), name=self.name)
            try:
                yield
            finally:
                work.cancel()

    async def _attend(self, agent: DuplexAgent) -> None:
        """Death is for the script to find out: a call that it has begun must not be cut short here."""
        with suppress(Killed, Stopped):
            async for event in agent.events():
                await self._take(agent, event)

    async def _take(self, agent: DuplexAgent, event: Event) -> None:
        match event:
            case Confirmed():
                await agent.allow(event.connection_id, self.name.encode())
            case ContactRequested():
                await agent.accept(event.invitation_id, self.name.encode(), pq=False)
            case MessageReceived():
                self.read.setdefault(event.message_id, event.body)
                if not isinstance(event.integrity, IntegrityOk):
                    self.out_of_turn.add(event.body)
                await agent.ack(event.connection_id, event.message_id)
            case Failed() | MessageFailed():
                self.troubles.append(event)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Raises Killed if it dies before."""
        async with asyncio.timeout(DEADLINE):
            while not condition():
                await self._wait()

    async def _wait(self) -> None:
        if self._kind.dead.is_set():
            raise Killed
        await asyncio.sleep(LOOK_AGAIN)

    async def connection_id(self) -> int | None:
        """Of the connection with the other one."""
        for connection in await self.agent.connections():
            if connection.kind is not ConnectionKind.CONTACT and not connection.deleted:
                return connection.connection_id
        return None

    async def say(self, text: bytes) -> None:
        """As soon as the connection is made, if it is not said; a call that death ended may have done it."""
        body = self.name.encode() + text
        while body not in self.said:
            if len(found(self.path, STORED)) > len(self.said):
                self.said.append(body)
                return
            connection_id = await self.connection_id()
            with suppress(Prohibited):
                if connection_id is not None:
                    await self.agent.send(connection_id, body)
                    self.said.append(body)
            await self._wait()

    async def hear(self, text: bytes) -> None:
        await self.until(lambda: self.other.name.encode() + text in self.read.values())


Script = Callable[[Life], Awaitable[None]]


# What the file says


def found(path: Path, sql: str) -> list[sqlite3.Row]:
    with reading(path) as db:
        return db.execute(sql).fetchall()


def places(path: Path) -> set[str]:
    """Where messages are received."""
    return {server for (server,) in found(path, "SELECT server FROM receive_queues")}


LEFTOVERS = (
    "SELECT kind FROM commands",
    "SELECT queue_id FROM deliveries",
    "SELECT connection_id FROM confirmations",
    "SELECT queue_id FROM receive_queues WHERE switch IS NOT NULL OR deleting OR replaces IS NOT NULL",
    "SELECT queue_id FROM send_queues WHERE switch IS NOT NULL OR replaces IS NOT NULL",
    "SELECT local_id FROM received_messages WHERE NOT is_acked",
    "SELECT connection_id FROM connections WHERE deleted OR sync_state <> 'ok'",
    "SELECT connection_id FROM connections WHERE kind NOT IN ('duplex', 'contact')",
    "SELECT connection_id FROM receive_queues GROUP BY connection_id HAVING count(*) > 1",
    "SELECT connection_id FROM send_queues GROUP BY connection_id HAVING count(*) > 1",
    "SELECT key FROM deleted_ntf_tokens",
    "SELECT queue_id FROM ntf_subscriptions WHERE action IN ('SMP_KEY', 'NTF_CREATE', 'SMP_DELETE')",
)
"Rows of things that have not come to their end."


def is_settled(life: Life) -> bool:
    with reading(life.path) as db:
        return all(db.execute(sql).fetchone() is None for sql in LEFTOVERS)


# What they do; each can begin anew at any point of itself


async def invites(life: Life) -> None:
    if life.link is None:
        await forgets(life)
        life.link = (await life.agent.create_invitation(pq=False))[1]
    await talks(life)


async def invites_shortly(life: Life) -> None:
    if life.link is None:
        await forgets(life)
        life.link = (await life.agent.create_short_invitation())[1]
    await talks(life)


async def has_an_address(life: Life) -> None:
    if life.link is None:
        await forgets(life)
        life.link = (await life.agent.create_address())[1]
    await talks(life)


async def forgets(life: Life) -> None:
    """Connections whose link nobody has seen."""
    for connection in await life.agent.connections():
        if not connection.deleted:
            await life.agent.delete(connection.connection_id)


async def joins(life: Life) -> None:
    await life.until(lambda: life.other.link is not None)
    assert life.other.link is not None
    if await life.connection_id() is None:
        await life.agent.join(life.other.link, life.name.encode())
    await talks(life)


async def talks(life: Life) -> None:
    for text in (b" one", b" two"):
        await life.say(text)
        await life.hear(text)


async def goes_on(life: Life) -> None:
    for text in (b" three", b" four"):
        await life.say(text)
        await life.hear(text)


async def moves(life: Life) -> None:
    connection_id = await life.connection_id()
    assert connection_id is not None
    if (
        not found(life.path, "SELECT 1 FROM receive_queues WHERE switch IS NOT NULL")
        and "move" not in life.done
    ):
        await life.agent.switch(connection_id)
    life.done.add("move")
    await goes_on(life)


async def synchronises(life: Life) -> None:
    connection_id = await life.connection_id()
    assert connection_id is not None
    if not found(life.path, "SELECT 1 FROM connections WHERE sync_state <> 'ok'") and "sync" not in life.done:
        await life.agent.sync(connection_id, force=True)
    life.done.add("sync")
    await goes_on(life)


async def leaves(life: Life) -> None:
    connection_id = await life.connection_id()
    if connection_id is not None and "leave" not in life.done:
        await life.say(b" farewell")
        with suppress(Prohibited):
            await life.agent.delete(connection_id, wait=True)
    life.done.add("leave")
    await life.until(lambda: not found(life.path, "SELECT 1 FROM connections"))


async def stays(life: Life) -> None:
    await life.hear(b" farewell")


async def wakes(life: Life) -> None:
    """Of a push; then everything that waits is read."""
    await life.until(
        lambda: life.other.name.encode() + b" four" in life.other.said and is_settled(life.other)
    )
    await life.agent.notifications.on_push(ALL_QUEUES)
    for text in (b" three", b" four"):
        await life.hear(text)


async def calls(life: Life) -> None:
    for text in (b" three", b" four"):
        await life.say(text)


async def is_notified(life: Life) -> None:
    """The device is registered, its queues are watched, and then nothing of that is wanted any more."""
    notifications, world = life.agent.notifications, life.world
    assert world is not None
    if "unregister" not in life.done:
        if await notifications.register(DEVICE, Mode.INSTANT, world.server.address) is not TokenStatus.ACTIVE:
            await notifications.on_push((await verification(world)).body)
        await life.until(lambda: bool(found(life.path, WATCHED)))
        life.done.add("unregister")
    if await notifications.token() is not None:
        await notifications.delete()
    await life.until(lambda: not found(life.path, "SELECT 1 FROM ntf_subscriptions"))
    await life.hear(b" four")


@dataclass(frozen=True)
class Story:
    alice: Script
    bob: Script
    made: bool = True
    "Whether the connection is made before."
    asleep: bool = False
    "Alice's agent subscribes to nothing."
    versions: VersionRange | None = None
    "Of the routers."
    notified: bool = False


STORIES = {
    "fast handshake": Story(invites, joins, made=False),
    "slow handshake": Story(invites, joins, made=False, versions=BEFORE_SKEY),
    "short link": Story(invites_shortly, joins, made=False),
    "address": Story(has_an_address, joins, made=False),
    "move": Story(moves, goes_on),
    "synchronisation": Story(synchronises, goes_on),
    "deletion": Story(leaves, stays),
    "asleep": Story(wakes, calls, asleep=True),
    "notifications": Story(is_notified, calls, notified=True),
}
VICTIMS = ("alice", "bob")


class Stage:
    """Routers, two people, and who of them is to be killed when."""

    def __init__(self, alice: Life, bob: Life) -> None:
        self.alice, self.bob = alice, bob
        alice.other, bob.other = bob, alice

    async def play(self, alice: Script, bob: Script, *, asleep: bool = False) -> None:
        over: set[str] = set()

        async def lives(life: Life, script: Script, asleep: bool) -> None:
            async def whole(life: Life) -> None:
                await script(life)
                await life.until(lambda: is_settled(life))
                over.add(life.name)

            await life.live(whole, lambda: len(over) == len(VICTIMS), asleep=asleep)

        async with TaskGroup() as tasks:
            tasks.create_task(lives(self.alice, alice, asleep), name="alice's life")
            tasks.create_task(lives(self.bob, bob, False), name="bob's life")

    def judge(self) -> None:
        for reader in (self.alice, self.bob):
            read, said = list(reader.read.values()), reader.other.said
            assert sorted(read) == sorted(said), f"{reader.name} read {read} of {said}"
            in_turn = [body for body in read if body not in reader.out_of_turn]
            assert in_turn == [body for body in said if body not in reader.out_of_turn]
            assert reader.troubles == [], reader.troubles


@asynccontextmanager
async def stage(story: Story, folder: Path) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(playground(folder / "servers")) if story.notified else None
        routers = [] if world is None else [world.router]
        while len(routers) < 2:
            routers.append(await stack.enter_async_context(Router.start(versions=story.versions)))
        servers = [router.address for router in routers]
        people = [Life(name, folder, servers, await stack.enter_async_context(tunnel())) for name in VICTIMS]
        people[0].world = world
        yield Stage(*people)


async def tell(story: Story, victim: str, records: int | None, folder: Path) -> int:
    """With the victim killed after so many records; how many it took until then, or to the end."""
    async with stage(story, folder) as played:
        if story.made:
            await played.play(invites, joins)
        dying = played.alice if victim == "alice" else played.bob
        dying.starts, dying.tunnel.records, dying.tunnel.cut_after = 0, 0, records
        await played.play(story.alice, story.bob, asleep=story.asleep)
        played.judge()
        return records if records is not None and dying.starts > 1 else dying.tunnel.records


async def sweep(name: str, victim: str, numbers: Iterable[int]) -> bool:
    """False if one of them failed."""
    clock, kills, failed = time.monotonic(), 0, list[int]()
    for records in numbers:
        with tempfile.TemporaryDirectory() as folder:
            try:
                if await tell(STORIES[name], victim, records, Path(folder)) < records:
                    break
            except Exception:
                traceback.print_exc()
                failed.append(records)
        kills += 1
    seconds = time.monotonic() - clock
    print(f"{name}, {victim}: killed {kills} times in {seconds:.0f} s, failed {failed}", flush=True)
    return not failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--story", choices=STORIES, action="append")
    parser.add_argument("--victim", choices=VICTIMS, action="append")
    parser.add_argument("--first", type=int, default=1, help="the first record to be killed after")
    parser.add_argument("--every", type=int, default=1, help="not after all records, but every so many")
    options = parser.parse_args()
    good = [
        asyncio.run(sweep(name, victim, count(options.first, options.every)))
        for name in options.story or STORIES
        for victim in options.victim or VICTIMS
    ]
    raise SystemExit(not all(good))


if __name__ == "__main__":
    main()
