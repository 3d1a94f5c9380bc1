"""Every command and answer of the protocol in one table: who may send it, since when, what it is answered.

Each row is tried in the first and the last version that has it: as it should be, authorised by somebody else,
and with parameters that do not parse.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NamedTuple

import pytest

from protocol.connection import Outgoing
from protocol.crypto import AuthPrivateKey, X25519PrivateKey, X25519PublicKey
from protocol.encoding import NO_ENTITY, CorrId, EntityId
from protocol.errors import AUTH, CMD_HAS_AUTH, CMD_NO_AUTH, CMD_SYNTAX, SERVICE, ErrorType
from protocol.proxy import ClientLayer, Forwarded, seal_forwarded
from protocol.signed_key import open_signed_key
from protocol.smp_codec import SMP_COMMANDS, SMP_MESSAGES
from protocol.smp_handshake import ServiceRole
from protocol.smp_messages import (
    Ack,
    Alls,
    Del,
    Deld,
    End,
    Ends,
    Err,
    Get,
    Ids,
    Info,
    Key,
    Ldel,
    Lget,
    LinkData,
    Lkey,
    Lnk,
    Lset,
    Msg,
    Ndel,
    New,
    Nid,
    Nkey,
    Nmsg,
    NotifierKeys,
    Nsub,
    Nsubs,
    Off,
    Ok,
    Pfwd,
    Ping,
    Pkey,
    Pong,
    Pres,
    Prxy,
    Que,
    QueueMode,
    QueueSet,
    Rfwd,
    Rkey,
    Rname,
    Rres,
    Rslv,
    Send,
    Skey,
    SmpCommand,
    SmpMessage,
    Sok,
    Soks,
    Sub,
    Subs,
)
from protocol.transmission import body
from protocol.versions import VersionRange
from smp_router.config import RouterConfig
from smp_router.router import Router
from tests.smp_router.test_links import new_link_id
from tests.smp_router.wire import (
    TestQueue,
    WireClient,
    add_notifier,
    connected,
    create_queue,
    new_dh,
    new_key,
)
from transport.certificates import make_service

NEWEST = 19
NO_QUEUES = QueueSet(0, bytes(16))
DATA = LinkData(b"fixed", b"user")


class Asked(NamedTuple):
    command: SmpCommand
    entity_id: EntityId = NO_ENTITY
    key: AuthPrivateKey | None = None


@dataclass
class World:
    """A router, a client that owns a queue of each mode, and services."""

    router: Router
    client: WireClient
    queue: TestQueue
    contact: TestQueue
    stack: AsyncExitStack
    version: int
    service: WireClient | None = None

    async def link(self, queue: TestQueue) -> EntityId:
        link_id = new_link_id()
        assert await self.client.ask(Lset(link_id, DATA), queue.recipient_id, queue.key) == Ok()
        return link_id

    async def log_in(self, role: ServiceRole) -> tuple[EntityId, AuthPrivateKey]:
        """A connection of a service, which the command is sent in."""
        self.service = await self.stack.enter_async_context(
            connected(
                self.router.address,
                service=make_service(datetime.now(UTC)),
                role=role,
                versions=VersionRange(6, self.version),
            )
        )
        params = self.service.connection.params
        assert params is not None
        assert params.service is not None
        assert params.service.private_key is not None
        return params.service.service_id, params.service.private_key

    @property
    def asking(self) -> WireClient:
        return self.service or self.client


@asynccontextmanager
async def world(version: int) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(Router.start(RouterConfig(private_relays=True)))
        versions = VersionRange(6, version)
        client = await stack.enter_async_context(connected(router.address, versions=versions))
        modern = await stack.enter_async_context(connected(router.address))
        contact = await create_queue(modern, mode=QueueMode.CONTACT)
        yield World(router, client, await create_queue(modern), contact, stack, version)


def of_recipient(command: SmpCommand) -> Callable[[World], Awaitable[Asked]]:
    async def build(world: World) -> Asked:
        return Asked(command, world.queue.recipient_id, world.queue.key)

    return build


async def new(world: World) -> Asked:
    key = new_key()
    return Asked(New(recipient_key=key.public, dh_key=new_dh().public, mode=QueueMode.MESSAGING), key=key)


async def rkey(world: World) -> Asked:
    return Asked(Rkey((new_key().public,)), world.contact.recipient_id, world.contact.key)


async def ack(world: World) -> Asked:
    queue, client = world.queue, world.client
    assert await client.ask(Send(False, b""), queue.sender_id) == Ok()
    message = await client.ask(Get(), queue.recipient_id, queue.key)
    assert isinstance(message, Msg)
    return Asked(Ack(message.message_id), queue.recipient_id, queue.key)


async def get(world: World) -> Asked:
    assert await world.client.ask(Send(False, b""), world.queue.sender_id) == Ok()
    return Asked(Get(), world.queue.recipient_id, world.queue.key)


async def skey(world: World) -> Asked:
    key = new_key()
    return Asked(Skey(key.public), world.queue.sender_id, key)


async def send(world: World) -> Asked:
    key = new_key()
    assert await world.client.ask(Key(key.public), world.queue.recipient_id, world.queue.key) == Ok()
    return Asked(Send(True, b"body"), world.queue.sender_id, key)


async def lkey(world: World) -> Asked:
    key = new_key()
    return Asked(Lkey(key.public), await world.link(world.queue), key)


async def lget(world: World) -> Asked:
    return Asked(Lget(), await world.link(world.contact))


async def nsub(world: World) -> Asked:
    await add_notifier(world.client, world.queue)
    return Asked(Nsub(), world.queue.notifier_id, world.queue.notifier_key)


async def subs(world: World) -> Asked:
    service_id, key = await world.log_in(ServiceRole.MESSAGING)
    return Asked(Subs(NO_QUEUES), service_id, key)


async def nsubs(world: World) -> Asked:
    service_id, key = await world.log_in(ServiceRole.NOTIFIER)
    return Asked(Nsubs(NO_QUEUES), service_id, key)


async def prxy(world: World) -> Asked:
    return Asked(Prxy(world.router.address))


def inner(world: World, relay: X25519PrivateKey, pkey: Pkey, corr_id: CorrId) -> tuple[Pfwd, ClientLayer]:
    relay_key = open_signed_key(pkey.chain[0], pkey.signed_key, X25519PublicKey)
    layer = ClientLayer.agree(relay, relay_key, corr_id)
    content = b"\0" + body(corr_id, world.contact.sender_id, b"SEND F hello")
    packed = b"\1" + len(content).to_bytes(2, "big") + content
    return Pfwd(NEWEST, relay.public, layer.seal_command(packed)), layer


async def pfwd(world: World) -> Asked:
    pkey = await world.client.ask(Prxy(world.router.address))
    assert isinstance(pkey, Pkey)
    command, _ = inner(world, new_dh(), pkey, FORWARDED)
    return Asked(command, EntityId(pkey.session_id))


async def rfwd(world: World) -> Asked:
    """As a proxy would, in a session of its own."""
    params = world.client.connection.params
    assert params is not None
    assert params.proof is not None
    assert params.shared_secret is not None
    pkey = Pkey(params.session_id, params.proof.versions, params.proof.chain, params.proof.signed_key)
    command, _ = inner(world, new_dh(), pkey, FORWARDED)
    forwarded = Forwarded(FORWARDED, command.version, command.key, command.body)
    return Asked(Rfwd(seal_forwarded(params.shared_secret, FORWARDED, forwarded)))


async def rslv(world: World) -> Asked:
    return Asked(Rslv("team.simplex"))


async def ping(world: World) -> Asked:
    return Asked(Ping())


FORWARDED = CorrId(bytes(range(24)))
"The correlation id of commands that contain something sealed with it."


@dataclass(frozen=True)
class Row:
    who: str
    since: int
    build: Callable[[World], Awaitable[Asked]]
    answer: type
    by_somebody_else: ErrorType
    "With the key of somebody else; where none belongs, with any."
    malformed: bytes


NKEY = Nkey(NotifierKeys(new_key().public, new_dh().public))
LSET = Lset(EntityId(b"link"), DATA)
TABLE: dict[bytes, Row] = {
    b"NEW": Row("recipient", 6, new, Ids, AUTH, b" "),
    b"SUB": Row("recipient", 6, of_recipient(Sub()), Sok, AUTH, b" x"),
    b"SUBS": Row("messaging service", 19, subs, Soks, SERVICE, b" 12345678"),
    b"KEY": Row("recipient", 6, of_recipient(Key(new_key().public)), Ok, AUTH, b" \x05short"),
    b"RKEY": Row("recipient of a contact queue", 6, rkey, Ok, AUTH, b" \0"),
    b"LSET": Row("recipient", 6, of_recipient(LSET), Ok, AUTH, b" \x04link\0\x09short"),
    b"LDEL": Row("recipient", 6, of_recipient(Ldel()), Ok, AUTH, b" x"),
    b"NKEY": Row("recipient", 6, of_recipient(NKEY), Nid, AUTH, b" "),
    b"NDEL": Row("recipient", 6, of_recipient(Ndel()), Ok, AUTH, b" x"),
    b"GET": Row("recipient", 6, get, Msg, AUTH, b" x"),
    b"ACK": Row("recipient", 6, ack, Ok, AUTH, b" \x18short"),
    b"OFF": Row("recipient", 6, of_recipient(Off()), Ok, AUTH, b" x"),
    b"DEL": Row("recipient", 6, of_recipient(Del()), Ok, AUTH, b" x"),
    b"QUE": Row("recipient", 6, of_recipient(Que()), Info, AUTH, b" x"),
    b"SKEY": Row("sender of a messaging queue", 6, skey, Ok, AUTH, b" "),
    b"SEND": Row("sender", 6, send, Ok, AUTH, b" T"),
    b"LKEY": Row("whoever has an invitation", 6, lkey, Lnk, AUTH, b" "),
    b"LGET": Row("whoever has an address", 6, lget, Lnk, CMD_HAS_AUTH, b" x"),
    b"PRXY": Row("client of a proxy", 7, prxy, Pkey, CMD_HAS_AUTH, b" \0"),
    b"PFWD": Row("client of a proxy", 7, pfwd, Pres, CMD_HAS_AUTH, b" \0"),
    b"RFWD": Row("proxy", 7, rfwd, Rres, CMD_HAS_AUTH, b""),
    b"NSUB": Row("notifier", 6, nsub, Sok, AUTH, b" x"),
    b"NSUBS": Row("notifier service", 16, nsubs, Soks, SERVICE, b" x"),
    b"RSLV": Row("anybody", 6, rslv, Err, CMD_HAS_AUTH, b" no_name"),
    b"PING": Row("anybody", 6, ping, Pong, CMD_HAS_AUTH, b" x"),
}

ELSEWHERE = {Rname}
"Answers of routers that have a resolver; see `protocol/names.py`."

EVENTS = {End, Ends, Deld, Alls, Nmsg, Msg}
"Not answers to a command of the one who gets them; see `test_events`."


COMMANDS = (
    b"PING NEW SUB SUBS KEY RKEY NKEY NDEL GET ACK OFF DEL QUE LSET LDEL SEND SKEY LKEY LGET PRXY PFWD RFWD"
    b" RSLV NSUB NSUBS"
)
ROUTER_MESSAGES = b"IDS LNK SOK SOKS MSG ALLS NID NMSG PKEY PRES RRES RNAME END ENDS DELD INFO OK ERR PONG"
"The words of the protocol's grammar, in its order."


def test_the_table_is_complete() -> None:
    assert set(TABLE) == set(COMMANDS.split()) == set(SMP_COMMANDS.specs)
    assert set(ROUTER_MESSAGES.split()) == set(SMP_MESSAGES.specs)
    answers = {row.answer for row in TABLE.values()} | EVENTS | ELSEWHERE | {Err}
    assert answers == {spec.kind for spec in SMP_MESSAGES.specs.values()}


CASES = [(word, version) for word, row in TABLE.items() for version in sorted({row.since, NEWEST})]


def seen_as(answer: type, version: int) -> type:
    return Ok if answer is Sok and version < 16 else answer


async def ask(client: WireClient, asked: Asked) -> SmpMessage:
    command, entity_id, key = asked
    corr_id = FORWARDED if isinstance(command, Pfwd | Rfwd) else CorrId(secrets.token_bytes(24))
    client.write(Outgoing(corr_id, entity_id, command, key))
    return await client.answer(corr_id)


@pytest.mark.parametrize(("word", "version"), CASES)
async def test_allowed(word: bytes, version: int) -> None:
    row = TABLE[word]
    async with world(version) as here:
        asked = await row.build(here)
        assert type(await ask(here.asking, asked)) is seen_as(row.answer, version)


@pytest.mark.parametrize(("word", "version"), CASES)
async def test_not_authorised(word: bytes, version: int) -> None:
    """Nothing has happened: the right one can still do it."""
    row = TABLE[word]
    async with world(version) as here:
        asked = await row.build(here)
        attempt = asked._replace(key=new_key())
        if isinstance(asked.command, Pfwd | Rfwd):  # as long as they are, a signature does not fit
            attempt = attempt._replace(command=replace(asked.command, body=b""))
        assert await ask(here.asking, attempt) == Err(row.by_somebody_else)
        if asked.key is not None:
            refused = await ask(here.asking, asked._replace(key=None))
            assert refused == Err(AUTH if word == b"SEND" else CMD_NO_AUTH)
        if word not in (b"LKEY", b"SKEY", b"NEW"):
            assert type(await ask(here.asking, asked)) is seen_as(row.answer, version)


@pytest.mark.parametrize(("word", "version"), CASES)
async def test_malformed(word: bytes, version: int) -> None:
    row = TABLE[word]
    async with world(version) as here:
        asked = await row.build(here)
        client, corr_id = here.asking, CorrId(secrets.token_bytes(24))
        with_wrong_parameters(client, word + row.malformed, asked, corr_id)
        assert await client.answer(corr_id) == Err(CMD_SYNTAX)
        assert await client.ask(Ping()) == Pong()


def with_wrong_parameters(client: WireClient, wire: bytes, asked: Asked, corr_id: CorrId) -> None:
    """Send bytes as a command, authorised as the right one is."""

    class Raw:
        specs = SMP_COMMANDS.specs

        def encode(self, _message: object, _version: int) -> bytes:
            return wire

    connection = client.connection
    genuine = connection._codec_out
    connection._codec_out = Raw()  # type: ignore[assignment]
    try:
        client.write(Outgoing(corr_id, asked.entity_id, asked.command, asked.key))
    finally:
        connection._codec_out = genuine


async def test_events() -> None:
    """Each event, and to whom it goes."""
    async with world(NEWEST) as here:
        owner, queue = here.client, here.queue
        await add_notifier(owner, queue)
        async with connected(here.router.address) as other, connected(here.router.address) as notifier:
            assert await owner.ask(Sub(), queue.recipient_id, queue.key) == Sok()
            assert await notifier.ask(Nsub(), queue.notifier_id, queue.notifier_key) == Sok()
            assert await other.ask(Send(True, b""), queue.sender_id) == Ok()
            assert type((await owner.event())[1]) is Msg
            assert type((await notifier.event())[1]) is Nmsg
            assert await other.ask(Sub(), queue.recipient_id, queue.key) == Sok()
            assert await owner.event() == (queue.recipient_id, End())
            assert await owner.ask(Del(), queue.recipient_id, queue.key) == Ok()
            assert (await other.events(2))[1] == (queue.recipient_id, Deld())
            assert await notifier.event() == (queue.notifier_id, Deld())
        credentials = make_service(datetime.now(UTC))
        role = ServiceRole.MESSAGING
        async with (
            connected(here.router.address, service=credentials, role=role) as first,
            connected(here.router.address, service=credentials, role=role) as second,
        ):
            for client in (first, second):
                params = client.connection.params
                assert params is not None
                assert params.service is not None
                key = params.service.private_key
                assert await client.ask(Subs(NO_QUEUES), client.service_id, key) == Soks(NO_QUEUES)
                assert await client.event() == (NO_ENTITY, Alls())
            assert await first.event() == (first.service_id, Ends(NO_QUEUES))


async def test_proxy_services() -> None:
    """A service may have the role of a proxy; it has no queues in that name."""
    async with world(NEWEST) as here:
        service_id, key = await here.log_in(ServiceRole.PROXY)
        assert here.service is not None
        for command in (Subs(NO_QUEUES), Nsubs(NO_QUEUES)):
            assert await here.service.ask(command, service_id, key) == Err(SERVICE)
        queue = here.queue
        signed = await here.service.ask(Sub(), queue.recipient_id, queue.key, with_service=True)
        assert signed == Err(SERVICE)
        assert await here.service.ask(Sub(), queue.recipient_id, queue.key) == Sok()
        assert isinstance(await here.service.ask(Prxy(here.router.address)), Pkey)
