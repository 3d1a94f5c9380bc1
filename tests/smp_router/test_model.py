"""Any interleaving of two recipients, two services and three queues, with restarts, against a small model.

The model knows for each queue what is stored, who hears of it, and what was delivered to that one; it says
what each command is answered and which events follow. The router is real: TLS, and in half of the runs a
database. When that router is killed, the next one has the files as they were at that moment.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from protocol.encoding import NO_ENTITY, EntityId
from protocol.errors import AUTH, NO_MSG, QUOTA
from protocol.ids_hash import ids_hash
from protocol.messages_crypto import QuotaExceeded, open_message
from protocol.smp_handshake import ServiceRole
from protocol.smp_messages import (
    Ack,
    Alls,
    Del,
    Deld,
    End,
    Ends,
    Err,
    Msg,
    Off,
    Ok,
    QueueSet,
    Send,
    SmpMessage,
    Sok,
    Soks,
    Sub,
    Subs,
)
from smp_router.config import RouterConfig
from smp_router.router import Router, make_credentials
from smp_router.sqlite_records import stored_state
from smp_router.state import RouterState
from tests.smp_router.wire import TestQueue, WireClient, connected, create_queue
from transport.certificates import make_service

QUOTA_SIZE = 2
QUEUES = range(3)
PEOPLE = (0, 1)
SERVICE_OF = {2: "A", 3: "B", 4: "A"}
"The clients of services; A has two."
CLIENTS = (*PEOPLE, *SERVICE_OF)
IDENTITY = make_credentials("127.0.0.1")
CERTIFICATES = {name: make_service(datetime.now(UTC)) for name in set(SERVICE_OF.values())}


class Step(NamedTuple):
    do: str
    client: int = 0
    queue: int = 0


steps = st.one_of(
    st.builds(
        Step, st.sampled_from(["sub", "ack", "ack wrong"]), st.sampled_from(CLIENTS), st.sampled_from(QUEUES)
    ),
    st.builds(Step, st.just("send"), st.just(0), st.sampled_from(QUEUES)),
    st.builds(Step, st.just("subs"), st.sampled_from(list(SERVICE_OF)), st.just(0)),
    st.builds(Step, st.sampled_from(["off", "delete"]), st.sampled_from(CLIENTS), st.sampled_from(QUEUES)),
    st.builds(Step, st.just("reconnect"), st.sampled_from(CLIENTS), st.just(0)),
    st.sampled_from([Step("restart"), Step("kill")]),
)

FULL = "quota"
Event = tuple[str, int | str]
"What a client is told without having asked: END and a queue, MSG and its number, ENDS and a count…"


@dataclass
class Model:
    stored: dict[int, deque[int | str]] = field(default_factory=lambda: {q: deque() for q in QUEUES})
    owner: dict[int, str | None] = field(default_factory=lambda: dict.fromkeys(QUEUES))
    "The service that a queue belongs to."
    single: dict[int, int] = field(default_factory=dict)
    speaking: dict[str, tuple[int, set[int] | None]] = field(default_factory=dict)
    "By service: the client that speaks for it, and the queues it subscribed; None is all."
    delivered: dict[tuple[int, int], int | str] = field(default_factory=dict)
    "By client and queue: what it has to acknowledge."
    off: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    sent: int = 0
    events: dict[int, list[Event]] = field(default_factory=lambda: {c: [] for c in CLIENTS})

    def subscriber(self, queue: int) -> int | None:
        service = self.owner[queue]
        if service is None:
            return self.single.get(queue)
        return self.speaking[service][0] if service in self.speaking else None

    def speak_for(self, client: int) -> tuple[str, set[int] | None]:
        """The client's service; whoever spoke for it before is told, and has nothing any more."""
        service = SERVICE_OF[client]
        before, subscribed = self.speaking.get(service, (client, set()))
        if before != client:
            mine = sum(1 for owner in self.owner.values() if owner == service)
            self.events[before].append(("ENDS", mine if subscribed is None else len(subscribed)))
            self.delivered = {key: value for key, value in self.delivered.items() if key[0] != before}
            self.single = {queue: other for queue, other in self.single.items() if other != before}
            subscribed = set()
        self.speaking[service] = client, subscribed
        return service, subscribed

    def deliver(self, queue: int, again: bool = False) -> None:
        """The first stored message goes to whoever hears of the queue, if it has none from there."""
        client = self.subscriber(queue)
        if client is None or not self.stored[queue] or ((client, queue) in self.delivered and not again):
            return
        first = self.stored[queue][0]
        self.delivered[client, queue] = first
        self.events[client].append(("MSG", first))

    def sub(self, client: int, queue: int) -> str:
        if queue in self.gone:
            return "AUTH"
        service, subscribed = self.speak_for(client) if client in SERVICE_OF else (None, None)
        before, old = self.subscriber(queue), self.owner[queue]
        self.single.pop(queue, None)
        if old is not None and old in self.speaking and self.speaking[old][1] is not None:
            self.speaking[old][1].discard(queue)  # type: ignore[union-attr]
        self.owner[queue] = service
        if service is None:
            self.single[queue] = client
        elif subscribed is not None:
            subscribed.add(queue)
        if before is not None and before != client:
            self.delivered.pop((before, queue), None)
            self.events[before].append(("END", queue))
        self.deliver(queue, again=True)
        return "SOK"

    def subs(self, client: int) -> str:
        service, subscribed = self.speak_for(client)
        first = subscribed is not None
        self.speaking[service] = client, None
        mine = [queue for queue in QUEUES if self.owner[queue] == service]
        if first:
            for queue in mine:
                self.deliver(queue)
            self.events[client].append(("ALLS", ""))
        return f"SOKS {len(mine)}"

    def send(self, queue: int) -> str:
        if queue in self.gone or queue in self.off:
            return "AUTH"
        waiting = self.stored[queue]
        if waiting and waiting[-1] == FULL:
            return "QUOTA"
        full = len(waiting) >= QUOTA_SIZE
        self.sent += 1
        waiting.append(FULL if full else self.sent)
        self.deliver(queue)
        return "QUOTA" if full else "OK"

    def ack(self, client: int, queue: int, right: bool) -> str:
        if queue in self.gone:
            return "AUTH"
        message = self.delivered.get((client, queue))
        if message is None or not right:
            return "NO_MSG"
        del self.delivered[client, queue]
        if self.stored[queue] and self.stored[queue][0] == message:
            self.stored[queue].popleft()
        if not self.stored[queue]:
            return "OK"
        following = self.stored[queue][0]
        self.delivered[client, queue] = following
        return f"MSG {following}"

    def delete(self, client: int, queue: int) -> str:
        if queue in self.gone:
            return "AUTH"
        heard = self.subscriber(queue)
        self.gone.add(queue)
        self.stored[queue].clear()
        for other in CLIENTS:
            self.delivered.pop((other, queue), None)
        if heard is not None and heard != client:
            self.events[heard].append(("DELD", queue))
        self.owner[queue] = None
        self.single.pop(queue, None)
        for _, subscribed in self.speaking.values():
            if subscribed is not None:
                subscribed.discard(queue)
        return "OK"

    def suspend(self, queue: int) -> str:
        if queue in self.gone:
            return "AUTH"
        self.off.add(queue)
        return "OK"

    def disconnect(self, client: int) -> None:
        if client in SERVICE_OF and self.speaking.get(SERVICE_OF[client], (None,))[0] == client:
            del self.speaking[SERVICE_OF[client]]
        self.single = {queue: other for queue, other in self.single.items() if other != client}
        self.delivered = {key: value for key, value in self.delivered.items() if key[0] != client}
        self.events[client].clear()


