"""A hostile client cannot make the router keep, or do, more than its limits; others are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Coroutine
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from typing import Any

import pytest

from protocol.addresses import SmpServer
from protocol.connection import Outgoing
from protocol.crypto import Ed448PrivateKey
from protocol.encoding import NO_ENTITY, CorrId
from protocol.errors import AUTH, CMD_PROHIBITED, PROXY_BASIC_AUTH, QUOTA, HandshakeError, proxy_broker_error
from protocol.smp_handshake import ServiceRole
from protocol.smp_messages import (
    Del,
    Err,
    Get,
    Ids,
    Lset,
    New,
    Nmsg,
    Nsub,
    Ok,
    Ping,
    Pkey,
    Pong,
    Prxy,
    QueueMode,
    Rkey,
    Send,
    SmpCommand,
    SmpMessage,
    Sok,
    Sub,
)
from smp_router import broker, relays
from smp_router.config import RouterConfig
from smp_router.information import COUNTERS, RouterPages
from smp_router.queues import new_id
from smp_router.router import Router
from tests.smp_router.test_links import DATA, ask_new, new_link_id, with_link
from tests.smp_router.wire import (
    DEADLINE,
    TestQueue,
    WireClient,
    add_notifier,
    connected,
    create_queue,
    eventually,
    new_dh,
    new_key,
    tls,
)
from transport import budget
from transport import server as serving
from transport.budget import CpuBudget, Slice
from transport.certificates import make_service
from transport.errors import TransportError


async def test_connections_of_one_address() -> None:
    async with Router.start(RouterConfig(max_connections_per_address=2)) as router:
        async with connected(router.address), connected(router.address) as second:
            with pytest.raises((TransportError, OSError)):
                await tls(router.address)
            assert await second.ask(Ping()) == Pong()
        await eventually(lambda: router.connections == 0)
        async with connected(router.address) as client:
            assert await client.ask(Ping()) == Pong()
        assert router.counts["connections_refused"] == 1


async def test_connections_in_all() -> None:
    config = RouterConfig(max_connections=3)
    async with Router.start(config) as router, AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(connected(router.address))
        with pytest.raises((TransportError, OSError)):
            await tls(router.address)


async def test_a_handshake_that_stops_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "GRACE", 0.1)
    config = RouterConfig(max_handshakes=1, handshake_timeout=10 * DEADLINE)
    async with Router.start(config) as router, asyncio.timeout(DEADLINE):
        reader, writer = await asyncio.open_connection(router.address.hosts[0], int(router.address.port))
        writer.write(bytes.fromhex("1603010200 01"))  # the head of a ClientHello of 512 bytes
        while not reader.at_eof():
            async with connected(router.address) as client:
                assert await client.ask(Ping()) == Pong()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    assert await reader.read() == b""
        writer.close()


async def test_a_fast_client_is_read_later() -> None:
    config = RouterConfig(commands_per_second=200, commands_burst=300)
    async with Router.start(config) as router, connected(router.address) as flood:
        loop = asyncio.get_running_loop()
        corr_ids = [CorrId(secrets.token_bytes(24)) for _ in range(500)]
        started = loop.time()
        flood.write(*(Outgoing(corr_id, NO_ENTITY, Ping()) for corr_id in corr_ids))
        async with connected(router.address) as other:
            assert await other.ask(Ping()) == Pong()
        for corr_id in corr_ids:
            assert await flood.answer(corr_id) == Pong()
        assert loop.time() - started > 0.9  # 300 at once, the others 200 a second


async def test_connections_of_an_address_share_its_rate() -> None:
    config = RouterConfig(address_commands_per_second=200, address_commands_burst=300)
    async with Router.start(config) as router, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(router.address)) for _ in range(5)]
        started = asyncio.get_running_loop().time()
        corr_ids = [CorrId(secrets.token_bytes(24)) for _ in range(100)]
        for client in clients:
            client.write(*(Outgoing(corr_id, NO_ENTITY, Ping()) for corr_id in corr_ids))
        for client in clients:
            for corr_id in corr_ids:
                assert await client.answer(corr_id) == Pong()
        assert asyncio.get_running_loop().time() - started > 0.9


async def test_queues_of_one_address() -> None:
    async with Router.start(RouterConfig(address_queues_per_hour=3)) as router, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(router.address)) for _ in range(2)]
        answers = []
        for client in clients * 2:
            key = new_key()
            command = New(recipient_key=key.public, dh_key=new_dh().public, mode=QueueMode.MESSAGING)
            answers.append(await client.ask(command, key=key))
        assert [isinstance(answer, Ids) for answer in answers] == [True, True, True, False]
        assert answers[-1] == Err(QUOTA)


async def test_services_are_limited() -> None:
    """Those without queues make room; those with queues, or connected, do not."""
    async with Router.start(RouterConfig(max_services=2, address_share_percent=100)) as router:
        used, idle, later = (make_service(datetime.now(UTC)) for _ in range(3))
        role = ServiceRole.MESSAGING
        async with connected(router.address, service=used, role=role) as client:
            await create_queue(client, with_service=True)
            used_id = client.service_id
        async with connected(router.address, service=idle, role=role):
            with pytest.raises(HandshakeError, match="BAD_SERVICE"):
                async with connected(router.address, service=later, role=role):
                    pass
        await eventually(lambda: router.connections == 0)
        async with connected(router.address, service=later, role=role) as client:
            assert {service.service_id for service in router.services} == {used_id, client.service_id}


async def test_links_are_limited() -> None:
    async with (
        Router.start(RouterConfig(max_links=1, address_share_percent=100)) as router,
        connected(router.address) as client,
    ):
        queue, link_id = await with_link(client, QueueMode.CONTACT)
        other = await create_queue(client)
        assert await client.ask(Lset(new_link_id(), DATA), other.recipient_id, other.key) == Err(QUOTA)
        assert (await ask_new(client, QueueMode.MESSAGING))[1] == Err(QUOTA)
        assert await client.ask(Lset(link_id, DATA), queue.recipient_id, queue.key) == Ok()


async def test_recipient_keys_are_limited() -> None:
    async with (
        Router.start(RouterConfig(max_recipient_keys=3, address_share_percent=100)) as router,
        connected(router.address) as client,
    ):
        one, other = [await create_queue(client, mode=QueueMode.CONTACT) for _ in range(2)]

        async def set_keys(queue: TestQueue, count: int) -> SmpMessage:
            keys = (queue.key.public, *(new_key().public for _ in range(count - 1)))
            return await client.ask(Rkey(keys), queue.recipient_id, queue.key)

        assert await set_keys(one, 5) == Err(QUOTA)
        assert await set_keys(one, 4) == Ok()
        assert await set_keys(other, 2) == Err(QUOTA)
        assert await set_keys(other, 1) == Ok()
        assert await set_keys(one, 2) == Ok()
        assert await set_keys(other, 3) == Ok()
        assert await client.ask(Del(), other.recipient_id, other.key) == Ok()
        assert await set_keys(one, 4) == Ok()
        assert router.state.storage.total.keys == 3


async def test_queues_that_were_read_and_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection reads queue after queue, another one deletes them."""
    monkeypatch.setattr(broker, "RECEPTIONS_UNCHECKED", 5)
    async with Router.start() as router, connected(router.address) as reader:
        assert await reader.ask(Ping()) == Pong()
        (session,) = router._sessions
        assert session.client is not None
        async with connected(router.address) as deleter:
            kept = await create_queue(deleter)
            await reader.ask(Get(), kept.recipient_id, kept.key)
            for _ in range(20):
                queue = await create_queue(deleter)
                assert await reader.ask(Get(), queue.recipient_id, queue.key) == Ok()
                assert await deleter.ask(Del(), queue.recipient_id, queue.key) == Ok()
        assert len(session.client.receptions) <= 5
        assert await reader.ask(Sub(), kept.recipient_id, kept.key) == Err(CMD_PROHIBITED)


