"""Queues from NEW to DEL, as recipients and senders use them."""

from __future__ import annotations

import json
import secrets

import pytest

from protocol.crypto import AuthPrivateKey, Ed448PrivateKey, X25519PublicKey, decode_public_key
from protocol.encoding import EntityId
from protocol.errors import (
    AUTH,
    CMD_NO_AUTH,
    CMD_NO_ENTITY,
    CMD_PROHIBITED,
    CMD_SYNTAX,
    LARGE_MSG,
    NO_MSG,
    QUOTA,
)
from protocol.messages_crypto import QuotaExceeded, RcvMessage, max_message_length, open_message
from protocol.push_messages import open_nmsg_meta
from protocol.queue_uri import QueueUri, parse_queue_uri
from protocol.smp_messages import (
    Ack,
    Del,
    Deld,
    End,
    Err,
    Get,
    Ids,
    Info,
    Key,
    LinkData,
    Msg,
    Ndel,
    New,
    NewLink,
    Nkey,
    Nmsg,
    NotifierKeys,
    Nsub,
    Off,
    Ok,
    Ping,
    Pong,
    Que,
    QueueMode,
    Send,
    Skey,
    SmpMessage,
    Sok,
    Sub,
)
from protocol.versions import VersionRange
from smp_router.config import RouterConfig
from smp_router.router import Router
from tests.smp_router.wire import (
    TestQueue,
    WireClient,
    add_notifier,
    connected,
    create_queue,
    first_message,
    new_dh,
    new_key,
)


def opened(queue: TestQueue, message: SmpMessage) -> RcvMessage | QuotaExceeded:
    assert isinstance(message, Msg), message
    return open_message(queue.secret, message.message_id, message.body)


def text(queue: TestQueue, message: SmpMessage) -> bytes:
    content = opened(queue, message)
    assert isinstance(content, RcvMessage)
    return content.body


def message_id(message: SmpMessage) -> bytes:
    assert isinstance(message, Msg), message
    return message.message_id


async def acknowledge(client: WireClient, queue: TestQueue, message: SmpMessage) -> SmpMessage:
    return await client.ask(Ack(message_id(message)), queue.recipient_id, queue.key)


@pytest.mark.parametrize("version", range(6, 20))
async def test_message_round_trip_in_every_version(router: Router, version: int) -> None:
    async with connected(router.address, versions=VersionRange(version, version)) as client:
        assert client.version == version
        queue = await create_queue(client, subscribe=True)
        assert (queue.ids.mode is QueueMode.MESSAGING) == (version >= 9)
        sender_key = new_key()
        if version >= 9:
            answer = await client.ask(Skey(sender_key.public), queue.sender_id, sender_key)
        else:
            answer = await client.ask(Key(sender_key.public), queue.recipient_id, queue.key)
        assert answer == Ok()
        body = secrets.token_bytes(max_message_length(version))
        assert await client.ask(Send(False, body), queue.sender_id, sender_key) == Ok()
        entity_id, message = await client.event()
        assert entity_id == queue.recipient_id
        assert text(queue, message) == body
        assert await acknowledge(client, queue, message) == Ok()


@pytest.mark.parametrize("version", [6, 9, 18])
async def test_message_from_an_old_sender_fits_a_new_recipients_block(router: Router, version: int) -> None:
    old = connected(router.address, versions=VersionRange(version, version))
    async with connected(router.address) as recipient, old as sender:
        queue = await create_queue(recipient, subscribe=True)
        body = secrets.token_bytes(max_message_length(version))
        assert await sender.ask(Send(True, body), queue.sender_id) == Ok()
        _, message = await recipient.event()
        assert text(queue, message) == body


@pytest.mark.parametrize("version", [7, 10, 11, 19])
async def test_too_large_message_is_refused(router: Router, version: int) -> None:
    async with connected(router.address, versions=VersionRange(version, version)) as client:
        queue = await create_queue(client)
        body = bytes(max_message_length(version) + 1)
        assert await client.ask(Send(False, body), queue.sender_id) == Err(LARGE_MSG)
        assert await client.ask(Get(), queue.recipient_id, queue.key) == Ok()


