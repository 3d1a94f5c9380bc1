"""Commands through a proxy: three routers over real TLS, every answer lost once, slow and hostile peers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest

from protocol.addresses import SmpServer
from protocol.blocks import pack_batches
from protocol.connection import Outgoing
from protocol.crypto import AuthPrivateKey, X25519PublicKey
from protocol.encoding import NO_CORR, NO_ENTITY, CorrId, EntityId, short
from protocol.errors import (
    AUTH,
    BLOCK,
    CMD_NO_ENTITY,
    CMD_PROHIBITED,
    CMD_UNKNOWN,
    CRYPTO,
    INTERNAL,
    LARGE_MSG,
    NAME_NO_RESOLVER,
    PROXY_BASIC_AUTH,
    PROXY_NO_SESSION,
    ErrorType,
    proxy_broker_error,
    proxy_protocol_error,
)
from protocol.proxy import ClientLayer
from protocol.session_params import SessionParams, smp_params
from protocol.signed_key import open_signed_key
from protocol.smp_codec import SMP_COMMANDS
from protocol.smp_messages import (
    End,
    Err,
    Lget,
    Lkey,
    Lnk,
    Msg,
    Ok,
    Pfwd,
    Ping,
    Pkey,
    Pong,
    Pres,
    Prxy,
    QueueMode,
    Rfwd,
    Rslv,
    Send,
    Skey,
    SmpCommand,
    SmpMessage,
)
from protocol.transmission import body, encode_transmission, parse_transmission
from protocol.versions import SMP_BLOCK_SIZE, SMP_VERSIONS, VersionRange
from smp_client import requests as smp_requests
from smp_client.dialer import Dialer
from smp_client.errors import ClientError
from smp_client.proxy import ProxyConfig, ProxyPolicy, Sender
from smp_client.requests import SESSION_DEFAULTS, SessionConfig
from smp_client.session import SmpSession, connect_smp
from smp_router.broker import Broker
from smp_router.client import Client
from smp_router.commands import HANDLERS, Response
from smp_router.config import RouterConfig
from smp_router.proxy_commands import MAX_CONNECTING_PER_CLIENT
from smp_router.router import Router
from tests.smp_router.test_links import DATA, with_link
from tests.smp_router.test_recipients import text
from tests.smp_router.wire import (
    WireClient,
    connected,
    create_queue,
    eventually,
    new_dh,
    new_key,
)

LOCAL = RouterConfig(private_relays=True)
NETWORK = Err(proxy_broker_error(b"NETWORK"))
TIMEOUT = Err(proxy_broker_error(b"TIMEOUT"))


@dataclass
class Pool:
    """Sessions of one sender, made anew when they are closed."""

    stack: AsyncExitStack
    sessions: dict[SmpServer, SmpSession] = field(default_factory=dict)
    config: SessionConfig = SESSION_DEFAULTS

    async def __call__(self, server: SmpServer) -> SmpSession:
        session = self.sessions.get(server)
        if session is None or session.is_closed:
            session = await connect_smp(server, Dialer(), config=self.config)
            self.sessions[server] = await self.stack.enter_async_context(session)
        return session


@asynccontextmanager
async def sender(config: ProxyConfig, answer: float = 30.0) -> AsyncIterator[Sender]:
    async with AsyncExitStack() as stack:
        yield Sender(Pool(stack, config=SessionConfig(answer=answer)), config)


def always(*proxies: Router) -> ProxyConfig:
    return ProxyConfig(policy=ProxyPolicy.ALWAYS, proxies=tuple(proxy.address for proxy in proxies))


@asynccontextmanager
async def routers(count: int, config: RouterConfig | None = None) -> AsyncIterator[list[Router]]:
    async with AsyncExitStack() as stack:
        config = replace(config or RouterConfig(), private_relays=True)
        yield [await stack.enter_async_context(Router.start(config)) for _ in range(count)]


async def test_delivery_over_three_routers() -> None:
    """Alice's queue and Bob's are on routers of their own; both send through Carol's, which sees neither."""
    async with (
        routers(3) as (alices, bobs, carols),
        connected(alices.address) as alice,
        connected(bobs.address) as bob,
        sender(always(carols)) as through,
    ):
        for owner, router in ((alice, alices), (bob, bobs)):
            queue, key = await create_queue(owner, subscribe=True), new_key()
            assert await through.request(router.address, queue.sender_id, Skey(key.public), key) == Ok()
            for message in (b"one", b"two"):
                sent = Send(True, message)
                assert await through.request(router.address, queue.sender_id, sent, key) == Ok()
            _, received = await owner.event()
            assert text(queue, received) == b"one"
            refused = await through.request(router.address, queue.sender_id, Send(True, b""), new_key())
            assert refused == Err(AUTH)
        assert (alices.connections, bobs.connections) == (2, 2)  # the owner and the proxy, once
        assert len(carols.state.queues) == 0


