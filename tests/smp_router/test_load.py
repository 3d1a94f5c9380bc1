"""Load on command, and clients that cannot follow it."""

from __future__ import annotations

import asyncio

import pytest

from protocol.connection import Outgoing
from protocol.encoding import CorrId
from protocol.push_messages import open_nmsg_meta
from protocol.smp_messages import Get, Lget, LinkData, Lset, Nmsg, Nsub, Ok, QueueMode, Send, Sok
from protocol.versions import SMP_BLOCK_SIZE
from smp_router.client import ROOM, Client
from smp_router.config import RouterConfig
from smp_router.load import LoadQueue
from smp_router.router import Router
from tests.smp_router.test_links import new_link_id
from tests.smp_router.wire import DEADLINE, WireClient, connected, create_queue, eventually


async def subscribe(client: WireClient, queues: list[LoadQueue]) -> None:
    for queue in queues:
        assert await client.ask(Nsub(), queue.notifier_id, queue.notifier_key) == Sok()


def the_client(router: Router) -> Client:
    (session,) = router._sessions
    assert session.client is not None
    return session.client


async def test_emit_goes_round_the_queues(router: Router) -> None:
    queues = router.load.create_queues(3)
    async with connected(router.address) as client:
        await subscribe(client, queues)
        await router.load.emit(queues, count=7)
        events = await client.events(7)
        assert [entity for entity, _ in events] == [queues[i % 3].notifier_id for i in range(7)]
        assert await client.silent()
        metas = set()
        for index, (_, nmsg) in enumerate(events):
            assert isinstance(nmsg, Nmsg)
            metas.add(open_nmsg_meta(queues[index % 3].rcv_ntf_dh_secret, nmsg.nonce, nmsg.meta))
        assert len(metas) == 3
        await router.load.emit(queues, count=6, fresh=True)
        assert len({nmsg for _, nmsg in await client.events(6)}) == 6
        await router.load.emit([], count=6)
        await router.load.emit(queues, count=0)
        assert await client.silent()


async def test_emit_reaches_several_subscribers_and_stores_the_rest(router: Router) -> None:
    queues = router.load.create_queues(30)
    async with connected(router.address) as one, connected(router.address) as two:
        await subscribe(one, queues[:10])
        await subscribe(two, queues[10:20])
        await router.load.emit(queues, count=60)
        assert {entity for entity, _ in await one.events(20)} == {q.notifier_id for q in queues[:10]}
        assert {entity for entity, _ in await two.events(20)} == {q.notifier_id for q in queues[10:20]}
        await subscribe(two, queues[20:])
        assert {entity for entity, _ in await two.events(20)} == {q.notifier_id for q in queues[20:]}


async def test_emit_keeps_its_rate(router: Router) -> None:
    queues = router.load.create_queues(2)
    async with connected(router.address) as client:
        await subscribe(client, queues)
        started = asyncio.get_running_loop().time()
        await router.load.emit(queues, count=20, rate=100)
        assert asyncio.get_running_loop().time() - started >= 0.18
        await client.events(20)


async def test_emit_waits_for_a_slow_subscriber(router: Router) -> None:
    """It goes no faster than it is taken, and ends when the subscriber does."""
    queues = router.load.create_queues(100)
    async with (
        asyncio.timeout(DEADLINE),
        asyncio.TaskGroup() as tasks,  # waits for `emit` after the client is gone
        connected(router.address) as client,
    ):
        await subscribe(client, queues)
        served = the_client(router)
        emitting = tasks.create_task(router.load.emit(queues, count=100_000))
        await eventually(lambda: served.unsent >= ROOM)
        assert not emitting.done()
        await client.events(10_000)
    assert sum(len(queue.notifier.pending) for queue in queues) > 0


@pytest.fixture
def impatient() -> RouterConfig:
    return RouterConfig(send_timeout=0.3)


async def test_client_that_does_not_read_is_disconnected(impatient: RouterConfig) -> None:
    """It was sent NMSGs; the router neither buffers them all nor waits for ever."""
    async with Router.start(impatient) as router, connected(router.address) as client:
        queues = router.load.create_queues(10)
        await subscribe(client, queues)
        async with asyncio.timeout(DEADLINE):
            await router.load.emit(queues, count=100_000)
        await eventually(lambda: router.connections == 0)
        assert router.subscribed_notifiers() == set()


async def test_client_that_asks_and_does_not_read_is_disconnected(impatient: RouterConfig) -> None:
    """Its commands are not read any more once its answers wait, and then it has to go."""
    async with Router.start(impatient) as router, connected(router.address) as client:
        (queue,) = router.load.create_queues(1)
        await client.ask(Send(False, b"long when padded"), queue.sender_id)
        get = Outgoing(CorrId(bytes(24)), queue.recipient_id, Get(), queue.recipient_key)
        client.write(*[get] * 1500)
        await eventually(lambda: router.connections == 0)
        assert router.counts["clients_too_slow"] == 1


async def test_small_commands_with_large_answers_do_not_pile_up(router: Router) -> None:
    """A block has room for hundreds of LGETs, and one answer fills a block."""
    data = LinkData(bytes(2000), bytes(12_000))
    async with connected(router.address) as client:
        queue, link_id = await create_queue(client, mode=QueueMode.CONTACT), new_link_id()
        assert await client.ask(Lset(link_id, data), queue.recipient_id, queue.key) == Ok()
        served = the_client(router)
        client.write(*[Outgoing(CorrId(bytes(24)), link_id, Lget())] * 3000)
        await eventually(lambda: not served.has_room)
        assert served.unsent < ROOM + SMP_BLOCK_SIZE
        assert len(served.outbox) * len(data.user) <= served.unsent


async def test_stored_messages_do_not_pile_up_for_a_slow_reader() -> None:
    """More is stored for it than may wait unsent: it still gets everything, as fast as it reads."""
    config = RouterConfig(max_unsent=600_000)
    async with Router.start(config) as router, connected(router.address) as client:
        queues = router.load.create_queues(200)
        await router.load.emit(queues, count=200 * 50)
        batch = [Outgoing(CorrId(q.notifier_id), q.notifier_id, Nsub(), q.notifier_key) for q in queues]
        client.write(*batch)
        assert len(await client.events(200 * 50)) == 200 * 50


async def test_too_much_unsent_disconnects() -> None:
    """A flood of events that cannot be held back."""
    config = RouterConfig(max_unsent=2000)
    async with Router.start(config) as router, connected(router.address) as client:
        queues = router.load.create_queues(20)
        await subscribe(client, queues)
        router.faults.send_end([queue.notifier_id for queue in queues])
        assert await client.closed()


async def test_load_queues_are_real(router: Router) -> None:
    (queue,) = router.load.create_queues(1)
    async with connected(router.address) as client:
        await subscribe(client, [queue])
        await client.ask(Send(True, b"hello"), queue.sender_id)
        _, nmsg = await client.event()
        assert isinstance(nmsg, Nmsg)
        assert open_nmsg_meta(queue.rcv_ntf_dh_secret, nmsg.nonce, nmsg.meta).timestamp > 0
