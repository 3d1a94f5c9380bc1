"""NMSG: stored with SEND, delivered to whoever is subscribed, kept while nobody is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from protocol.connection import Block, Outgoing
from protocol.encoding import CorrId
from protocol.messages_crypto import open_message
from protocol.push_messages import open_nmsg_meta
from protocol.smp_messages import End, Msg, Ndel, Nmsg, Nsub, Ok, Send, SmpMessage, Sok
from smp_router.config import RouterConfig
from smp_router.load import EMIT_CHUNK, LoadQueue
from smp_router.router import Router
from tests.smp_router.wire import (
    DEADLINE,
    TestQueue,
    WireClient,
    add_notifier,
    connected,
    create_queue,
    eventually,
    first_message,
)


async def queue_with_notifier(client: WireClient) -> TestQueue:
    queue = await create_queue(client)
    await add_notifier(client, queue)
    return queue


def opened_id(queue: TestQueue, message: SmpMessage) -> bytes:
    assert isinstance(message, Nmsg)
    assert len(message.meta) == 144
    return open_nmsg_meta(queue.notifier_secret, message.nonce, message.meta).message_id


async def test_nmsg_names_the_message(router: Router) -> None:
    async with connected(router.address) as user, connected(router.address) as ntf:
        queue = await queue_with_notifier(user)
        assert await ntf.ask(Nsub(), queue.notifier_id, queue.notifier_key) == Sok()
        assert router.subscribed_notifiers() == {queue.notifier_id}
        assert await user.ask(Send(True, b"hello"), queue.sender_id) == Ok()
        entity_id, nmsg = await ntf.event()
        message = await first_message(user, queue)
        assert entity_id == queue.notifier_id
        assert isinstance(message, Msg)
        assert isinstance(nmsg, Nmsg)
        meta = open_nmsg_meta(queue.notifier_secret, nmsg.nonce, nmsg.meta)
        content = open_message(queue.secret, message.message_id, message.body)
        assert (meta.message_id, meta.timestamp) == (message.message_id, content.timestamp)


async def test_without_the_flag_there_is_no_nmsg(router: Router) -> None:
    async with connected(router.address) as client:
        queue = await queue_with_notifier(client)
        await client.ask(Nsub(), queue.notifier_id, queue.notifier_key)
        await client.ask(Send(False, b"hello"), queue.sender_id)
        assert await client.silent()


async def test_nmsgs_wait_for_a_subscriber(router: Router) -> None:
    async with connected(router.address) as user:
        queue = await queue_with_notifier(user)
        for _ in range(3):
            await user.ask(Send(True, b"hello"), queue.sender_id)
    async with connected(router.address) as ntf:
        await ntf.ask(Nsub(), queue.notifier_id, queue.notifier_key)
        events = await ntf.events(3)
        assert len({opened_id(queue, nmsg) for _, nmsg in events}) == 3
        assert await ntf.ask(Nsub(), queue.notifier_id, queue.notifier_key) == Sok()
        assert await ntf.silent()


async def test_oldest_pending_nmsgs_are_dropped() -> None:
    config = RouterConfig(max_pending=2)
    async with Router.start(config) as router, connected(router.address) as client:
        queue = await queue_with_notifier(client)
        for _ in range(5):
            await client.ask(Send(True, b"hello"), queue.sender_id)
        await client.ask(Nsub(), queue.notifier_id, queue.notifier_key)
        await client.events(2)
        assert await client.silent()


async def test_nmsgs_of_all_queues_are_limited() -> None:
    """Beyond it a queue keeps as many as it has, or its last one, which somebody may be waiting for."""
    async with Router.start(RouterConfig(max_nmsgs=3)) as router, connected(router.address) as client:
        many, few = await queue_with_notifier(client), await queue_with_notifier(client)
        for queue in (many, many, many, many, few, few):
            assert await client.ask(Send(True, b""), queue.sender_id) == Ok()
        assert router.state.stored_nmsgs == 4
        await client.ask(Nsub(), many.notifier_id, many.notifier_key)
        await client.events(3)
        assert router.state.stored_nmsgs == 1
        assert await client.ask(Send(True, b""), few.sender_id) == Ok()
        assert router.state.stored_nmsgs == 2
        assert await client.ask(Ndel(), few.recipient_id, few.key) == Ok()
        assert router.state.stored_nmsgs == 0


async def test_second_notifier_displaces_the_first(router: Router) -> None:
    async with connected(router.address) as first, connected(router.address) as second:
        queue = await queue_with_notifier(first)
        await first.ask(Nsub(), queue.notifier_id, queue.notifier_key)
        await second.ask(Nsub(), queue.notifier_id, queue.notifier_key)
        assert await first.event() == (queue.notifier_id, End())
        await first.ask(Send(True, b""), queue.sender_id)
        assert isinstance((await second.event())[1], Nmsg)
        assert await first.silent()


async def test_disconnected_notifier_is_not_subscribed(router: Router) -> None:
    async with connected(router.address) as user:
        queue = await queue_with_notifier(user)
        async with connected(router.address) as ntf:
            await ntf.ask(Nsub(), queue.notifier_id, queue.notifier_key)
        await eventually(lambda: router.subscribed_notifiers() == set())
        await user.ask(Send(True, b""), queue.sender_id)
        async with connected(router.address) as ntf:
            await ntf.ask(Nsub(), queue.notifier_id, queue.notifier_key)
            assert isinstance((await ntf.event())[1], Nmsg)


def each_second() -> Callable[[], datetime]:
    """A clock that goes on by a second each time somebody looks."""
    seconds = itertools.count(1)
    return lambda: datetime.fromtimestamp(next(seconds), UTC)


async def taken_in_order(router: Router, queue: LoadQueue) -> int:
    """How many NMSGs a new subscriber gets."""
    async with connected(router.address) as ntf:
        count = len(queue.notifier.pending)
        await ntf.ask(Nsub(), queue.notifier_id, queue.notifier_key)
        nmsgs = [nmsg for _, nmsg in await ntf.events(count) if isinstance(nmsg, Nmsg)]
    times = [open_nmsg_meta(queue.rcv_ntf_dh_secret, nmsg.nonce, nmsg.meta).timestamp for nmsg in nmsgs]
    assert times == sorted(times)
    return len(nmsgs)


async def test_nmsgs_that_did_not_leave_wait_for_the_next_subscriber() -> None:
    """The connection ended while they were in its queue."""
    async with Router.start(now=each_second()) as router:
        (queue,) = router.load.create_queues(1)
        async with connected(router.address) as ntf:
            await ntf.ask(Nsub(), queue.notifier_id, queue.notifier_key)
            router.faults.black_hole()
            await router.load.emit([queue], 2, fresh=True)
        await eventually(lambda: router.subscribed_notifiers() == set())
        router.faults.black_hole(False)
        await router.load.emit([queue], 1, fresh=True)
        assert await taken_in_order(router, queue) == 3


async def test_nmsgs_that_only_reached_the_write_buffer_are_kept_too(router: Router) -> None:
    """The router ended, or the connection did, while its peer took nothing."""
    queues = router.load.create_queues(EMIT_CHUNK)
    async with connected(router.address) as ntf:
        commands = [Outgoing(CorrId(q.notifier_id), q.notifier_id, Nsub(), q.notifier_key) for q in queues]
        ntf.write(*commands)
        for command in commands:
            await ntf.answer(command.corr_id)
        (session,) = router._sessions
        client = session.client
        assert client is not None
        while not session._stream.write_buffer_size:
            await router.load.emit(queues, len(queues))
            await eventually(lambda: not client.outbox)
        router.faults.drop_connections()
    last = queues[-1]
    await eventually(lambda: len(last.notifier.pending) > 0)
    assert await taken_in_order(router, last) == 1


async def test_nmsgs_that_wait_for_the_disk_are_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection ended before what led to them was safe."""
    waiting, never = asyncio.Event(), asyncio.Event()

    async def durable(_: int) -> None:
        waiting.set()
        await never.wait()

    async with Router.start(now=each_second()) as router:
        (queue,) = router.load.create_queues(1)
        async with connected(router.address) as ntf:
            await ntf.ask(Nsub(), queue.notifier_id, queue.notifier_key)
            with monkeypatch.context() as slow:
                slow.setattr(router.state.records, "durable", durable)
                await router.load.emit([queue], 1, fresh=True)
                await waiting.wait()
            await router.load.emit([queue], 1, fresh=True)
        await eventually(lambda: router.subscribed_notifiers() == set())
        assert await taken_in_order(router, queue) == 2


