"""Services: whose queues are whose, who speaks for whom. Notifiers and recipients go by the same rules."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from protocol.blocks import pack_batches, pad
from protocol.connection import Outgoing
from protocol.crypto import AuthPrivateKey
from protocol.encoding import NO_ENTITY, CorrId, EntityId, short
from protocol.errors import AUTH, NO_MSG, QUOTA, SERVICE
from protocol.ids_hash import NO_IDS, ids_hash
from protocol.messages_crypto import RcvMessage, open_message
from protocol.smp_codec import SMP_COMMANDS
from protocol.smp_handshake import ServiceRole
from protocol.smp_messages import (
    Ack,
    Alls,
    Del,
    Deld,
    End,
    Ends,
    Err,
    Msg,
    Ndel,
    New,
    Nmsg,
    Nsub,
    Nsubs,
    Off,
    Ok,
    Ping,
    QueueSet,
    Send,
    SmpMessage,
    Sok,
    Soks,
    Sub,
    Subs,
)
from protocol.transmission import authorize, body, encode_transmission
from protocol.versions import VersionRange
from smp_router import session
from smp_router.broker import Broker
from smp_router.client import Client, RouterMessage
from smp_router.config import RouterConfig
from smp_router.information import RouterPages
from smp_router.router import Router
from smp_router.services import Service
from tests.smp_router.wire import (
    TestQueue,
    WireClient,
    add_notifier,
    connected,
    create_queue,
    new_dh,
    new_key,
)
from transport import budget
from transport.certificates import Credentials, make_service


def queue_set(*ids: EntityId) -> QueueSet:
    return QueueSet(len(ids), ids_hash(ids))


@dataclass(frozen=True)
class Side:
    """The notifiers' or the recipients' half of the rules."""

    role: ServiceRole
    one: Nsub | Sub
    all: type[Nsubs] | type[Subs]

    def id(self, queue: TestQueue) -> EntityId:
        return queue.notifier_id if self.role is ServiceRole.NOTIFIER else queue.recipient_id

    async def subscribe(self, client: WireClient, queue: TestQueue, with_service: bool = True) -> SmpMessage:
        key = queue.notifier_key if self.role is ServiceRole.NOTIFIER else queue.key
        return await client.ask(self.one, self.id(queue), key, with_service=with_service)

    async def subscribe_all(self, client: WireClient) -> SmpMessage:
        params = client.connection.params
        assert params is not None
        assert params.service is not None
        return await client.ask(self.all(QueueSet(0, NO_IDS)), client.service_id, params.service.private_key)

    def service(self, router: Router) -> Service:
        (service,) = (s for s in router.services if s.role is self.role)
        return service


NOTIFIERS = Side(ServiceRole.NOTIFIER, Nsub(), Nsubs)
RECIPIENTS = Side(ServiceRole.MESSAGING, Sub(), Subs)


@pytest.fixture(params=[NOTIFIERS, RECIPIENTS], ids=["NSUB", "SUB"])
def side(request: pytest.FixtureRequest) -> Side:
    chosen: Side = request.param
    return chosen


@pytest.fixture
def credentials() -> Credentials:
    return make_service(datetime.now(UTC))


async def make_queues(router: Router, count: int) -> list[TestQueue]:
    async with connected(router.address) as client:
        queues = [await create_queue(client) for _ in range(count)]
        for queue in queues:
            await add_notifier(client, queue)
    return queues


async def send(router: Router, *queues: TestQueue) -> None:
    async with connected(router.address) as sender:
        for queue in queues:
            assert await sender.ask(Send(True, b"news"), queue.sender_id) == Ok()


async def test_case_service_and_free_queue(router: Router, side: Side, credentials: Credentials) -> None:
    queues = await make_queues(router, 3)
    async with connected(router.address, service=credentials, role=side.role) as client:
        for queue in queues:
            assert await side.subscribe(client, queue) == Sok(client.service_id)
        await send(router, queues[1])
        entity_id, message = await client.event()
        assert entity_id == side.id(queues[1])
        assert isinstance(message, Nmsg | Msg)
    assert side.service(router).queues == queue_set(*map(side.id, queues))


async def test_case_service_and_its_own_queue(router: Router, side: Side, credentials: Credentials) -> None:
    (queue,) = await make_queues(router, 1)
    for _ in range(2):
        async with connected(router.address, service=credentials, role=side.role) as client:
            for _ in range(2):
                assert await side.subscribe(client, queue) == Sok(client.service_id)
            assert side.service(router).queues == queue_set(side.id(queue))


async def test_case_service_and_anothers_queue(router: Router, side: Side, credentials: Credentials) -> None:
    queues = await make_queues(router, 2)
    other = make_service(datetime.now(UTC))
    async with (
        connected(router.address, service=credentials, role=side.role) as first,
        connected(router.address, service=other, role=side.role) as second,
    ):
        for queue in queues:
            await side.subscribe(first, queue)
        assert await side.subscribe(second, queues[0]) == Sok(second.service_id)
        assert await first.event() == (side.id(queues[0]), End())
        sets = {s.service_id: s.queues for s in router.services}
        assert sets[first.service_id] == queue_set(side.id(queues[1]))
        assert sets[second.service_id] == queue_set(side.id(queues[0]))


async def test_case_no_service_and_a_services_queue(
    router: Router, side: Side, credentials: Credentials
) -> None:
    queues = await make_queues(router, 2)
    async with (
        connected(router.address, service=credentials, role=side.role) as service,
        connected(router.address) as plain,
    ):
        for queue in queues:
            await side.subscribe(service, queue)
        assert await side.subscribe(plain, queues[0]) == Sok(None)
        assert await service.event() == (side.id(queues[0]), End())
        assert side.service(router).queues == queue_set(side.id(queues[1]))
        await send(router, queues[0])
        assert (await plain.event())[0] == side.id(queues[0])
        assert await service.silent()


async def test_case_no_service_and_a_free_queue(router: Router, side: Side) -> None:
    (queue,) = await make_queues(router, 1)
    async with connected(router.address) as first, connected(router.address) as second:
        assert await side.subscribe(first, queue) == Sok(None)
        assert await side.subscribe(second, queue) == Sok(None)
        assert await first.event() == (side.id(queue), End())
        assert len(router.services) == 0


async def test_service_client_cannot_act_for_itself(
    router: Router, side: Side, credentials: Credentials
) -> None:
    """In a service's session each subscription carries its signature; in another role's it need not."""
    (queue,) = await make_queues(router, 1)
    other_role = NOTIFIERS.role if side is RECIPIENTS else RECIPIENTS.role
    async with connected(router.address, service=credentials, role=side.role) as client:
        await side.subscribe(client, queue)
        assert await side.subscribe(client, queue, with_service=False) == Err(SERVICE)
        assert side.service(router).queues == queue_set(side.id(queue))
    async with connected(router.address, service=credentials, role=other_role) as client:
        assert await side.subscribe(client, queue, with_service=False) == Sok()
        assert side.service(router).queues == queue_set()


async def test_ordinary_subscriber_is_displaced_by_a_service(
    router: Router, side: Side, credentials: Credentials
) -> None:
    (queue,) = await make_queues(router, 1)
    async with (
        connected(router.address) as plain,
        connected(router.address, service=credentials, role=side.role) as service,
    ):
        await side.subscribe(plain, queue)
        await side.subscribe(service, queue)
        assert await plain.event() == (side.id(queue), End())


async def test_associations_outlive_connections(router: Router, credentials: Credentials) -> None:
    queues = await make_queues(router, 3)
    async with connected(router.address, service=credentials) as client:
        for queue in queues[:2]:
            await NOTIFIERS.subscribe(client, queue)
        assert len(router.subscribed_notifiers()) == 2
    async with connected(router.address, service=credentials) as client:
        assert router.subscribed_notifiers() == set()
        await send(router, *queues)
        assert await client.silent()
        expected = queue_set(*(queue.notifier_id for queue in queues[:2]))
        assert await NOTIFIERS.subscribe_all(client) == Soks(expected)
        assert router.subscribed_notifiers() == {queue.notifier_id for queue in queues[:2]}
        assert {entity for entity, _ in await client.events(2)} == router.subscribed_notifiers()
        assert await NOTIFIERS.subscribe_all(client) == Soks(expected)
        assert await client.silent()


async def test_who_subscribes_one_queue_for_a_service_hears_of_all(
    router: Router, side: Side, credentials: Credentials
) -> None:
    queues = await make_queues(router, 2)
    async with connected(router.address, service=credentials, role=side.role) as client:
        for queue in queues:
            await side.subscribe(client, queue)
    async with connected(router.address, service=credentials, role=side.role) as client:
        await side.subscribe(client, queues[0])
        await send(router, queues[1])
        assert (await client.event())[0] == side.id(queues[1])


async def test_second_client_of_a_service_displaces_the_first(
    router: Router, side: Side, credentials: Credentials
) -> None:
    queues = await make_queues(router, 2)
    ids = [side.id(queue) for queue in queues]
    async with connected(router.address, service=credentials, role=side.role) as first:
        for queue in queues:
            await side.subscribe(first, queue)
        async with connected(router.address, service=credentials, role=side.role) as second:
            assert await side.subscribe_all(second) == Soks(queue_set(*ids))
            assert await first.event() == (first.service_id, Ends(queue_set(*ids)))
            async with connected(router.address, service=credentials, role=side.role) as third:
                await side.subscribe(third, queues[0])
                events = await second.events(2 if side is RECIPIENTS else 1)
                assert events[-1] == (second.service_id, Ends(queue_set(*ids)))
                async with connected(router.address, service=credentials, role=side.role) as fourth:
                    await side.subscribe_all(fourth)
                    assert await third.event() == (third.service_id, Ends(queue_set(ids[0])))
        await send(router, queues[0])
        assert await first.silent()


async def test_subs_delivers_what_is_stored_and_then_alls(router: Router, credentials: Credentials) -> None:
    queues = await make_queues(router, 40)
    async with connected(router.address, service=credentials, role=ServiceRole.MESSAGING) as client:
        for queue in queues:
            await RECIPIENTS.subscribe(client, queue)
    await send(router, *queues[:30])
    async with connected(router.address, service=credentials, role=ServiceRole.MESSAGING) as client:
        answer = await RECIPIENTS.subscribe_all(client)
        assert answer == Soks(queue_set(*(queue.recipient_id for queue in queues)))
        events = await client.events(31)
        assert events[-1] == (NO_ENTITY, Alls())
        assert {entity for entity, _ in events[:-1]} == {queue.recipient_id for queue in queues[:30]}
        by_id = {queue.recipient_id: queue for queue in queues}
        for entity_id, message in events[:-1]:
            assert isinstance(message, Msg)
            opened = open_message(by_id[entity_id].secret, message.message_id, message.body)
            assert isinstance(opened, RcvMessage)
        assert await RECIPIENTS.subscribe_all(client) == answer
        assert await client.silent()
        await send(router, queues[35])
        assert (await client.event())[0] == queues[35].recipient_id


async def test_a_service_with_many_queues_holds_up_nobody(
    router: Router, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queues are looked at in slices; others have their turns in between."""
    monkeypatch.setattr(session, "FEW_OFFERS", 5)
    monkeypatch.setattr(budget, "SLICE", 0.0)
    looked_at, turns, done = Counter[int](), 0, False
    take_offer = Broker.take_offer

    def count(broker: Broker, client: Client, entity_id: EntityId) -> list[Outgoing[RouterMessage]]:
        looked_at[turns] += 1
        return take_offer(broker, client, entity_id)

    async def count_turns() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(Broker, "take_offer", count)
    async with (
        asyncio.TaskGroup() as tasks,
        connected(router.address, service=credentials, role=ServiceRole.MESSAGING) as client,
    ):
        tasks.create_task(count_turns())
        for _ in range(22):
            await create_queue(client, with_service=True)
        await RECIPIENTS.subscribe_all(client)
        assert await client.event() == (NO_ENTITY, Alls())
        done = True
    assert looked_at.total() == 23
    assert max(looked_at.values()) <= 5


