"""A broker and its clients without connections: what each is given, and what nobody may use up."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from protocol.connection import Outgoing
from protocol.encoding import NO_CORR, EntityId
from protocol.push_messages import NmsgMeta
from protocol.session_params import smp_params
from protocol.smp_handshake import ServiceRole
from protocol.smp_messages import End, LinkData, Lnk, Msg, Pong, Send
from protocol.versions import SMP_VERSIONS
from smp_router import broker as module
from smp_router.broker import Broker
from smp_router.client import ROOM, SMALL_MESSAGE, Client, Reception
from smp_router.config import RouterConfig
from smp_router.queues import Notifier, Queue, new_id
from smp_router.services import Service
from smp_router.state import Records, RouterState
from tests.smp_client.peer import make_identity
from tests.smp_router.wire import new_key

CREDENTIALS = make_identity()
NOW = datetime(2026, 6, 1, tzinfo=UTC)


class Clock:
    now = NOW

    def __call__(self) -> datetime:
        return self.now


def make_broker(clock: Clock | None = None, **config: float) -> Broker:
    settings = RouterConfig(**config)  # type: ignore[arg-type]
    return Broker(RouterState(CREDENTIALS), settings, clock or Clock())


def make_client(max_unsent: int = 1 << 30) -> Client:
    return Client(smp_params(SMP_VERSIONS.max, bytes(32)), max_unsent, Records())


def make_queue(broker: Broker) -> tuple[Queue, Notifier]:
    notifier = Notifier(new_id(), new_key().public, bytes(32))
    queue = Queue(
        recipient_id=new_id(),
        recipient_keys=(new_key().public,),
        secret=bytes(32),
        sender_id=new_id(),
        notifier=notifier,
    )
    broker.state.add_queue(queue)
    return queue, notifier


def service(number: int, creator: int | None) -> Service:
    return Service(new_id(), bytes([number]) * 32, ServiceRole.NOTIFIER, creator=creator)


# Room for services


def test_a_service_that_is_known_needs_no_room() -> None:
    broker = make_broker(max_services=1, address_share_percent=100)
    known = broker.service_came(service(1, 1))
    assert known is not None
    assert broker.service_came(service(2, 1)) is None
    assert broker.service_came(service(1, 1)) is known


def test_services_in_all_and_of_one_address() -> None:
    broker = make_broker(max_services=4, address_share_percent=50)
    first, _ = broker.service_came(service(1, 1)), broker.service_came(service(2, 1))
    assert broker.service_came(service(3, 1)) is None
    third, _ = broker.service_came(service(4, 2)), broker.service_came(service(5, 2))
    assert broker.service_came(service(6, 3)) is None
    assert third is not None
    broker.service_left(third)
    assert broker.service_came(service(3, 1)) is None, "others make no room for a crowded address"
    assert broker.service_came(service(6, 3)) is not None
    assert first is not None
    broker.service_left(first)
    assert broker.service_came(service(3, 1)) is not None


def test_services_of_before_the_start_have_no_address() -> None:
    broker = make_broker(max_services=4, address_share_percent=50)
    assert all(broker.service_came(service(number, None)) for number in range(3))


# What is whose


def test_only_the_subscriber_is_given_what_is_stored() -> None:
    broker, subscriber, other = make_broker(), make_client(), make_client()
    queue, notifier = make_queue(broker)
    broker.subscribe(broker.recipients, queue.recipient_id, subscriber, None)
    broker.subscribe(broker.notifiers, notifier.notifier_id, subscriber, None)
    assert broker.send(queue, Send(True, b"message")) is not None
    for entity_id in (queue.recipient_id, notifier.notifier_id):
        assert broker.take_offer(other, entity_id) == []
        assert len(broker.take_offer(subscriber, entity_id)) == 1
    assert broker.take_offer(subscriber, new_id()) == []


def test_who_reads_by_get_is_sent_nothing() -> None:
    broker, client = make_broker(), make_client()
    queue, _ = make_queue(broker)
    broker.subscribe(broker.recipients, queue.recipient_id, client, None)
    client.receptions[queue.recipient_id] = Reception(by_get=True)
    assert broker.send(queue, Send(False, b"message")) is not None
    assert broker.take_offer(client, queue.recipient_id) == []


def test_only_notifications_wait_for_the_next_subscriber() -> None:
    broker, client = make_broker(), make_client()
    queue, notifier = make_queue(broker)
    nmsg = notifier.seal(NmsgMeta(bytes(24), 0))
    client.push([Outgoing(NO_CORR, notifier.notifier_id, message) for message in (End(), nmsg)])
    client.push([Outgoing(NO_CORR, new_id(), nmsg)])
    broker.release(client)
    assert list(notifier.pending) == [nmsg]
    assert queue.notifier is notifier


# Time


async def test_queues_end_when_their_time_is_over() -> None:
    clock = Clock()
    broker = make_broker(clock, suspended_ttl=100.0, unused_ttl=100.0)
    now = broker.timestamp()
    (suspended, _), (unused, _), (kept, _) = (make_queue(broker) for _ in range(3))
    suspended.suspended_at, unused.unused_since, kept.unused_since = now, now, now
    broker.subscribe(broker.recipients, kept.recipient_id, make_client(), None)
    clock.now += timedelta(seconds=40)
    await broker.expire()
    assert len(broker.state.queues) == 3
    assert kept.unused_since == now, "written down once in half of the time"
    clock.now += timedelta(seconds=61)
    await broker.expire()
    assert list(broker.state.queues) == [kept]
    assert kept.unused_since == broker.timestamp()
    assert broker.counts["queues_expired"] == 2


async def test_many_queues_expire_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPIRED_AT_ONCE", 3)
    broker = make_broker(suspended_ttl=100.0)
    queues = [make_queue(broker)[0] for _ in range(3)]
    for queue in queues:
        queue.suspended_at = broker.timestamp() - 101
    expiring = asyncio.ensure_future(broker.expire())
    await asyncio.sleep(0)
    assert list(broker.state.queues) == queues[2:]
    broker.delete_queue(queues[2])  # while others have their turn
    await expiring
    assert broker.counts["queues_expired"] == 2


def test_receptions_are_looked_through_now_and_then() -> None:
    broker, client = make_broker(), make_client()
    gone = [new_id() for _ in range(5)]
    client.receptions |= dict.fromkeys(gone, Reception(by_get=True))
    client.receptions_checked = 6
    for expected in (6, 2):
        queue, _ = make_queue(broker)
        broker.next_message(client, queue, by_get=True)
        assert len(client.receptions) == expected
    assert not set(gone) & set(client.receptions)


# A client's outbox


def pongs(count: int) -> list[Outgoing[Pong]]:
    return [Outgoing(NO_CORR, EntityId(b""), Pong()) for _ in range(count)]


def test_a_full_outbox_has_no_room_until_it_is_taken() -> None:
    client = make_client()
    client.push([Outgoing(NO_CORR, new_id(), Msg(bytes(24), b"")) for _ in range(15)])
    assert client.has_room
    client.push([Outgoing(NO_CORR, new_id(), Msg(bytes(24), b"")) for _ in range(17)])
    assert not client.has_room
    assert len(client.take()) == 16
    assert not client.has_room
    assert len(client.take()) == 16
    assert client.has_room


def test_a_client_that_takes_nothing_is_told_from_others() -> None:
    client = make_client(max_unsent=10 * SMALL_MESSAGE)
    client.push(pongs(10))
    assert not client.overrun
    client.push(pongs(1))
    assert client.overrun
    client.take()
    client.push(pongs(1))
    assert client.overrun, "it is disconnected all the same"


def test_link_data_counts_with_its_size() -> None:
    client = make_client(max_unsent=10_000)
    client.push([Outgoing(NO_CORR, new_id(), Lnk(new_id(), LinkData(bytes(6_000), bytes(6_000))))])
    assert client.overrun


def test_what_is_collected_wakes_the_sender_when_it_is_enough() -> None:
    client = make_client()
    with client.collecting():
        client.push(pongs(1))
        assert not client.wake.is_set()
        client.push(pongs(ROOM // SMALL_MESSAGE + 1))
        assert client.wake.is_set()


def test_nothing_is_kept_for_a_client_that_is_gone() -> None:
    client = make_client()
    client.gone()
    client.push(pongs(1))
    client.offer(new_id())
    assert not client.outbox
    assert not client.offers
    assert client.sent.is_set()
