"""Connections: handshakes, limits, idle clients, shutdown, a failing store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sqlite3
from collections.abc import Coroutine, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ntf_server import listener
from ntf_server.app import App, running
from ntf_server.client_session import BROKEN_BLOCKS
from protocol.blocks import pad
from protocol.connection import Outgoing
from protocol.encoding import NO_ENTITY, CorrId, EntityId
from protocol.errors import AUTH, BLOCK, QUOTA, ErrorType, store_error
from protocol.ntf_commands import Err, IdTkn, NtfCommand, NtfResponse, Ok, Ping, Pong, Tchk, Tkn, Trpl
from protocol.ntf_handshake import NtfClientHandshake
from protocol.statuses import TokenStatus
from protocol.versions import NTF_ALPN, NTF_BLOCK_SIZE
from tests import builders
from tests.http import get
from tests.ntf_server.conftest import active_device, make_app, make_config, null_token
from tests.ntf_server.ntf_client import DEADLINE, Device, NtfClient
from tests.waiting import until
from transport import budget
from transport.budget import CpuBudget, Slice
from transport.certificates import KeyAlgorithm, renew_online
from transport.errors import ConnectionClosed, TlsFailed
from transport.streams import connect
from transport.tls import client_context


@pytest.mark.parametrize("algorithm", list(KeyAlgorithm))
async def test_both_certificate_algorithms(tmp_path: Path, algorithm: KeyAlgorithm) -> None:
    async with running(make_app(tmp_path, make_config(tmp_path, algorithm))) as app:
        client = await NtfClient.open(app.address)
        assert await client.ask(Ping()) == Pong()
        client.close()


async def test_a_handshake_ends_with_the_certificate_it_began_with(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    async with running(make_app(tmp_path, config)) as app:
        early = socket.create_connection(("127.0.0.1", app.listener.port))
        (await NtfClient.open(app.address)).close()  # whoever came before is accepted now
        renew_online(tmp_path / "config", None, "127.0.0.1", datetime.now(UTC))
        app.reload(config)
        for sock in (early, None):
            client = await NtfClient.open(app.address, sock=sock)
            assert await client.ask(Ping()) == Pong()
            client.close()


async def test_wrong_identity_in_the_handshake_closes(app: App) -> None:
    client = await NtfClient.open(app.address, key_hash=b"x" * 32)
    assert await client.is_closed_by_server()


async def test_version_that_was_not_offered_closes(app: App) -> None:
    client = await NtfClient.open(app.address)
    other = await NtfClient.open(app.address)
    client.close()
    fresh = await _after_hello(app)
    fresh.stream.write(pad(b"\x00\x09" + b"\x20" + app.address.key_hash, NTF_BLOCK_SIZE))
    assert await fresh.is_closed_by_server()
    assert await other.ask(Ping()) == Pong()
    other.close()


@pytest.mark.parametrize("block", [b"\xff" * NTF_BLOCK_SIZE, bytes(NTF_BLOCK_SIZE), pad(b"\x05", 512)])
async def test_broken_block_closes_only_that_connection(app: App, client: NtfClient, block: bytes) -> None:
    victim, before = await NtfClient.open(app.address), BROKEN_BLOCKS._value.get()
    victim.stream.write(block)
    assert await victim.is_closed_by_server()
    assert BROKEN_BLOCKS._value.get() == before + 1
    assert await client.ask(Ping()) == Pong()


async def test_commands_before_a_broken_block_are_answered(app: App, client: NtfClient) -> None:
    device = await active_device(app, client)
    check = Outgoing(builders.corr_id(), device.token_id, Tchk(), device.key)
    client.stream.write(client.connection.send([check]) + b"\xff" * NTF_BLOCK_SIZE)
    (answer,) = await client.receive(1)
    assert answer.message == Tkn(TokenStatus.ACTIVE)
    assert await client.is_closed_by_server()


async def test_silent_client_is_dropped(tmp_path: Path) -> None:
    config = make_config(tmp_path, LIMITS={"handshake_timeout": 0.3})
    async with running(make_app(tmp_path, config)) as app:
        silent = await _after_hello(app)
        assert await silent.is_closed_by_server()


async def test_client_that_leaves_in_the_handshake_costs_nothing_more(app: App, client: NtfClient) -> None:
    leaving = await _after_hello(app)
    await until(lambda: app.listener.clients == 2)
    leaving.close()
    await until(lambda: app.listener.clients == 1)
    assert await client.ask(Ping()) == Pong()


async def _after_hello(app: App) -> NtfClient:
    """A client that got the server's hello and has not answered."""
    address = app.address
    stream = await connect(
        address.hosts[0],
        address.port_number,
        context=client_context([NTF_ALPN]),
        identity=address.key_hash,
        now=lambda: datetime.now(UTC),
        timeout=10,
    )
    return NtfClient(stream, NtfClientHandshake(stream.session_id, address.key_hash, stream.peer_chain[0]))