async def test_answers_to_subs_have_a_block_each(router: Router, credentials: Credentials) -> None:
    """Also beside another answer, and with nothing stored."""
    (queue,) = await make_queues(router, 1)
    async with connected(router.address, service=credentials, role=ServiceRole.MESSAGING) as client:
        await RECIPIENTS.subscribe(client, queue)
    await send(router, queue)
    async with connected(router.address, service=credentials, role=ServiceRole.MESSAGING) as client:
        blocks = noted_blocks(client)
        await RECIPIENTS.subscribe_all(client)
        (_, message), _ = await client.events(2)
        assert blocks == [["Soks"], ["Msg"], ["Alls"]]
        assert isinstance(message, Msg)
        assert await client.ask(Ack(message.message_id), queue.recipient_id, queue.key) == Ok()
    for stored in ([], ["Msg"]):
        if stored:
            await send(router, queue)
        async with connected(router.address, service=credentials, role=ServiceRole.MESSAGING) as client:
            blocks = noted_blocks(client)
            params = client.connection.params
            assert params is not None
            assert params.service is not None
            subs = Subs(queue_set(queue.recipient_id))
            client.write(
                Outgoing(CorrId(b"1" * 24), client.service_id, subs, params.service.private_key),
                Outgoing(CorrId(b"2" * 24), NO_ENTITY, Ping()),
            )
            assert (await client.events(len(stored) + 1))[-1] == (NO_ENTITY, Alls())
            assert blocks == [["Soks"], ["Pong"], *[[word] for word in stored], ["Alls"]]


