"""What a push is about: both layers of encryption, and the filter of what was seen before."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from agent.duplex.schema import prepare
from agent.duplex.secrets import Secrets
from agent.duplex.store import Tx, insert
from agent.errors import BadPush
from agent.notifications.pushes import (
    CheckPush,
    MessagePush,
    NotificationInfo,
    VerificationPush,
    announced,
    parse_push,
)
from agent.notifications.records import Mode, SubAction, Subscription, Token
from agent.notifications.rows import put_subscription, subscriptions
from protocol.addresses import NtfServer, SmpQueueNtf, SmpServer
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey
from protocol.encoding import EntityId, b64
from protocol.push_messages import NmsgMeta, PnMessage, encode_pn_messages, seal_nmsg_meta, seal_push
from tests.agent.notifications.world import DEVICE

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


@pytest.fixture
def tx() -> Iterator[Tx]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.row_factory = sqlite3.Row
        prepare(db)
        yield Tx(db, SEEN, Secrets())


def add_queue(tx: Tx, number: int, last_broker_ts: int | None = None, last: str = "m") -> None:
    """Queue and connection of this number; what came last from it."""
    insert(tx.db, "connections", connection_id=number, kind="duplex", agent_version=7, pq_support=0)
    insert(
        tx.db,
        "receive_queues",
        queue_id=number,
        connection_id=number,
        server=str(ROUTER),
        recipient_id=bytes((number,)),
        recipient_key=bytes(32),
        router_secret=bytes(32),
        e2e_key=bytes(32),
        sender_id=b"",
        status="active",
        client_version=4,
        last_broker_ts=last_broker_ts,
        last_broker_id=None if last_broker_ts is None else message_id(last),
    )
    put_subscription(
        tx,
        Subscription(
            queue_id=number,
            smp_server=ROUTER,
            ntf_server=SERVER,
            token_id=EntityId(b"token"),
            action=SubAction.NTF_CHECK,
            due=0,
            notifier_key=Ed25519PrivateKey(bytes(32)),
            dh_key=X25519PrivateKey(bytes(32)),
            notifier_id=notifier_id(number),
            dh_secret=queue_secret(number),
        ),
    )


def entry(number: int, timestamp: int, name: str = "m", secret: bytes | None = None) -> PnMessage:
    nonce = os.urandom(24)
    meta = NmsgMeta(message_id(name), timestamp)
    boxed = seal_nmsg_meta(secret or queue_secret(number), nonce, meta)
    return PnMessage(SmpQueueNtf(ROUTER, notifier_id(number)), timestamp + 1, nonce, boxed)


def push(*entries: PnMessage) -> MessagePush:
    nonce = os.urandom(24)
    return MessagePush(nonce, seal_push(TOKEN_SECRET, nonce, encode_pn_messages(entries)))


def found_in(tx: Tx, pushed: MessagePush) -> list[int]:
    return [info.connection_id for info in announced(tx.db, TOKEN, pushed)]


def test_both_layers_are_opened(tx: Tx) -> None:
    add_queue(tx, 1)
    found = announced(tx.db, TOKEN, push(entry(1, SEEN, "first")))
    assert found == [NotificationInfo(1, 1, SEEN + 1, NmsgMeta(message_id("first"), SEEN))]


@pytest.mark.parametrize(
    ("last_broker_ts", "timestamp", "passes"),
    [
        (None, SEEN, True),
        (SEEN, SEEN - 1, False),
        (SEEN, SEEN, False),
        (SEEN, SEEN + 1, True),
    ],
)
def test_all_but_the_last_must_be_newer_than_what_was_seen(
    tx: Tx, last_broker_ts: int | None, timestamp: int, passes: bool
) -> None:
    add_queue(tx, 1, last_broker_ts)
    add_queue(tx, 2, last_broker_ts)
    assert found_in(tx, push(entry(1, timestamp), entry(2, timestamp))) == ([1, 2] if passes else [2])


def test_another_message_of_the_same_second_is_news(tx: Tx) -> None:
    add_queue(tx, 1, SEEN)
    add_queue(tx, 2)
    assert found_in(tx, push(entry(1, SEEN, "other"), entry(2, SEEN))) == [1, 2]


def test_what_is_not_ours_is_left_out(tx: Tx) -> None:
    add_queue(tx, 1)
    add_queue(tx, 2)
    forged = entry(2, SEEN, secret=b"x" * 32)
    assert found_in(tx, push(entry(9, SEEN), forged, entry(1, SEEN))) == [1]
    assert found_in(tx, push(entry(9, SEEN))) == []


def test_queue_that_is_being_deleted_is_left_out(tx: Tx) -> None:
    add_queue(tx, 1)
    tx.db.execute("UPDATE receive_queues SET deleting = 1")
    assert found_in(tx, push(entry(1, SEEN))) == []


def test_notifier_without_a_secret_yet_is_left_out(tx: Tx) -> None:
    add_queue(tx, 1)
    (row,) = subscriptions(tx.db)
    put_subscription(tx, replace(row, dh_secret=None))
    assert found_in(tx, push(entry(1, SEEN))) == []


def test_push_for_another_device(tx: Tx) -> None:
    for secret in (b"z" * 32, None):
        with pytest.raises(BadPush):
            announced(tx.db, replace(TOKEN, dh_secret=secret), push(entry(1, SEEN)))


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
