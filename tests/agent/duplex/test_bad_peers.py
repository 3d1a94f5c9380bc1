"""A peer that does not keep to the protocol: an event says so, the message is ACKed, nothing else changes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.duplex import ratchets
from agent.duplex.events import Failed, MessageReceived, RatchetSync
from agent.duplex.outgoing import next_delivery, queue_message
from agent.duplex.store import Tx
from agent.duplex.tables import connection, send_queues
from protocol.addresses import SmpServer
from protocol.agent.envelopes import (
    ClientMessage,
    ConfirmationEnvelope,
    InvitationEnvelope,
    MessageEnvelope,
    encode_agent_envelope,
    seal_body,
)
from protocol.agent.messages import (
    AMessage,
    Hello,
    NewQueue,
    QueueAdd,
    QueueAddress,
    QueueContinue,
    QueueKey,
    QueueKeys,
    QueuesUse,
    QueueUse,
    RatchetReady,
    Receipt,
    Receipts,
    UserMessage,
)
from protocol.crypto import X25519PrivateKey
from protocol.encoding import EntityId
from protocol.queue_uri import SMP_CLIENT_VERSIONS, QueueInfo, QueueUri
from protocol.smp_messages import QueueMode, Send
from smp_client.requests import Request
from smp_router.router import Router
from tests.agent.duplex.world import Person, connect, person

NOWHERE = QueueAddress(SmpServer(("nowhere.example",), "", bytes(32)), EntityId(b"x" * 24))
KEY = X25519PrivateKey(bytes(range(32)))
URI = QueueUri(SMP_CLIENT_VERSIONS, NOWHERE.server, NOWHERE.sender_id, KEY.public, QueueMode.MESSAGING)
INFO = QueueInfo(4, NOWHERE.server, NOWHERE.sender_id, KEY.public, QueueMode.MESSAGING)

MESSAGES: dict[str, tuple[AMessage, str | None]] = {
    "HELLO again": (Hello(), "A_PROHIBITED HELLO"),
    "a queue that was replaced continues": (QueueContinue(NOWHERE), None),
    "an offer that replaces nothing": (QueueAdd((NewQueue(URI, None),)), "A_QUEUE replaces nothing"),
    "an offer for an unknown queue": (
        QueueAdd((NewQueue(URI, NOWHERE),)),
        "A_QUEUE replaced queue not found",
    ),
    "keys for an unknown queue": (QueueKeys((QueueKey(INFO, KEY.public),)), "A_QUEUE not found"),
    "an unknown queue to use": (QueuesUse((QueueUse(NOWHERE, True),)), "A_QUEUE not found"),
    "a receipt for the confirmation": (Receipts((Receipt(1, bytes(32)),)), None),
    "a receipt for nothing": (Receipts((Receipt(99, bytes(32)),)), None),
    "EREADY without a reason": (RatchetReady(1), None),
}


@pytest.mark.parametrize("name", MESSAGES)
async def test_messages_that_make_no_sense(tmp_path: Path, name: str) -> None:
    message, error = MESSAGES[name]
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
    ):
        _, his = await connect(alice, bob, pq=False)
        await bob.agent.send(his, b"first")
        await alice.reads()
        await bob.agent._transact(lambda tx: queue_message(tx, connection(tx.db, his), message))
        await still_fine(alice, bob, his)
        failures = [event.error for event in alice.unseen if isinstance(event, Failed)]
        assert failures == ([] if error is None else [error])


async def still_fine(alice: Person, bob: Person, his: int) -> None:
    await bob.agent.send(his, b"still there?")
    while (await alice.event(MessageReceived)).body != b"still there?":
        pass


def sealed(
    make: Callable[[Tx, int], bytes], *, with_key: bool = False, version: int = 4
) -> Callable[[Tx, int], bytes]:
    """An envelope in the queue's box."""

    def body(tx: Tx, connection_id: int) -> bytes:
        queue = send_queues(tx.db, connection_id)[0]
        key, secret = (queue.e2e_key.public, queue.e2e_secret) if with_key else (None, queue.e2e_secret)
        return seal_body(version, key, secret, bytes(24), ClientMessage(make(tx, connection_id)))

    return body