@pytest.mark.parametrize("key", [new_key(), new_dh()], ids=["signed", "authenticated"])
async def test_links_through_a_proxy(key: AuthPrivateKey) -> None:
    async with (
        routers(2) as (owners, proxy),
        connected(owners.address) as owner,
        sender(always(proxy)) as through,
    ):
        queue, link_id = await with_link(owner, QueueMode.MESSAGING)
        found = await through.request(owners.address, link_id, Lkey(key.public), key)
        assert found == Lnk(queue.sender_id, DATA)
        assert await through.request(owners.address, queue.sender_id, Send(False, b""), key) == Ok()
        queue, link_id = await with_link(owner, QueueMode.CONTACT)
        assert await through.request(owners.address, link_id, Lget()) == Lnk(queue.sender_id, DATA)


async def test_policies() -> None:
    async with routers(2) as (owners, proxy), connected(owners.address) as owner:
        queue, server = await create_queue(owner), owners.address
        for policy, known, forwarded in (
            (ProxyPolicy.NEVER, (), False),
            (ProxyPolicy.UNKNOWN, (server,), False),
            (ProxyPolicy.UNKNOWN, (), True),
            (ProxyPolicy.ALWAYS, (server,), True),
        ):
            before = proxy.counts["commands_forwarded"]
            config = ProxyConfig(policy=policy, proxies=(proxy.address,), known=known)
            async with sender(config) as chosen:
                assert await chosen.request(server, queue.sender_id, Send(False, b"")) == Ok()
            assert (proxy.counts["commands_forwarded"] > before) is forwarded


async def test_fall_back() -> None:
    """Only where no proxy can reach a router at all; a failure that passes does not show the address."""
    async with Router.start(versions=VersionRange(6, 7)) as old, Router.start(LOCAL) as proxy:
        async with connected(old.address) as owner:
            queue = await create_queue(owner, mode=None)
            allowed = replace(always(proxy), fall_back=True)
            for config, answer in (
                (always(proxy), Err(proxy_broker_error(b"TRANSPORT VERSION"))),
                (always(), Err(proxy_broker_error(b"HOST"))),
                (allowed, Ok()),
                (replace(allowed, proxies=()), Ok()),
            ):
                async with sender(config) as chosen:
                    assert await chosen.request(old.address, queue.sender_id, Send(False, b"")) == answer
        await old.stop()
        async with sender(replace(always(proxy), fall_back=True)) as chosen:
            assert await chosen.request(old.address, queue.sender_id, Send(False, b"")) == NETWORK


async def attempt(asked: Awaitable[SmpMessage]) -> SmpMessage | None:
    """None if there was no answer, or only the proxy's that it has none."""
    try:
        answer = await asked
    except ClientError:
        return None
    return None if answer in (TIMEOUT, NETWORK) else answer


async def test_every_answer_is_lost_once() -> None:
    """The command is sent again with the same correlation id, over whatever still works: no second copy."""
    config = RouterConfig(relay_timeout=0.5)
    async with (
        routers(2, config) as (owners, proxy),
        connected(owners.address) as owner,
        sender(always(proxy), answer=0.6) as through,
    ):
        queue, key, server = await create_queue(owner), new_key(), owners.address
        commands: list[Skey | Send] = [Skey(key.public), Send(False, b"message")]
        for lossy, cut, command in product((proxy, owners), (False, True), commands):
            corr_id = CorrId(secrets.token_bytes(24))

            async def ask(command: Skey | Send = command, corr_id: CorrId = corr_id) -> SmpMessage | None:
                return await attempt(through.request(server, queue.sender_id, command, key, corr_id=corr_id))

            lossy.faults.lose_answers()
            before = owners.state.stored_messages
            assert await ask() is None
            lossy.faults.lose_answers(False)
            if cut:
                lossy.faults.drop_connections()
            assert await ask() == Ok() or await ask() == Ok()  # a cut connection may be noticed late
            assert await ask() == Ok()
            assert owners.state.stored_messages - before == isinstance(command, Send)
        await eventually(lambda: proxy.relays_waiting == 0)
    await eventually(lambda: owners.connections == 0)


