"""Sessions against a scripted router over real TLS."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime

import pytest

from protocol.addresses import SmpServer
from protocol.connection import Outgoing, Received
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey
from protocol.encoding import NO_CORR, NO_ENTITY, EntityId
from protocol.errors import AUTH
from protocol.smp_messages import Err, Nmsg, Nsub, Ok, Ping, Pong, Send, SmpCommand, SmpMessage, Sok
from protocol.versions import SMP_VERSIONS, VersionRange
from smp_client.dialer import Dialer
from smp_client.errors import (
    BadAnswer,
    CannotSend,
    ClientError,
    ConnectFailed,
    HandshakeFailed,
    RequestTimeout,
    SessionClosed,
    WrongIdentity,
)
from smp_client.requests import Nonsense, Request, SessionConfig
from smp_client.session import Service, SmpSession, connect_smp
from tests.smp_client.peer import PeerSession, make_identity, scripted_router
from transport.certificates import make_service
from transport.server import serve
from transport.streams import TlsStream
from transport.tls import server_context

QUICK = SessionConfig(answer=0.4, ping_after=0.1, ping_limit=0.2)


def new_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey(os.urandom(32))


def nsubs(count: int) -> list[Request[SmpCommand]]:
    return [Request(EntityId(os.urandom(24)), Nsub(), new_key()) for _ in range(count)]


async def accept_all(peer: PeerSession) -> None:
    while commands := await peer.receive():
        peer.answer([(c.corr_id, c.entity_id, _reply(c)) for c in commands])


def _reply(command: Received[SmpCommand]) -> SmpMessage:
    return Pong() if isinstance(command.message, Ping) else Sok()


async def test_one_request() -> None:
    async with scripted_router(accept_all) as server, await connect_smp(server, Dialer()) as session:
        assert await session.request(EntityId(b"q" * 24), Nsub(), new_key()) == Sok()
        assert session.params.version == SMP_VERSIONS.max
        assert session.params.service is None


async def test_answers_come_in_the_order_of_requests_whatever_the_routers_order() -> None:
    async def reverse(peer: PeerSession) -> None:
        commands: list[Received[SmpCommand]] = []
        while len(commands) < 300:
            commands += await peer.receive()
        peer.answer([(c.corr_id, c.entity_id, Sok(EntityId(c.entity_id))) for c in reversed(commands)])
        await peer.receive()

    requests = nsubs(300)
    async with scripted_router(reverse) as server, await connect_smp(server, Dialer()) as session:
        answers = await session.request_many(requests)
    assert answers == [Sok(request.entity_id) for request in requests]


async def test_error_is_an_answer_and_silence_a_timeout_of_that_request_only() -> None:
    async def script(peer: PeerSession) -> None:
        first, _, third = await peer.receive()
        peer.answer([(first.corr_id, first.entity_id, Sok()), (third.corr_id, third.entity_id, Err(AUTH))])
        await accept_all(peer)

    async with (
        scripted_router(script) as server,
        await connect_smp(server, Dialer(), config=QUICK) as session,
    ):
        first, second, third = await session.request_many(nsubs(3))
        assert (first, third) == (Sok(), Err(AUTH))
        assert isinstance(second, RequestTimeout)
        assert await session.request(EntityId(b"q"), Nsub(), new_key()) == Sok()


async def test_every_open_request_fails_when_the_router_closes() -> None:
    async def script(peer: PeerSession) -> None:
        await peer.receive()

    async with scripted_router(script) as server, await connect_smp(server, Dialer()) as session:
        answers = await session.request_many(nsubs(3))
        assert [type(answer) for answer in answers] == [SessionClosed] * 3
        assert isinstance(await session.wait_closed(), SessionClosed)
        with pytest.raises(SessionClosed):
            await session.request(EntityId(b"q"), Nsub(), new_key())


async def test_an_impossible_request_fails_alone() -> None:
    """Version 6 has no session key to make X25519 authenticators with; and one message is too long."""
    requests: list[Request[SmpCommand]] = [
        Request(EntityId(b"a"), Nsub(), new_key()),
        Request(EntityId(b"b"), Nsub(), X25519PrivateKey(os.urandom(32))),
        Request(EntityId(b"c"), Send(False, bytes(20_000))),
        Request(EntityId(b"d"), Nsub(), new_key()),
    ]
    async with (
        scripted_router(accept_all, versions=VersionRange(6, 6)) as server,
        await connect_smp(server, Dialer()) as session,
    ):
        answers = await session.request_many(requests)
    assert [type(answer) for answer in answers] == [Ok, CannotSend, CannotSend, Ok]


async def test_unreadable_answer() -> None:
    async def script(peer: PeerSession) -> None:
        (command,) = await peer.receive()
        transmission = b"\0" + bytes([24]) + command.corr_id + b"\0" + b"WHAT"
        content = b"\1" + len(transmission).to_bytes(2, "big") + transmission
        assert peer.connection._sending is not None
        peer.stream.write(peer.connection._sending.encrypt(content, 16384))
        await peer.receive()

    seen: list[tuple[Nonsense, int]] = []

    def on_nonsense(kind: Nonsense, count: int) -> None:
        seen.append((kind, count))

    async with (
        scripted_router(script) as server,
        await connect_smp(server, Dialer(), on_nonsense=on_nonsense) as session,
    ):
        with pytest.raises(BadAnswer):
            await session.request(EntityId(b"q"), Nsub(), new_key())
        assert seen == [(Nonsense.UNREADABLE, 1)]
        assert not session.is_closed


async def test_a_broken_block_ends_the_session() -> None:
    async def script(peer: PeerSession) -> None:
        peer.stream.write(bytes(16384))
        await peer.receive()

    async with scripted_router(script) as server, await connect_smp(server, Dialer()) as session:
        async with asyncio.timeout(60):
            assert "BLOCK" in str(await session.wait_closed())


def nmsgs(count: int) -> list[tuple[EntityId, SmpMessage]]:
    return [(EntityId(os.urandom(24)), Nmsg(os.urandom(24), os.urandom(144))) for _ in range(count)]


async def test_the_events_that_came_meanwhile_come_together_and_in_order() -> None:
    sent, blocks = nmsgs(1500), 20
    all_sent = asyncio.Event()

    async def script(peer: PeerSession) -> None:
        peer.events(sent)
        await peer.stream.drain()
        all_sent.set()
        await peer.receive()

    calls: list[list[Received[SmpMessage]]] = []
    received_all = asyncio.Event()

    async def on_events(events: list[Received[SmpMessage]]) -> None:
        calls.append(events)
        await all_sent.wait()
        if sum(map(len, calls)) == len(sent):
            received_all.set()

    async with (
        scripted_router(script) as server,
        await connect_smp(server, Dialer(), on_events=on_events),
        asyncio.timeout(60),
    ):
        await received_all.wait()
    assert [(event.entity_id, event.message) for call in calls for event in call] == sent
    assert len(calls) < blocks / 2


async def test_events_come_before_the_answers_in_later_blocks() -> None:
    """An END before the answer to NSUB is about an older subscription, one behind it about this one."""
    sent = nmsgs(2)

    async def script(peer: PeerSession) -> None:
        (command,) = await peer.receive()
        first, last = (Outgoing(NO_CORR, *event) for event in sent)
        answer = Outgoing(command.corr_id, command.entity_id, Ok())
        peer.stream.write(b"".join(peer.connection.send([one]) for one in (first, answer, last)))
        await peer.receive()

    answered: list[bool] = []
    received_all = asyncio.Event()

    async def on_events(events: list[Received[SmpMessage]]) -> None:
        answered.extend([batch.answers[0] is not None] * len(events))
        if len(answered) == len(sent):
            received_all.set()

    async with (
        scripted_router(script) as server,
        await connect_smp(server, Dialer(), on_events=on_events) as session,
        asyncio.timeout(60),
    ):
        batch = session.new_batch(1)
        assert await session.send(batch, nsubs(1)) == [Ok()]
        await received_all.wait()
    assert answered == [False, True]


async def test_a_slow_consumer_stops_the_router_and_its_time_is_not_the_routers() -> None:
    blocked = asyncio.Event()

    async def flood(peer: PeerSession) -> None:
        commands = await peer.receive()
        for _ in range(3000):
            peer.events(nmsgs(1))
            try:
                async with asyncio.timeout(config.answer + 1):
                    await peer.stream.drain()
            except TimeoutError:
                break
        else:
            pytest.fail("the router was never stopped")
        blocked.set()
        peer.answer([(c.corr_id, c.entity_id, Sok()) for c in commands])
        await peer.receive()

    go_on = asyncio.Event()

    async def on_events(_: list[Received[SmpMessage]]) -> None:
        await go_on.wait()

    config = SessionConfig(answer=3.0, ping_after=1.0, ping_limit=1.0)
    async with (
        scripted_router(flood) as server,
        await connect_smp(server, Dialer(), on_events=on_events, config=config) as session,
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
    ):
        request = tasks.create_task(session.request(EntityId(b"q"), Nsub(), new_key()))
        await blocked.wait()
        assert not session.is_closed
        go_on.set()
        assert await request == Sok()


async def test_ping_keeps_a_silent_connection_and_drops_a_dead_one() -> None:
    pings = 0
    dead = asyncio.Event()

    async def script(peer: PeerSession) -> None:
        nonlocal pings
        while commands := await peer.receive():
            pings += len(commands)
            if pings <= 3:
                peer.answer([(c.corr_id, NO_ENTITY, Pong()) for c in commands])
            else:
                dead.set()

    async with (
        scripted_router(script) as server,
        await connect_smp(server, Dialer(), config=QUICK) as session,
        asyncio.timeout(60),
    ):
        await dead.wait()
        assert not session.is_closed
        assert "PING" in str(await session.wait_closed())
        assert pings == 4


async def test_close_fails_what_is_open() -> None:
    async def silent(peer: PeerSession) -> None:
        await peer.receive()
        await peer.receive()

    async with scripted_router(silent) as server:
        session = await connect_smp(server, Dialer())
        async with asyncio.TaskGroup() as tasks:
            request = tasks.create_task(session.request_many(nsubs(2)))
            await asyncio.sleep(0)
            await session.close()
        assert all(isinstance(answer, ClientError) for answer in request.result())
        assert session.is_closed


async def test_what_the_router_sent_before_it_noticed_the_end_is_taken() -> None:
    """It says goodbye after the client; what it says before that is not said again."""
    taken: list[EntityId] = []
    ids = [EntityId(os.urandom(24)) for _ in range(300)]

    async def talk_on(peer: PeerSession) -> None:
        while await peer.receive():
            pass
        peer.events([(queue_id, Nmsg(bytes(24), b"x")) for queue_id in ids])

    async def take(events: list[Received[SmpMessage]]) -> None:
        taken.extend(event.entity_id for event in events)

    async with (
        scripted_router(talk_on) as server,
        await connect_smp(server, Dialer(), on_events=take) as session,
    ):
        await session.finish()
    assert taken == ids


async def test_a_router_that_does_not_notice_the_end_is_left() -> None:
    over = asyncio.Event()

    async def wait(_: PeerSession) -> None:
        await over.wait()

    config = SessionConfig(finish_limit=0.05)
    async with scripted_router(wait) as server, await connect_smp(server, Dialer(), config=config) as session:
        await session.finish()
        over.set()


async def test_service_session() -> None:
    credentials = make_service_login()
    seen: list[bytes] = []

    async def script(peer: PeerSession) -> None:
        assert peer.connection.params is not None
        assert peer.connection.params.service is not None
        while commands := await peer.receive():
            seen.extend(command.raw.service_signature or b"" for command in commands)
            peer.answer([(c.corr_id, c.entity_id, Sok()) for c in commands])

    async with (
        scripted_router(script) as server,
        await connect_smp(server, Dialer(), service=credentials) as session,
    ):
        assert session.params.service is not None
        await session.request(EntityId(b"q"), Nsub(), new_key())
        await session.request(EntityId(b"q"), Send(False, b""), new_key())
    assert [len(signature) for signature in seen] == [64, 0]


async def test_no_service_below_its_version() -> None:
    async with (
        scripted_router(accept_all, versions=VersionRange(6, 15)) as server,
        await connect_smp(server, Dialer(), service=make_service_login()) as session,
    ):
        assert session.params.service is None
        assert await session.request(EntityId(b"q"), Nsub(), new_key()) == Ok()


async def test_no_service_where_tls_did_not_ask_for_its_certificate() -> None:
    async with (
        scripted_router(accept_all, ask_client_certificate=False) as server,
        await connect_smp(server, Dialer(), service=make_service_login()) as session,
    ):
        assert session.params.service is None
        assert await session.request(EntityId(b"q"), Nsub(), new_key()) == Sok()


def make_service_login() -> Service:
    return Service(make_service(datetime.now(UTC)))


async def test_wrong_identity() -> None:
    async with scripted_router(accept_all) as server:
        other = type(server)(server.hosts, server.port, bytes(32))
        with pytest.raises(WrongIdentity):
            await connect_smp(other, Dialer())


async def test_no_common_version() -> None:
    async with scripted_router(accept_all, versions=VersionRange(19, 19)) as server:
        with pytest.raises(HandshakeFailed, match="VERSION"):
            await connect_smp(server, Dialer(), versions=VersionRange(6, 18))


async def test_a_router_that_says_nothing() -> None:
    identity = make_identity()

    async def say_nothing(stream: object) -> None:
        await asyncio.Event().wait()

    listener = await serve(say_nothing, "127.0.0.1", 0, context=server_context(identity, [b"smp/1"]))
    server = SmpServer(("127.0.0.1",), str(listener.port), identity.identity)
    with pytest.raises(ConnectFailed, match="in time"):
        await connect_smp(server, Dialer(), config=SessionConfig(connect=0.2))
    listener.close()
    await listener.wait_closed()


async def test_a_router_that_breaks_off_in_the_handshake() -> None:
    identity = make_identity()

    async def break_off(stream: TlsStream) -> None:
        assert stream._transport is not None
        stream._transport.write(b"\x17\x03\x03\0\x20" + bytes(32))  # no record of this connection
        await stream.receive()

    listener = await serve(break_off, "127.0.0.1", 0, context=server_context(identity, [b"smp/1"]))
    server = SmpServer(("127.0.0.1",), str(listener.port), identity.identity)
    with pytest.raises(SessionClosed, match="bad record"):
        await connect_smp(server, Dialer())
    listener.close()
    await listener.wait_closed()


async def test_events_that_nobody_wants_are_dropped() -> None:
    async def script(peer: PeerSession) -> None:
        peer.events(nmsgs(1))
        await accept_all(peer)

    async with scripted_router(script) as server, await connect_smp(server, Dialer()) as session:
        assert await session.request(EntityId(b"q"), Nsub(), new_key()) == Sok()


async def test_noise_is_made_on_request_only() -> None:
    """A PING on a session that has nothing else to say."""
    heard = asyncio.Event()

    async def listen(peer: PeerSession) -> None:
        while commands := await peer.receive():
            peer.answer([(ping.corr_id, ping.entity_id, Pong()) for ping in commands])
            heard.set()

    noisy = SessionConfig(noise=0.01)
    async with scripted_router(listen) as server:
        async with asyncio.timeout(60), await connect_smp(server, Dialer(), config=noisy):
            await heard.wait()
        heard.clear()
        async with await connect_smp(server, Dialer()):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(heard.wait(), 0.2)


async def test_a_session_is_no_longer_usable_after_the_with_block() -> None:
    async with scripted_router(accept_all) as server:
        session: SmpSession = await connect_smp(server, Dialer())
        async with session:
            pass
        with pytest.raises(SessionClosed, match="the session was closed"):
            await session.request(EntityId(b"q"), Nsub(), new_key())


async def test_a_router_that_reads_nothing_is_given_up() -> None:
    async def deaf(peer: PeerSession) -> None:
        peer.stream.read_limit = 0
        while True:
            peer.events(nmsgs(1))  # alive, as far as PING can tell
            await asyncio.sleep(0.05)

    requests: list[Request[SmpCommand]] = [
        Request(EntityId(b"q"), Send(False, bytes(16_000))) for _ in range(2_000)
    ]
    async with (
        scripted_router(deaf) as server,
        await connect_smp(server, Dialer(), config=QUICK) as session,
        asyncio.timeout(60),
    ):
        answers = await session.request_many(requests)
        assert {type(answer) for answer in answers} == {SessionClosed}


async def test_a_failing_consumer_ends_the_session_and_is_heard_of() -> None:
    async def script(peer: PeerSession) -> None:
        peer.events(nmsgs(1))
        await peer.receive()

    async def on_events(_: list[Received[SmpMessage]]) -> None:
        raise ArithmeticError

    async with scripted_router(script) as server:
        session = await connect_smp(server, Dialer(), on_events=on_events)
        async with asyncio.timeout(60):
            await session.wait_closed()
        with pytest.raises(ArithmeticError):
            await session.close()


async def test_a_router_that_closes_in_the_handshake() -> None:
    identity = make_identity()

    async def leave(stream: TlsStream) -> None:
        stream.close()

    listener = await serve(leave, "127.0.0.1", 0, context=server_context(identity, [b"smp/1"]))
    server = SmpServer(("127.0.0.1",), str(listener.port), identity.identity)
    with pytest.raises(ClientError):
        await connect_smp(server, Dialer())
    listener.close()
    await listener.wait_closed()