async def test_stored_nmsgs_come_eighty_to_a_block(router: Router) -> None:
    queues = router.load.create_queues(80)
    await router.load.emit(queues, count=160)
    async with connected(router.address) as ntf:
        # One batch of commands: their answers and all that waits go out together.
        commands = [Outgoing(CorrId(q.notifier_id), q.notifier_id, Nsub(), q.notifier_key) for q in queues]
        ntf.write(*commands)
        sizes: list[int] = []
        async with asyncio.timeout(DEADLINE):
            while sum(sizes) < len(queues) * 3:
                events = ntf.connection.receive_data(await ntf.stream.receive())
                sizes += [len(event.items) for event in events if isinstance(event, Block)]
        assert sum(sizes) == len(queues) * 3
        assert len(sizes) <= 5
        assert max(sizes) >= 80


async def test_rounds_deliver_what_came_since_the_last() -> None:
    """With an hour between rounds nothing comes; a short interval delivers to the same subscribers."""
    async with Router.start(RouterConfig(interval=3600)) as router, connected(router.address) as ntf:
        (queue,) = router.load.create_queues(1)
        assert await ntf.ask(Nsub(), queue.notifier_id, queue.notifier_key) == Sok()
        await ntf.ask(Send(True, b"hi"), queue.sender_id)
        assert await ntf.silent()
        await router.stop()
    config = RouterConfig(interval=0.02)
    async with Router.start(config, state=router.state) as router, connected(router.address) as ntf:
        await ntf.ask(Nsub(), queue.notifier_id, queue.notifier_key)
        await ntf.event()
        await ntf.ask(Send(True, b"hi"), queue.sender_id)
        assert isinstance((await ntf.event())[1], Nmsg)


async def test_rounds_wait_for_a_subscriber_too() -> None:
    async with Router.start(RouterConfig(interval=0.02)) as router, connected(router.address) as user:
        queue = await queue_with_notifier(user)
        await user.ask(Send(True, b""), queue.sender_id)
        await asyncio.sleep(0.05)  # a round passes with nobody to tell
        async with connected(router.address) as ntf:
            await ntf.ask(Nsub(), queue.notifier_id, queue.notifier_key)
            assert isinstance((await ntf.event())[1], Nmsg)
