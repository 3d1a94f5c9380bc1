"""Real routers and agents, and waiting for what they say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from agent.duplex.agent import DuplexAgent, DuplexConfig, open_duplex
from agent.duplex.events import Confirmed, Connected, Event, MessageReceived
from agent.duplex.store import DuplexStore
from agent.errors import Prohibited
from protocol.addresses import SmpServer
from protocol.versions import VersionRange
from smp_client.proxy import ProxyConfig, ProxyPolicy
from smp_client.requests import SessionConfig
from transport.cancellation import TaskGroup

DEADLINE = 60.0
DIRECT = ProxyConfig(policy=ProxyPolicy.NEVER)
BEFORE_SKEY = VersionRange(6, 8)
"Of routers that do not let senders secure queues: handshakes are slow ones."

E = TypeVar("E", bound=Event)


@dataclass
class Person:
    """An agent, and the events that it has told and nobody has asked for."""

    agent: DuplexAgent
    unseen: list[Event] = field(default_factory=list)

    async def event(self, kind: type[E], matches: Callable[[E], bool] = lambda _event: True) -> E:
        """The next of this kind; others are kept."""
        for event in self.unseen:
            if isinstance(event, kind) and matches(event):
                self.unseen.remove(event)
                return event
        try:
            async with asyncio.timeout(DEADLINE):
                return await self._new_event(kind, matches)
        except TimeoutError:
            raise AssertionError(f"no {kind.__name__}, but {self.unseen}") from None

    async def _new_event(self, kind: type[E], matches: Callable[[E], bool]) -> E:
        while True:
            event = await self.agent.next_event()
            if isinstance(event, kind) and matches(event):
                return event
            self.unseen.append(event)

    async def reads(self, *, receipt: bytes | None = None) -> MessageReceived:
        message = await self.event(MessageReceived)
        await self.agent.ack(message.connection_id, message.message_id, receipt)
        return message


def config(path: Path, *servers: SmpServer, services: bool = False) -> DuplexConfig:
    return DuplexConfig(
        path=path,
        servers=servers,
        session=SessionConfig(connect=15.0, answer=15.0),
        proxy=DIRECT,
        private_servers=True,
        services=services,
        kem_pairs=0,
    )


@asynccontextmanager
async def person(path: Path, *servers: SmpServer, services: bool = False) -> AsyncIterator[Person]:
    async with open_duplex(config(path, *servers, services=services)) as agent:
        yield Person(agent)


async def connect(alice: Person, bob: Person, *, pq: bool = True) -> tuple[int, int]:
    """Alice makes a link, Bob joins; their ids of the connection."""
    hers, link = await alice.agent.create_invitation(pq=pq)
    his = await bob.agent.join(link, b"Bob", pq=pq)
    confirmed = await alice.event(Confirmed)
    assert (confirmed.connection_id, confirmed.info) == (hers, b"Bob")
    await alice.agent.allow(hers, b"Alice")
    await alice.event(Connected)
    await bob.event(Connected)
    return hers, his


class Chat:
    """Somebody who answers everything at once: lets people in, reads, remembers."""

    def __init__(self, person: Person) -> None:
        self.agent = person.agent
        self.bodies: list[bytes] = []
        self.news = asyncio.Condition()

    async def run(self) -> None:
        while True:
            event = await self.agent.next_event()
            if isinstance(event, Confirmed):
                await self.agent.allow(event.connection_id, b"chat")
            elif isinstance(event, MessageReceived):
                self.bodies.append(event.body)
                await self.agent.ack(event.connection_id, event.message_id)
            async with self.news:
                self.news.notify_all()

    async def has_read(self, *bodies: bytes, within: float = DEADLINE) -> None:
        try:
            async with asyncio.timeout(within), self.news:
                await self.news.wait_for(lambda: set(bodies) <= set(self.bodies))
        except TimeoutError:
            raise AssertionError(f"not read: {set(bodies) - set(self.bodies)}") from None

    async def say(self, connection_id: int, body: bytes) -> None:
        """As soon as the connection is made."""
        async with asyncio.timeout(DEADLINE):
            while True:
                try:
                    await self.agent.send(connection_id, body)
                    return
                except Prohibited:
                    async with self.news:
                        await self.news.wait()


@asynccontextmanager
async def chat(
    path: Path, *servers: SmpServer, store: type[DuplexStore] = DuplexStore
) -> AsyncIterator[Chat]:
    async with open_duplex(config(path, *servers), store) as agent, TaskGroup() as tasks:
        made = Chat(Person(agent))
        work = tasks.create_task(made.run(), name="chat")
        try:
            yield made
        finally:
            work.cancel()
