"""Routes through a proxy that lies, and to destinations that mix up their answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest

from protocol.addresses import SmpServer
from protocol.blocks import pack_batches
from protocol.connection import Outgoing, write_item
from protocol.crypto import KEY_SIZE, X25519PrivateKey, X25519PublicKey
from protocol.encoding import CorrId, EntityId
from protocol.errors import INTERNAL, PROXY_NO_SESSION, proxy_broker_error
from protocol.proxy import ClientLayer, ForwardedAnswer, open_forwarded, seal_forwarded_answer
from protocol.session_params import smp_params
from protocol.signed_key import sign_key
from protocol.smp_codec import SMP_MESSAGES
from protocol.smp_messages import (
    Err,
    Ok,
    Pfwd,
    Pkey,
    Pong,
    Pres,
    Prxy,
    Rfwd,
    Rres,
    Send,
    SmpMessage,
)
from protocol.versions import SMP_BLOCK_SIZE, SMP_PROXY, SMP_VERSIONS, VersionRange
from smp_client.dialer import Dialer
from smp_client.errors import BadAnswer, WrongIdentity
from smp_client.proxy import Command, ProxyConfig, ProxyPolicy, Route, Sender, open_route
from smp_client.session import SmpSession, connect_smp
from smp_router.config import RouterConfig
from smp_router.router import Router
from tests.smp_client.peer import PeerSession, make_identity, scripted_router
from tests.smp_router.wire import connected
from transport.certificates import Credentials

QUEUE = EntityId(b"q" * 24)
OTHER = CorrId(b"o" * 24)
HERE = VersionRange(SMP_PROXY, SMP_VERSIONS.max)


def utc_now() -> datetime:
    return datetime.now(UTC)


def pkey_of(
    credentials: Credentials, *, signer: Credentials | None = None, versions: VersionRange = HERE
) -> Pkey:
    key = X25519PrivateKey(os.urandom(KEY_SIZE)).public
    signed = sign_key((signer or credentials).signing_key, key)
    return Pkey(os.urandom(32), versions, credentials.chain, signed)


@dataclass
class Proxy:
    """Answers PRXY with what it is given, and forwards nothing."""

    pkey: SmpMessage
    answers: Sequence[SmpMessage] = ()
    forwarded: list[Pfwd] = field(default_factory=list)
    corr_ids: list[CorrId] = field(default_factory=list)
    asked: int = 0

    async def __call__(self, session: PeerSession) -> None:
        answers = iter(self.answers)
        while commands := await session.receive():
            for command in commands:
                if isinstance(command.message, Prxy):
                    self.asked += 1
                    answer: SmpMessage = self.pkey
                else:
                    assert isinstance(command.message, Pfwd)
                    self.forwarded.append(command.message)
                    self.corr_ids.append(command.corr_id)
                    answer = next(answers, Err(INTERNAL))
                session.answer([(command.corr_id, command.entity_id, answer)])


def address_of(credentials: Credentials) -> SmpServer:
    return SmpServer(("destination.example",), "", credentials.identity)


async def route_of(session: SmpSession, destination: Credentials) -> Route | Err:
    return await open_route(session, address_of(destination), None, utc_now)


async def test_a_proxy_cannot_put_itself_in_the_routers_place() -> None:
    """The chain in PKEY must be that of the router that was asked for, and the key signed by it."""
    right, other = make_identity(), make_identity()
    proxy = Proxy(pkey_of(other))
    async with scripted_router(proxy) as server, await connect_smp(server, Dialer()) as session:
        with pytest.raises(WrongIdentity):
            await route_of(session, right)
        proxy.pkey = pkey_of(right, signer=other)
        with pytest.raises(WrongIdentity):
            await route_of(session, right)
        proxy.pkey = pkey_of(right)
        assert isinstance(await route_of(session, right), Route)


async def test_every_command_has_a_key_of_its_own() -> None:
    """Also one that is sent again: otherwise the destination could tell whose commands belong together."""
    destination = make_identity()
    lost = [Err(PROXY_NO_SESSION), Err(INTERNAL)]
    proxy = Proxy(pkey_of(destination), [Err(INTERNAL)] * 5 + lost)
    async with scripted_router(proxy) as server, await connect_smp(server, Dialer()) as session:

        async def sessions(_: SmpServer) -> SmpSession:
            return session

        sender = Sender(sessions, ProxyConfig(policy=ProxyPolicy.ALWAYS, proxies=(server,)))
        corr_id = CorrId(os.urandom(24))
        for _ in range(6):
            await sender.request(address_of(destination), QUEUE, Send(True, b"hello"), corr_id=corr_id)
    keys = [command.key for command in proxy.forwarded]
    assert len(keys) == 7
    assert len(set(keys)) == 7
    assert proxy.corr_ids == [corr_id] * 7
    assert proxy.asked == 2  # one route for all, another one after it was lost


async def test_a_route_ends_with_the_session_of_its_proxy() -> None:
    destination = make_identity()
    proxy = Proxy(pkey_of(destination))
    async with scripted_router(proxy) as server:
        opened = [await connect_smp(server, Dialer()) for _ in range(2)]

        async def sessions(_: SmpServer) -> SmpSession:
            return next(session for session in opened if not session.is_closed)

        sender = Sender(sessions, ProxyConfig(policy=ProxyPolicy.ALWAYS, proxies=(server,)))
        for session in opened:
            answer = await sender.request(address_of(destination), QUEUE, Send(True, b"hello"))
            assert answer == Err(INTERNAL)
            await session.close()
    assert proxy.asked == 2


async def test_a_proxy_that_answers_something_else() -> None:
    destination = make_identity()
    proxy = Proxy(Ok(), [Pong()])
    async with scripted_router(proxy) as server, await connect_smp(server, Dialer()) as session:
        with pytest.raises(BadAnswer):
            await route_of(session, destination)
        proxy.pkey = pkey_of(destination)
        route = await route_of(session, destination)
        assert isinstance(route, Route)
        with pytest.raises(BadAnswer):
            await route.request(Command(CorrId(os.urandom(24)), QUEUE, Send(True, b"hello"), None))


def written(corr_id: CorrId) -> bytes:
    return write_item(smp_params(SMP_VERSIONS.max, b""), Outgoing(corr_id, QUEUE, Ok()), SMP_MESSAGES)


@pytest.mark.parametrize(
    ("answered", "is_read"),
    [
        (lambda corr_id: [written(corr_id)], True),
        (lambda _: [written(OTHER)], False),
        (lambda corr_id: [written(corr_id)] * 2, False),
        (lambda _: [b"no transmission"], False),
    ],
    ids=["right", "to another command", "twice", "unreadable"],
)
async def test_an_answer_of_the_destination_is_checked(
    answered: Callable[[CorrId], list[bytes]], is_read: bool
) -> None:
    """It opens, so it is the destination's: that it is one, and to this command, is checked as well."""
    destination, relay = make_identity(), X25519PrivateKey(os.urandom(KEY_SIZE))
    pkey = Pkey(os.urandom(32), HERE, destination.chain, sign_key(destination.signing_key, relay.public))

    async def proxy(session: PeerSession) -> None:
        while commands := await session.receive():
            for command in commands:
                answer: SmpMessage = pkey
                if isinstance(command.message, Pfwd):
                    layer = ClientLayer.agree(relay, command.message.key, command.corr_id)
                    (content,) = pack_batches(answered(command.corr_id), SMP_BLOCK_SIZE)
                    answer = Pres(layer.seal_answer(content))
                session.answer([(command.corr_id, command.entity_id, answer)])

    async with scripted_router(proxy) as server, await connect_smp(server, Dialer()) as session:
        route = await route_of(session, destination)
        assert isinstance(route, Route)
        request = route.request(Command(CorrId(os.urandom(24)), QUEUE, Send(True, b"hello"), None))
        if is_read:
            assert await request == Ok()
        else:
            with pytest.raises(BadAnswer):
                await request