async def test_refusals_of_the_destination_are_told_as_such() -> None:
    """What it answers to the proxy, not to the client; and a session that it ended is asked for again."""
    async with (
        routers(2) as (owners, proxy),
        connected(owners.address) as owner,
        sender(always(proxy)) as through,
    ):
        queue, server = await create_queue(owner), owners.address
        owners.faults.answer_errors("RFWD", INTERNAL, count=1)
        refused = await through.request(server, queue.sender_id, Send(False, b""))
        assert refused == Err(proxy_protocol_error(INTERNAL))
        assert await through.request(server, queue.sender_id, Send(False, b"")) == Ok()
        owners.faults.drop_connections()
        await eventually(lambda: owners.connections == 0)
        assert await attempt(through.request(server, queue.sender_id, Send(False, b""))) in (Ok(), None)
        assert await through.request(server, queue.sender_id, Send(False, b"")) == Ok()


async def test_a_slow_destination_holds_up_nobody() -> None:
    config = RouterConfig(relay_timeout=20)
    async with (
        routers(3, config) as (slow, quick, proxy),
        connected(slow.address) as slow_owner,
        connected(quick.address) as quick_owner,
        sender(always(proxy)) as through,
        asyncio.TaskGroup() as tasks,
    ):
        slow_queue, quick_queue = await create_queue(slow_owner), await create_queue(quick_owner)
        assert await through.request(slow.address, slow_queue.sender_id, Send(False, b"")) == Ok()
        slow.faults.black_hole()
        held = tasks.create_task(through.request(slow.address, slow_queue.sender_id, Send(False, b"")))
        await eventually(lambda: proxy.relays_waiting == 1)
        for _ in range(20):
            assert await through.request(quick.address, quick_queue.sender_id, Send(False, b"")) == Ok()
        assert not held.done()
        slow.faults.black_hole(False)
        slow.faults.drop_connections()
        assert await held == NETWORK


async def test_what_is_under_way_has_limits() -> None:
    config = RouterConfig(max_forwarded=2, relay_timeout=20)
    async with routers(2, config) as (slow, proxy), connected(proxy.address) as client:
        relay = await client.ask(Prxy(slow.address))
        assert isinstance(relay, Pkey)
        slow.faults.black_hole()
        forward = Pfwd(19, new_dh().public, bytes(100))
        for _ in range(2):
            corr_id = CorrId(secrets.token_bytes(24))
            client.write(Outgoing(corr_id, EntityId(relay.session_id), forward))
        await eventually(lambda: proxy.relays_waiting == 2)
        assert await client.ask(forward, EntityId(relay.session_id)) == TIMEOUT
        assert await client.ask(Ping()) == Pong()
    await eventually(lambda: proxy.relays_waiting == 0)


async def test_sessions_with_routers_are_few_and_end() -> None:
    config = replace(LOCAL, max_relays=1, relay_idle=0.01, expiry_interval=0.01)
    async with (
        routers(2) as (first, second),
        Router.start(config) as proxy,
        connected(proxy.address) as client,
    ):
        one = await client.ask(Prxy(first.address))
        assert isinstance(one, Pkey)
        assert isinstance(await client.ask(Prxy(second.address)), Pkey)
        forward = Pfwd(19, new_dh().public, b"")
        assert await client.ask(forward, EntityId(one.session_id)) == Err(PROXY_NO_SESSION)
        await eventually(lambda: first.connections + second.connections == 0)