class Real:
    """The router and its clients, driven by the same steps."""

    def __init__(self, database: Path | None) -> None:
        self._database = database
        self._state = RouterState(IDENTITY)
        self._life = AsyncExitStack()
        self._clients: dict[int, tuple[AsyncExitStack, WireClient]] = {}
        self.queues: list[TestQueue] = []
        self._messages: dict[bytes, int | str] = {}
        self._last: dict[tuple[int, int], bytes] = {}

    async def start(self) -> None:
        if self._database is not None:
            state = await self._life.enter_async_context(stored_state(self._database, IDENTITY))
        else:
            state = self._state
        config = RouterConfig(quota=QUOTA_SIZE)
        self.router = await self._life.enter_async_context(Router.start(config, state=state))
        for number in CLIENTS:
            await self.connect(number)
        if not self.queues:
            self.queues = [await create_queue(self.client(0)) for _ in QUEUES]

    async def stop(self) -> None:
        for number in CLIENTS:
            await self.disconnect(number)
        await self._life.aclose()
        self._life = AsyncExitStack()

    async def kill(self) -> None:
        """What a killed process leaves are its files; everything that was answered must be in them."""
        database = self._database
        if database is not None:
            self._database = Path(tempfile.mkdtemp(dir=database.parent), database.name)
            for file in database.parent.glob(f"{database.name}*"):
                shutil.copy(file, self._database.parent)
        await self.stop()

    async def connect(self, number: int) -> None:
        stack = AsyncExitStack()
        service = CERTIFICATES[SERVICE_OF[number]] if number in SERVICE_OF else None
        client = await stack.enter_async_context(
            connected(self.router.address, service=service, role=ServiceRole.MESSAGING)
        )
        self._clients[number] = stack, client

    async def disconnect(self, number: int) -> None:
        stack, _ = self._clients.pop(number)
        before = self.router.connections
        await stack.aclose()
        async with asyncio.timeout(60):
            while self.router.connections >= before:
                await asyncio.sleep(0.001)

    def client(self, number: int) -> WireClient:
        return self._clients[number][1]

    async def sub(self, number: int, queue: int) -> SmpMessage:
        made = self.queues[queue]
        return await self.client(number).ask(
            Sub(), made.recipient_id, made.key, with_service=number in SERVICE_OF
        )

    async def subs(self, number: int) -> SmpMessage:
        client = self.client(number)
        params = client.connection.params
        assert params is not None
        assert params.service is not None
        expected = QueueSet(0, bytes(16))
        return await client.ask(Subs(expected), client.service_id, params.service.private_key)

    async def ack(self, number: int, queue: int, right: bool) -> SmpMessage:
        made = self.queues[queue]
        message_id = self._last.get((number, queue), b"nothing") if right else b"wrong"
        answer = await self.client(number).ask(Ack(message_id), made.recipient_id, made.key)
        if isinstance(answer, Msg):
            self._last[number, queue] = answer.message_id
        return answer

    async def events(self, number: int) -> list[Event]:
        client = self.client(number)
        await client.silent()
        return [self.told(number, entity, message) for entity, message in client.taken_events()]

    def told(self, number: int, entity_id: EntityId, message: SmpMessage) -> Event:
        ids = [queue.recipient_id for queue in self.queues]
        if isinstance(message, Msg):
            queue = ids.index(entity_id)
            self._last[number, queue] = message.message_id
            return "MSG", self.content(queue, message)
        if isinstance(message, Alls):
            assert entity_id == NO_ENTITY
            return "ALLS", ""
        if isinstance(message, Ends):
            return "ENDS", message.queues.count
        assert isinstance(message, End | Deld)
        return type(message).__name__.upper(), ids.index(entity_id)

    def content(self, queue: int, message: Msg) -> int | str:
        opened = open_message(self.queues[queue].secret, message.message_id, message.body)
        return FULL if isinstance(opened, QuotaExceeded) else int(opened.body)

    def word(self, queue: int, answer: SmpMessage) -> str:
        if isinstance(answer, Msg):
            return f"MSG {self.content(queue, answer)}"
        if isinstance(answer, Soks):
            return f"SOKS {answer.queues.count}"
        if isinstance(answer, Err):
            return {AUTH: "AUTH", NO_MSG: "NO_MSG", QUOTA: "QUOTA"}[answer.error]
        assert isinstance(answer, Ok | Sok), answer
        return type(answer).__name__.upper()


