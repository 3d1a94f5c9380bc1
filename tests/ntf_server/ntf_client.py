"""A client of the notification server, over real TLS, that can also say wrong things."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from protocol.addresses import NtfServer, SmpQueueNtf
from protocol.blocks import pad
from protocol.connection import Block, Connection, Failed, Outgoing, Received
from protocol.crypto import AuthPrivateKey, Ed25519PrivateKey, X25519PrivateKey
from protocol.device_token import DeviceToken
from protocol.encoding import NO_ENTITY, CorrId, EntityId
from protocol.ntf_commands import (
    NTF_COMMANDS,
    NTF_RESPONSES,
    IdSub,
    IdTkn,
    NtfCommand,
    NtfResponse,
    Ok,
    Snew,
    Tnew,
    Tvfy,
)
from protocol.ntf_handshake import NtfClientHandshake
from protocol.session_params import SessionParams
from protocol.versions import NTF_ALPN, NTF_VERSIONS, VersionRange
from transport.errors import ConnectionClosed
from transport.streams import TlsStream, connect
from transport.tls import client_context

DEADLINE = 60.0


class NtfClient:
    """Sends commands one batch at a time and returns their answers in order."""

    def __init__(self, stream: TlsStream, handshake: NtfClientHandshake) -> None:
        self.stream = stream
        self.connection: Connection[NtfResponse, NtfCommand] = Connection(
            handshake, NTF_RESPONSES, NTF_COMMANDS, checks_credentials=False
        )

    @classmethod
    async def open(
        cls,
        address: NtfServer,
        *,
        versions: VersionRange = NTF_VERSIONS,
        alpn: Sequence[bytes] = (NTF_ALPN,),
        key_hash: bytes | None = None,
        sock: socket.socket | None = None,
    ) -> NtfClient:
        """`key_hash`: what the client says the server's identity is, if not the truth. `sock`: connected."""
        stream = await connect(
            address.hosts[0],
            address.port_number,
            context=client_context(list(alpn)),
            identity=address.key_hash,
            now=lambda: datetime.now(UTC),
            sock=sock,
            timeout=DEADLINE,
        )
        handshake = NtfClientHandshake(
            stream.session_id, key_hash or address.key_hash, stream.peer_chain[0], versions
        )
        client = cls(stream, handshake)
        async with asyncio.timeout(DEADLINE):
            while client.connection.params is None:
                events = client.connection.receive_data(await stream.receive())
                assert not any(isinstance(event, Failed) for event in events), events
                stream.write(client.connection.data_to_send())
        return client

    @property
    def params(self) -> SessionParams:
        assert self.connection.params is not None
        return self.connection.params

    def close(self) -> None:
        self.stream.close()

    async def ask(
        self, command: NtfCommand, entity_id: EntityId = NO_ENTITY, key: AuthPrivateKey | None = None
    ) -> NtfResponse:
        (answer,) = await self.ask_many([(command, entity_id, key)])
        return answer

    async def ask_many(
        self, requests: Sequence[tuple[NtfCommand, EntityId, AuthPrivateKey | None]]
    ) -> list[NtfResponse]:
        batch = [Outgoing(CorrId(os.urandom(24)), entity, command, key) for command, entity, key in requests]
        self.stream.write(self.connection.send(batch))
        answers = await self.receive(len(batch))
        assert [answer.corr_id for answer in answers] == [outgoing.corr_id for outgoing in batch]
        assert [answer.entity_id for answer in answers] == [outgoing.entity_id for outgoing in batch]
        return [answer.message for answer in answers]

    def send_content(self, content: bytes) -> None:
        """A block with any content."""
        self.stream.write(pad(content, self.params.block_size))

    async def receive(self, count: int) -> list[Received[NtfResponse]]:
        answers: list[Received[NtfResponse]] = []
        async with asyncio.timeout(DEADLINE):
            while len(answers) < count:
                data = await self.stream.receive()
                if not data:
                    raise ConnectionClosed("the server closed the connection")
                for event in self.connection.receive_data(data):
                    assert isinstance(event, Block), event
                    for item in event.items:
                        assert isinstance(item, Received), item
                        answers.append(item)
        return answers

    async def is_closed_by_server(self) -> bool:
        async with asyncio.timeout(DEADLINE):
            while await self.stream.receive():
                pass
        return True


@dataclass
class Device:
    """A phone: its token, its keys, and what the server told it."""

    token: DeviceToken
    key: AuthPrivateKey
    dh: X25519PrivateKey
    token_id: EntityId = NO_ENTITY
    secret: bytes = b""

    @classmethod
    def make(cls, token: DeviceToken, key: AuthPrivateKey | None = None) -> Device:
        return cls(token, key or Ed25519PrivateKey(os.urandom(32)), X25519PrivateKey(os.urandom(32)))

    @property
    def tnew(self) -> Tnew:
        return Tnew(self.token, self.key.public, self.dh.public)

    async def register(self, client: NtfClient) -> IdTkn:
        answer = await client.ask(self.tnew, NO_ENTITY, self.key)
        assert isinstance(answer, IdTkn), answer
        self.token_id = answer.token_id
        self.secret = self.dh.exchange(answer.dh_key)
        return answer

    async def verify(self, client: NtfClient, code: bytes) -> None:
        assert await self.ask(client, Tvfy(code)) == Ok()

    async def ask(self, client: NtfClient, command: NtfCommand) -> NtfResponse:
        return await client.ask(command, self.token_id, self.key)

    async def subscribe(
        self, client: NtfClient, queue: SmpQueueNtf, notifier_key: AuthPrivateKey
    ) -> EntityId:
        answer = await client.ask(Snew(self.token_id, queue, notifier_key), NO_ENTITY, self.key)
        assert isinstance(answer, IdSub), answer
        return answer.subscription_id