async def test_idle_clients_are_disconnected(tmp_path: Path) -> None:
    config = make_config(tmp_path, INACTIVE_CLIENTS={"ttl": 1.0, "check_interval": 0.1})
    async with running(make_app(tmp_path, config)) as app:
        idle, busy = await NtfClient.open(app.address), await NtfClient.open(app.address)
        async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
            closed = tasks.create_task(idle.is_closed_by_server())
            while not closed.done():
                assert await busy.ask(Ping()) == Pong()
                await asyncio.sleep(0.05)
        busy.close()


async def test_idle_clients_stay_where_the_operator_wants_it(tmp_path: Path) -> None:
    config = make_config(tmp_path, INACTIVE_CLIENTS={"disconnect": False, "ttl": -1.0})
    async with running(make_app(tmp_path, config)) as app:
        client = await NtfClient.open(app.address)
        app.listener.end_idle()
        assert await client.ask(Ping()) == Pong()
        client.close()


async def test_connections_per_address(tmp_path: Path) -> None:
    config = make_config(tmp_path, LIMITS={"connections_per_address": 2})
    async with running(make_app(tmp_path, config)) as app:
        first, second = await NtfClient.open(app.address), await NtfClient.open(app.address)
        with pytest.raises((ConnectionClosed, TlsFailed, OSError)):
            await NtfClient.open(app.address)
        first.close()
        await first.stream.wait_closed()
        third = await _open_soon(app)
        assert await third.ask(Ping()) == Pong()
        for client in (second, third):
            client.close()


async def _open_soon(app: App) -> NtfClient:
    """The server notices a closed connection a moment after its client."""
    async with asyncio.timeout(DEADLINE):
        while True:
            with contextlib.suppress(ConnectionClosed, TlsFailed, OSError):
                return await NtfClient.open(app.address)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(("of_whom", "for_others"), [("", Pong()), ("address_", Err(QUOTA))])
async def test_commands_over_the_rate_are_answered_quota(
    tmp_path: Path, of_whom: str, for_others: NtfResponse
) -> None:
    config = make_config(tmp_path, LIMITS={f"{of_whom}commands_per_second": 1, f"{of_whom}commands_burst": 5})
    async with running(make_app(tmp_path, config)) as app:
        client = await NtfClient.open(app.address)
        answers = [await client.ask(Ping()) for _ in range(8)]
        assert answers[:5] == [Pong()] * 5
        assert Err(QUOTA) in answers[5:]
        other = await NtfClient.open(app.address)
        assert await other.ask_many([(Ping(), NO_ENTITY, None)] * 5) == [for_others] * 5
        for each in (client, other):
            each.close()


@pytest.mark.parametrize("most", [0, 2])
async def test_tokens_per_connection(tmp_path: Path, most: int) -> None:
    """0 is no limit."""
    config = make_config(tmp_path, LIMITS={"tokens_per_connection": most})
    async with running(make_app(tmp_path, config)) as app:
        client = await NtfClient.open(app.address)
        devices = [Device.make(null_token()) for _ in range(3)]
        answers = [await client.ask(device.tnew, NO_ENTITY, device.key) for device in devices]
        assert [isinstance(answer, IdTkn) for answer in answers] == [True, True, not most]
        assert not most or answers[2] == Err(QUOTA)
        client.close()


async def test_replacements_count_as_tokens_of_the_connection_only(tmp_path: Path) -> None:
    config = make_config(tmp_path, LIMITS={"tokens_per_connection": 2, "address_tokens_per_day": 1})
    async with running(make_app(tmp_path, config)) as app:
        client = await NtfClient.open(app.address)
        device = await active_device(app, client)
        assert await device.ask(client, Trpl(null_token())) == Ok()
        assert await device.ask(client, Trpl(null_token())) == Err(QUOTA)
        client.close()


@pytest.mark.parametrize("limit", ["address_verifications_per_hour", "address_tokens_per_day"])
async def test_registrations_of_an_address(tmp_path: Path, limit: str) -> None:
    """Counted over all of its connections."""
    config = make_config(tmp_path, LIMITS={limit: 3})
    async with running(make_app(tmp_path, config)) as app:
        answers = []
        for _ in range(5):
            client, device = await NtfClient.open(app.address), Device.make(null_token())
            answers.append(await client.ask(device.tnew, NO_ENTITY, device.key))
            client.close()
        assert [isinstance(answer, IdTkn) for answer in answers] == [True] * 3 + [False] * 2
        assert answers[4] == Err(QUOTA)


