"""Every fault on command, seen from the other side of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from protocol.encoding import EntityId
from protocol.errors import AUTH, QUOTA, SERVICE
from protocol.ids_hash import NO_IDS, ids_hash
from protocol.smp_messages import (
    Deld,
    End,
    Ends,
    Err,
    Nmsg,
    Nsub,
    Nsubs,
    Ok,
    Ping,
    Pong,
    QueueSet,
    Send,
    SmpMessage,
    Sok,
    Soks,
    Sub,
)
from smp_router.load import LoadQueue
from smp_router.router import Router, make_credentials
from tests.smp_router.wire import WireClient, connected, eventually
from transport.certificates import Credentials, make_service
from transport.errors import IdentityMismatch, TransportError


async def subscribe(client: WireClient, queue: LoadQueue, with_service: bool = False) -> SmpMessage:
    return await client.ask(Nsub(), queue.notifier_id, queue.notifier_key, with_service=with_service)


async def subscribe_all(client: WireClient) -> SmpMessage:
    params = client.connection.params
    assert params is not None
    assert params.service is not None
    return await client.ask(Nsubs(QueueSet(0, NO_IDS)), client.service_id, params.service.private_key)


@dataclass
class Stage:
    """A router with ten queues of a service that is subscribed to them."""

    router: Router
    queues: list[LoadQueue]
    credentials: Credentials
    client: WireClient

    @property
    def ids(self) -> list[EntityId]:
        return [queue.notifier_id for queue in self.queues]


@pytest.fixture
async def stage(router: Router) -> AsyncIterator[Stage]:
    queues, credentials = router.load.create_queues(10), make_service(datetime.now(UTC))
    async with connected(router.address, service=credentials) as client:
        for queue in queues:
            assert await subscribe(client, queue, with_service=True) == Sok(client.service_id)
        yield Stage(router, queues, credentials, client)


async def test_drop_connections(stage: Stage) -> None:
    assert stage.router.faults.drop_connections() == 1
    assert stage.router.subscribed_notifiers() == set()
    assert await stage.client.closed()
    async with connected(stage.router.address) as client:
        assert await client.ask(Ping()) == Pong()


async def test_refuse(stage: Stage) -> None:
    stage.router.faults.refuse()
    with pytest.raises((TransportError, OSError)):
        async with connected(stage.router.address):
            pass
    assert await stage.client.ask(Ping()) == Pong()
    stage.router.faults.refuse(False)
    async with connected(stage.router.address) as client:
        assert await client.ask(Ping()) == Pong()


async def test_black_hole(stage: Stage) -> None:
    faults = stage.router.faults
    faults.black_hole()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await stage.client.ask(Ping())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1), connected(stage.router.address):
            pass
    await stage.router.load.emit(stage.queues, count=1)
    faults.black_hole(False)
    assert isinstance((await stage.client.event())[1], Nmsg)
    assert await stage.client.ask(Ping()) == Pong()
    assert stage.client._answers == {}


async def test_delay(stage: Stage) -> None:
    clock = asyncio.get_running_loop().time
    stage.router.faults.delay(0.1)
    started = clock()
    assert await stage.client.ask(Ping()) == Pong()
    assert clock() - started >= 0.1
    stage.router.faults.delay(0)
    assert await stage.client.ask(Ping()) == Pong()
    with pytest.raises(ValueError, match="negative"):
        stage.router.faults.delay(-1)


async def test_forget_services(stage: Stage) -> None:
    stage.router.faults.forget_services()
    assert stage.router.subscribed_notifiers() == set()
    assert await subscribe_all(stage.client) == Err(SERVICE)
    assert await subscribe(stage.client, stage.queues[0], with_service=True) == Err(SERVICE)
    async with connected(stage.router.address, service=stage.credentials) as client:
        assert client.service_id != stage.client.service_id
        assert await subscribe_all(client) == Soks(QueueSet(0, NO_IDS))


async def test_change_service_ids(stage: Stage) -> None:
    stage.router.faults.change_service_ids()
    async with connected(stage.router.address, service=stage.credentials) as client:
        assert client.service_id != stage.client.service_id
        assert await subscribe_all(client) == Soks(QueueSet(10, ids_hash(stage.ids)))
    assert await subscribe_all(stage.client) == Err(SERVICE)


@pytest.mark.parametrize(("part", "count"), [(0.3, 3), (4, 4), (1.0, 10), (100, 10), (0, 0)])
async def test_lose_associations(stage: Stage, part: float, count: int) -> None:
    lost = stage.router.faults.lose_associations(part)
    assert len(set(lost)) == count
    left = set(stage.ids) - set(lost)
    assert stage.router.subscribed_notifiers() == left
    assert await subscribe_all(stage.client) == Soks(QueueSet(10 - count, ids_hash(left)))
    (service,) = stage.router.services
    assert service.queue_ids == left


async def test_delete_queues(stage: Stage) -> None:
    queues = stage.queues
    unknown = EntityId(b"unknown")
    ids = [queues[0].notifier_id, queues[1].recipient_id, queues[2].sender_id, unknown]
    assert stage.router.faults.delete_queues(ids) == 3
    assert await stage.client.silent()
    assert stage.router.subscribed_notifiers() == set(stage.ids[3:])
    for queue in queues[:3]:
        assert await subscribe(stage.client, queue) == Err(AUTH)
        assert await stage.client.ask(Send(True, b""), queue.sender_id) == Err(AUTH)


async def test_send_end(stage: Stage) -> None:
    stage.router.faults.send_end(stage.ids[:2])
    assert await stage.client.events(2) == [(queue_id, End()) for queue_id in stage.ids[:2]]
    assert stage.router.subscribed_notifiers() == set(stage.ids[2:])
    await stage.router.load.emit(stage.queues[:1], count=1)
    assert await stage.client.silent()
    again = await subscribe(stage.client, stage.queues[0], with_service=True)
    assert again == Sok(stage.client.service_id)
    assert (await stage.client.event())[0] == stage.ids[0]


async def test_send_end_to_a_recipient(stage: Stage) -> None:
    queue = stage.queues[0]
    assert await stage.client.ask(Sub(), queue.recipient_id, queue.recipient_key) == Sok()
    stage.router.faults.send_end([queue.recipient_id])
    assert await stage.client.event() == (queue.recipient_id, End())
    assert queue.notifier_id in stage.router.subscribed_notifiers()


async def test_send_ends(stage: Stage) -> None:
    stage.router.faults.send_ends()
    expected = QueueSet(10, ids_hash(stage.ids))
    assert await stage.client.event() == (stage.client.service_id, Ends(expected))
    assert stage.router.subscribed_notifiers() == set()
    assert await subscribe_all(stage.client) == Soks(expected)
    assert stage.router.subscribed_notifiers() == set(stage.ids)


async def test_send_deld(stage: Stage) -> None:
    stage.router.faults.send_deld(stage.ids[:1])
    assert await stage.client.event() == (stage.ids[0], Deld())
    assert stage.router.subscribed_notifiers() == set(stage.ids[1:])
    assert await subscribe(stage.client, stage.queues[0], with_service=True) == Sok(stage.client.service_id)


async def test_answer_errors(stage: Stage) -> None:
    faults = stage.router.faults
    faults.answer_errors("NSUB", QUOTA, count=2)
    answers = [await subscribe(stage.client, stage.queues[0], with_service=True) for _ in range(3)]
    assert answers == [Err(QUOTA), Err(QUOTA), Sok(stage.client.service_id)]
    faults.answer_errors("PING", AUTH)
    assert [await stage.client.ask(Ping()) for _ in range(3)] == [Err(AUTH)] * 3
    faults.answer_errors("PING", None)
    faults.answer_errors("PING", None)
    assert await stage.client.ask(Ping()) == Pong()
    with pytest.raises(ValueError, match="PONG"):
        faults.answer_errors("PONG", AUTH)


async def test_present_certificate(stage: Stage) -> None:
    impostor = make_credentials("127.0.0.1")
    stage.router.faults.present_certificate(impostor)
    with pytest.raises(IdentityMismatch):
        async with connected(stage.router.address):
            pass
    stage.router.faults.present_certificate(None)
    async with connected(stage.router.address) as client:
        assert await client.ask(Ping()) == Pong()


async def test_restart_with_the_same_state(stage: Stage) -> None:
    old = stage.router
    await old.load.emit(stage.queues, count=5)
    await stage.client.events(5)
    await old.stop()
    assert await stage.client.closed()
    with pytest.raises(OSError, match=r".*"):
        async with connected(old.address):
            pass
    await old.load.emit(stage.queues, count=3)
    async with Router.start(state=old.state, port=old.port) as router:
        assert router.address == old.address
        async with connected(router.address, service=stage.credentials) as client:
            assert client.service_id == stage.client.service_id
            assert await subscribe_all(client) == Soks(QueueSet(10, ids_hash(stage.ids)))
            assert {entity for entity, _ in await client.events(3)} == set(stage.ids[:3])
            assert await client.ask(Send(True, b""), stage.queues[0].sender_id) == Ok()
    await eventually(lambda: router.connections == 0)