@pytest.mark.parametrize("key", [new_key(), new_dh(), Ed448PrivateKey(secrets.token_bytes(57))])
async def test_every_kind_of_key_authorises(router: Router, key: AuthPrivateKey) -> None:
    async with connected(router.address) as client:
        queue = await create_queue(client, key=key)
        assert await client.ask(Sub(), queue.recipient_id, key) == Sok()
        for wrong in (new_key(), new_dh(), Ed448PrivateKey(secrets.token_bytes(57))):
            assert await client.ask(Sub(), queue.recipient_id, wrong) == Err(AUTH)


async def test_unknown_queues_and_wrong_sides_are_all_auth(router: Router) -> None:
    async with connected(router.address) as client:
        queue = await create_queue(client)
        await add_notifier(client, queue)
        unknown = EntityId(secrets.token_bytes(24))
        for entity_id in (unknown, queue.sender_id, queue.notifier_id):
            for command in (Sub(), Get(), Off(), Del(), Que(), Ndel(), Ack(b"x"), Key(new_key().public)):
                assert await client.ask(command, entity_id, queue.key) == Err(AUTH)
        for entity_id in (unknown, queue.recipient_id, queue.notifier_id):
            assert await client.ask(Send(True, b""), entity_id) == Err(AUTH)
            assert await client.ask(Skey(queue.key.public), entity_id, queue.key) == Err(AUTH)
        for entity_id in (unknown, queue.recipient_id, queue.sender_id):
            assert await client.ask(Nsub(), entity_id, queue.notifier_key) == Err(AUTH)


async def test_credentials_are_required(router: Router) -> None:
    async with connected(router.address) as client:
        queue = await create_queue(client)
        assert await client.ask(Sub(), queue.recipient_id) == Err(CMD_NO_AUTH)
        assert await client.ask(Nsub(), key=queue.key) == Err(CMD_NO_AUTH)
        assert await client.ask(Send(True, b"")) == Err(CMD_NO_ENTITY)
        assert await client.ask(Ping()) == Pong()


async def test_new_must_be_signed_with_its_own_key(router: Router) -> None:
    async with connected(router.address) as client:
        command = New(recipient_key=new_key().public, dh_key=new_dh().public)
        assert await client.ask(command, key=new_key()) == Err(AUTH)
        assert len(router.state.queues) == 0


async def test_useless_dh_keys_are_refused(router: Router) -> None:
    """Of low order: the secret would be known to everybody."""
    async with connected(router.address) as client:
        key, useless = new_key(), X25519PublicKey(bytes(32))
        assert await client.ask(New(recipient_key=key.public, dh_key=useless), key=key) == Err(CMD_SYNTAX)
        queue = await create_queue(client)
        nkey = Nkey(NotifierKeys(key.public, useless))
        assert await client.ask(nkey, queue.recipient_id, queue.key) == Err(CMD_SYNTAX)


async def test_basic_auth() -> None:
    async with (
        Router.start(RouterConfig(password=b"let me in")) as router,
        connected(router.address) as client,
    ):
        for password, allowed in ((None, False), (b"", False), (b"let me out", False), (b"let me in", True)):
            key = new_key()
            command = New(recipient_key=key.public, dh_key=new_dh().public, password=password)
            answer = await client.ask(command, key=key)
            assert isinstance(answer, Ids) if allowed else answer == Err(AUTH)


async def test_new_with_notifier_credentials(router: Router) -> None:
    async with connected(router.address) as client:
        key, notifier_key, dh = new_key(), new_key(), new_dh()
        notifier = NotifierKeys(notifier_key.public, dh.public)
        command = New(recipient_key=key.public, dh_key=new_dh().public, subscribe=False, notifier=notifier)
        ids = await client.ask(command, key=key)
        assert isinstance(ids, Ids)
        assert ids.notifier is not None
        assert await client.ask(Nsub(), ids.notifier.notifier_id, notifier_key) == Sok()
        assert await client.ask(Send(True, b"hi"), ids.sender_id) == Ok()
        _, nmsg = await client.event()
        assert isinstance(nmsg, Nmsg)
        open_nmsg_meta(dh.exchange(ids.notifier.dh_key), nmsg.nonce, nmsg.meta)