async def test_addresses_that_never_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client waits for a few of them only; the rest of its commands, and others, go on."""
    config = RouterConfig(private_relays=True, relay_timeout=60)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with Router.start(config) as router, connected(router.address) as client:
            await ask_for_silent_routers(router, client, str(silent.getsockname()[1]), monkeypatch)


async def ask_for_silent_routers(
    router: Router, client: WireClient, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        server = SmpServer(("127.0.0.1",), port, bytes((number,)) * 32)
        client.write(Outgoing(CorrId(secrets.token_bytes(24)), NO_ENTITY, Prxy(server)))
    another = SmpServer(("127.0.0.1",), port, bytes(31) + b"x")
    busy = Err(proxy_broker_error(b"TIMEOUT"))
    assert await client.ask(Prxy(another)) == busy
    assert await client.ask(Ping()) == Pong()
    monkeypatch.setattr(relays, "MAX_CONNECTING", 8)
    async with connected(router.address) as other:
        assert await other.ask(Prxy(another)) == busy


async def test_names_that_never_resolve_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as one address may name in a minute, and another client asks for a router."""
    release, resolve = threading.Event(), socket.getaddrinfo

    def look_up(host: str, *arguments: Any, **options: Any) -> Any:
        if str(host).endswith(".slow.example"):
            release.wait(DEADLINE)
            raise OSError
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    config = RouterConfig(private_relays=True, relay_timeout=DEADLINE)
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(Router.start(config))
        wanted = await stack.enter_async_context(Router.start())
        stack.callback(release.set)
        for number in range(56):
            if number % 8 == 0:
                hostile = await stack.enter_async_context(connected(proxy.address))
            slow = SmpServer((f"{number}.slow.example",), "5223", bytes(32))
            hostile.write(Outgoing(CorrId(secrets.token_bytes(24)), NO_ENTITY, Prxy(slow)))

        def connecting() -> int:
            relays = proxy._broker.relays
            return 0 if relays is None else len(relays._connecting)

        await eventually(lambda: connecting() == 56)
        named = SmpServer(("localhost",), wanted.address.port, wanted.address.key_hash)
        honest = await stack.enter_async_context(connected(proxy.address, source="127.0.0.2"))
        assert isinstance(await honest.ask(Prxy(named)), Pkey)