def noted_blocks(client: WireClient) -> list[list[str]]:
    """The words of each block that arrives from now on."""
    blocks: list[list[str]] = []
    keep = client._keep_block

    def note(items: Sequence[Any]) -> None:
        blocks.append([type(item.message).__name__ for item in items])
        keep(items)

    client._keep_block = note  # type: ignore[method-assign]
    return blocks


async def test_drift_is_counted(router: Router, side: Side, credentials: Credentials) -> None:
    (queue,) = await make_queues(router, 1)
    count = f"drift_{side.role.name.lower()}"
    async with connected(router.address, service=credentials, role=side.role) as client:
        await side.subscribe(client, queue)
        params = client.connection.params
        assert params is not None
        assert params.service is not None
        right = queue_set(side.id(queue))
        told = (right, QueueSet(2, right.ids_hash), QueueSet(1, NO_IDS), None)
        for queues in told:
            answer = await client.ask(side.all(queues), client.service_id, params.service.private_key)
            assert answer == Soks(right)
    assert router.counts[count] == 2
    metrics = RouterPages(router, {}).page(b"/metrics")
    assert metrics is not None
    assert f"smp_router_{count}_total 2.0" in metrics.body.decode().splitlines()


async def test_a_service_has_a_limit_of_queues(side: Side, credentials: Credentials) -> None:
    async with Router.start(RouterConfig(max_service_queues=1)) as router:
        first, second = await make_queues(router, 2)
        async with connected(router.address, service=credentials, role=side.role) as client:
            for _ in range(2):
                assert isinstance(await side.subscribe(client, first), Sok)
            assert await side.subscribe(client, second) == Err(QUOTA)
            if side.role is ServiceRole.MESSAGING:
                command = New(recipient_key=(key := new_key()).public, dh_key=new_dh().public)
                assert await client.ask(command, key=key, with_service=True) == Err(QUOTA)