async def test_an_address_has_a_share_of_the_sessions_with_routers() -> None:
    """A client that names many routers, and keeps them busy, takes no session of others."""
    config = replace(LOCAL, max_relays=4)
    async with (
        routers(3) as (first, second, third),
        Router.start(config) as proxy,
        connected(proxy.address) as hostile,
        connected(proxy.address, source="127.0.0.2") as honest,
    ):
        theirs = await honest.ask(Prxy(first.address))
        assert isinstance(theirs, Pkey)
        assert isinstance(await hostile.ask(Prxy(second.address)), Pkey)
        own = await hostile.ask(Prxy(third.address))  # instead of the one before
        assert isinstance(own, Pkey)
        assert proxy.relays == 2
        await eventually(lambda: second.connections == 0)
        third.faults.black_hole()
        forward = Pfwd(19, new_dh().public, bytes(100))
        hostile.write(Outgoing(CorrId(secrets.token_bytes(24)), EntityId(own.session_id), forward))
        await eventually(lambda: proxy.relays_waiting == 1)
        assert await hostile.ask(Prxy(second.address)) == TIMEOUT
        assert await honest.ask(Prxy(first.address)) == theirs
        assert first.connections == 1


async def test_a_router_that_sends_events_to_a_proxy_is_left(router: Router) -> None:
    """It subscribed to nothing."""
    async with Router.start(LOCAL) as proxy, connected(proxy.address) as client:
        assert isinstance(await client.ask(Prxy(router.address)), Pkey)
        (session,) = router._sessions
        await eventually(lambda: session.client is not None)
        assert session.client is not None
        session.client.push(
            [Outgoing(NO_CORR, EntityId(bytes(24)), End())] * (smp_requests.MOST_NONSENSE + 200)
        )
        await eventually(lambda: router.connections == 0)
        assert isinstance(await client.ask(Prxy(router.address)), Pkey)


async def test_many_ask_for_the_same_router_at_once() -> None:
    async with routers(2) as (owners, proxy), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(proxy.address)) for _ in range(5)]
        address = owners.address
        spelled = [SmpServer((host,), address.port, address.key_hash) for host in ("localhost", "LocalHost.")]
        servers = [*spelled, *spelled, spelled[0]]
        asked = (client.ask(Prxy(server)) for client, server in zip(clients, servers, strict=True))
        keys = await asyncio.gather(*asked)
        assert len({key.session_id for key in keys if isinstance(key, Pkey)}) == 1
        assert owners.connections == 1


async def test_many_commands_at_once_share_one_route() -> None:
    """More than a proxy lets one client connect at a time."""
    async with routers(2) as (owners, proxy), connected(owners.address) as owner:
        queue = await create_queue(owner)
        async with sender(always(proxy)) as through:
            await through.request(proxy.address, EntityId(bytes(24)), Send(False, b""))  # the session exists
            sends = [Send(False, b"%d" % number) for number in range(3 * MAX_CONNECTING_PER_CLIENT)]
            answers = await asyncio.gather(
                *(through.request(owners.address, queue.sender_id, send) for send in sends)
            )
        assert answers == [Ok()] * len(sends)


async def test_private_networks_are_not_for_clients(router: Router) -> None:
    async with connected(router.address) as client:
        assert await client.ask(Prxy(router.address)) == NETWORK
    assert router.counts["connections"] == 1


async def test_routers_that_cannot_be_reached() -> None:
    closed = SmpServer(("127.0.0.1",), "1", bytes(32))
    onion = SmpServer(("beccx4yfxxbvyhqypaavemqurytl6hozr47wfc7uuecacjqdvwpw2xid.onion",), "", bytes(32))
    unknown = SmpServer(("nowhere.invalid",), "", bytes(32))
    async with Router.start(LOCAL) as router, connected(router.address) as client:
        stranger = SmpServer(router.address.hosts, router.address.port, bytes(32))
        for server in (closed, onion, unknown, stranger):
            assert await client.ask(Prxy(server)) == NETWORK
        assert isinstance(await client.ask(Prxy(router.address)), Pkey)  # itself


async def test_an_address_causes_few_attempts_to_reach_routers() -> None:
    """However many connections ask, and however often; a session that exists is still for everybody."""
    config = replace(LOCAL, address_relays_per_minute=3)
    async with (
        routers(1) as (there,),
        Router.start(config) as proxy,
        connected(proxy.address) as client,
        connected(proxy.address) as other,
    ):
        assert isinstance(await client.ask(Prxy(there.address)), Pkey)
        stranger = SmpServer(there.address.hosts, there.address.port, bytes(32))
        assert [await one.ask(Prxy(stranger)) for one in (client, other)] == [NETWORK] * 2
        before = there.counts["connections"]
        assert [await one.ask(Prxy(stranger)) for one in (client, other)] == [TIMEOUT] * 2
        assert there.counts["connections"] == before
        assert isinstance(await other.ask(Prxy(there.address)), Pkey)


