"""Two people talk over three bad routers: `python -m tests.drills.conversation --messages 10000`.

Routers drop connections, lose answers, fall silent, are slow, refuse and restart. Both people are asleep half
of the time: then their agents are closed, and a push opens one for as long as it takes to read what the push
is about. Meanwhile receive queues move to other routers. Everything has to arrive, once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent.duplex.agent import DuplexAgent, DuplexConfig, open_duplex
from agent.duplex.events import (
    Confirmed,
    Connected,
    Event,
    Failed,
    Fetched,
    MessageFailed,
    MessageReceived,
)
from agent.errors import Prohibited, Stopped
from agent.notifications.records import Mode
from ntf_demo.demo import Playground, playground
from protocol.addresses import SmpServer
from protocol.device_token import ApnsToken, Provider
from smp_client.requests import SessionConfig
from smp_router.router import Router
from tests.agent.duplex.world import DIRECT
from transport.cancellation import TaskGroup

SESSION = SessionConfig(connect=8.0, answer=5.0, ping_after=6.0, ping_limit=4.0)
AWAKE = ASLEEP = (1.0, 4.0)
"Seconds, at least and at most."
PACE = 0.005
PATIENCE = 240.0
"Seconds from the end of the faults until everything must have arrived."
MOVES = 3
LOCALHOST = "127.0.0.1"


class Person:
    """A file, a device, and an application that remembers which messages it has dealt with."""

    def __init__(
        self, name: str, path: Path, world: Playground, servers: list[SmpServer], chance: random.Random
    ) -> None:
        self.name = name
        self._world = world
        self._chance = chance
        self._config = DuplexConfig(
            path=path, servers=servers, session=SESSION, proxy=DIRECT, private_servers=True, kem_pairs=0
        )
        self._device = ApnsToken(Provider.APNS_TEST, name[:1].encode().hex().encode() * 32)
        self._pushes = 0
        self._tired = asyncio.Event()
        self.connection_id = 0
        self.agent: DuplexAgent | None = None
        self.sent: list[bytes] = []
        self.read: dict[int, bytes] = {}
        self.happened: Counter[str] = Counter()

    @asynccontextmanager
    async def open(self, *, asleep: bool = False) -> AsyncIterator[DuplexAgent]:
        async with open_duplex(replace(self._config, subscribe=not asleep)) as agent:
            self.agent = agent
            try:
                yield agent
            finally:
                self.agent = None

    async def register(self, agent: DuplexAgent) -> None:
        await agent.notifications.register(self._device, Mode.INSTANT, self._world.server.address)
        await agent.notifications.on_push(await self._push())

    async def _push(self) -> str:
        """The next for this device."""
        while True:
            mine = [push for push in self._world.accepted() if push.token == self._device.token.decode()]
            if len(mine) > self._pushes:
                self._pushes += 1
                return mine[self._pushes - 1].body
            await asyncio.sleep(0.02)

    # The application

    async def take(self, agent: DuplexAgent, event: Event) -> None:
        match event:
            case Confirmed():
                await agent.allow(event.connection_id, self.name.encode())
            case Connected():
                self.connection_id = event.connection_id
            case MessageReceived():
                if event.message_id not in self.read:
                    self.read[event.message_id] = event.body
                    self.happened[type(event.integrity).__name__] += 1
                await agent.ack(event.connection_id, event.message_id)
            case Failed() | MessageFailed():
                self.happened[f"{type(event).__name__} {event.error}"] += 1

    async def attend(self, agent: DuplexAgent) -> None:
        async for event in agent.events():
            await self.take(agent, event)

    async def talk(self, agent: DuplexAgent, bodies: list[bytes]) -> None:
        """Until it is time to sleep. Not cancelled: then nobody would know what was said."""
        while bodies and not self._tired.is_set():
            try:
                await agent.send(self.connection_id, bodies[0])
            except Prohibited:
                await asyncio.sleep(0.1)
                continue
            self.sent.append(bodies.pop(0))
            await asyncio.sleep(PACE)

    async def move(self) -> bool:
        """False if the agent is closed, or the last move is not over."""
        if self.agent is None:
            return False
        try:
            await self.agent.switch(self.connection_id)
        except (Prohibited, Stopped):
            return False
        self.happened["moves"] += 1
        return True

    def queues(self) -> int:
        """How many queues the file has to receive from: two while one replaces the other."""
        with closing(sqlite3.connect(self._config.path)) as db:
            (count,) = db.execute("SELECT count(*) FROM receive_queues").fetchone()
        return int(count)

    async def awake(self, bodies: list[bytes], seconds: float) -> None:
        self.happened["awake"] += 1
        async with self.open() as agent, TaskGroup() as tasks:
            reading = tasks.create_task(self.attend(agent), name=f"{self.name} reads")
            self._tired.clear()
            writing = tasks.create_task(self.talk(agent, bodies), name=f"{self.name} writes")
            await asyncio.sleep(seconds)
            self._tired.set()
            await asyncio.wait([writing])
            reading.cancel()

    async def asleep(self, seconds: float) -> None:
        """Until it is time; meanwhile pushes open the agent."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    push = await self._push()
            except TimeoutError:
                return
            self.happened["pushes"] += 1
            await self.pushed(push, left)

    async def pushed(self, push: str, left: float) -> None:
        async with self.open(asleep=True) as agent:
            try:
                async with asyncio.timeout(left):
                    if not await agent.notifications.on_push(push):
                        return
                    while not isinstance(event := await agent.next_event(), Fetched):
                        self.happened["read by push"] += isinstance(event, MessageReceived)
                        await self.take(agent, event)
            except TimeoutError:
                return

    def lines(self, count: int) -> list[bytes]:
        return [b"%s %d" % (self.name.encode(), number) for number in range(count)]

    async def live(self, bodies: list[bytes], moved: asyncio.Event) -> None:
        """Until all is said and the last move has begun."""
        while bodies or not moved.is_set():
            await self.awake(bodies, self._chance.uniform(*AWAKE))
            await self.asleep(self._chance.uniform(*ASLEEP))


