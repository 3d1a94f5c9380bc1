"""Keys of several recipients, queues blocked by the operator, what expires, failures of the router itself."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from protocol.blocking import blocking_info, parse_blocking_info
from protocol.crypto import AuthPrivateKey
from protocol.encoding import EntityId
from protocol.errors import AUTH, INTERNAL, LARGE_MSG, QUOTA, DecodeError, ErrorType
from protocol.smp_messages import (
    Ack,
    Del,
    Err,
    Get,
    Info,
    Key,
    Ldel,
    Lget,
    LinkData,
    Lkey,
    Lset,
    Ndel,
    Nkey,
    NotifierKeys,
    Off,
    Ok,
    Ping,
    Pong,
    Que,
    QueueMode,
    Rkey,
    Send,
    Skey,
    SmpCommand,
    Sok,
    Sub,
)
from protocol.versions import VersionRange
from smp_router.broker import Broker
from smp_router.config import RouterConfig
from smp_router.router import Router
from tests.builders import ed448
from tests.smp_router.test_links import new_link_id, with_link
from tests.smp_router.wire import (
    TestQueue,
    WireClient,
    connected,
    create_queue,
    eventually,
    new_dh,
    new_key,
)

BLOCKED = blocking_info("spam", {"ttl": 86400})
DATA = LinkData(b"fixed", b"user")


async def test_several_recipients(router: Router) -> None:
    async with connected(router.address) as client:
        queue = await create_queue(client, mode=QueueMode.CONTACT)
        keys: tuple[AuthPrivateKey, ...] = (new_key(), new_dh(), ed448())

        async def set_keys(key: AuthPrivateKey, *chosen: AuthPrivateKey) -> object:
            return await client.ask(Rkey(tuple(key.public for key in chosen)), queue.recipient_id, key)

        assert await set_keys(queue.key, *keys) == Ok()
        for key in keys:
            assert await client.ask(Sub(), queue.recipient_id, key) == Sok()
            assert isinstance(await client.ask(Que(), queue.recipient_id, key), Info)
        assert await client.ask(Sub(), queue.recipient_id, queue.key) == Err(AUTH)
        assert await set_keys(queue.key, queue.key) == Err(AUTH)
        assert await set_keys(keys[1], *[queue.key] * 100) == Ok()
        assert await client.ask(Sub(), queue.recipient_id, queue.key) == Sok()
        assert await client.ask(Sub(), queue.recipient_id, keys[0]) == Err(AUTH)


@pytest.mark.parametrize("mode", [None, QueueMode.MESSAGING])
async def test_only_addresses_have_several(router: Router, mode: QueueMode | None) -> None:
    async with connected(router.address) as client:
        queue = await create_queue(client, mode=mode)
        assert await client.ask(Rkey((new_key().public,)), queue.recipient_id, queue.key) == Err(AUTH)
        assert await client.ask(Sub(), queue.recipient_id, queue.key) == Sok()


def block(router: Router, entity_id: EntityId) -> None:
    assert router.block(entity_id, BLOCKED)


RECIPIENT_COMMANDS: list[SmpCommand] = [
    Sub(),
    Get(),
    Ack(b"id"),
    Key(new_key().public),
    Rkey((new_key().public,)),
    Lset(new_link_id(), DATA),
    Ldel(),
    Nkey(NotifierKeys(new_key().public, new_dh().public)),
    Ndel(),
    Que(),
]


async def test_blocked_queue(router: Router) -> None:
    async with connected(router.address) as client:
        queue, link_id = await with_link(client, QueueMode.CONTACT)
        block(router, queue.sender_id)
        for command in RECIPIENT_COMMANDS:
            assert await client.ask(command, queue.recipient_id, queue.key) == Err(BLOCKED.error), command
            assert await client.ask(command, queue.recipient_id, new_key()) == Err(AUTH), command
        assert await client.ask(Send(True, b""), queue.sender_id) == Err(BLOCKED.error)
        assert await client.ask(Send(True, bytes(16049)), queue.sender_id) == Err(LARGE_MSG)
        assert await client.ask(Lget(), link_id) == Err(BLOCKED.error)
        assert await client.ask(Off(), queue.recipient_id, queue.key) == Ok()
        assert await client.ask(Send(True, b""), queue.sender_id) == Err(AUTH)
        assert await client.ask(Sub(), queue.recipient_id, queue.key) == Sok()
        block(router, queue.recipient_id)
        assert await client.ask(Del(), queue.recipient_id, queue.key) == Ok()


async def test_blocked_invitation(router: Router) -> None:
    async with connected(router.address) as client:
        queue, link_id = await with_link(client, QueueMode.MESSAGING)
        key = new_key()
        block(router, link_id)
        assert await client.ask(Lget(), link_id) == Err(AUTH)
        assert await client.ask(Lkey(key.public), link_id, key) == Err(BLOCKED.error)
        assert await client.ask(Skey(key.public), queue.sender_id, key) == Err(BLOCKED.error)
        assert router.block(queue.sender_id, None)
        assert await client.ask(Skey(key.public), queue.sender_id, key) == Ok()
    assert not router.block(new_link_id(), BLOCKED)


@pytest.mark.parametrize(
    ("version", "error"),
    [
        (11, AUTH),
        (12, ErrorType(b"BLOCKED reason=spam")),
        (17, ErrorType(b"BLOCKED reason=spam")),
        (18, ErrorType(b'BLOCKED reason=spam,notice={"ttl":86400}')),
    ],
)
async def test_who_is_told_what_about_a_block(router: Router, version: int, error: ErrorType) -> None:
    async with connected(router.address, versions=VersionRange(6, version)) as client:
        queue = await create_queue(client)
        block(router, queue.sender_id)
        assert await client.ask(Sub(), queue.recipient_id, queue.key) == Err(error)


async def test_messages_of_a_queue_blocked_later_are_not_delivered(router: Router) -> None:
    async with connected(router.address) as client, connected(router.address) as sender:
        queue = await create_queue(client, subscribe=True)
        block(router, queue.sender_id)
        assert await sender.ask(Send(False, b""), queue.sender_id) == Err(BLOCKED.error)
        assert await client.silent()


def test_blocking_information() -> None:
    for info in (BLOCKED, blocking_info("content", None)):
        assert parse_blocking_info(info.text) == info
    for wrong in ("reason=other", "", 'notice={"ttl":1}'):
        with pytest.raises(DecodeError):
            parse_blocking_info(wrong)
    with pytest.raises(DecodeError):
        blocking_info("dislike", None)


class Clock:
    def __init__(self) -> None:
        self.time = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.time


async def size(client: WireClient, queue: TestQueue) -> int:
    info = await client.ask(Que(), queue.recipient_id, queue.key)
    assert isinstance(info, Info)
    found: int = json.loads(info.json)["qiSize"]
    return found


async def test_messages_and_suspended_queues_expire() -> None:
    clock = Clock()
    config = RouterConfig(message_ttl=100, suspended_ttl=50, expiry_interval=0.01, quota=2)
    async with Router.start(config, now=clock) as router, connected(router.address) as client:
        queue, suspended = await create_queue(client), await create_queue(client)
        assert await client.ask(Off(), suspended.recipient_id, suspended.key) == Ok()
        for _ in range(2):
            assert await client.ask(Send(False, b""), queue.sender_id) == Ok()
        assert await client.ask(Send(False, b""), queue.sender_id) == Err(QUOTA)
        clock.time += timedelta(seconds=60)
        await eventually(lambda: len(router.state.queues) == 1)
        assert await client.ask(Del(), suspended.recipient_id, suspended.key) == Err(AUTH)
        assert await size(client, queue) == 3
        clock.time += timedelta(seconds=60)
        await eventually(lambda: router.state.stored_messages == 0)
        assert await size(client, queue) == 0
        assert await client.ask(Send(False, b""), queue.sender_id) == Ok()
        assert await size(client, queue) == 1


@pytest.mark.parametrize("on_send", [True, False])
async def test_messages_expire_on_send(on_send: bool) -> None:
    clock = Clock()
    config = RouterConfig(message_ttl=100, quota=2, expire_on_send=on_send)
    async with Router.start(config, now=clock) as router, connected(router.address) as client:
        queue = await create_queue(client)
        for expected in (Ok(), Ok(), Err(QUOTA)):
            assert await client.ask(Send(False, b""), queue.sender_id) == expected
        clock.time += timedelta(seconds=101)
        assert await client.ask(Send(False, b""), queue.sender_id) == (Ok() if on_send else Err(QUOTA))
        assert await size(client, queue) == (1 if on_send else 3)
        assert router.counts["messages_expired"] == (3 if on_send else 0)


async def test_what_is_stored_has_limits() -> None:
    config = RouterConfig(max_queues=2, address_share_percent=100)
    async with Router.start(config) as router, connected(router.address) as client:
        queues = [await create_queue(client) for _ in range(2)]
        with pytest.raises(AssertionError, match="QUOTA"):
            await create_queue(client)
        assert await client.ask(Del(), queues[0].recipient_id, queues[0].key) == Ok()
        await create_queue(client)


async def test_a_defect_of_the_router_is_told_and_survived(
    router: Router, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(router.address) as client:
        queue = await create_queue(client)

        def defect(*_: object) -> None:
            raise ZeroDivisionError("with a secret inside")

        monkeypatch.setattr(Broker, "send", defect)
        assert await client.ask(Send(False, b""), queue.sender_id) == Err(INTERNAL)
        assert await client.ask(Ping()) == Pong()
    assert "ZeroDivisionError" in caplog.text
    assert "secret" not in caplog.text
    assert "Traceback" not in caplog.text
