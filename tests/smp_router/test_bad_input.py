"""What breaks the protocol gets the answer it deserves, or the end of its connection."""

from __future__ import annotations

import random
import secrets

import pytest

from protocol.blocks import pack_batches, pad
from protocol.connection import Outgoing
from protocol.encoding import NO_ENTITY, CorrId, EntityId, short
from protocol.errors import BLOCK, CMD_HAS_AUTH, CMD_NO_ENTITY, CMD_SYNTAX, CMD_UNKNOWN, SESSION, ErrorType
from protocol.smp_codec import SMP_COMMANDS
from protocol.smp_messages import Err, Ok, Ping, Pong, Send
from protocol.versions import SMP_BLOCK_SIZE
from smp_router.commands import HANDLERS
from smp_router.router import Router
from tests.smp_router.wire import WireClient, connected

CORR = CorrId(b"correlation")


def write_raw(client: WireClient, *transmissions: bytes) -> None:
    """Into a session without block encryption."""
    for content in pack_batches(transmissions, SMP_BLOCK_SIZE):
        client.stream.write(pad(content, SMP_BLOCK_SIZE))


def transmission(command: bytes, entity_id: bytes = b"", auth: bytes = b"") -> bytes:
    mark = b"0" if auth else b""
    return short(auth) + mark + short(CORR) + short(entity_id) + command


def test_every_command_has_a_handler() -> None:
    assert {spec.kind for spec in SMP_COMMANDS.specs.values()} == set(HANDLERS)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (b"", CMD_UNKNOWN),
        (b"NOPE", CMD_UNKNOWN),
        (b"ping", CMD_UNKNOWN),
        (b"PING ", CMD_SYNTAX),
        (b"SUB x", CMD_SYNTAX),
        (b"ACK", CMD_SYNTAX),
        (b"ACK \x05abcd", CMD_SYNTAX),
        (b"NEW ", CMD_SYNTAX),
        (b"SEND X body", CMD_SYNTAX),
        (b"KEY \x03abc", CMD_SYNTAX),
        (b"NSUBS", CMD_SYNTAX),
        (b"PRXY anything", CMD_SYNTAX),
        (b"LGET", CMD_NO_ENTITY),
        (b"RSLV x", CMD_SYNTAX),
    ],
)
async def test_bad_commands(router: Router, command: bytes, error: ErrorType) -> None:
    async with connected(router.address, encrypt=False) as client:
        write_raw(client, transmission(command))
        assert await client.answer(CORR) == Err(error)
        assert await client.ask(Ping()) == Pong()


async def test_credentials_that_do_not_belong(router: Router) -> None:
    async with connected(router.address, encrypt=False) as client:
        write_raw(client, transmission(b"PING", bytes(24)))
        assert await client.answer(CORR) == Err(CMD_HAS_AUTH)
        write_raw(client, transmission(b"PING", auth=bytes(64)))
        assert await client.answer(CORR) == Err(CMD_HAS_AUTH)
        write_raw(client, transmission(b"SUB", bytes(24), bytes(63)))
        assert await client.answer(CORR) == Err(BLOCK)


async def test_rest_of_a_batch_is_processed(router: Router) -> None:
    (queue,) = router.load.create_queues(1)
    async with connected(router.address, encrypt=False) as client:
        write_raw(client, b"", b"\x05abc", transmission(b"SEND T hello", queue.sender_id))
        assert await client.answer(CORR) == Ok()
        assert await client.events(2) == [(NO_ENTITY, Err(BLOCK))] * 2


async def test_wrong_session_id_in_the_oldest_version(router: Router) -> None:
    async with connected(router.address, alpn=None) as client:
        body = short(CORR) + short(NO_ENTITY) + b"PING"
        write_raw(client, short(b"") + short(bytes(32)) + body)
        assert await client.answer(CORR) == Err(SESSION)
        write_raw(client, short(b"") + short(client.stream.session_id) + body)
        assert await client.answer(CORR) == Pong()


@pytest.mark.parametrize("encrypt", [True, False])
async def test_broken_blocks_end_the_connection(router: Router, encrypt: bool) -> None:
    (queue,) = router.load.create_queues(1)
    async with connected(router.address) as other:
        for block in (
            b"\xff" * SMP_BLOCK_SIZE,
            b"\x40\x00" + bytes(SMP_BLOCK_SIZE - 2),
        ):
            async with connected(router.address, encrypt=encrypt) as client:
                client.stream.write(block)
                assert await client.closed()
        assert await other.ask(Send(True, b""), queue.sender_id) == Ok()


@pytest.mark.parametrize("content", [b"", b"\x00", b"\x02\x00\x01a", b"\x01\x00\x01ab"], ids=bytes.hex)
async def test_a_batch_that_does_not_parse_is_answered(router: Router, content: bytes) -> None:
    async with connected(router.address, encrypt=False) as client:
        client.stream.write(pad(content, SMP_BLOCK_SIZE))
        assert await client.event() == (NO_ENTITY, Err(BLOCK))
        assert await client.ask(Ping()) == Pong()


async def test_commands_before_a_broken_block_are_carried_out(router: Router) -> None:
    (queue,) = router.load.create_queues(1)
    async with connected(router.address, encrypt=False) as client:
        (good,) = pack_batches([transmission(b"SEND F x", queue.sender_id)], SMP_BLOCK_SIZE)
        client.stream.write(pad(good, SMP_BLOCK_SIZE) + b"\xff" * SMP_BLOCK_SIZE)
        assert await client.closed()
    stored = router.state.queues.by_sender(queue.sender_id)
    assert stored is not None
    assert len(stored.messages) == 1


async def test_replayed_blocks_end_an_encrypted_session(router: Router) -> None:
    async with connected(router.address) as client:
        block = client.connection.send([Outgoing(CORR, NO_ENTITY, Ping())])
        client.stream.write(block)
        assert await client.answer(CORR) == Pong()
        client.stream.write(block)
        assert await client.closed()


async def test_random_transmissions(router: Router) -> None:
    """Whatever comes, each transmission is answered once and the connection stays usable."""
    chance = random.Random(19)
    tags = sorted(SMP_COMMANDS.specs)
    (queue,) = router.load.create_queues(1)
    ids = [NO_ENTITY, queue.recipient_id, queue.sender_id, queue.notifier_id, EntityId(bytes(24))]
    async with connected(router.address, encrypt=False) as client:
        for _ in range(300):
            tail = chance.randbytes(chance.randrange(60))
            command = chance.choice(tags) + chance.choice([b"", b" ", b" "]) + tail
            auth = chance.choice([b"", secrets.token_bytes(64), secrets.token_bytes(80), bytes(114)])
            write_raw(client, transmission(command, chance.choice(ids), auth))
            assert type(await client.answer(CORR)) in (Err, Ok, Pong)
        assert await client.silent()