async def storm(routers: list[Router], chance: random.Random, seen: Counter[str]) -> None:
    """Something goes wrong somewhere, all the time."""
    while True:
        router, seconds = chance.choice(routers), chance.uniform(0.2, 1.5)
        kind = chance.choice(("drop", "lose answers", "half-open", "slow", "refuse", "restart"))
        seen[kind] += 1
        try:
            await suffer(router, kind, seconds)
        finally:
            router.faults.lose_answers(False)
            router.faults.black_hole(False)
            router.faults.delay(0)
            router.faults.refuse(False)
        await asyncio.sleep(chance.uniform(0.2, 1.0))


async def suffer(router: Router, kind: str, seconds: float) -> None:
    match kind:
        case "drop":
            router.faults.drop_connections()
            return
        case "lose answers":
            router.faults.lose_answers(True)
        case "half-open":  # for longer than an answer is waited for; then it goes on as if nothing had been
            router.faults.black_hole(True)
            seconds *= 5
        case "slow":
            router.faults.delay(0.3)
        case "refuse":
            router.faults.refuse(True)
            router.faults.drop_connections()
        case "restart":
            port = router.port
            await router.stop()
            try:
                await asyncio.sleep(seconds)
            finally:
                await asyncio.shield(router.listen(LOCALHOST, port))
            return
    await asyncio.sleep(seconds)


async def moves(people: tuple[Person, Person], share: int, begun: asyncio.Event) -> None:
    """Three times somebody moves, spread over the conversation."""
    for number, who in enumerate((people[0], people[1], people[0]), 1):
        while sum(len(person.sent) for person in people) < share * number or not await who.move():
            await asyncio.sleep(0.1)
    begun.set()


