"""What a push is about: both layers of encryption, and the filter of what was seen before."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from agent import rows
from agent.errors import BadPush
from agent.records import Message, Mode, ReceiveQueue, SubAction, Subscription, Token
from agent.store import AgentStore
from agent.wake import (
    CheckPush,
    MessagePush,
    NotificationInfo,
    VerificationPush,
    notification_connections,
    parse_push,
)
from protocol.addresses import NtfServer, SmpQueueNtf, SmpServer
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey
from protocol.encoding import EntityId, b64
from protocol.push_messages import NmsgMeta, PnMessage, encode_pn_messages, seal_nmsg_meta, seal_push
from tests.agent.world import DEVICE

ROUTER = SmpServer(("router.example",), "5223", bytes(32))
SERVER = NtfServer(("ntf.example",), "443", bytes(32))
TOKEN_SECRET = b"t" * 32
SEEN = 1_700_000_000


def queue_secret(number: int) -> bytes:
    return bytes((number,)) * 32


def notifier_id(number: int) -> EntityId:
    return EntityId(b"notifier" + bytes((number,)) * 16)


def message_id(name: str) -> bytes:
    return name.encode().ljust(24, b"-")


TOKEN = Token(
    server=SERVER,
    device_token=DEVICE,
    mode=Mode.INSTANT,
    auth_key=Ed25519PrivateKey(bytes(32)),
    dh_key=X25519PrivateKey(bytes(32)),
    token_id=EntityId(b"token"),
    dh_secret=TOKEN_SECRET,
)


async def add_queue(store: AgentStore, number: int, last_broker_ts: int | None = None) -> None:
    queue = ReceiveQueue(
        connection_id=number,
        server=ROUTER,
        recipient_key=Ed25519PrivateKey(bytes(32)),
        dh_key=X25519PrivateKey(bytes(32)),
        e2e_key=X25519PrivateKey(bytes(32)),
        last_broker_ts=last_broker_ts,
    )
    subscription = Subscription(
        connection_id=number,
        smp_server=ROUTER,
        ntf_server=SERVER,
        token_id=EntityId(b"token"),
        action=SubAction.NTF_CHECK,
        notifier_key=Ed25519PrivateKey(bytes(32)),
        dh_key=X25519PrivateKey(bytes(32)),
        notifier_id=notifier_id(number),
        dh_secret=queue_secret(number),
    )
    await store.write(
        [
            rows.put_connection(number, wants_notifications=True),
            rows.put_receive_queue(queue),
            rows.put_subscription(subscription),
        ]
    )


def entry(number: int, timestamp: int, name: str = "m", secret: bytes | None = None) -> PnMessage:
    nonce = os.urandom(24)
    meta = NmsgMeta(message_id(name), timestamp)
    boxed = seal_nmsg_meta(secret or queue_secret(number), nonce, meta)
    return PnMessage(SmpQueueNtf(ROUTER, notifier_id(number)), timestamp + 1, nonce, boxed)


def push(*entries: PnMessage) -> MessagePush:
    nonce = os.urandom(24)
    return MessagePush(nonce, seal_push(TOKEN_SECRET, nonce, encode_pn_messages(entries)))


async def test_both_layers_are_opened(store: AgentStore) -> None:
    await add_queue(store, 1)
    found = await notification_connections(store, TOKEN, push(entry(1, SEEN, "first")))
    assert found == [NotificationInfo(1, SEEN + 1, NmsgMeta(message_id("first"), SEEN))]


@pytest.mark.parametrize(
    ("last_broker_ts", "timestamp", "passes"),
    [
        (None, SEEN, True),
        (SEEN, SEEN - 1, False),
        (SEEN, SEEN, False),
        (SEEN, SEEN + 1, True),
    ],
)
async def test_all_but_the_last_must_be_newer_than_what_was_seen(
    store: AgentStore, last_broker_ts: int | None, timestamp: int, passes: bool
) -> None:
    await add_queue(store, 1, last_broker_ts)
    await add_queue(store, 2, last_broker_ts)
    known = Message(connection_id=1, message_id=message_id("m"), broker_ts=SEEN, number=1, body=b"")
    await store.write([rows.add_message(known)])
    found = await notification_connections(store, TOKEN, push(entry(1, timestamp), entry(2, timestamp)))
    assert [info.connection_id for info in found] == ([1, 2] if passes else [2])


async def test_another_message_of_the_same_second_is_news(store: AgentStore) -> None:
    await add_queue(store, 1, SEEN)
    await add_queue(store, 2)
    found = await notification_connections(store, TOKEN, push(entry(1, SEEN, "other"), entry(2, SEEN)))
    assert [info.connection_id for info in found] == [1, 2]


async def test_what_is_not_ours_is_left_out(store: AgentStore) -> None:
    await add_queue(store, 1)
    await add_queue(store, 2)
    forged = entry(2, SEEN, secret=b"x" * 32)
    found = await notification_connections(store, TOKEN, push(entry(9, SEEN), forged, entry(1, SEEN)))
    assert [info.connection_id for info in found] == [1]
    assert await notification_connections(store, TOKEN, push(entry(9, SEEN))) == []


async def test_notifier_without_a_secret_yet_is_left_out(store: AgentStore) -> None:
    await add_queue(store, 1)
    (row,) = await store.subscriptions()
    await store.write([rows.put_subscription(replace(row, dh_secret=None))])
    assert await notification_connections(store, TOKEN, push(entry(1, SEEN))) == []


async def test_push_for_another_device(store: AgentStore) -> None:
    elsewhere = replace(TOKEN, dh_secret=b"z" * 32)
    with pytest.raises(BadPush):
        await notification_connections(store, elsewhere, push(entry(1, SEEN)))
    with pytest.raises(BadPush):
        await notification_connections(store, replace(TOKEN, dh_secret=None), push(entry(1, SEEN)))


NONCE, BOXED = b"n" * 24, b"boxed bytes"
DATA = {"nonce": b64(NONCE).decode(), "message": b64(BOXED).decode()}


@pytest.mark.parametrize(
    ("payload", "parsed"),
    [
        (DATA, MessagePush(NONCE, BOXED)),
        (json.dumps(DATA), MessagePush(NONCE, BOXED)),
        (json.dumps({"aps": {}, "notificationData": DATA}).encode(), MessagePush(NONCE, BOXED)),
        ({"nonce": DATA["nonce"], "verification": DATA["message"]}, VerificationPush(NONCE, BOXED)),
        ({"checkMessages": True}, CheckPush()),
        ({"checkMessages": "true"}, CheckPush()),
    ],
)
def test_payloads(payload: str | bytes | dict[str, object], parsed: object) -> None:
    assert parse_push(payload) == parsed


@pytest.mark.parametrize(
    "payload",
    [
        "",
        "[]",
        "{",
        b"\xff",
        {},
        {"notificationData": 1},
        {"nonce": 1, "message": DATA["message"]},
        {"nonce": DATA["nonce"]},
        {"nonce": "not base64!", "message": DATA["message"]},
        {"checkMessages": False},
    ],
)
def test_what_is_no_push(payload: str | bytes | dict[str, object]) -> None:
    with pytest.raises(BadPush):
        parse_push(payload)
