"""Connections of one person, in one object.

async with open_duplex(DuplexConfig(path, servers=[router])) as alice:
    connection_id, link = await alice.create_invitation()
    async for event in alice.events():
        match event:
            case Confirmed(connection_id):
                await alice.allow(connection_id, b"Alice")
            case MessageReceived(connection_id, message_id):
                await alice.ack(connection_id, message_id)
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from agent.duplex import deletion, handshake, rotation, synchronisation
from agent.duplex.commands import CommandRunner, start_joining
from agent.duplex.creation import chosen_servers, start_creation
from agent.duplex.defects import survived
from agent.duplex.delivery import after_attempt, attempt
from agent.duplex.events import Event, MessageReceived, ReceiptsReceived
from agent.duplex.fetching import Fetches
from agent.duplex.inbox import Inbox
from agent.duplex.incoming import acknowledge, unacknowledged
from agent.duplex.links import (
    PreparedLink,
    data_key_of,
    forget_link,
    own_link,
    own_request,
    prepare_link,
    sealed_user_data,
)
from agent.duplex.outgoing import next_delivery, queue_user_message, queue_user_messages
from agent.duplex.queue_maker import QueueMaker
from agent.duplex.records import Connection
from agent.duplex.replies import HostFailure, TemporaryFailure, answer_to
from agent.duplex.router_links import RouterLinks
from agent.duplex.secrets import KemPairs, Secrets
from agent.duplex.services import Logins
from agent.duplex.store import Change, DuplexStore, Strand, Tx
from agent.duplex.tables import (
    connections,
    next_command,
    receive_queues,
    receiving,
    unfinished,
)
from agent.duplex.workers import Wait, WorkerTasks
from agent.errors import AgentError, Prohibited, Stopped
from agent.notifications.notifications import Notifications
from agent.notifications.sessions import NtfSessions
from agent.notifications.subscribing import NotificationConfig
from protocol.addresses import NtfServer, SmpServer
from protocol.agent.connection_requests import request_text
from protocol.agent.e2e_params import E2eKeys
from protocol.agent.errors import LinkError
from protocol.crypto import Ed25519PrivateKey
from protocol.encoding import CorrId
from protocol.errors import DecodeError
from protocol.smp_messages import Ldel, LinkData, Lset, QueueMode, SmpCommand, SmpMessage
from smp_client.dialer import Dialer, NetworkConfig
from smp_client.proxy import ProxyConfig, ProxyPolicy, SenderCommand
from smp_client.requests import SESSION_DEFAULTS, Request, SessionConfig
from smp_client.session import NtfSession, Service, SmpEvents, SmpSession, connect_ntf, connect_smp
from transport.address_guard import AddressGuard
from transport.cancellation import TaskGroup, first_cause, raise_if_cancelled

T = TypeVar("T")

FIRST_CLEANING = 30.0
CLEANING_INTERVAL = 300.0
SYNC_INTERVAL = 10.0
"Seconds between looks for synchronisations that do not end by themselves."
EVENTS_WAITING = 1000
"Events that nobody took: more messages are acknowledged only when there is room."


def _wall_time() -> float:
    return datetime.now(UTC).timestamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplexConfig:
    path: Path
    "The file with the state."
    key: str | None = field(default=None, repr=False)
    "Encrypts the file, if there is one (extra `encryption`)."
    servers: Sequence[SmpServer]
    "Where our queues are made."
    passwords: Mapping[SmpServer, bytes] = field(default_factory=dict, repr=False)
    "Of the routers that let only those create queues who know it."
    session: SessionConfig = SESSION_DEFAULTS
    network: NetworkConfig = field(default_factory=NetworkConfig)
    proxy: ProxyConfig | None = None
    "Which routers are not to learn our address. By default all but `servers`, which forward what we send."
    private_servers: bool = False
    "Connect to routers that others name also in private networks and on this machine: for development."
    services: bool = False
    "Subscribe all queues of a router at once, as a service: for agents with thousands of connections."
    separate_sessions: bool = False
    "A session with the router for each queue: routers cannot tell which queues have the same owner."
    cover_traffic: float | None = None
    "Seconds between PINGs at random times, on average, in each session with a router; none without it."
    subscribe: bool = True
    "False for a device that sleeps: its queues are read when a push asks for it."
    notifications: NotificationConfig = field(default_factory=NotificationConfig)
    now: Callable[[], float] = _wall_time
    random: Callable[[int], bytes] = os.urandom
    kem_pairs: int = 8
    "Made ahead, in another process, from the first that is needed on; 0 makes each when it is needed."

    def __post_init__(self) -> None:
        if self.services and self.separate_sessions:
            raise Prohibited("a service needs one session for all queues of a router")
        if self.cover_traffic is not None and not self.cover_traffic > 0:
            raise Prohibited("cover traffic needs a positive number of seconds")

    @property
    def sending(self) -> ProxyConfig:
        servers = tuple(self.servers)
        return self.proxy or ProxyConfig(
            policy=ProxyPolicy.UNKNOWN, proxies=servers, known=servers, passwords=self.passwords
        )


def _settle(result: asyncio.Future[Any]) -> None:
    """Whoever waits for a transaction that was cancelled is told; if nobody does, no failure is news."""
    if not result.done():
        result.set_exception(Stopped())
    if not result.cancelled():
        result.exception()


class DuplexAgent:
    """Use `open_duplex`."""

    def __init__(self, store: DuplexStore, config: DuplexConfig, secrets: Secrets, tasks: TaskGroup) -> None:
        self._store = store
        self._config = config
        self._tasks = tasks
        network = replace(config.network, isolated=config.separate_sessions)
        self._dialer = Dialer(network)
        self._guard = AddressGuard(allow_private=config.private_servers, cache_time=0)
        self._dialer_of_strangers = Dialer(network, guard=self._guard)
        chosen = (*config.servers, *config.sending.proxies, *config.sending.known)
        self._chosen = {server.canonical for server in chosen}
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._room = asyncio.Event()
        self._room.set()
        self._shown: set[tuple[int, int]] = set()
        self._secrets = secrets
        logins = Logins(self._transact, self._dial, config.servers, enabled=config.services)
        self._inbox = Inbox(store, self._transact, self._publish, self._room.wait, self._start, logins)
        self._links = RouterLinks(
            self._inbox,
            self._start,
            config.sending,
            subscribe=config.subscribe,
            separate=config.separate_sessions,
        )
        self._maker = QueueMaker(
            config.servers,
            self._secrets,
            self._ask,
            subscribe=config.subscribe,
            passwords=config.passwords,
        )
        self._commands = CommandRunner(self._transact, self._ask, self._maker, self._secrets)
        self._command_workers: WorkerTasks[Strand] = WorkerTasks(
            "commands of connection", tasks, self._command_step
        )
        self._delivery_workers: WorkerTasks[int] = WorkerTasks(
            "deliveries to queue", tasks, self._delivery_step
        )
        self._fetches = Fetches(tasks, store, self._transact, self._ask, self._publish, self._room.wait)
        self._ntf_sessions = NtfSessions(self._connect_ntf)
        self.notifications = Notifications(
            tasks,
            store,
            self._transact,
            self._links.request_many,
            self._ntf_sessions,
            None if config.subscribe else self._fetches.start,
            config.now,
            config.notifications,
        )

    async def start(self) -> None:
        """Go on with what an earlier run left."""
        queues = await self._store.read(lambda db: receiving(db, each=self._config.separate_sessions))
        self._chosen.update(await self._store.read(chosen_servers))
        commands, deliveries = await self._store.read(unfinished)
        for event in (*await self._store.read(handshake.waiting), *await self._store.read(unacknowledged)):
            self._publish(event)
        for queue in queues:
            self._links.keep(queue)
        for strand in commands:
            self._command_workers.wake(strand)
        for queue_id in deliveries:
            self._delivery_workers.wake(queue_id)
        await self.notifications.start()
        self._tasks.create_task(self._clean_up(), name="cleaning up")
        self._tasks.create_task(self._synchronise_again(), name="synchronising again")

    async def _clean_up(self) -> None:
        await asyncio.sleep(FIRST_CLEANING)
        while True:
            await survived(self._transact(deletion.clean_up), "cleaning up")
            await asyncio.sleep(CLEANING_INTERVAL)

    async def _synchronise_again(self) -> None:
        while True:
            await survived(self._start_due_rounds(), "synchronising again")
            await asyncio.sleep(SYNC_INTERVAL)

    async def _start_due_rounds(self) -> None:
        if await self._store.read(lambda db: synchronisation.due_rounds(db, int(self._config.now()))):
            await self._transact(synchronisation.start_due_rounds)

    async def close(self) -> None:
        await self._links.close()
        await self._ntf_sessions.close()
        self._guard.close()

    # What a transaction leads to

    async def _transact(self, change: Change[T]) -> T:
        """Runs to its end even if the caller is cancelled: what was stored is also acted on."""
        result = asyncio.get_running_loop().create_future()
        task = self._start(self._commit(change, result), "transaction")
        task.add_done_callback(lambda _: _settle(result))
        return await asyncio.shield(result)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        try:
            return self._tasks.create_task(work, name=name)
        except RuntimeError:  # the agent is at its end, and a router still has something to say
            work.close()
            raise Stopped from None

    async def _commit(self, change: Change[T], done: asyncio.Future[T]) -> None:
        try:
            result, tx = await self._store.run(change)
        except Exception as error:
            raise_if_cancelled()
            done.set_exception(error)
            return
        self._act(tx)
        done.set_result(result)

    def _act(self, tx: Tx) -> None:
        for event in tx.events:
            self._publish(event)
        for queue in tx.subscriptions:
            self._links.keep(queue)
        for strand in tx.commands:
            self._command_workers.wake(strand, hurry=strand in tx.hurried)
        for queue_id in tx.deliveries:
            self._delivery_workers.wake(queue_id, hurry=queue_id in tx.hurried)
        self.notifications.wake(tx.notifications)

    def _publish(self, event: Event) -> None:
        if isinstance(event, MessageReceived | ReceiptsReceived):
            key = event.connection_id, event.message_id
            if key in self._shown:
                return  # a router repeats what it has no ACK for; the application has it
            self._shown.add(key)
        self._events.put_nowait(event)
        if self._events.qsize() >= EVENTS_WAITING:
            self._room.clear()

    def end(self) -> None:
        """The agent does not work any more: whoever waits for an event learns it."""
        self._events.put_nowait(None)

    async def next_event(self) -> Event:
        event = await self._events.get()
        if event is None:
            self.end()
            raise Stopped
        if self._events.qsize() < EVENTS_WAITING:
            self._room.set()
        return event

    async def events(self) -> AsyncIterator[Event]:
        """For ever."""
        while True:
            yield await self.next_event()

    def unread(self) -> list[Event]:
        """The events that are there, without waiting for others."""
        found: list[Event] = []
        while not self._events.empty():
            event = self._events.get_nowait()
            if event is not None:
                found.append(event)
        return found

    # Workers

    async def settled(self) -> None:
        """Wait until nothing is left to do at the routers, or to be sent.

        What a server does not answer about notifications is not waited for: it is tried again later.
        """
        workers = (self._command_workers, self._delivery_workers, self._fetches, self.notifications)
        while not all(each.idle.is_set() for each in workers):
            for each in workers:
                await each.idle.wait()

    async def _command_step(self, strand: Strand, wait: Wait) -> bool:
        command = await self._store.read(lambda db: next_command(db, strand))
        if command is None:
            return False
        await self._commands.run(command, wait)
        return True

    async def _delivery_step(self, queue_id: int, wait: Wait) -> bool:
        delivery = await self._store.read(lambda db: next_delivery(db, queue_id))
        if delivery is None:
            return False
        failure = await attempt(self._ask, delivery, self._secrets.nonce())
        await after_attempt(self._transact, wait, delivery, failure, self._config.now())
        return True

    # Routers

    async def _dial(self, server: SmpServer, on_events: SmpEvents, service: Service | None) -> SmpSession:
        """Peers name routers too: they must not lead us into our own network."""
        config, is_ours = self._config, server in self._chosen
        return await connect_smp(
            server,
            self._dialer if is_ours else self._dialer_of_strangers,
            service=service,
            on_events=on_events,
            config=replace(config.session, noise=config.cover_traffic),
            random=config.random,
        )

    async def _connect_ntf(self, server: NtfServer) -> NtfSession:
        config = self._config
        return await connect_ntf(server, self._dialer, config=config.session, random=config.random)

    async def _ask(
        self, server: SmpServer, request: Request[SmpCommand], corr_id: CorrId | None = None
    ) -> SmpMessage:
        """What senders say goes directly or through a proxy, as the policy says."""
        entity_id, command, key = request
        if isinstance(command, SenderCommand):
            return await answer_to(self._links.send(server, entity_id, command, key))
        return await answer_to(self._links.request(server, request, corr_id))

    # Connections

    async def create_invitation(
        self, *, server: SmpServer | None = None, pq: bool = True, pq_in_link: bool = False
    ) -> tuple[int, str]:
        """A connection for one other person, and the link for them."""
        keys = self._secrets.e2e_keys(pq and pq_in_link)
        return await self._create(server, QueueMode.MESSAGING, keys, pq=pq)

    async def create_address(self, *, server: SmpServer | None = None) -> tuple[int, str]:
        """An address that many may write to; each request is an event."""
        return await self._create(server, QueueMode.CONTACT, None, pq=False)

    async def _create(
        self, server: SmpServer | None, mode: QueueMode, keys: E2eKeys | None, *, pq: bool
    ) -> tuple[int, str]:
        server = self._choose(server)
        queue = await self._maker.make(server, mode)
        connection_id = await self._transact(lambda tx: handshake.created(tx, queue, keys, pq=pq))
        return connection_id, request_text(own_request(queue.uri, keys))

    def _choose(self, server: SmpServer | None) -> SmpServer:
        chosen = server or self._maker.choose()
        self._chosen.add(chosen.canonical)
        return chosen

    def new_root_key(self) -> Ed25519PrivateKey:
        return self._secrets.ed25519()

    def prepare_address(
        self, root_key: Ed25519PrivateKey, entity_id: bytes | None = None, *, server: SmpServer | None = None
    ) -> PreparedLink:
        """The link of an address that does not exist yet; `create_prepared` makes it with one call."""
        return prepare_link(self._secrets, server or self._maker.choose(), None, root_key, entity_id)

    async def create_prepared(self, prepared: PreparedLink, user_data: bytes = b"") -> tuple[int, str]:
        """The connection and its link. If the network fails, the agent goes on in the background.

        `LinkReady` tells when the link works; calling again with the same link also waits for it.
        """
        self._choose(prepared.server)
        connection_id = await self._transact(lambda tx: start_creation(tx, prepared, user_data))
        try:
            await self._commands.create(connection_id)
        finally:
            self._command_workers.wake(Strand(connection_id))
        link, _ = await self._store.read(lambda db: own_link(db, connection_id))
        return connection_id, prepared.link(link.link_id if prepared.keys else None).text()

    async def create_short_invitation(
        self, user_data: bytes = b"", *, server: SmpServer | None = None, pq: bool = True
    ) -> tuple[int, str]:
        """An invitation with a short link; keys for the ratchet are in the data behind it."""
        keys, root_key = self._secrets.e2e_keys(pq), self._secrets.ed25519()
        at = server or self._maker.choose()
        prepared = prepare_link(self._secrets, at, keys, root_key, None)
        try:
            return await self.create_prepared(prepared, user_data)
        except (TemporaryFailure, HostFailure, asyncio.CancelledError):  # nobody knows the link yet
            await self.delete(await self._transact(lambda tx: start_creation(tx, prepared, user_data)))
            raise

    async def set_link_data(self, connection_id: int, user_data: bytes) -> None:
        """Change what our short link shows."""
        link, queue = await self._store.read(lambda db: own_link(db, connection_id))
        key = data_key_of(link.link_key, is_address=link.is_address)
        user = sealed_user_data(self._secrets, link.root_key, key, user_data, is_address=link.is_address)
        command = Lset(link.link_id, LinkData(link.fixed, user))
        await self._ask(queue.server, queue.request(command))

    async def delete_link(self, connection_id: int) -> None:
        """The short link leads nowhere from now on; the connection stays, as do those made with the link."""
        _, queue = await self._store.read(lambda db: own_link(db, connection_id))
        await self._ask(queue.server, queue.request(Ldel()))
        await self._transact(lambda tx: forget_link(tx, connection_id))

    async def link_data(self, link: str) -> bytes:
        """What the owner of a short link shows. Reading an invitation reserves it: only we can join it."""
        try:
            return await self._commands.link_data(link)
        except (DecodeError, LinkError):
            raise Prohibited("this is no short link, or not what its owner made of it") from None

    async def join(self, link: str, info: bytes, *, pq: bool = True) -> int:
        """The connection exists at once; the rest happens in the background, and events tell of it."""
        return await self._transact(lambda tx: start_joining(tx, link, info, pq=pq))

    async def allow(self, connection_id: int, info: bytes) -> None:
        """Let the one who joined in."""
        await self._transact(lambda tx: handshake.allow(tx, connection_id, info))

    async def send(
        self, connection_id: int, body: bytes, *, notification: bool = True, pq: bool | None = None
    ) -> int:
        """The message's id; it is stored, and goes out in the background."""
        return await self._transact(
            lambda tx: queue_user_message(tx, connection_id, body, notification=notification, pq=pq)
        )

    async def send_many(
        self, messages: Sequence[tuple[int, bytes]], *, notification: bool = True
    ) -> list[int | AgentError]:
        """At most one to each connection, all stored together; an error where a connection cannot send."""
        return await self._transact(lambda tx: queue_user_messages(tx, messages, notification=notification))

    async def ack(self, connection_id: int, message_id: int, receipt: bytes | None = None) -> None:
        """The message is dealt with; with `receipt` its sender is told."""
        queue, broker_id = await self._transact(
            lambda tx: acknowledge(tx, connection_id, message_id, receipt)
        )
        self._shown.discard((connection_id, message_id))
        if queue is not None and not self._config.subscribe:
            self._fetches.acknowledge(queue, broker_id)
        elif queue is not None:
            self._links.acknowledge(queue, broker_id)

    async def accept(self, invitation_id: int, info: bytes, *, pq: bool = True) -> int:
        """Answer a request: a connection of its own."""

        def start(tx: Tx) -> int:
            link = handshake.take_invitation(tx, invitation_id)
            return start_joining(tx, link, info, pq=pq, invitation_id=invitation_id)

        return await self._transact(start)

    async def reject(self, invitation_id: int) -> None:
        """Whoever asked is not told."""
        await self._transact(lambda tx: handshake.reject_invitation(tx, invitation_id))

    async def switch(self, connection_id: int) -> None:
        """Move our receive queue to another router."""
        await self._transact(lambda tx: rotation.start_switch(tx, connection_id, self._config.servers))

    async def abort_switch(self, connection_id: int) -> None:
        """As long as the peer cannot have used the new queue."""
        await self._transact(lambda tx: rotation.abort_switch(tx, connection_id))

    async def sync(self, connection_id: int, *, force: bool = False, pq: bool | None = None) -> None:
        """Make a new ratchet with the peer; with `pq` also decide anew whether it is to be post-quantum."""
        await self._transact(lambda tx: synchronisation.start_sync(tx, connection_id, force=force, pq=pq))

    async def delete(self, connection_id: int, *, wait: bool = False) -> None:
        """Delete the connection and its queues; with `wait`, after its messages have gone out."""
        await self._transact(lambda tx: deletion.start_deletion(tx, connection_id, wait=wait))
        queues = await self._store.read(lambda db: receive_queues(db, connection_id))
        self._fetches.end(queue.queue_id for queue in queues)

    async def connections(self) -> list[Connection]:
        return await self._store.read(connections)


