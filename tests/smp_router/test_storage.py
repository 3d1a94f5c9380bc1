"""What one address makes the router keep leaves room for others, and what nobody uses is removed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from protocol.errors import QUOTA, HandshakeError
from protocol.smp_handshake import ServiceRole
from protocol.smp_messages import Del, Err, Ids, Lset, New, Ok, QueueMode, Rkey, Send, SmpMessage, Sok, Sub
from smp_router.config import RouterConfig
from smp_router.queues import MESSAGE_BYTES
from smp_router.router import Router, make_credentials
from smp_router.sqlite_records import stored_state
from tests.smp_router.test_links import DATA, new_link_id
from tests.smp_router.wire import TestQueue, WireClient, connected, create_queue, eventually, new_dh, new_key
from transport.certificates import make_service

OTHER_ADDRESS = "127.0.0.2"
BODY = bytes(50)
EACH = MESSAGE_BYTES + len(BODY)


async def ask_new(client: WireClient, mode: QueueMode = QueueMode.MESSAGING) -> SmpMessage:
    key = new_key()
    command = New(recipient_key=key.public, dh_key=new_dh().public, subscribe=False, mode=mode)
    return await client.ask(command, key=key)


async def send(client: WireClient, queue: TestQueue) -> SmpMessage:
    return await client.ask(Send(False, BODY), queue.sender_id)


async def test_an_address_has_a_share_of_queues() -> None:
    async with (
        Router.start(RouterConfig(max_queues=12)) as router,
        connected(router.address) as hostile,
        connected(router.address, source=OTHER_ADDRESS) as honest,
    ):
        made = [await create_queue(hostile) for _ in range(3)]
        assert await ask_new(hostile) == Err(QUOTA)
        assert isinstance(await ask_new(honest), Ids)
        assert await hostile.ask(Del(), made[0].recipient_id, made[0].key) == Ok()
        assert isinstance(await ask_new(hostile), Ids)


async def test_an_address_has_a_share_of_links_and_keys() -> None:
    config = RouterConfig(max_links=4, max_recipient_keys=4)
    async with (
        Router.start(config) as router,
        connected(router.address) as hostile,
        connected(router.address, source=OTHER_ADDRESS) as honest,
    ):
        for client, expected in ((hostile, Ok()), (hostile, Err(QUOTA)), (honest, Ok())):
            queue = await create_queue(client, mode=QueueMode.CONTACT)
            keys = Rkey((queue.key.public, new_key().public))
            assert await client.ask(keys, queue.recipient_id, queue.key) == expected
            assert await client.ask(Lset(new_link_id(), DATA), queue.recipient_id, queue.key) == expected


async def test_an_address_has_a_share_of_services() -> None:
    """Counted with their queues; its own services without queues make room."""
    role = ServiceRole.MESSAGING
    async with Router.start(RouterConfig(max_services=8)) as router:
        for _ in range(2):
            service = make_service(datetime.now(UTC))
            async with connected(router.address, service=service, role=role) as client:
                await create_queue(client, with_service=True)
        one_more = make_service(datetime.now(UTC))
        with pytest.raises(HandshakeError, match="BAD_SERVICE"):
            async with connected(router.address, service=one_more, role=role):
                pass
        async with connected(router.address, service=one_more, role=role, source=OTHER_ADDRESS) as honest:
            await create_queue(honest, with_service=True)


async def test_messages_are_limited_in_bytes_by_the_address_of_their_queue() -> None:
    config = RouterConfig(max_message_bytes=40 * EACH)
    async with (
        Router.start(config) as router,
        connected(router.address) as hostile,
        connected(router.address, source=OTHER_ADDRESS) as honest,
    ):
        theirs, mine = await create_queue(hostile), await create_queue(honest)
        assert [await send(hostile, theirs) for _ in range(11)] == [Ok()] * 10 + [Err(QUOTA)]
        assert router.state.storage.total.message_bytes == 10 * EACH
        assert await send(hostile, mine) == Ok()  # whoever sends it
        assert await hostile.ask(Del(), theirs.recipient_id, theirs.key) == Ok()
        assert router.state.storage.total.message_bytes == EACH


async def test_a_queue_takes_a_few_messages_when_all_have_too_many() -> None:
    config = RouterConfig(max_message_bytes=10 * EACH, address_share_percent=100)
    async with (
        Router.start(config) as router,
        connected(router.address) as hostile,
        connected(router.address, source=OTHER_ADDRESS) as honest,
    ):
        theirs, mine = await create_queue(hostile), await create_queue(honest)
        assert [await send(hostile, theirs) for _ in range(11)] == [Ok()] * 10 + [Err(QUOTA)]
        assert [await send(honest, mine) for _ in range(5)] == [Ok()] * 4 + [Err(QUOTA)]
        # But not beyond the share of its address.
        more = await create_queue(hostile)
        assert await send(hostile, more) == Err(QUOTA)


@pytest.fixture
def clock() -> list[datetime]:
    return [datetime(2030, 1, 1, tzinfo=UTC)]


async def test_queues_that_were_never_used_are_removed(clock: list[datetime]) -> None:
    config = RouterConfig(expiry_interval=0.01, unused_ttl=3600)
    async with Router.start(config, now=lambda: clock[0]) as router, connected(router.address) as client:
        await create_queue(client)
        read, written = await create_queue(client), await create_queue(client)
        await create_queue(client, subscribe=True)
        assert await client.ask(Sub(), read.recipient_id, read.key) == Sok()
        assert await send(client, written) == Ok()
        clock[0] += timedelta(seconds=3500)
        assert len(router.state.queues) == 4
        clock[0] += timedelta(seconds=200)
        await eventually(lambda: len(router.state.queues) == 3)
        clock[0] += timedelta(hours=5)
        await look_for_expired(router)
        router.faults.drop_connections()
        await eventually(lambda: router.connections == 0)
        await look_for_expired(router)
        assert len(router.state.queues) == 3  # its recipient may be back in a moment
        clock[0] += timedelta(seconds=3700)
        await eventually(lambda: len(router.state.queues) == 2)
        assert router.counts["queues_expired"] == 2
        assert {queue.recipient_id for queue in router.state.queues} == {
            read.recipient_id,
            written.recipient_id,
        }


async def look_for_expired(router: Router) -> None:
    await router._broker.expire()


def contents(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in folder.iterdir()]


async def test_whether_a_queue_was_used_is_kept(tmp_path: Path, clock: list[datetime]) -> None:
    path, credentials = tmp_path / "router.db", make_credentials("127.0.0.1")
    async with (
        stored_state(path, credentials) as state,
        Router.start(state=state, now=lambda: clock[0]) as router,
        connected(router.address) as client,
    ):
        unused, used = await create_queue(client), await create_queue(client)
        assert await client.ask(Sub(), used.recipient_id, used.key) == Sok()
    assert not any(b"127.0.0.1" in data for data in contents(tmp_path))  # who created a queue is not stored
    async with stored_state(path, credentials) as state:
        since = {queue.recipient_id: queue.unused_since for queue in state.queues}
        assert since == {unused.recipient_id: int(clock[0].timestamp()), used.recipient_id: None}
        assert state.storage.total.queues == 2


async def test_a_database_of_an_earlier_version_is_taken_over(tmp_path: Path) -> None:
    path, credentials = tmp_path / "router.db", make_credentials("127.0.0.1")
    async with (
        stored_state(path, credentials) as state,
        Router.start(state=state) as router,
        connected(router.address) as client,
    ):
        queue = await create_queue(client)
    with closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE queues DROP COLUMN unused_since")
        db.execute("PRAGMA user_version = 1")
        db.commit()
    async with (
        stored_state(path, credentials) as state,
        Router.start(state=state) as router,
        connected(router.address) as client,
    ):
        assert [each.unused_since for each in state.queues] == [None]  # nobody knows: it stays
        assert await client.ask(Sub(), queue.recipient_id, queue.key) == Sok()