async def test_link_data_is_refused(router: Router) -> None:
    async with connected(router.address) as client:
        key = new_key()
        link = NewLink(None, EntityId(bytes(24)), LinkData(b"fixed", b"user"))
        command = New(recipient_key=key.public, dh_key=new_dh().public, mode=QueueMode.MESSAGING, link=link)
        assert await client.ask(command, key=key) == Err(CMD_PROHIBITED)


async def test_messages_come_one_by_one(router: Router) -> None:
    async with connected(router.address) as client:
        queue = await create_queue(client)
        for body in (b"one", b"two", b"three"):
            assert await client.ask(Send(False, body), queue.sender_id) == Ok()
        first = await first_message(client, queue)
        assert text(queue, first) == b"one"
        again = await first_message(client, queue)
        assert message_id(again) == message_id(first)
        second = await acknowledge(client, queue, first)
        assert text(queue, second) == b"two"
        assert await acknowledge(client, queue, first) == Err(NO_MSG)
        third = await acknowledge(client, queue, second)
        assert await acknowledge(client, queue, third) == Ok()
        assert await acknowledge(client, queue, third) == Err(NO_MSG)
        assert await client.ask(Send(False, b"four"), queue.sender_id) == Ok()
        _, fourth = await client.event()
        assert text(queue, fourth) == b"four"
        assert await client.ask(Send(False, b"five"), queue.sender_id) == Ok()
        assert await client.silent()


async def test_ack_without_subscription(router: Router) -> None:
    async with connected(router.address) as client:
        queue = await create_queue(client)
        assert await client.ask(Ack(bytes(24)), queue.recipient_id, queue.key) == Err(NO_MSG)


async def test_unacknowledged_message_is_delivered_to_the_next_connection(router: Router) -> None:
    async with connected(router.address) as client:
        queue = await create_queue(client, subscribe=True)
        assert await client.ask(Send(False, b"one"), queue.sender_id) == Ok()
        await client.event()
    async with connected(router.address) as client:
        assert text(queue, await first_message(client, queue)) == b"one"


async def test_get(router: Router) -> None:
    async with connected(router.address) as client, connected(router.address) as subscriber:
        queue = await create_queue(client)
        assert await client.ask(Get(), queue.recipient_id, queue.key) == Ok()
        for body in (b"one", b"two"):
            await client.ask(Send(False, body), queue.sender_id)
        assert await client.silent()
        message = await client.ask(Get(), queue.recipient_id, queue.key)
        assert text(queue, message) == b"one"
        assert await acknowledge(client, queue, message) == Ok()
        assert text(queue, await client.ask(Get(), queue.recipient_id, queue.key)) == b"two"
        assert await client.ask(Sub(), queue.recipient_id, queue.key) == Err(CMD_PROHIBITED)
        assert text(queue, await first_message(subscriber, queue)) == b"two"
        assert await subscriber.ask(Get(), queue.recipient_id, queue.key) == Err(CMD_PROHIBITED)


async def test_get_is_prohibited_where_new_subscribed(router: Router) -> None:
    async with connected(router.address) as client:
        queue = await create_queue(client, subscribe=True)
        assert await client.ask(Get(), queue.recipient_id, queue.key) == Err(CMD_PROHIBITED)


async def test_second_subscriber_displaces_the_first(router: Router) -> None:
    async with connected(router.address) as first, connected(router.address) as second:
        queue = await create_queue(first, subscribe=True)
        assert await second.ask(Sub(), queue.recipient_id, queue.key) == Sok()
        assert await first.event() == (queue.recipient_id, End())
        await first.ask(Send(False, b"for the second"), queue.sender_id)
        _, message = await second.event()
        assert text(queue, message) == b"for the second"
        assert await first.silent()
        assert await acknowledge(first, queue, message) == Err(NO_MSG)