async def test_new_in_a_services_name(router: Router, credentials: Credentials) -> None:
    async with connected(router.address, service=credentials, role=ServiceRole.MESSAGING) as client:
        queue = await create_queue(client, subscribe=True, with_service=True)
        assert queue.ids.service_id == client.service_id
        stored = await create_queue(client, subscribe=False, with_service=True)
        assert RECIPIENTS.service(router).queues == queue_set(queue.recipient_id, stored.recipient_id)
        await send(router, queue, stored)
        heard = [entity_id for entity_id, _ in await client.events(2)]
        assert heard == [queue.recipient_id, stored.recipient_id]


async def test_queues_that_come_later_are_heard_by_the_subscribed_service(
    router: Router, credentials: Credentials
) -> None:
    (queue,) = await make_queues(router, 1)
    role = ServiceRole.MESSAGING
    async with connected(router.address, service=credentials, role=role) as client:
        assert await RECIPIENTS.subscribe_all(client) == Soks(queue_set())
        assert await client.event() == (NO_ENTITY, Alls())
        created = await create_queue(client, with_service=True)
        assert await RECIPIENTS.subscribe(client, queue) == Sok(client.service_id)
        await send(router, created, queue)
        heard = {entity_id for entity_id, _ in await client.events(2)}
        assert heard == {created.recipient_id, queue.recipient_id}


