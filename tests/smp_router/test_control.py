"""The control socket: every action, and requests that make no sense."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from protocol.crypto import Ed25519PrivateKey, decode_private_key
from protocol.encoding import EntityId, unb64
from protocol.errors import AUTH
from protocol.smp_messages import Deld, End, Ends, Err, Nmsg, Nsub, Ping, Pong, Sok
from smp_router.control import MAX_LINE, ControlError, ask, control_socket
from smp_router.router import Router
from tests.smp_router.wire import connected
from tests.waiting import until
from transport.certificates import KeyAlgorithm, make_ca, make_online, make_service, write_server_files
from transport.errors import IdentityMismatch, TransportError


@pytest.fixture
async def socket(router: Router, tmp_path: Path) -> AsyncIterator[Path]:
    path = tmp_path / "control"
    async with control_socket(router, path):
        yield path


async def do(socket: Path, action: str, **arguments: Any) -> Any:
    answer = await ask(socket, json.dumps({"do": action, **arguments}))
    assert answer["ok"], answer
    return answer["result"]


async def test_socket_is_for_the_owner_and_goes_away(router: Router, tmp_path: Path) -> None:
    path = tmp_path / "control"
    path.touch()
    async with control_socket(router, path):
        mode = path.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"do": "status"}\n' * 2)
        assert json.loads(await reader.readline())["ok"]
        assert json.loads(await reader.readline())["ok"]
    assert await reader.read() == b""
    assert not path.exists()
    writer.close()


async def test_a_client_that_does_not_read_is_not_waited_for(router: Router, tmp_path: Path) -> None:
    path = tmp_path / "control"
    others = asyncio.all_tasks()
    async with control_socket(router, path):
        reader, writer = await asyncio.open_unix_connection(path, limit=1)
        while not writer.transport.get_write_buffer_size():  # the router has stopped to read: it cannot write
            writer.write(b'{"do": "status"}\n' * 100)
            await asyncio.sleep(0)
    await until(lambda: asyncio.all_tasks() == others)
    with pytest.raises(ConnectionError):
        await reader.read()
    writer.close()


async def test_load_and_status(router: Router, socket: Path) -> None:
    first, second = await do(socket, "create_queues", count=2)
    notifier_id = EntityId(unb64(first["notifier_id"].encode()))
    key = decode_private_key(unb64(first["notifier_key"].encode()))
    assert isinstance(key, Ed25519PrivateKey)
    service = make_service(datetime.now(UTC))
    async with connected(router.address, service=service) as client:
        assert await client.ask(Nsub(), notifier_id, key, with_service=True) == Sok(client.service_id)
        assert await do(socket, "emit", count=4, rate=1000) == 4
        assert [entity for entity, _ in await client.events(2)] == [notifier_id] * 2
        status = await do(socket, "status")
        assert (status["connections"], status["queues"], status["subscribed_notifiers"]) == (1, 2, 1)
        assert [(s["role"], s["queues"]) for s in status["services"]] == [("notifier", 1)]
        assert status["address"] == str(router.address)
        await do(socket, "send_deld", ids=[first["notifier_id"]])
        assert await client.event() == (notifier_id, Deld())
        await client.ask(Nsub(), notifier_id, key, with_service=True)
        await do(socket, "send_end", ids=[first["notifier_id"]])
        assert await client.event() == (notifier_id, End())
        await client.ask(Nsub(), notifier_id, key, with_service=True)
        await do(socket, "send_ends")
        assert isinstance((await client.event())[1], Ends)
        assert await do(socket, "lose_associations", share=1) == 1
        assert await do(socket, "lose_associations", count=1) == 0
        await do(socket, "change_service_ids")
        await do(socket, "forget_services")
        assert len(router.services) == 0
        assert await do(socket, "delete_queues", ids=[second["recipient_id"]]) == 1
        assert len(router.state.queues) == 1
        await client.ask(Nsub(), notifier_id, key)
        await do(socket, "emit", count=1)
        assert isinstance((await client.event())[1], Nmsg)


async def test_faults(router: Router, socket: Path, tmp_path: Path) -> None:
    async with connected(router.address) as client:
        await do(socket, "answer_errors", command="PING", error="AUTH", count=1)
        assert [await client.ask(Ping()) for _ in range(2)] == [Err(AUTH), Pong()]
        await do(socket, "answer_errors", command="PING", error="AUTH")
        await do(socket, "answer_errors", command="PING", error=None)
        await do(socket, "delay", seconds=0)
        await do(socket, "black_hole")
        await do(socket, "black_hole", on=False)
        assert await client.ask(Ping()) == Pong()
        assert await do(socket, "drop_connections") == 1
        assert await client.closed()
    await do(socket, "refuse", on=True)
    with pytest.raises((TransportError, OSError)):
        async with connected(router.address):
            pass
    await do(socket, "refuse", on=False)
    now = datetime.now(UTC)
    ca, ca_key = make_ca(KeyAlgorithm.ED25519, "impostor", now)
    online = make_online(ca, ca_key, KeyAlgorithm.ED25519, "127.0.0.1", now)
    write_server_files(tmp_path / "other", ca, ca_key, online)
    await do(socket, "present_certificate", config_dir=str(tmp_path / "other"))
    with pytest.raises(IdentityMismatch):
        async with connected(router.address):
            pass
    await do(socket, "present_certificate", config_dir=None)
    async with connected(router.address) as client:
        assert await client.ask(Ping()) == Pong()


@pytest.mark.parametrize(
    ("request_line", "expected"),
    [
        ("", "a request is a JSON object"),
        ("nonsense", "a request is a JSON object"),
        ("[]", "JSON object"),
        ("{}", "do: one of answer_errors"),
        ('{"do": "explode"}', "do: one of"),
        ('{"do": "refuse", "on": 1}', "on: true or false"),
        ('{"do": "delay"}', "seconds: a number"),
        ('{"do": "delay", "seconds": -1}', "seconds: a number"),
        ('{"do": "delay", "seconds": true}', "seconds: a number"),
        ('{"do": "delay", "seconds": Infinity}', "seconds: a number"),
        ('{"do": "lose_associations"}', "share: a number"),
        ('{"do": "send_end", "ids": "x"}', "ids: a list"),
        ('{"do": "send_end", "ids": [1]}', "ids: a list"),
        ('{"do": "block", "ids": [], "reason": "spam", "notice": []}', "notice: a JSON object"),
        ('{"do": "send_end", "ids": ["!"]}', "does not parse"),
        ('{"do": "answer_errors", "command": "NOPE", "error": "AUTH"}', "NOPE is not a command"),
        ('{"do": "answer_errors", "command": "PING", "error": "WHAT"}', "does not parse"),
        (
            '{"do": "block", "ids": [], "reason": "spam", "notice": {"text": "%s"}}' % ("x" * 1000),
            "at most 1000",
        ),
        ('{"do": "emit", "count": 1}', "create_queues first"),
        ('{"do": "emit", "count": 1, "rate": 0}', "rate: above 0"),
        ('{"do": "create_queues", "count": 1000001}', "at most"),
        ('{"do": "present_certificate", "config_dir": "/nowhere"}', "cannot read"),
    ],
)
async def test_senseless_requests(socket: Path, request_line: str, expected: str) -> None:
    answer = await ask(socket, request_line)
    assert not answer["ok"]
    assert expected in answer["error"]


async def test_endless_line_ends_the_connection(socket: Path) -> None:
    with pytest.raises((ControlError, ConnectionError)):
        await ask(socket, "x" * (MAX_LINE + 10))
    assert (await ask(socket, '{"do": "status"}'))["ok"]


async def test_a_request_that_is_cut_is_not_carried_out(socket: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(socket)
    writer.write(b'{"do": "create_queues", "count": 5}')
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    assert (await do(socket, "status"))["queues"] == 0


async def test_a_block_needs_no_notice(socket: Path) -> None:
    assert await do(socket, "block", ids=[], reason="spam") == 0


@pytest.mark.parametrize("first", [b"POST / HTTP/1.1\r", b'{"do": "nothing"}', b"[]", b"[" * 10_000])
async def test_who_does_not_know_the_words_is_disconnected(
    router: Router, socket: Path, first: bytes
) -> None:
    """What follows, such as the body of a browser's request, is not carried out."""
    reader, writer = await asyncio.open_unix_connection(socket)
    writer.write(first + b"\n" + b'{"do": "create_queues", "count": 5}\n')
    answer, *more = (await reader.read()).splitlines()
    writer.close()
    assert not json.loads(answer)["ok"]
    assert more == []
    assert (await do(socket, "status"))["queues"] == 0