async def test_recipient_keys_of_a_queue(router: Router) -> None:
    async with connected(router.address) as client:
        queue = await create_queue(client, mode=QueueMode.CONTACT)
        keys = tuple(new_key().public for _ in range(33))
        assert await client.ask(Rkey(keys), queue.recipient_id, queue.key) == Err(QUOTA)
        same = (*keys[:31], *[queue.key.public] * 100)
        assert await client.ask(Rkey(same), queue.recipient_id, queue.key) == Ok()
        assert await client.ask(Sub(), queue.recipient_id, queue.key) == Sok()


async def longest_pauses(until: Awaitable[object]) -> list[float]:
    """CPU seconds between two turns of the event loop, longest last, until something has happened."""
    done, pauses = asyncio.ensure_future(until), list[float]()
    while not done.done():
        started = time.thread_time()
        await asyncio.sleep(0)
        pauses.append(time.thread_time() - started)
    await done
    return sorted(pauses)


@pytest.mark.parametrize("known", [True, False])
async def test_signatures_that_cost_most_do_not_hold_up_others(known: bool) -> None:
    """A queue with as many keys as it may have; ids that do not exist."""
    config = RouterConfig(address_failures_burst=10_000)
    async with Router.start(config) as router, connected(router.address) as hostile:
        queue = await create_queue(hostile, mode=QueueMode.CONTACT)
        keys = [Ed448PrivateKey(secrets.token_bytes(57)) for _ in range(32)]
        public = tuple(key.public for key in keys)
        assert await hostile.ask(Rkey(public), queue.recipient_id, queue.key) == Ok()
        wrong = Ed448PrivateKey(secrets.token_bytes(57))
        commands: list[Outgoing[SmpCommand]] = [
            Outgoing(CorrId(secrets.token_bytes(24)), queue.recipient_id if known else new_id(), Sub(), wrong)
            for _ in range(10 if known else 600)
        ]
        hostile.write(*commands)

        async def answers() -> None:
            for command in commands:
                assert await hostile.answer(command.corr_id) == Err(AUTH)

        pauses = await longest_pauses(answers())
        assert sum(pauses) > 0.04  # it does cost something
        assert pauses[-5] < 0.006  # of a few, other things are the cause