async def test_first_subs_after_single_subs_ends_with_alls(router: Router, credentials: Credentials) -> None:
    queues = await make_queues(router, 2)
    async with connected(router.address, service=credentials, role=ServiceRole.MESSAGING) as client:
        for queue in queues:
            assert await RECIPIENTS.subscribe(client, queue) == Sok(client.service_id)
        await send(router, queues[0])
        assert (await client.event())[0] == queues[0].recipient_id
        expected = Soks(queue_set(*(queue.recipient_id for queue in queues)))
        assert await RECIPIENTS.subscribe_all(client) == expected
        assert await client.event() == (NO_ENTITY, Alls())
        assert await RECIPIENTS.subscribe_all(client) == expected
        assert await client.silent()


async def test_displaced_client_of_a_service_loses_its_single_subscriptions(
    router: Router, credentials: Credentials
) -> None:
    theirs, own = await make_queues(router, 2)
    async with (
        connected(router.address, service=credentials, role=ServiceRole.NOTIFIER) as first,
        connected(router.address, service=credentials, role=ServiceRole.NOTIFIER) as second,
    ):
        assert await RECIPIENTS.subscribe(first, own, with_service=False) == Sok()
        await NOTIFIERS.subscribe(first, theirs)
        assert await NOTIFIERS.subscribe_all(second) == Soks(queue_set(theirs.notifier_id))
        assert await first.event() == (first.service_id, Ends(queue_set(theirs.notifier_id)))
        await send(router, own)
        assert (await first.event())[0] == own.recipient_id  # another role: not this service's business
    role = ServiceRole.MESSAGING
    async with (
        connected(router.address, service=credentials, role=role) as first,
        connected(router.address, service=credentials, role=role) as second,
    ):
        message = await RECIPIENTS.subscribe(first, own)
        assert message == Sok(first.service_id)
        _, delivered = await first.event()
        assert isinstance(delivered, Msg)
        await RECIPIENTS.subscribe_all(second)
        assert await first.event() == (first.service_id, Ends(queue_set(own.recipient_id)))
        assert await first.ask(Ack(delivered.message_id), own.recipient_id, own.key) == Err(NO_MSG)
        assert [entity for entity, _ in await second.events(2)] == [own.recipient_id, NO_ENTITY]


async def test_before_v19_counts_come_without_hashes(router: Router, credentials: Credentials) -> None:
    queues = await make_queues(router, 2)
    versions = VersionRange(16, 18)
    async with connected(router.address, service=credentials, versions=versions) as first:
        for queue in queues:
            assert await NOTIFIERS.subscribe(first, queue) == Sok(first.service_id)
        async with connected(router.address, service=credentials, versions=versions) as second:
            assert await NOTIFIERS.subscribe_all(second) == Soks(QueueSet(2))
            assert await first.event() == (first.service_id, Ends(QueueSet(2)))


async def test_deleted_queues_leave_the_service(router: Router, credentials: Credentials) -> None:
    queues = await make_queues(router, 3)
    async with connected(router.address, service=credentials) as service, connected(router.address) as owner:
        for queue in queues:
            await NOTIFIERS.subscribe(service, queue)
        await owner.ask(Del(), queues[0].recipient_id, queues[0].key)
        await owner.ask(Ndel(), queues[1].recipient_id, queues[1].key)
        assert await service.events(2) == [(queue.notifier_id, Deld()) for queue in queues[:2]]
        assert NOTIFIERS.service(router).queues == queue_set(queues[2].notifier_id)
        assert router.subscribed_notifiers() == {queues[2].notifier_id}


