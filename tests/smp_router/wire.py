"""A small SMP client that speaks for itself: every test sees real bytes over real TLS."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TypeVar

from protocol.addresses import SmpServer
from protocol.connection import Block, Connection, Failed, HandshakeDone, Outgoing, Received, Rejected
from protocol.crypto import AuthPrivateKey, Ed25519PrivateKey, X25519PrivateKey
from protocol.encoding import NO_ENTITY, CorrId, EntityId
from protocol.errors import HandshakeError
from protocol.smp_codec import SMP_COMMANDS, SMP_MESSAGES
from protocol.smp_handshake import ServiceLogin, ServiceRole, SmpClientHandshake
from protocol.smp_messages import (
    Ids,
    New,
    Nid,
    Nkey,
    NotifierKeys,
    QueueMode,
    SmpCommand,
    SmpMessage,
    Sok,
    Sub,
)
from protocol.versions import SMP_ALPN, SMP_VERSIONS, VersionRange
from transport import streams
from transport.certificates import Credentials
from transport.errors import ConnectionClosed
from transport.tls import client_context

DEADLINE = 60.0
Event = tuple[EntityId, SmpMessage]
M = TypeVar("M")


class WireClient:
    def __init__(self, stream: streams.TlsStream, connection: Connection[SmpMessage, SmpCommand]) -> None:
        self.stream = stream
        self.connection = connection
        self._answers: dict[CorrId, SmpMessage] = {}
        self._events: list[Event] = []

    @property
    def version(self) -> int:
        assert self.connection.params is not None
        return self.connection.params.version

    @property
    def service_id(self) -> EntityId:
        assert self.connection.params is not None
        assert self.connection.params.service is not None
        return self.connection.params.service.service_id

    def write(self, *batch: Outgoing[SmpCommand]) -> None:
        self.stream.write(self.connection.send(batch))

    async def ask(
        self,
        command: SmpCommand,
        entity_id: EntityId = NO_ENTITY,
        key: AuthPrivateKey | None = None,
        *,
        with_service: bool = False,
    ) -> SmpMessage:
        corr_id = CorrId(secrets.token_bytes(24))
        self.write(Outgoing(corr_id, entity_id, command, key, with_service))
        return await self.answer(corr_id)

    async def answer(self, corr_id: CorrId) -> SmpMessage:
        while corr_id not in self._answers:
            await self._receive()
        return self._answers.pop(corr_id)

    async def event(self) -> Event:
        while not self._events:
            await self._receive()
        return self._events.pop(0)

    async def events(self, count: int) -> list[Event]:
        return [await self.event() for _ in range(count)]

    def taken_events(self) -> list[Event]:
        """What has come so far."""
        events, self._events = self._events, []
        return events

    async def silent(self) -> bool:
        """True if no event came before the answer to a PING that is sent now."""
        await self.ask(SMP_COMMANDS.decode(b"PING", self.version))
        return not self._events

    async def closed(self) -> bool:
        """Wait until the router closes the connection."""
        async with asyncio.timeout(DEADLINE):
            try:
                while await self.stream.receive():
                    pass
            except ConnectionClosed:
                pass
        return True

    async def _receive(self) -> None:
        async with asyncio.timeout(DEADLINE):
            data = await self.stream.receive()
        if not data:
            raise ConnectionResetError
        for event in self.connection.receive_data(data):
            assert isinstance(event, Block), event
            self._keep_block(event.items)

    def _keep_block(self, items: Sequence[Received[SmpMessage] | Rejected]) -> None:
        for item in items:
            self._keep(item)

    def _keep(self, item: Received[SmpMessage] | Rejected) -> None:
        assert isinstance(item, Received), item
        if item.corr_id:
            self._answers[item.corr_id] = item.message
        else:
            self._events.append((item.entity_id, item.message))


async def tls(
    server: SmpServer,
    *,
    alpn: bytes | None = SMP_ALPN,
    service: Credentials | None = None,
    source: str | None = None,
) -> streams.TlsStream:
    """`source`: one of this machine's many addresses, to come from."""
    sock = None
    if source is not None:
        sock = socket.create_connection((server.hosts[0], server.port_number), source_address=(source, 0))
        sock.setblocking(False)
    return await streams.connect(
        server.hosts[0],
        server.port_number,
        context=client_context([alpn] if alpn else [], service),
        identity=server.key_hash,
        now=lambda: datetime.now(UTC),
        timeout=DEADLINE,
        sock=sock,
    )