async def carry_out(step: Step, model: Model, real: Real) -> tuple[str, str]:
    """(what the model answers, what the router answers)"""
    _, client, queue = step
    made = real.queues[queue]
    if step.do == "sub":
        return model.sub(client, queue), real.word(queue, await real.sub(client, queue))
    if step.do == "subs":
        return model.subs(client), real.word(queue, await real.subs(client))
    if step.do == "send":
        expected = model.send(queue)
        answer = await real.client(0).ask(Send(False, str(model.sent).encode()), made.sender_id)
        return expected, real.word(queue, answer)
    if step.do in ("ack", "ack wrong"):
        right = step.do == "ack"
        expected = model.ack(client, queue, right)
        return expected, real.word(queue, await real.ack(client, queue, right))
    if step.do == "off":
        return model.suspend(queue), real.word(
            queue, await real.client(client).ask(Off(), made.recipient_id, made.key)
        )
    if step.do == "delete":
        return model.delete(client, queue), real.word(
            queue, await real.client(client).ask(Del(), made.recipient_id, made.key)
        )
    if step.do == "reconnect":
        model.disconnect(client)
        await real.disconnect(client)
        await real.connect(client)
    else:
        for number in CLIENTS:
            model.disconnect(number)
        await (real.kill() if step.do == "kill" else real.stop())
        await real.start()
    return "", ""


async def compare(model: Model, real: Real) -> None:
    for number in CLIENTS:
        expected, model.events[number] = model.events[number], []
        told = await real.events(number)
        assert sorted(told, key=str) == sorted(expected, key=str), f"client {number}"
    for number, name in SERVICE_OF.items():
        mine = [real.queues[queue].recipient_id for queue in QUEUES if model.owner[queue] == name]
        service_id = real.client(number).service_id
        service = real.router.state.services.get(service_id)
        assert service is not None
        assert service.queues == QueueSet(len(mine), ids_hash(mine))
    left = sum(len(stored) for stored in model.stored.values())
    assert real.router.state.stored_messages == left


async def run(script: list[Step], database: Path | None) -> None:
    model, real = Model(), Real(database)
    await real.start()
    try:
        for number, step in enumerate(script):
            expected, answer = await carry_out(step, model, real)
            assert answer == expected, f"step {number}: {step}"
            if Step("kill") not in script[number + 1 : number + 2]:  # that comes right behind the answer
                await compare(model, real)
    finally:
        await real.stop()


@given(st.lists(steps, min_size=5, max_size=30), st.booleans())
@example([Step("send"), Step("kill"), Step("sub", 2), Step("kill"), Step("subs", 4), Step("kill")], True)
@example([Step("sub"), Step("send"), Step("ack"), Step("kill"), Step("delete"), Step("kill")], True)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_interleaving(script: list[Step], stored: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(script, Path(folder, "router.db") if stored else None))
