"""A router of which every move is scripted: real TLS, real handshake, answers chosen by the test."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from protocol.addresses import SmpServer
from protocol.connection import Block, Connection, Outgoing, Received
from protocol.crypto import X25519PrivateKey
from protocol.encoding import NO_CORR, CorrId, EntityId
from protocol.smp_codec import SMP_COMMANDS, SMP_MESSAGES
from protocol.smp_handshake import ServiceRole, SmpServerHandshake
from protocol.smp_messages import SmpCommand, SmpMessage
from protocol.versions import SMP_ALPN, SMP_VERSIONS, VersionRange
from transport.certificates import Credentials, KeyAlgorithm, make_ca, make_online
from transport.server import serve
from transport.streams import TlsStream
from transport.tls import server_context


class PeerSession:
    """The router's side of one connection."""

    def __init__(
        self,
        stream: TlsStream,
        connection: Connection[SmpCommand, SmpMessage],
        early: list[Block[SmpCommand]],
    ) -> None:
        self.stream = stream
        self.connection = connection
        self._blocks = early

    async def receive(self) -> list[Received[SmpCommand]]:
        """The commands of the next block; empty when the client has gone."""
        while not self._blocks:
            data = await self.stream.receive()
            if not data:
                return []
            events = self.connection.receive_data(data)
            self._blocks += [event for event in events if isinstance(event, Block)]
        return [item for item in self._blocks.pop(0).items if isinstance(item, Received)]

    def answer(self, answers: Sequence[tuple[CorrId, EntityId, SmpMessage]]) -> None:
        self.stream.write(self.connection.send(Outgoing(*answer) for answer in answers))

    def events(self, events: Sequence[tuple[EntityId, SmpMessage]]) -> None:
        self.answer([(NO_CORR, entity_id, message) for entity_id, message in events])


Script = Callable[[PeerSession], Awaitable[None]]


def make_identity(algorithm: KeyAlgorithm = KeyAlgorithm.ED25519) -> Credentials:
    now = datetime.now(UTC)
    ca, ca_key = make_ca(algorithm, "test router", now)
    return make_online(ca, ca_key, KeyAlgorithm.ED25519, "localhost", now)


@asynccontextmanager
async def scripted_router(
    script: Script,
    *,
    versions: VersionRange = SMP_VERSIONS,
    identity: Credentials | None = None,
    port: int = 0,
    ask_client_certificate: bool = True,
    service_id: Callable[[bytes, ServiceRole], EntityId] = lambda fingerprint, _: EntityId(fingerprint[:24]),
) -> AsyncIterator[SmpServer]:
    """Runs `script` for each client that finished its handshake; gives the router's address."""
    credentials = identity or make_identity()

    async def handle(stream: TlsStream) -> None:
        handshake = SmpServerHandshake(
            stream.session_id,
            credentials.chain,
            credentials.signing_key,
            X25519PrivateKey(os.urandom(32)),
            client_chain=stream.peer_chain,
            service_id=service_id,
            versions=versions,
        )
        connection = Connection(handshake, SMP_COMMANDS, SMP_MESSAGES, checks_credentials=True)
        stream.write(connection.data_to_send())
        while connection.params is None:
            data = await stream.receive()
            if not data:
                return
            events = connection.receive_data(data)
            stream.write(connection.data_to_send())
        await script(PeerSession(stream, connection, [event for event in events if isinstance(event, Block)]))

    context = server_context(credentials, [SMP_ALPN], ask_client_certificate=ask_client_certificate)
    server = await serve(handle, "127.0.0.1", port, context=context)
    try:
        yield SmpServer(("127.0.0.1",), str(server.port), credentials.identity)
    finally:
        server.close()
        await server.wait_closed()