async def test_securing(router: Router) -> None:
    async with connected(router.address) as client:
        for by_sender in (True, False):
            queue, key, other = await create_queue(client), new_key(), new_key()

            async def secure(
                key: AuthPrivateKey, queue: TestQueue = queue, by_sender: bool = by_sender
            ) -> SmpMessage:
                if by_sender:
                    return await client.ask(Skey(key.public), queue.sender_id, key)
                return await client.ask(Key(key.public), queue.recipient_id, queue.key)

            assert await client.ask(Send(False, b""), queue.sender_id) == Ok()
            assert await client.ask(Send(False, b""), queue.sender_id, key) == Err(AUTH)
            assert await secure(key) == Ok()
            assert await secure(key) == Ok()
            assert await secure(other) == Err(AUTH)
            assert await client.ask(Send(False, b""), queue.sender_id) == Err(AUTH)
            assert await client.ask(Send(False, b""), queue.sender_id, other) == Err(AUTH)
            assert await client.ask(Send(False, b""), queue.sender_id, key) == Ok()


async def test_contact_queues_are_not_secured_by_senders(router: Router) -> None:
    async with connected(router.address) as client:
        queue, key = await create_queue(client, mode=QueueMode.CONTACT), new_key()
        assert queue.ids.mode is QueueMode.CONTACT
        assert await client.ask(Skey(key.public), queue.sender_id, key) == Err(AUTH)


@pytest.mark.parametrize("mode", [None, QueueMode.CONTACT])
async def test_queues_that_senders_cannot_secure_are_joined_with_key(
    router: Router, mode: QueueMode | None
) -> None:
    """The key comes with the confirmation, which is not authorised; the recipient gives it to the router."""
    async with connected(router.address) as recipient, connected(router.address) as sender:
        queue, key = await create_queue(recipient, subscribe=True, mode=mode), new_key()
        uri = QueueUri(VersionRange(1, 4), router.address, queue.sender_id, new_dh().public, mode)
        joined = parse_queue_uri(uri.text())
        assert not joined.sender_can_secure
        confirmation = Send(True, key.public.der)
        assert await sender.ask(confirmation, joined.sender_id) == Ok()
        _, message = await recipient.event()
        sender_key = decode_public_key(text(queue, message))
        assert await recipient.ask(Key(sender_key), queue.recipient_id, queue.key) == Ok()
        assert await sender.ask(Send(True, b"hello"), joined.sender_id, key) == Ok()
        assert await sender.ask(confirmation, joined.sender_id) == Err(AUTH)


async def test_off(router: Router) -> None:
    async with connected(router.address) as client:
        queue = await create_queue(client)
        await client.ask(Send(False, b"before"), queue.sender_id)
        for _ in range(2):
            assert await client.ask(Off(), queue.recipient_id, queue.key) == Ok()
        assert await client.ask(Send(False, b"after"), queue.sender_id) == Err(AUTH)
        assert text(queue, await first_message(client, queue)) == b"before"


async def test_deletion_is_told_to_others(router: Router) -> None:
    async with (
        connected(router.address) as owner,
        connected(router.address) as device,
        connected(router.address) as notifier,
        connected(router.address, versions=VersionRange(6, 9)) as old,
    ):
        queue = await create_queue(owner)
        await add_notifier(owner, queue)
        await device.ask(Sub(), queue.recipient_id, queue.key)
        await notifier.ask(Nsub(), queue.notifier_id, queue.notifier_key)
        assert await owner.ask(Del(), queue.recipient_id, queue.key) == Ok()
        assert await device.event() == (queue.recipient_id, Deld())
        assert await notifier.event() == (queue.notifier_id, Deld())
        assert await owner.ask(Del(), queue.recipient_id, queue.key) == Err(AUTH)
        assert len(router.state.queues) == 0
        assert router.subscribed_notifiers() == set()
        other = await create_queue(owner)
        await old.ask(Sub(), other.recipient_id, other.key)
        assert await owner.ask(Del(), other.recipient_id, other.key) == Ok()
        assert await old.event() == (other.recipient_id, End())
        mine = await create_queue(owner, subscribe=True)
        assert await owner.ask(Del(), mine.recipient_id, mine.key) == Ok()
        assert await owner.silent()