async def test_clients_that_come_later_get_the_same_session() -> None:
    async with routers(1) as (there,), Router.start(LOCAL) as proxy:
        keys = []
        for _ in range(3):
            async with connected(proxy.address) as client:
                keys.append(await client.ask(Prxy(there.address)))
        assert isinstance(keys[0], Pkey)
        assert keys == keys[:1] * 3
        assert there.counts["connections"] == 1


@pytest.mark.parametrize(("password", "fits"), [(None, False), (b"wrong", False), (b"right", True)])
async def test_password_of_a_proxy(password: bytes | None, fits: bool) -> None:
    config = replace(LOCAL, password=b"right")
    async with Router.start(config) as router, connected(router.address) as client:
        answer = await client.ask(Prxy(router.address, password))
        assert isinstance(answer, Pkey) if fits else answer == Err(PROXY_BASIC_AUTH)


@dataclass
class Forwarder:
    """A client of a proxy that forwards whatever bytes it likes."""

    client: WireClient
    pkey: Pkey
    version: int = SMP_VERSIONS.max

    @property
    def params(self) -> SessionParams:
        return smp_params(self.version, self.pkey.session_id)

    async def forward(self, content: bytes) -> tuple[bytes, SmpMessage]:
        """The bytes of the destination's answer, if it opens, and the proxy's."""
        corr_id, own = CorrId(secrets.token_bytes(24)), new_dh()
        relay_key = open_signed_key(self.pkey.chain[0], self.pkey.signed_key, X25519PublicKey)
        layer = ClientLayer.agree(own, relay_key, corr_id)
        command = Pfwd(self.version, own.public, layer.seal_command(content))
        self.client.write(Outgoing(corr_id, EntityId(self.pkey.session_id), command))
        answer = await self.client.answer(corr_id)
        return (layer.open_answer(answer.body) if isinstance(answer, Pres) else b""), answer

    async def ask(self, command: bytes, entity_id: bytes = b"") -> bytes:
        """The command part of the destination's answer to one command without authorisation."""
        content = body(CorrId(bytes(24)), EntityId(entity_id), command)
        packed, _ = await self.forward(_batch(encode_transmission(self.params, b"", None, content)))
        return parse_transmission(self.params, packed[3:]).command


def _batch(*transmissions: bytes) -> bytes:
    (packed,) = pack_batches(transmissions, SMP_BLOCK_SIZE)
    return packed


@asynccontextmanager
async def forwarder(router: Router) -> AsyncIterator[Forwarder]:
    async with Router.start(LOCAL) as proxy, connected(proxy.address) as client:
        pkey = await client.ask(Prxy(router.address))
        assert isinstance(pkey, Pkey)
        yield Forwarder(client, pkey)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (Ping(), CMD_PROHIBITED),
        (Prxy(SmpServer(("localhost",), "", bytes(32))), CMD_PROHIBITED),
        (Rfwd(b""), CMD_PROHIBITED),
        (b"NOPE", CMD_UNKNOWN),
        (b"LGET", CMD_NO_ENTITY),
    ],
    ids=str,
)
async def test_what_is_not_forwarded(router: Router, command: SmpCommand | bytes, error: ErrorType) -> None:
    async with forwarder(router) as through:
        wire = command if isinstance(command, bytes) else SMP_COMMANDS.encode(command, 19)
        assert await through.ask(wire) == b"ERR " + error.text


async def test_authorised_commands_that_are_not_forwarded(router: Router) -> None:
    async with forwarder(router) as through, connected(router.address) as owner:
        queue = await create_queue(owner)
        for command in (b"SUB", b"NSUB", b"DEL", b"OFF"):
            content = body(CorrId(bytes(24)), queue.recipient_id, command)
            signature = queue.key.sign(short(through.pkey.session_id) + content)  # type: ignore[union-attr]
            packed, _ = await through.forward(
                _batch(encode_transmission(through.params, signature, None, content))
            )
            assert packed.endswith(b"ERR " + CMD_PROHIBITED.text), command
        assert len(router.state.queues) == 1