async def test_client_that_does_not_read_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    limits = {"send_timeout": 0.3, "commands_per_second": 0, "address_commands_per_second": 0}
    async with running(make_app(tmp_path, make_config(tmp_path, LIMITS=limits))) as app:
        client = await NtfClient.open(app.address)
        client.stream.read_limit = 1  # it reads no more than TLS needs
        pings = client.connection.send([Outgoing(builders.corr_id(), NO_ENTITY, Ping()) for _ in range(2000)])
        with pytest.raises(ConnectionClosed):
            async with asyncio.timeout(DEADLINE):
                while True:
                    client.stream.write(pings)
                    await client.stream.drain()
        said = [record for record in caplog.records if "a client was disconnected" in record.getMessage()]
        assert [(record.levelname, record.exc_info) for record in said] == [("INFO", None)]
        assert "it took no answers for 0.3 seconds" in said[0].getMessage()
        assert "Traceback" not in caplog.text
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_ids_that_leave_no_room_for_an_answer(app: App, caplog: pytest.LogCaptureFixture) -> None:
    client = await NtfClient.open(app.address)
    long, ping = CorrId(b"c" * 250), Outgoing(builders.corr_id(), NO_ENTITY, Ping())
    strange = Outgoing[NtfCommand](long, EntityId(b"e" * 250), Ping())
    client.stream.write(client.connection.send([ping]) + client.connection.send([strange]))
    first, second = await client.receive(2)
    assert first.message == Pong()
    assert (second.corr_id, second.entity_id, second.message) == (b"", b"", Err(BLOCK))
    client.stream.write(client.connection.send([Outgoing(long, NO_ENTITY, Ping())]))
    (answer,) = await client.receive(1)
    assert (answer.corr_id, answer.message) == (long, Pong())
    client.close()
    assert not caplog.records


