"""Servers that misbehave: silent, of another version, with answers that make no sense."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.agent import open_agent
from agent.errors import Temporary, Unreachable
from agent.records import Mode
from ntf_demo.demo import Playground
from protocol.addresses import NtfServer, SmpServer
from protocol.connection import Block, Connection, Outgoing, Received
from protocol.crypto import X25519PrivateKey, X25519PublicKey
from protocol.encoding import NO_ENTITY, EntityId
from protocol.ntf_commands import NTF_COMMANDS, NTF_RESPONSES, IdTkn, NtfCommand, NtfResponse, Ok, Ping, Pong
from protocol.ntf_handshake import NtfServerHandshake
from protocol.smp_messages import Ids, New, SmpMessage
from protocol.smp_messages import Pong as SmpPong
from protocol.versions import NTF_ALPN, NTF_VERSIONS, VersionRange
from smp_client.dialer import Dialer
from smp_client.errors import ClientError, ConnectFailed, HandshakeFailed, WrongIdentity
from smp_client.requests import SessionConfig
from smp_client.session import connect_ntf
from tests.agent.world import DEVICE, agent_config, verified
from tests.smp_client.peer import PeerSession, make_identity, scripted_router
from transport.server import serve
from transport.streams import TlsStream
from transport.tls import server_context

Answer = Callable[[NtfCommand], NtfResponse]
Handler = Callable[[TlsStream], Awaitable[None]]
WEAK_KEY = X25519PublicKey(bytes(32))


@asynccontextmanager
async def tls_server(handler: Handler) -> AsyncIterator[NtfServer]:
    server = await serve(handler, "127.0.0.1", 0, context=server_context(IDENTITY, [NTF_ALPN]))
    try:
        yield NtfServer(("127.0.0.1",), str(server.port), IDENTITY.identity)
    finally:
        server.close()
        await server.wait_closed()


IDENTITY = make_identity()


@asynccontextmanager
async def scripted_server(answer: Answer, versions: VersionRange = NTF_VERSIONS) -> AsyncIterator[NtfServer]:
    """A notification server whose answers a test chooses."""

    async def handle(stream: TlsStream) -> None:
        handshake = NtfServerHandshake(
            stream.session_id,
            IDENTITY.identity,
            IDENTITY.signing_key,
            X25519PrivateKey(os.urandom(32)),
            versions,
        )
        connection: Connection[NtfCommand, NtfResponse] = Connection(
            handshake, NTF_COMMANDS, NTF_RESPONSES, checks_credentials=True
        )
        stream.write(connection.data_to_send())
        while data := await stream.receive():
            for event in connection.receive_data(data):
                if isinstance(event, Block):
                    stream.write(connection.send(_answers(event.items, answer)))

    async with tls_server(handle) as address:
        yield address


def _answers(items: Sequence[object], answer: Answer) -> list[Outgoing[NtfResponse]]:
    return [
        Outgoing(item.corr_id, item.entity_id, answer(item.message))
        for item in items
        if isinstance(item, Received)
    ]


@pytest.mark.parametrize("versions", [VersionRange(1, 1), VersionRange(1, 2), VersionRange(2, 3)])
async def test_every_version_is_spoken(versions: VersionRange) -> None:
    async with scripted_server(lambda _: Pong(), versions) as address:
        session = await connect_ntf(address, Dialer())
        assert session.params.version == versions.max
        assert await session.request(NO_ENTITY, Ping()) == Pong()
        await session.close()


async def test_no_common_version() -> None:
    async with scripted_server(lambda _: Pong()) as address:
        with pytest.raises(HandshakeFailed):
            await connect_ntf(address, Dialer(), versions=VersionRange(7, 9))


async def test_silent_server() -> None:
    async def say_nothing(stream: TlsStream) -> None:
        await stream.receive()

    async with tls_server(say_nothing) as address:
        with pytest.raises(ConnectFailed, match="handshake"):
            await connect_ntf(address, Dialer(), config=SessionConfig(connect=0.5))


async def test_impostor() -> None:
    async with scripted_server(lambda _: Pong()) as address:
        impostor = NtfServer(address.hosts, address.port, bytes(32))
        with pytest.raises(WrongIdentity):
            await connect_ntf(impostor, Dialer())


async def test_garbage_instead_of_a_handshake() -> None:
    async def babble(stream: TlsStream) -> None:
        stream.write(b"\xff" * 512)
        await stream.receive()

    async with tls_server(babble) as address:
        with pytest.raises(ClientError):
            await connect_ntf(address, Dialer(), config=SessionConfig(connect=5.0))


NONSENSE = (Unreachable, Temporary)
"The wrong word is no server of ours; a weak key makes an answer unreadable, which may pass."


@pytest.mark.parametrize("answer", [Ok(), IdTkn(EntityId(b"id"), WEAK_KEY)], ids=["wrong word", "weak key"])
async def test_registration_answered_with_nonsense(tmp_path: Path, answer: NtfResponse) -> None:
    async with (
        scripted_server(lambda _: answer) as address,
        open_agent(agent_config(tmp_path)) as agent,
    ):
        with pytest.raises(NONSENSE):
            await agent.register(DEVICE, Mode.INSTANT, address)
        token = await agent.token()
        assert token is not None
        assert token.token_id is None


WEAK_IDS = Ids(recipient_id=EntityId(b"r"), sender_id=EntityId(b"s"), dh_key=WEAK_KEY)


@pytest.mark.parametrize("answer", [SmpPong(), WEAK_IDS], ids=["wrong word", "weak key"])
async def test_queue_answered_with_nonsense(tmp_path: Path, answer: SmpMessage) -> None:
    async def script(session: PeerSession) -> None:
        while commands := await session.receive():
            session.answer([(command.corr_id, command.entity_id, answer) for command in commands])

    async with scripted_router(script) as address, open_agent(agent_config(tmp_path)) as agent:
        with pytest.raises(NONSENSE):
            await agent.create_connection(address)
        assert [connection.can_receive for connection in await agent.connections()] == [False]


async def test_unreachable_servers(tmp_path: Path, unused_port: int) -> None:
    async with open_agent(agent_config(tmp_path)) as agent:
        with pytest.raises(Temporary):
            await agent.register(DEVICE, Mode.INSTANT, NtfServer(("127.0.0.1",), str(unused_port), bytes(32)))
        with pytest.raises(Temporary):
            await agent.create_connection(SmpServer(("127.0.0.1",), str(unused_port), bytes(32)))


@pytest.fixture
async def unused_port() -> int:
    """A port where nobody listens."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = int(server.sockets[0].getsockname()[1])
    server.close()
    return port


IDS = Ids(
    recipient_id=EntityId(b"r" * 24), sender_id=EntityId(b"s" * 24), dh_key=X25519PrivateKey(b"k" * 32).public
)


async def test_notifier_answered_with_nonsense(world: Playground, tmp_path: Path) -> None:
    async def script(session: PeerSession) -> None:
        while commands := await session.receive():
            session.answer(
                [(c.corr_id, c.entity_id, IDS if isinstance(c.message, New) else SmpPong()) for c in commands]
            )

    async with scripted_router(script) as address, open_agent(agent_config(tmp_path / "agent")) as agent:
        await verified(world, agent)
        await agent.create_connection(address)
        await agent.settled()
        (row,) = await agent.subscriptions()
        assert (row.action, row.status) == (None, "given up: an answer that makes no sense")
