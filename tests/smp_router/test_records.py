"""The stored router: nothing that was answered is lost, whatever ends it; nothing outlives its use."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from protocol.addresses import SmpServer, parse_smp_server
from protocol.blocking import blocking_info
from protocol.connection import Outgoing
from protocol.encoding import CorrId, EntityId
from protocol.errors import AUTH, ErrorType
from protocol.ids_hash import ids_hash
from protocol.smp_messages import (
    Ack,
    Del,
    Err,
    Info,
    Key,
    Lget,
    Lnk,
    Msg,
    Nsub,
    Nsubs,
    Off,
    Ok,
    Ping,
    Pong,
    Que,
    QueueMode,
    QueueSet,
    Rkey,
    Send,
    Soks,
    Sub,
)
from smp_router.router import Router, make_credentials
from smp_router.sqlite_records import load_records, stored_state
from smp_router.state import RouterState
from store.interface import StoreError
from tests.smp_router.test_links import DATA, with_link
from tests.smp_router.test_recipients import text
from tests.smp_router.wire import (
    DEADLINE,
    TestQueue,
    WireClient,
    add_notifier,
    connected,
    create_queue,
    eventually,
    first_message,
    new_key,
)
from transport.certificates import Credentials, make_service
from transport.errors import TransportError

IDENTITY = make_credentials("127.0.0.1")


@asynccontextmanager
async def stored_router(path: Path, credentials: Credentials = IDENTITY) -> AsyncIterator[Router]:
    async with stored_state(path, credentials) as state, Router.start(state=state) as router:
        yield router


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "router.db"


async def test_everything_is_kept(database: Path) -> None:
    service, keys = make_service(datetime.now(UTC)), (new_key(), new_key())
    async with stored_router(database) as router, connected(router.address, service=service) as client:
        queue, plain = await create_queue(client), await create_queue(client, mode=None)
        address, link_id = await with_link(client, QueueMode.CONTACT)
        blocked = await create_queue(client)
        gone = await create_queue(client)
        await add_notifier(client, queue)
        await client.ask(Rkey(tuple(key.public for key in keys)), address.recipient_id, address.key)
        await client.ask(Key(keys[0].public), plain.recipient_id, plain.key)
        await client.ask(Off(), plain.recipient_id, plain.key)
        await client.ask(Del(), gone.recipient_id, gone.key)
        await client.ask(Nsub(), queue.notifier_id, queue.notifier_key, with_service=True)
        router.block(blocked.sender_id, blocking_info("content", {"ttl": 5}))
        service_id = client.service_id
        router.faults.drop_connections()
        async with connected(router.address) as sender:
            for body in (b"one", b"two"):
                assert await sender.ask(Send(True, body), queue.sender_id) == Ok()
    for _ in range(2):
        async with stored_router(database) as router, connected(router.address, service=service) as client:
            assert (len(router.state.queues), router.state.stored_messages) == (4, 2)
            assert client.service_id == service_id
            await check_service(client, queue)
            async with connected(router.address) as reader:
                assert text(queue, await first_message(reader, queue)) == b"one"
            assert await client.ask(Sub(), address.recipient_id, keys[1]) != Err(AUTH)
            assert await client.ask(Send(True, b""), plain.sender_id) == Err(AUTH)
            assert await client.ask(Lget(), link_id) == Lnk(address.sender_id, DATA)
            error = ErrorType(b'BLOCKED reason=content,notice={"ttl":5}')
            assert await client.ask(Send(True, b""), blocked.sender_id) == Err(error)


async def check_service(client: WireClient, queue: TestQueue) -> None:
    params = client.connection.params
    assert params is not None
    assert params.service is not None
    expected = QueueSet(1, ids_hash([queue.notifier_id]))
    answer = await client.ask(Nsubs(expected), client.service_id, params.service.private_key)
    assert answer == Soks(expected)


async def test_acknowledged_messages_leave_no_trace(database: Path) -> None:
    secret = b"a body that nobody else must find" * 20
    async with stored_router(database) as router, connected(router.address) as client:
        queue = await create_queue(client)
        for _ in range(20):
            assert await client.ask(Send(True, secret), queue.sender_id) == Ok()
        message = await first_message(client, queue)
        while isinstance(message, Msg):
            message = await client.ask(Ack(message.message_id), queue.recipient_id, queue.key)
        await router.state.records.maintain()
        for file in database.parent.iterdir():
            assert secret[:20] not in file.read_bytes(), file.name
            assert file.stat().st_mode & 0o777 == 0o600


async def test_a_repeated_send_is_known_after_a_restart(database: Path) -> None:
    corr_id = CorrId(os.urandom(24))
    async with stored_router(database) as router, connected(router.address) as client:
        queue = await create_queue(client)
        await send_as(client, queue, corr_id)
    async with stored_router(database) as router, connected(router.address) as client:
        await send_as(client, queue, corr_id)
        assert router.state.stored_messages == 1


async def send_as(client: WireClient, queue: TestQueue, corr_id: CorrId) -> None:
    client.write(Outgoing(corr_id, queue.sender_id, Send(False, b"once")))
    assert await client.answer(corr_id) == Ok()


@pytest.mark.parametrize("end", ["", "-wal"])
async def test_answers_wait_for_the_disk(database: Path, end: str) -> None:
    """While the database, or its log, is away nothing is promised; what is read goes on afterwards."""
    file = database.with_name(database.name + end)
    async with stored_router(database) as router, connected(router.address) as client:
        queue = await create_queue(client)
        away = database.with_suffix(".away")
        os.rename(file, away)  # a file that vanished takes no writes
        client.write(Outgoing(CorrId(os.urandom(24)), queue.sender_id, Send(False, b"kept")))
        await eventually(lambda: router.state.records.failing)
        async with connected(router.address) as other:
            assert await other.ask(Ping()) == Pong()
            refused = await other.ask(Send(False, b"refused"), queue.sender_id)
            assert refused == Err(ErrorType(b"STORE not available"))
            joining = asyncio.ensure_future(log_in(router.address))
            await eventually(lambda: len(router.services) == 1)
            assert await other.ask(Ping()) == Pong()
            assert not joining.done()  # its id is not kept yet
        os.rename(away, file)
        await eventually(lambda: not router.state.records.failing)
        assert isinstance(await client.ask(Que(), queue.recipient_id, queue.key), Info)
        service_id = await joining
    async with stored_router(database) as router, connected(router.address) as client:
        assert text(queue, await first_message(client, queue)) == b"kept"
        assert router.services.get(service_id) is not None


async def log_in(server: SmpServer) -> EntityId:
    async with connected(server, service=make_service(datetime.now(UTC))) as service:
        return service.service_id


async def test_only_one_router_uses_a_database(database: Path) -> None:
    async with stored_router(database):
        with pytest.raises(StoreError):
            async with stored_state(database, IDENTITY):
                pass


@pytest.mark.parametrize(
    "spoil",
    [
        "CREATE TABLE something (x)",
        "PRAGMA user_version = 99",
        "INSERT INTO queues (recipient_id, recipient_keys, secret, sender_id) VALUES (x'', x'', x'', x'')",
        "INSERT INTO messages VALUES (1, x'01', x'01', x'01', x'')",
        "INSERT INTO services VALUES (x'01', 'X', x'01')",
    ],
)
async def test_a_database_of_others(database: Path, spoil: str) -> None:
    if "something" not in spoil:
        async with stored_state(database, IDENTITY):
            pass
    with closing(sqlite3.connect(database)) as db:
        db.execute(spoil)
        db.commit()
    state = RouterState(IDENTITY)
    with pytest.raises(StoreError):
        load_records(database, state)


def test_no_database(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(StoreError):
        load_records(path, RouterState(IDENTITY))


async def start_program(config_dir: Path, database: Path) -> tuple[SmpServer, asyncio.subprocess.Process]:
    options = ["start", "--config-dir", str(config_dir), "--store", str(database)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "smp_router", *options, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        line = await process.stdout.readline()
    return parse_smp_server(line.decode().strip()), process


async def kill(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGKILL)
    async with asyncio.timeout(DEADLINE):
        await process.wait()


async def test_kill(tmp_path: Path) -> None:
    """Killed in the middle of many commands, again and again: all that was answered is there."""
    config_dir, database = tmp_path / "config", tmp_path / "router.db"
    made = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "smp_router", "init", "--ip", "127.0.0.1",
        "--config-dir", str(config_dir), stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await made.wait() == 0
    (config_dir / "smp-router.ini").write_text("[router]\nhost = 127.0.0.1\nport = 0\n")
    kept: dict[bytes, tuple[TestQueue, int]] = {}
    for _ in range(3):
        server, process = await start_program(config_dir, database)
        try:
            await check_kept(server, kept)
            await send_until_killed(server, process, kept)
        finally:
            await kill(process)
    server, process = await start_program(config_dir, database)
    try:
        await check_kept(server, kept)
    finally:
        await kill(process)


async def check_kept(server: SmpServer, kept: dict[bytes, tuple[TestQueue, int]]) -> None:
    async with connected(server) as client:
        for queue, answered in kept.values():
            info = await client.ask(Que(), queue.recipient_id, queue.key)
            assert isinstance(info, Info)
            size = int(info.json.split(b'"qiSize":')[1].split(b",")[0].rstrip(b"}"))
            assert size >= answered


async def send_until_killed(
    server: SmpServer, process: asyncio.subprocess.Process, kept: dict[bytes, tuple[TestQueue, int]]
) -> None:
    async with connected(server) as client:
        queue = await create_queue(client)
        kept[queue.recipient_id] = (queue, 0)
        for number in range(100):
            if number == 60:
                process.send_signal(signal.SIGKILL)
            try:
                answer = await client.ask(Send(False, b"message"), queue.sender_id)
            except (OSError, TransportError):
                return
            assert answer == Ok()
            kept[queue.recipient_id] = (queue, number + 1)


async def test_messages_that_are_not_restored_are_deleted(database: Path) -> None:
    """Queues are kept; once messages are restored again, the deleted ones do not come back."""
    async with stored_router(database) as router, connected(router.address) as client:
        queue = await create_queue(client)
        await add_notifier(client, queue)
        for body in (b"one", b"two"):
            assert await client.ask(Send(True, body), queue.sender_id) == Ok()
        assert (router.state.stored_messages, router.state.stored_nmsgs) == (2, 2)
    async with (
        stored_state(database, IDENTITY, restore_messages=False) as state,
        Router.start(state=state) as router,
        connected(router.address) as client,
    ):
        assert (state.stored_messages, state.stored_nmsgs, len(state.queues)) == (0, 0, 1)
        assert await client.ask(Send(False, b"three"), queue.sender_id) == Ok()
    async with stored_router(database) as router, connected(router.address) as client:
        assert (router.state.stored_messages, router.state.stored_nmsgs) == (1, 0)
        assert text(queue, await first_message(client, queue)) == b"three"