@asynccontextmanager
async def open_duplex(
    config: DuplexConfig, store_kind: type[DuplexStore] = DuplexStore
) -> AsyncIterator[DuplexAgent]:
    """An agent at work, until the block ends; raises what broke it."""
    loop = asyncio.get_running_loop()
    pairs = KemPairs(config.kem_pairs)
    secrets = Secrets(config.random, pairs)
    async with store_kind.open(config.path, secrets, config.now, config.key) as store:
        ready: asyncio.Future[DuplexAgent] = loop.create_future()
        background = loop.create_task(_run(store, config, secrets, ready), name="agent")
        try:
            background.add_done_callback(lambda _task: ready.done() or ready.cancel())
            await asyncio.wait([ready])
            if not ready.cancelled():
                background.add_done_callback(lambda _task: ready.result().end())
                yield ready.result()
        finally:
            background.cancel()
            await asyncio.wait([background])
            if ready.done() and not ready.cancelled():
                await ready.result().close()
            await asyncio.to_thread(pairs.close)
            _raise_failure(background)


async def _run(
    store: DuplexStore, config: DuplexConfig, secrets: Secrets, ready: asyncio.Future[DuplexAgent]
) -> None:
    async with TaskGroup() as tasks:
        agent = DuplexAgent(store, config, secrets, tasks)
        await agent.start()
        ready.set_result(agent)
        await asyncio.Event().wait()


def _raise_failure(task: asyncio.Task[None]) -> None:
    """What ended a task, without the groups around it."""
    failure = None if task.cancelled() else task.exception()
    if failure is not None:
        raise first_cause(failure)