def tampered(tx: Tx, connection_id: int) -> bytes:
    """A good message of the ratchet, with a changed end; the ratchet goes on as if it was never made."""
    conn = connection(tx.db, connection_id)
    before = ratchets.ratchet_of(tx.db, connection_id)
    assert before is not None
    sealer = ratchets.seal_next(tx, connection_id, None)
    ratchets.put_ratchet(tx, connection_id, before)
    message = sealer.seal(b"R", 15840)
    return encode_agent_envelope(MessageEnvelope(conn.agent_version, message[:-1] + b"\0"))


def unknown_header(tx: Tx, connection_id: int) -> bytes:
    return encode_agent_envelope(
        MessageEnvelope(7, b"\x7b\0\2" + bytes(16 + 16) + b"\x58" + bytes(88 + 16 + 60))
    )


BODIES: dict[str, tuple[Callable[[Tx, int], bytes], str | None]] = {
    "rubbish": (lambda tx, _id: b"rubbish", "A_MESSAGE"),
    "a box with rubbish": (sealed(lambda tx, _id: b"rubbish"), "A_MESSAGE"),
    "a future version": (sealed(lambda tx, _id: b"rubbish", version=99), "A_VERSION"),
    "a box of somebody else": (
        lambda tx, _id: seal_body(4, None, bytes(32), bytes(24), ClientMessage(b"")),
        "A_CRYPTO DECRYPT_CB",
    ),
    "an invitation": (
        sealed(lambda tx, _id: encode_agent_envelope(InvitationEnvelope(7, "simplex:/", b"")), with_key=True),
        "A_PROHIBITED message with a key",
    ),
    "a confirmation without a key": (
        sealed(lambda tx, _id: encode_agent_envelope(ConfirmationEnvelope(7, None, b"x"))),
        "A_PROHIBITED envelope",
    ),
    "a confirmation again": (
        sealed(lambda tx, _id: encode_agent_envelope(ConfirmationEnvelope(7, None, b"x")), with_key=True),
        None,
    ),
    "a ratchet message that is none": (
        sealed(lambda tx, _id: encode_agent_envelope(MessageEnvelope(7, b"x"))),
        "A_MESSAGE",
    ),
    "an unknown header": (sealed(unknown_header), "A_CRYPTO RATCHET_HEADER"),
    "a changed body": (sealed(tampered), "A_CRYPTO DECRYPT_AES"),
}


@pytest.mark.parametrize("name", BODIES)
async def test_bytes_that_make_no_sense(tmp_path: Path, name: str) -> None:
    make, error = BODIES[name]
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
    ):
        hers, his = await connect(alice, bob, pq=False)
        body = await bob.agent._transact(lambda tx: make(tx, his))
        queue = await bob.agent._store.read(lambda db: send_queues(db, his)[0])
        for _ in range(2):
            await bob.agent._ask(queue.server, Request(queue.sender_id, Send(True, body), queue.auth_key))
        if error is not None:
            failed = await alice.event(Failed)
            assert (failed.connection_id, failed.error) == (hers, error)
        if "RATCHET_HEADER" in str(error):
            assert (await alice.event(RatchetSync)).state.value == "required"
        if name == "a changed body":
            return  # its number is used up: what follows is "earlier"
        await still_fine(alice, bob, his)


def counter(table: str) -> Callable[[sqlite3.Connection], int]:
    return lambda db: int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


async def test_rows_that_a_peer_can_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of messages that never come, and hashes of those that came, have a limit."""
    monkeypatch.setattr(ratchets, "MAX_SKIPPED_KEYS", 20)
    monkeypatch.setattr(ratchets, "MAX_HASHES", 5)
    monkeypatch.setattr(ratchets, "HASHES_COUNTED", 1)
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
    ):
        hers, his = await connect(alice, bob, pq=False)

        def skip(tx: Tx) -> None:
            for _ in range(9):
                ratchets.seal_next(tx, his, None)
            queue_message(tx, connection(tx.db, his), UserMessage(b"after a gap"))

        for _ in range(6):
            await bob.agent._transact(skip)
            await alice.reads()
            await alice.agent.send(hers, b"turn")
            await bob.reads()
        for table, limit in (("skipped_keys", 20), ("seen_hashes", 5)):
            assert await alice.agent._store.read(counter(table)) == limit
        assert await bob.agent._store.read(lambda db: next_delivery(db, 99)) is None