async def test_reading_and_authorising_wait_for_a_turn_after_each_slice(
    app: App, client: NtfClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = await active_device(app, client)
    turns, take = list[str](), CpuBudget.take

    def counted(self: CpuBudget, source: str) -> Coroutine[None, None, Slice]:
        turns.append(source)
        return take(self, source)

    monkeypatch.setattr(CpuBudget, "take", counted)
    monkeypatch.setattr(budget, "SLICE", 0.0)
    answers = await client.ask_many([(Tchk(), device.token_id, device.key)] * 40)
    assert answers == [Tkn(TokenStatus.ACTIVE)] * 40
    assert len(turns) >= 40 + 40 // 4, "one for each command, one for each block of four"


async def test_nonsense_is_answered_for_a_while(app: App, client: NtfClient) -> None:
    nonsense = pad(bytes([200]) + bytes(2 * 200), NTF_BLOCK_SIZE)
    client.stream.write(nonsense)
    assert [answer.message for answer in await client.receive(200)] == [Err(BLOCK)] * 200
    assert await client.ask(Ping()) == Pong()
    client.stream.write(nonsense * 2)
    with pytest.raises(ConnectionClosed):
        await client.receive(201)
    other = await NtfClient.open(app.address)
    assert await other.ask(Ping()) == Pong()
    other.close()


async def test_flood_after_quota_ends_the_connection(tmp_path: Path) -> None:
    config = make_config(tmp_path, LIMITS={"commands_per_second": 1, "commands_burst": 20})
    async with running(make_app(tmp_path, config)) as app:
        client = await NtfClient.open(app.address)
        answers: list[NtfResponse] = []
        with pytest.raises(ConnectionClosed):
            while len(answers) < 100:
                answers.append(await client.ask(Ping()))
        assert answers[:20] == [Pong()] * 20
        assert 20 <= answers.count(Err(QUOTA)) <= 30


async def test_connections_count_before_their_handshake(tmp_path: Path) -> None:
    config = make_config(tmp_path, LIMITS={"connections_per_address": 2})
    async with running(make_app(tmp_path, config)) as app:
        silent = [await asyncio.open_connection("127.0.0.1", app.listener.port) for _ in range(2)]
        with pytest.raises((ConnectionClosed, TlsFailed, OSError)):
            await NtfClient.open(app.address)
        for _, writer in silent:
            writer.close()
        client = await _open_soon(app)
        assert await client.ask(Ping()) == Pong()
        client.close()


async def test_shutdown_answers_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "SHUTDOWN_TIMEOUT", 2 * DEADLINE)  # sessions end of their own accord
    stop, ready = asyncio.Event(), asyncio.Event()
    app = make_app(tmp_path, make_config(tmp_path))
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        tasks.create_task(app.run(stop, ready.set))
        await ready.wait()
        client, idle = await NtfClient.open(app.address), await NtfClient.open(app.address)
        device = Device.make(null_token())
        with _locked(tmp_path):
            asked: list[Outgoing[NtfCommand]] = [Outgoing(builders.corr_id(1), NO_ENTITY, Ping())]
            asked.append(Outgoing(builders.corr_id(2), NO_ENTITY, device.tnew, device.key))
            client.stream.write(client.connection.send(asked))
            (answer,) = await client.receive(1)
            assert answer.message == Pong()  # so the registration waits for the store now
            stop.set()
            assert await idle.is_closed_by_server()
        (answer,) = await client.receive(1)
        assert isinstance(answer.message, IdTkn)
        assert await client.is_closed_by_server()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Another program holds the write lock of the database."""
    locker = sqlite3.connect(folder / "data" / "ntf-server.db", isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        locker.execute("ROLLBACK")
        locker.close()


async def test_state_survives_a_restart(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    async with running(make_app(tmp_path, config)) as app:
        client = await NtfClient.open(app.address)
        device = await active_device(app, client)
        client.close()
    async with running(make_app(tmp_path, config)) as app:
        client = await NtfClient.open(app.address)
        assert await device.ask(client, Tchk()) == Tkn(TokenStatus.ACTIVE)
        client.close()


async def test_locked_store_answers_store_error(tmp_path: Path) -> None:
    config = make_config(tmp_path, STORE={"busy_timeout": 0.1})
    async with running(make_app(tmp_path, config)) as app:
        client = await NtfClient.open(app.address)
        device = await active_device(app, client)
        other = Device.make(null_token())
        with _locked(tmp_path):
            answer = await client.ask(other.tnew, NO_ENTITY, other.key)
            assert isinstance(answer, Err)
            assert answer.error.text.startswith(b"STORE ")
            assert await device.ask(client, Tchk()) == Tkn(TokenStatus.ACTIVE)
        assert isinstance(await client.ask(other.tnew, NO_ENTITY, other.key), IdTkn)
        client.close()


async def test_metrics_and_health(tmp_path: Path, unused_tcp_port: int) -> None:
    config = make_config(tmp_path, METRICS={"port": unused_tcp_port})
    async with running(make_app(tmp_path, config)) as app:
        client = await NtfClient.open(app.address)
        await active_device(app, client)
        client.close()
        metrics = await get(unused_tcp_port, "/metrics")
        for name in ("tokens_created", "subscriptions_created", "clients"):
            assert f"\nsimplex_ntf_{name} " in metrics
        assert 'simplex_ntf_commands{command="TVFY",outcome="ok"}' in metrics
        assert (await get(unused_tcp_port, "/health/live")).startswith("HTTP/1.1 200")
        async with asyncio.timeout(DEADLINE):
            while not (await get(unused_tcp_port, "/health/ready")).startswith("HTTP/1.1 200"):
                await asyncio.sleep(0.05)  # the store has not been tried yet
        assert (await get(unused_tcp_port, "/other")).startswith("HTTP/1.1 404")
        assert (await get(unused_tcp_port, "/metrics", "POST")).startswith("HTTP/1.1 405")


async def test_random_blocks_never_hurt_others(app: App, client: NtfClient) -> None:
    for _ in range(30):
        victim = await NtfClient.open(app.address)
        victim.stream.write(pad(b"\x02" + os.urandom(200), NTF_BLOCK_SIZE))
        with contextlib.suppress(ConnectionClosed):
            data = await victim.stream.receive()
            assert not data or len(data) % NTF_BLOCK_SIZE == 0
        victim.close()
    assert await client.ask(Ping()) == Pong()


def test_error_texts_fit_in_a_block() -> None:
    assert len(store_error("x" * 5000).text) < 300
    assert store_error("voilà") == ErrorType(b"STORE voil?")


async def test_an_address_with_hundreds_of_failures_is_disconnected(tmp_path: Path) -> None:
    """Its answers arrive, its connections that do not fail stay, and it gets in again."""
    config = make_config(tmp_path, LIMITS={"address_failures_burst": 100})
    async with running(make_app(tmp_path, config)) as app:
        honest, hostile = await NtfClient.open(app.address), await NtfClient.open(app.address)
        device, key = await active_device(app, honest), builders.ed25519()
        unknown = [(Tchk(), builders.entity_id(), key)]
        assert await hostile.ask_many(unknown * 100) == [Err(AUTH)] * 100
        assert await hostile.ask_many(unknown * 2) == [Err(AUTH)] * 2
        with pytest.raises(ConnectionClosed):
            await hostile.ask_many(unknown)
        assert await device.ask(honest, Tchk()) == Tkn(TokenStatus.ACTIVE)
        again = await NtfClient.open(app.address)
        assert await again.ask(Ping()) == Pong()
        assert await again.ask_many(unknown) == [Err(AUTH)]
        with pytest.raises(ConnectionClosed):
            await again.receive(1)
        honest.close()