async def test_the_keys_of_a_queue_are_tried_in_turns(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every key is a slice of its own if it takes as long as one."""
    turns, take = list[str](), CpuBudget.take

    def counted(self: CpuBudget, source: str) -> Coroutine[None, None, Slice]:
        turns.append(source)
        return take(self, source)

    async with connected(router.address) as client:
        queue = await create_queue(client, mode=QueueMode.CONTACT)
        keys = tuple(Ed448PrivateKey(secrets.token_bytes(57)).public for _ in range(32))
        assert await client.ask(Rkey(keys), queue.recipient_id, queue.key) == Ok()
        monkeypatch.setattr(CpuBudget, "take", counted)
        monkeypatch.setattr(budget, "SLICE", 0.00002)
        wrong = Ed448PrivateKey(secrets.token_bytes(57))
        assert await client.ask(Sub(), queue.recipient_id, wrong) == Err(AUTH)
    assert len(turns) >= 32


async def test_an_address_that_fails_too_often_is_disconnected() -> None:
    async with (
        Router.start(RouterConfig(address_failures_burst=100)) as router,
        connected(router.address) as honest,
        connected(router.address) as hostile,
    ):
        queue, wrong = await create_queue(honest), new_key()
        commands: list[Outgoing[SmpCommand]] = [
            Outgoing(CorrId(secrets.token_bytes(24)), new_id(), Sub(), wrong) for _ in range(150)
        ]
        hostile.write(*commands[:100])
        for command in commands[:100]:
            assert await hostile.answer(command.corr_id) == Err(AUTH)
        hostile.write(*commands[100:])
        assert await hostile.answer(commands[100].corr_id) == Err(AUTH)  # the answer still arrives
        assert await hostile.closed()
        assert router.counts["clients_unauthorised"] == 1
        assert await honest.ask(Sub(), queue.recipient_id, queue.key) == Sok()
        async with connected(router.address) as again:
            assert await again.ask(Ping()) == Pong()


@pytest.mark.parametrize("with_service", [False, True])
async def test_strangers_cannot_disconnect_a_notification_server(with_service: bool) -> None:
    """It subscribes what its clients name, and they may name queues that do not exist. Whoever is subscribed
    to nothing, or subscribes as a recipient, is disconnected as ever."""
    service = make_service(datetime.now(UTC)) if with_service else None
    async with (
        Router.start(RouterConfig(address_failures_burst=100)) as router,
        connected(router.address) as owner,
        connected(router.address, service=service) as server,
        connected(router.address) as hostile,
    ):
        queue = await create_queue(owner)
        await add_notifier(owner, queue)
        subscribed = await server.ask(
            Nsub(), queue.notifier_id, queue.notifier_key, with_service=with_service
        )
        assert isinstance(subscribed, Sok)
        for _ in range(3):
            assert await refused(server, Nsub(), 100, with_service) == 100
        assert router.counts["clients_unauthorised"] == 0
        assert await refused(hostile, Nsub(), 150) < 150
        assert await hostile.closed()
        assert await refused(server, Nsub(), 10, with_service) == 10
        assert await owner.ask(Send(True, b"message"), queue.sender_id) == Ok()
        assert isinstance((await server.event())[1], Nmsg)
        assert await refused(server, Sub(), 150) < 150
        assert await server.closed()


async def refused(client: WireClient, command: SmpCommand, count: int, with_service: bool = False) -> int:
    """How many commands about queues that do not exist are answered."""
    key, sent = new_key(), [CorrId(secrets.token_bytes(24)) for _ in range(count)]
    client.write(*(Outgoing(corr_id, new_id(), command, key, with_service) for corr_id in sent))
    answers = 0
    with suppress(TransportError, OSError):
        for corr_id in sent:
            assert await client.answer(corr_id) == Err(AUTH)
            answers += 1
    return answers


async def get(port: int, path: str, method: str = "GET") -> tuple[str, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: router\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return head, body


async def test_information_page() -> None:
    config = RouterConfig(password=b"secret", quota=7)
    async with Router.start(config) as router, connected(router.address):
        pages = RouterPages(router, {"operator": "<Example>", "website": "https://example.org"})
        port = await pages.open("127.0.0.1", 0)
        try:
            head, body = await get(port, "/information.json?x=1")
            assert "200 OK" in head
            described = json.loads(body)
            assert described["information"] == {"operator": "<Example>", "website": "https://example.org"}
            assert described["address"] == str(router.address)
            assert (described["messages_per_queue"], described["password_required"]) == (7, True)
            assert described["persistence"] == "memory"
            _, page = await get(port, "/")
            assert "&lt;Example&gt;" in page
            assert "6 to 20" in page
            assert "secret" not in body + page
            assert "404" in (await get(port, "/other"))[0]
            assert "405" in (await get(port, "/", "POST"))[0]
        finally:
            await pages.close()


async def test_metrics() -> None:
    async with Router.start() as router, connected(router.address) as client:
        queue = await create_queue(client, subscribe=True)
        assert await client.ask(Send(True, b"hello"), queue.sender_id) == Ok()
        await client.event()
        pages = RouterPages(router, {})
        found = pages.page(b"/metrics")
        assert found is not None
        lines = dict(line.rsplit(" ", 1) for line in found.body.decode().splitlines() if line[0] != "#")
        for name, value in (("queues", 1), ("messages_stored", 1), ("connections_open", 1)):
            assert float(lines[f"smp_router_{name}"]) == value
        for name in ("queues_created", "messages_received", "messages_delivered", "connections"):
            assert float(lines[f"smp_router_{name}_total"]) == 1
        assert set(router.counts) <= set(COUNTERS)


@pytest.mark.parametrize("password", [None, b"right"])
async def test_no_new_queues(password: bytes | None) -> None:
    async with Router.start(RouterConfig()) as router, connected(router.address) as client:
        queue, state = await create_queue(client), router.state
    config = RouterConfig(new_queues=False, password=password)
    async with Router.start(config, state=state) as router, connected(router.address) as client:
        key = new_key()
        for given in (None, b"right"):
            command = New(
                recipient_key=key.public, dh_key=new_dh().public, password=given, mode=QueueMode.MESSAGING
            )
            assert await client.ask(command, key=key) == Err(AUTH)
        assert await client.ask(Send(False, b""), queue.sender_id) == Ok()
        assert await client.ask(Sub(), queue.recipient_id, queue.key) == Sok()


@pytest.mark.parametrize("password", [None, b"right"])
async def test_no_proxy(router: Router, password: bytes | None) -> None:
    config = RouterConfig(proxy=False, password=password, private_relays=True)
    async with Router.start(config) as refusing, connected(refusing.address) as client:
        for given in (None, b"right"):
            assert await client.ask(Prxy(router.address, given)) == Err(PROXY_BASIC_AUTH)
        assert refusing.relays == 0