def login(credentials: Credentials, role: ServiceRole = ServiceRole.NOTIFIER) -> ServiceLogin:
    session_key = Ed25519PrivateKey(secrets.token_bytes(32))
    return ServiceLogin(role, credentials.chain, credentials.signing_key, session_key)


@asynccontextmanager
async def connected(
    server: SmpServer,
    *,
    versions: VersionRange = SMP_VERSIONS,
    encrypt: bool = True,
    service: Credentials | None = None,
    role: ServiceRole = ServiceRole.NOTIFIER,
    alpn: bytes | None = SMP_ALPN,
    change_login: Callable[[ServiceLogin], ServiceLogin] = lambda login: login,
    source: str | None = None,
) -> AsyncIterator[WireClient]:
    """A client after its handshake; HandshakeError if the router refuses it."""
    stream = await tls(server, alpn=alpn, service=service, source=source)
    try:
        handshake = SmpClientHandshake(
            stream.session_id,
            server.key_hash,
            stream.peer_chain,
            X25519PrivateKey(secrets.token_bytes(32)) if encrypt else None,
            None if service is None else change_login(login(service, role)),
            versions,
        )
        yield WireClient(stream, await _shake_hands(stream, handshake))
    finally:
        stream.abort()
        await stream.wait_closed()


async def _shake_hands(
    stream: streams.TlsStream, handshake: SmpClientHandshake
) -> Connection[SmpMessage, SmpCommand]:
    connection: Connection[SmpMessage, SmpCommand] = Connection(
        handshake, SMP_MESSAGES, SMP_COMMANDS, checks_credentials=False
    )
    async with asyncio.timeout(DEADLINE):
        while data := await stream.receive():
            for event in connection.receive_data(data):
                if isinstance(event, Failed):
                    raise HandshakeError(event.error)
                assert isinstance(event, HandshakeDone)
            stream.write(connection.data_to_send())
            if connection.params is not None:
                return connection
    raise ConnectionResetError


class TestQueue:
    """A queue made by commands, with what its recipient knows."""

    __test__ = False

    def __init__(self, key: AuthPrivateKey, ids: Ids, secret: bytes) -> None:
        self.key = key
        self.recipient_id = ids.recipient_id
        self.sender_id = ids.sender_id
        self.secret = secret
        self.ids = ids
        self.notifier_id = NO_ENTITY
        self.notifier_key = new_key()
        self.notifier_secret = b""


def new_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey(secrets.token_bytes(32))


def new_dh() -> X25519PrivateKey:
    return X25519PrivateKey(secrets.token_bytes(32))


async def create_queue(
    client: WireClient,
    *,
    key: AuthPrivateKey | None = None,
    subscribe: bool = False,
    mode: QueueMode | None = QueueMode.MESSAGING,
    with_service: bool = False,
) -> TestQueue:
    key, dh = key or new_key(), new_dh()
    command = New(recipient_key=key.public, dh_key=dh.public, subscribe=subscribe, mode=mode)
    ids = await client.ask(command, key=key, with_service=with_service)
    assert isinstance(ids, Ids), ids
    return TestQueue(key, ids, dh.exchange(ids.dh_key))


async def add_notifier(client: WireClient, queue: TestQueue) -> None:
    dh = new_dh()
    nid = await client.ask(
        Nkey(NotifierKeys(queue.notifier_key.public, dh.public)), queue.recipient_id, queue.key
    )
    assert isinstance(nid, Nid), nid
    queue.notifier_id = nid.ids.notifier_id
    queue.notifier_secret = dh.exchange(nid.ids.dh_key)


async def first_message(client: WireClient, queue: TestQueue) -> SmpMessage:
    """Subscribe a queue that has a message: it comes behind the answer."""
    assert await client.ask(Sub(), queue.recipient_id, queue.key) == Sok()
    entity_id, message = await client.event()
    assert entity_id == queue.recipient_id
    return message


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what other tasks will bring about."""
    async with asyncio.timeout(DEADLINE):
        while not condition():  # conditions here have no event
            await asyncio.sleep(0.005)


async def within(awaitable: Awaitable[M]) -> M:
    async with asyncio.timeout(DEADLINE):
        return await awaitable