async def test_queue_info(router: Router) -> None:
    async def info() -> dict[str, object]:
        answer = await client.ask(Que(), queue.recipient_id, queue.key)
        assert isinstance(answer, Info)
        content: dict[str, object] = json.loads(answer.json)
        return content

    async with connected(router.address) as client:
        queue, sender_key = await create_queue(client), new_key()
        assert await info() == {"qiSnd": False, "qiNtf": False, "qiSize": 0}
        await add_notifier(client, queue)
        await client.ask(Skey(sender_key.public), queue.sender_id, sender_key)
        await client.ask(Send(False, b"x"), queue.sender_id, sender_key)
        await client.ask(Get(), queue.recipient_id, queue.key)
        told = await info()
        assert (told["qiSnd"], told["qiNtf"], told["qiSize"]) == (True, True, 1)
        assert isinstance(told["qiSub"], dict)
        assert isinstance(told["qiMsg"], dict)
        assert told["qiSub"]["qSubThread"] == "prohibitSub"
        assert told["qiSub"]["qDelivered"] == told["qiMsg"]["msgId"]
        assert told["qiMsg"]["msgType"] == "message"


async def test_quota() -> None:
    async with Router.start(RouterConfig(quota=2)) as router, connected(router.address) as client:
        queue = await create_queue(client)
        await add_notifier(client, queue)
        for body, answer in ((b"1", Ok()), (b"2", Ok()), (b"3", Err(QUOTA)), (b"4", Err(QUOTA))):
            assert await client.ask(Send(True, body), queue.sender_id) == answer
        message = await first_message(client, queue)
        message = await acknowledge(client, queue, message)
        assert text(queue, message) == b"2"
        assert await client.ask(Send(True, b"still full"), queue.sender_id) == Err(QUOTA)
        marker = await acknowledge(client, queue, message)
        assert isinstance(opened(queue, marker), QuotaExceeded)
        assert await client.ask(Send(True, b"not yet"), queue.sender_id) == Err(QUOTA)
        assert await acknowledge(client, queue, marker) == Ok()
        assert await client.ask(Send(True, b"5"), queue.sender_id) == Ok()
        _, message = await client.event()
        assert text(queue, message) == b"5"
        await client.ask(Nsub(), queue.notifier_id, queue.notifier_key)
        assert len(await client.events(3)) == 3
        assert await client.silent()


async def test_nkey_replaces_and_ndel_removes_the_notifier(router: Router) -> None:
    async with connected(router.address) as owner, connected(router.address) as notifier:
        queue = await create_queue(owner)
        await add_notifier(owner, queue)
        first = queue.notifier_id
        await notifier.ask(Nsub(), first, queue.notifier_key)
        await add_notifier(owner, queue)
        assert queue.notifier_id != first
        assert await notifier.event() == (first, Deld())
        assert await notifier.ask(Nsub(), first, queue.notifier_key) == Err(AUTH)
        assert await notifier.ask(Nsub(), queue.notifier_id, queue.notifier_key) == Sok()
        for _ in range(2):
            assert await owner.ask(Ndel(), queue.recipient_id, queue.key) == Ok()
        assert await notifier.event() == (queue.notifier_id, Deld())
        await owner.ask(Send(True, b""), queue.sender_id)
        assert await notifier.silent()


async def test_message_that_another_connection_took_is_not_taken_twice(router: Router) -> None:
    async with connected(router.address) as subscriber, connected(router.address) as device:
        queue = await create_queue(subscriber, subscribe=True)
        for body in (b"one", b"two"):
            await device.ask(Send(False, body), queue.sender_id)
        _, first = await subscriber.event()
        taken = await device.ask(Get(), queue.recipient_id, queue.key)
        assert message_id(taken) == message_id(first)
        assert await acknowledge(device, queue, taken) == Ok()
        second = await acknowledge(subscriber, queue, first)
        assert text(queue, second) == b"two"
        assert await acknowledge(subscriber, queue, second) == Ok()