async def test_wrong_service_commands(router: Router, side: Side, credentials: Credentials) -> None:
    (queue,) = await make_queues(router, 1)
    other_side = RECIPIENTS if side is NOTIFIERS else NOTIFIERS
    expected = QueueSet(0, NO_IDS)
    async with connected(router.address, service=credentials, role=side.role) as client:
        assert await other_side.subscribe_all(client) == Err(SERVICE)
        assert await other_side.subscribe(client, queue) == Err(SERVICE)
        assert await client.ask(side.all(expected), client.service_id, new_key()) == Err(SERVICE)
        foreign = EntityId(secrets.token_bytes(24))
        params = client.connection.params
        assert params is not None
        assert params.service is not None
        assert await client.ask(side.all(expected), foreign, params.service.private_key) == Err(SERVICE)
        off = await client.ask(Off(), queue.recipient_id, queue.key, with_service=True)
        assert off == Err(SERVICE)
        own_key = params.service.private_key
        another_service = make_service(datetime.now(UTC))
        async with connected(router.address, service=another_service, role=side.role) as another:
            assert await client.ask(side.all(expected), another.service_id, own_key) == Err(SERVICE)
        service_id = client.service_id
        assert [each.queues for each in router.services] == [queue_set()] * 2
    async with connected(router.address) as client:
        assert await client.ask(side.all(expected), service_id, new_key()) == Err(SERVICE)


async def test_service_signature_must_fit(router: Router, credentials: Credentials) -> None:
    (queue,) = await make_queues(router, 1)
    async with connected(router.address, service=credentials) as client:
        connection = client.connection
        genuine = connection.params
        assert genuine is not None
        assert genuine.service is not None
        stranger = replace(genuine.service, private_key=new_key())
        connection.params = replace(genuine, service=stranger)
        assert await NOTIFIERS.subscribe(client, queue) == Err(SERVICE)
        unbound = replace(genuine.service, fingerprint=bytes(32))
        connection.params = replace(genuine, service=unbound)
        assert await NOTIFIERS.subscribe(client, queue) == Err(AUTH)
        connection.params = genuine
        assert await NOTIFIERS.subscribe(client, queue) == Sok(client.service_id)


async def ask_signed_twice(
    client: WireClient, command: bytes, entity_id: EntityId, key: AuthPrivateKey
) -> SmpMessage:
    """With an authorisation that is valid without a service, and the signature of one beside it."""
    params = client.connection.params
    assert params is not None
    corr_id = CorrId(secrets.token_bytes(24))
    content = body(corr_id, entity_id, command)
    auth = authorize(params, key, corr_id, short(params.session_id) + content)
    (packed,) = pack_batches([encode_transmission(params, auth, bytes(64), content)], params.block_size)
    client.stream.write(pad(packed, params.block_size))
    return await client.answer(corr_id)


async def test_signatures_of_services_where_none_belongs(router: Router, credentials: Credentials) -> None:
    (queue,) = await make_queues(router, 1)
    async with connected(router.address, encrypt=False) as client:
        nsub = ask_signed_twice(client, b"NSUB", queue.notifier_id, queue.notifier_key)
        assert await nsub == Err(SERVICE)
    async with connected(router.address, encrypt=False, service=credentials) as client:
        params = client.connection.params
        assert params is not None
        assert params.service is not None
        assert params.service.private_key is not None
        nsubs = SMP_COMMANDS.encode(Nsubs(QueueSet(0, NO_IDS)), params.version)
        key = params.service.private_key
        assert await ask_signed_twice(client, nsubs, client.service_id, key) == Err(SERVICE)


async def test_signature_of_a_service_in_an_ordinary_session(
    router: Router, credentials: Credentials
) -> None:
    (queue,) = await make_queues(router, 1)
    async with connected(router.address, service=credentials) as service, connected(router.address) as plain:
        assert service.connection.params is not None
        assert plain.connection.params is not None
        borrowed = replace(plain.connection.params, service=service.connection.params.service)
        genuine, plain.connection.params = plain.connection.params, borrowed
        corr_id = CorrId(secrets.token_bytes(24))
        plain.write(Outgoing(corr_id, queue.notifier_id, Nsub(), queue.notifier_key, True))
        plain.connection.params = genuine
        assert await plain.answer(corr_id) == Err(AUTH)