@dataclass
class Outcome:
    messages: int
    seconds: float = 0.0
    cpu: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    lost: list[bytes] = field(default_factory=list)
    doubled: list[bytes] = field(default_factory=list)
    failures: int = 0
    "Events that tell of one: in the end nothing had failed."
    unfinished: int = 0
    "Moves that have not ended."
    happened: dict[str, Counter[str]] = field(default_factory=dict)

    def judge(self, alice: Person, bob: Person) -> None:
        for reader, writer in ((alice, bob), (bob, alice)):
            read = Counter(reader.read.values())
            self.lost += [body for body in writer.sent if not read[body]]
            self.doubled += [body for body, times in read.items() if times > 1]
            self.unfinished += reader.queues() - 1
            self.failures += sum(times for what, times in reader.happened.items() if "Failed" in what)
            self.happened[reader.name] = reader.happened

    @property
    def moves(self) -> int:
        return sum(counts["moves"] for counts in self.happened.values())

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.doubled or self.failures or self.unfinished) and self.moves == MOVES

    def __str__(self) -> str:
        lines = [
            f"{self.messages} messages in {self.seconds:.0f} s ({self.cpu:.0f} s of processor time)",
            f"lost: {len(self.lost)}, shown twice: {len(self.doubled)}, false failures: {self.failures}",
            f"moves: {self.moves}, not ended: {self.unfinished}",
            f"faults: {dict(self.faults)}",
        ]
        return "\n".join(lines + [f"{name}: {dict(counts)}" for name, counts in self.happened.items()])


async def attended(
    people: Sequence[tuple[Person, DuplexAgent]], done: Callable[[], bool], within: float = PATIENCE
) -> None:
    """Everybody reads until it is done."""
    async with TaskGroup() as tasks:
        work = [tasks.create_task(person.attend(agent), name=person.name) for person, agent in people]
        until = time.monotonic() + within
        while not done() and time.monotonic() < until:
            await asyncio.sleep(0.1)
        for task in work:
            task.cancel()


async def introduce(alice: Person, bob: Person) -> None:
    """Both have a device and know each other."""
    async with alice.open() as hers, bob.open() as his:
        await alice.register(hers)
        await bob.register(his)
        _, link = await hers.create_invitation()
        await his.join(link, b"bob")
        await attended(((alice, hers), (bob, his)), lambda: bool(alice.connection_id and bob.connection_id))


async def everything_arrives(alice: Person, bob: Person) -> None:
    """Both stay awake until nothing is missing and nobody is moving."""

    def done() -> bool:
        all_read = len(alice.read) >= len(bob.sent) and len(bob.read) >= len(alice.sent)
        return all_read and alice.queues() + bob.queues() == 2

    async with alice.open() as hers, bob.open() as his:
        await attended(((alice, hers), (bob, his)), done)


async def converse(folder: Path, messages: int, seed: int) -> Outcome:
    chance = random.Random(seed)
    async with playground(folder / "servers") as world, Router.start() as two, Router.start() as three:
        routers = [world.router, two, three]
        servers = [router.address for router in routers]
        alice = Person("alice", folder / "alice.db", world, servers, chance)
        bob = Person("bob", folder / "bob.db", world, servers, chance)
        await introduce(alice, bob)
        clock, cpu = time.monotonic(), time.process_time()
        outcome = Outcome(messages)
        moved = asyncio.Event()
        async with TaskGroup() as tasks:
            bad = tasks.create_task(storm(routers, chance, outcome.faults), name="storm")
            tasks.create_task(moves((alice, bob), messages // 4, moved), name="moves")
            lives = [
                tasks.create_task(who.live(who.lines(messages // 2), moved), name=who.name)
                for who in (alice, bob)
            ]
            await asyncio.wait(lives)
            bad.cancel()
        await everything_arrives(alice, bob)
        outcome.seconds, outcome.cpu = time.monotonic() - clock, time.process_time() - cpu
    outcome.judge(alice, bob)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = asyncio.run(converse(Path(folder), options.messages, options.seed))
    print(outcome)
    raise SystemExit(not outcome.is_good)


if __name__ == "__main__":
    main()