async def test_versions_that_do_not_meet() -> None:
    destination = make_identity()
    future = VersionRange(SMP_VERSIONS.max + 1, SMP_VERSIONS.max + 2)
    proxy = Proxy(pkey_of(destination, versions=future))
    async with scripted_router(proxy) as server, await connect_smp(server, Dialer()) as session:
        assert await route_of(session, destination) == Err(proxy_broker_error(b"TRANSPORT VERSION"))


def test_a_router_is_its_own_proxy_only_if_there_is_no_other() -> None:
    one, other = (SmpServer((f"{name}.example",), "", bytes(32)) for name in ("one", "other"))
    both = ProxyConfig(proxies=(one, other))
    assert (both.proxy_for(one), both.proxy_for(other)) == (other, one)
    assert ProxyConfig(proxies=(one,)).proxy_for(one) == one
    assert ProxyConfig().proxy_for(one) is None


Altered = Callable[[CorrId, CorrId], tuple[CorrId, CorrId]]


@pytest.mark.parametrize(
    ("altered", "told"),
    [
        (lambda inner, outer: (inner, outer), None),
        (lambda inner, outer: (OTHER, outer), b"to something else"),
        (lambda inner, outer: (inner, OTHER), b"does not open"),
    ],
    ids=["right", "of another command", "sealed for another command"],
)
async def test_an_answer_must_be_to_its_command(altered: Altered, told: bytes | None) -> None:
    """A destination that answers one command with what belongs to another; the proxy notices."""

    async def destination(session: PeerSession) -> None:
        while commands := await session.receive():
            for command in commands:
                assert isinstance(command.message, Rfwd)
                params = session.connection.params
                assert params is not None
                assert params.shared_secret is not None
                opened = open_forwarded(params.shared_secret, command.corr_id, command.message.body)
                inner, outer = altered(opened.corr_id, command.corr_id)
                sealed = seal_forwarded_answer(params.shared_secret, outer, ForwardedAnswer(inner, b"?"))
                session.answer([(command.corr_id, command.entity_id, Rres(sealed))])

    config = RouterConfig(private_relays=True)
    key: X25519PublicKey = X25519PrivateKey(os.urandom(KEY_SIZE)).public
    async with (
        scripted_router(destination) as server,
        Router.start(config) as proxy,
        connected(proxy.address) as client,
    ):
        relay = await client.ask(Prxy(server))
        assert isinstance(relay, Pkey)
        answer = await client.ask(Pfwd(SMP_VERSIONS.max, key, b"sealed"), EntityId(relay.session_id))
    if told is None:
        assert not isinstance(answer, Err)
    else:
        assert isinstance(answer, Err)
        assert told in answer.error.text