async def test_what_does_not_parse(router: Router) -> None:
    async with forwarder(router) as through:
        for content in (_batch(b"\xff"), b"", b"\2\0\1a"):
            packed, _ = await through.forward(content)
            raw = parse_transmission(through.params, packed[3:])
            assert (raw.corr_id, raw.entity_id, raw.command) == (NO_CORR, NO_ENTITY, b"ERR " + BLOCK.text)
        two = encode_transmission(through.params, b"", None, body(CorrId(bytes(24)), NO_ENTITY, b"PING"))
        _, answer = await through.forward(_batch(two, two))
        assert answer == Err(proxy_protocol_error(BLOCK))
        garbage = Pfwd(19, new_dh().public, bytes(16242))
        answer = await through.client.ask(garbage, EntityId(through.pkey.session_id))
        assert answer == Err(proxy_protocol_error(CRYPTO))
        assert await through.client.ask(garbage, EntityId(bytes(32))) == Err(PROXY_NO_SESSION)
        assert await through.client.ask(garbage) == Err(CMD_NO_ENTITY)


@pytest.mark.parametrize(
    ("version", "limit"),
    [(0, 16088), (6, 16088), (8, 16064), (11, 16048), (19, 16048), (20, 16048), (99, 16048)],
)
async def test_limits_of_forwarded_messages(router: Router, version: int, limit: int) -> None:
    async with forwarder(router) as through, connected(router.address) as owner:
        queue = await create_queue(owner)
        through.version = version
        for size, answer in ((limit, b"OK"), (limit + 1, b"ERR " + LARGE_MSG.text)):
            assert await through.ask(b"SEND F " + bytes(size), queue.sender_id) == answer


async def test_forwarding_without_a_session_for_it(router: Router) -> None:
    async with connected(router.address, encrypt=False) as client:
        assert await client.ask(Rfwd(b"")) == Err(proxy_broker_error(b"TRANSPORT NO_AUTH"))
    async with connected(router.address) as client:
        assert await client.ask(Rfwd(bytes(100))) == Err(CRYPTO)
        assert await client.ask(Ping()) == Pong()


async def test_authorisation_is_for_the_proxys_session(router: Router) -> None:
    async with forwarder(router) as through, connected(router.address) as owner:
        queue, key = await create_queue(owner, subscribe=True), new_key()
        assert await owner.ask(Skey(key.public), queue.sender_id, key) == Ok()
        content = body(CorrId(bytes(24)), queue.sender_id, b"SEND F hello")
        for session_id, answer in ((bytes(32), b"ERR AUTH"), (through.pkey.session_id, b"OK")):
            auth = key.sign(short(session_id) + content)
            packed, _ = await through.forward(
                _batch(encode_transmission(through.params, auth, None, content))
            )
            assert packed.endswith(answer)
        _, message = await owner.event()
        assert isinstance(message, Msg)
        assert text(queue, message) == b"hello"


@pytest.mark.parametrize("through", [True, False], ids=["forwarded", "direct"])
async def test_names_without_a_resolver(router: Router, through: bool) -> None:
    async with Router.start(LOCAL) as proxy:
        config = always(proxy) if through else ProxyConfig(policy=ProxyPolicy.NEVER)
        async with sender(config) as sending:
            answer = await sending.request(router.address, NO_ENTITY, Rslv("team.simplex"))
            assert answer == Err(NAME_NO_RESOLVER)
        assert router.counts["commands_relayed"] == int(through)


async def test_every_part_of_the_way_has_the_newest_version(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy's session with the destination, and the command inside."""
    seen: dict[type[SmpCommand], int] = {}

    def watch(command: type[SmpCommand]) -> None:
        handler = HANDLERS[command]

        def run(broker: Broker, client: Client, request: Any, subject: Any) -> Response:
            seen[command] = client.params.version
            return handler.run(broker, client, request, subject)

        monkeypatch.setitem(HANDLERS, command, handler._replace(run=run))

    watch(Rfwd)
    watch(Rslv)
    async with Router.start(LOCAL) as proxy, sender(always(proxy)) as through:
        await through.request(router.address, NO_ENTITY, Rslv("team.simplex"))
    assert seen == {Rfwd: 20, Rslv: 20}
