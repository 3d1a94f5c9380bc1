"""All queues of a router subscribed at once, and what happens when the router sees things differently."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from agent.duplex.events import (
    Connected,
    Failed,
    MessageReceived,
    MessageSent,
    ServerUp,
    ServiceAll,
    ServiceDown,
    ServiceEnd,
    ServiceUp,
    SubscriptionEnded,
)
from protocol.crypto import X25519PrivateKey
from protocol.encoding import EntityId
from protocol.errors import AUTH, INTERNAL, NO_SERVICE, SERVICE
from protocol.smp_messages import Ids, New, QueueMode, QueueSet, SmpMessage, Sok, Soks, Subs
from protocol.versions import VersionRange
from smp_router.config import RouterConfig
from smp_router.router import Router
from tests.agent.duplex.world import Person, connect, person
from tests.smp_client.peer import PeerSession, scripted_router


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async with Router.start() as router:
        yield router


class Home:
    """Alice's file, with which she comes and goes; Bob's router is not hers."""

    def __init__(self, folder: Path, router: Router) -> None:
        self._folder = folder
        self._router = router

    def alice(self, file: str = "alice.db", *, services: bool = True) -> AbstractAsyncContextManager[Person]:
        return person(self._folder / file, self._router.address, services=services)

    def copy(self, file: str) -> None:
        """As a backup would be restored."""
        for path in self._folder.glob("alice.db*"):
            shutil.copy(path, self._folder / path.name.replace("alice.db", file))

    @asynccontextmanager
    async def bob(self) -> AsyncIterator[Person]:
        async with Router.start() as his, person(self._folder / "bob.db", his.address) as bob:
            yield bob


@pytest.fixture
def home(tmp_path: Path, router: Router) -> Home:
    return Home(tmp_path, router)


def queues_of(router: Router) -> QueueSet:
    """What the only service of the router has."""
    (service,) = router.services
    return service.queues


async def up(alice: Person, count: int) -> ServiceUp:
    found = await alice.event(ServiceUp)
    assert found.queues.count == count
    return found


async def says(bob: Person, connection_id: int, body: bytes) -> None:
    """The router has it."""
    sent = await bob.agent.send(connection_id, body)
    await bob.event(MessageSent, lambda event: event.message_id == sent)


async def reads(alice: Person, body: bytes) -> None:
    assert (await alice.reads()).body == body


async def test_new_queues_are_the_services_from_the_start(home: Home, router: Router) -> None:
    async with home.alice() as alice:
        for _ in range(3):
            await alice.agent.create_invitation(pq=False)
        assert (await alice.event(ServiceUp)).as_expected
        await alice.event(ServiceAll)
        assert queues_of(router).count == 3


async def test_a_start_subscribes_all_at_once(home: Home, router: Router) -> None:
    async with home.bob() as bob:
        async with home.alice() as alice:
            _, his = await connect(alice, bob, pq=False)
            await alice.agent.create_invitation(pq=False)
        await says(bob, his, b"one")
        router.faults.answer_errors("SUB", AUTH)
        async with home.alice() as alice:
            found = await up(alice, 2)
            assert found.as_expected
            assert found.queues == queues_of(router)
            await reads(alice, b"one")
            await alice.event(ServiceAll)
            await says(bob, his, b"two")
            await reads(alice, b"two")
            assert not [event for event in alice.unseen if isinstance(event, ServerUp | Failed)]


async def test_the_router_restarts(home: Home, router: Router) -> None:
    async with home.bob() as bob, home.alice() as alice:
        _, his = await connect(alice, bob, pq=False)
        await up(alice, 1)
        await router.stop()
        down = await alice.event(ServiceDown)
        assert (down.server, down.queues) == (router.address, queues_of(router))
        async with Router.start(state=router.state, port=router.port):
            assert (await up(alice, 1)).as_expected
            await says(bob, his, b"back")
            await reads(alice, b"back")


async def test_another_client_of_the_service_takes_over(home: Home, router: Router) -> None:
    async with home.bob() as bob:
        async with home.alice() as alice:
            _, his = await connect(alice, bob, pq=False)
        home.copy("copy.db")
        async with home.alice() as first:
            await up(first, 1)
            async with home.alice("copy.db") as second:
                assert (await up(second, 1)).as_expected
                assert (await first.event(ServiceEnd)).queues == queues_of(router)
                await says(bob, his, b"to the second")
                await reads(second, b"to the second")
                assert not [event for event in first.unseen if isinstance(event, MessageReceived)]
            router.faults.drop_connections()
            await up(first, 1)
            assert not [event for event in first.unseen if isinstance(event, ServiceDown)], "it was not up"


async def test_another_client_takes_a_queue(home: Home, router: Router) -> None:
    async with home.alice() as alice:
        await alice.agent.create_invitation(pq=False)
    home.copy("copy.db")
    async with home.alice() as alice:
        connection_id, _ = await alice.agent.create_invitation(pq=False)
        await alice.event(ServiceUp)
        async with home.alice("copy.db", services=False) as other:
            await other.event(ServerUp)
            assert (await alice.event(SubscriptionEnded)).connection_id != connection_id
            assert queues_of(router).count == 1
        router.faults.drop_connections()
        assert (await up(alice, 1)).as_expected, "the queue was not counted any more"
        await alice.event(ServerUp)
        assert queues_of(router).count == 2


async def test_the_router_lost_a_queue_of_the_service(home: Home, router: Router) -> None:
    async with home.bob() as bob:
        async with home.alice() as alice:
            _, his = await connect(alice, bob, pq=False)
            await alice.agent.create_invitation(pq=False)
        assert len(router.faults.lose_associations(2)) == 2
        await says(bob, his, b"is it lost?")
        async with home.alice() as alice:
            assert not (await up(alice, 0)).as_expected
            await reads(alice, b"is it lost?")
            await alice.event(ServerUp)
        assert queues_of(router).count == 2
        async with home.alice() as alice:
            assert (await up(alice, 2)).as_expected


async def test_a_queue_that_only_the_router_knows(home: Home, router: Router) -> None:
    """Once all of ours are confirmed one by one, what remains is no reason to ask again and again."""
    async with home.alice() as alice:
        await alice.agent.create_invitation(pq=False)
    home.copy("copy.db")
    async with home.alice("copy.db") as alice:
        await alice.agent.create_invitation(pq=False)
    async with home.alice() as alice:
        assert not (await up(alice, 2)).as_expected
        router.faults.drop_connections()
        assert (await up(alice, 2)).as_expected


@pytest.mark.parametrize("error", [NO_SERVICE, SERVICE])
async def test_the_router_refuses_the_service(home: Home, router: Router, error: object) -> None:
    async with home.bob() as bob:
        async with home.alice() as alice:
            hers, his = await connect(alice, bob, pq=False)
        (refused,) = router.services
        router.faults.answer_errors("SUBS", error, 1)  # type: ignore[arg-type]
        async with home.alice() as alice:
            assert (await alice.event(ServerUp)).connection_ids == (hers,)
            assert not refused.queue_ids
            await says(bob, his, b"one by one")
            await reads(alice, b"one by one")
            router.faults.drop_connections()
            await up(alice, 0)
            assert (await alice.event(ServerUp)).connection_ids == (hers,)
            fresh = next(service for service in router.services if service is not refused)
            assert fresh.queues.count == 1


async def test_a_single_queue_is_refused_because_of_the_service(home: Home, router: Router) -> None:
    async with home.alice(services=False) as alice:
        hers, _ = await alice.agent.create_invitation(pq=False)
    router.faults.answer_errors("SUB", SERVICE, 1)
    async with home.alice() as alice:
        assert (await alice.event(ServerUp)).connection_ids == (hers,)
        assert queues_of(router).count == 0


async def test_the_router_forgot_all_services(home: Home, router: Router) -> None:
    async with home.alice() as alice:
        hers, _ = await alice.agent.create_invitation(pq=False)
        await up(alice, 1)
        router.faults.forget_services()
        router.faults.drop_connections()
        assert (await up(alice, 0)).as_expected, "another id: none of our queues is its"
        assert (await alice.event(ServerUp)).connection_ids == (hers,)
        assert queues_of(router).count == 1


async def test_the_service_gets_another_id(home: Home, router: Router) -> None:
    async with home.alice() as alice:
        await alice.agent.create_invitation(pq=False)
    router.faults.change_service_ids()
    async with home.alice() as alice:
        assert not (await up(alice, 1)).as_expected, "the router kept a queue that we do not count"
        await alice.event(ServerUp)
        router.faults.drop_connections()
        assert (await up(alice, 1)).as_expected


async def test_a_router_without_room_for_services(tmp_path: Path) -> None:
    async with Router.start(RouterConfig(max_services=0)) as router:
        home = Home(tmp_path, router)
        async with home.bob() as bob, home.alice() as alice:
            _, his = await connect(alice, bob, pq=False)
            await says(bob, his, b"no service")
            await reads(alice, b"no service")
            assert not len(router.services)


async def test_a_router_that_knows_no_services(tmp_path: Path) -> None:
    async with Router.start(versions=VersionRange(6, 18)) as router:
        home = Home(tmp_path, router)
        async with home.bob() as bob, home.alice() as alice:
            _, his = await connect(alice, bob, pq=False)
            await says(bob, his, b"old router")
            await reads(alice, b"old router")
            assert not len(router.services)


async def test_services_are_turned_off(home: Home, router: Router) -> None:
    async with home.alice() as alice:
        hers, _ = await alice.agent.create_invitation(pq=False)
    async with home.alice(services=False) as alice:
        assert (await alice.event(ServerUp)).connection_ids == (hers,)
        assert queues_of(router).count == 0
    async with home.alice() as alice:
        assert (await up(alice, 0)).as_expected
        await alice.event(ServerUp)
        assert queues_of(router).count == 1


async def test_only_our_own_routers_see_a_certificate(tmp_path: Path, home: Home) -> None:
    async with Router.start() as his, person(tmp_path / "bob.db", his.address) as bob, home.alice() as alice:
        hers, _ = await connect(alice, bob, pq=False)
        await says(alice, hers, b"hello")
        assert not len(his.services)


async def test_a_queue_that_is_deleted_or_replaced_leaves_the_service(tmp_path: Path, home: Home) -> None:
    async with (
        Router.start() as one,
        Router.start() as two,
        home.bob() as bob,
    ):
        async with person(tmp_path / "both.db", one.address, two.address, services=True) as alice:
            hers, his = await connect(alice, bob, pq=False)
            old, new = (one, two) if len(one.services) else (two, one)
            await alice.agent.switch(hers)
            while not len(new.services) or queues_of(old).count:
                await says(bob, his, b"meanwhile")
                await reads(alice, b"meanwhile")
            assert queues_of(new).count == 1
        async with person(tmp_path / "both.db", one.address, two.address, services=True) as alice:
            assert (await up(alice, 1)).as_expected


async def test_a_router_that_is_busy_is_asked_again(home: Home, router: Router) -> None:
    async with home.alice() as alice:
        hers, _ = await alice.agent.create_invitation(pq=False)
    router.faults.answer_errors("SUBS", INTERNAL, 1)
    async with home.alice() as alice:
        await up(alice, 1)
    router.faults.answer_errors("SUB", INTERNAL, 1)
    async with home.alice(services=False) as alice:
        assert (await alice.event(ServerUp)).connection_ids == (hers,)
        assert not [event for event in alice.unseen if isinstance(event, Failed | Connected)]


async def test_a_queue_is_counted_to_another_service_than_that_of_the_session(tmp_path: Path) -> None:
    """The session is given up, and the queue subscribed in one without a service."""
    queue, another = EntityId(b"q" * 24), EntityId(b"a" * 24)
    with_service: list[bool] = []

    async def strange(session: PeerSession) -> None:
        params = session.connection.params
        assert params is not None
        with_service.append(params.service is not None)
        while commands := await session.receive():
            for command in commands:
                answer: SmpMessage = Sok(another if with_service[-1] else None)
                if isinstance(command.message, New):
                    key = X25519PrivateKey(bytes(range(32))).public
                    mode = QueueMode.MESSAGING
                    answer = Ids(recipient_id=queue, sender_id=EntityId(b"s" * 24), dh_key=key, mode=mode)
                elif isinstance(command.message, Subs) and command.message.queues is not None:
                    answer = Soks(command.message.queues)
                session.answer([(command.corr_id, command.entity_id, answer)])

    async with (
        scripted_router(strange) as router,
        person(tmp_path / "alice.db", router, services=True) as alice,
    ):
        hers, _ = await alice.agent.create_invitation(pq=False)
        assert (await alice.event(ServerUp)).connection_ids == (hers,)
        assert with_service == [True, False]


async def test_the_end_of_what_was_kept_is_told_after_the_confirmation(home: Home, router: Router) -> None:
    """The router sends it before the agent has found out which queues are missing."""
    async with home.alice() as alice:
        await alice.agent.create_invitation(pq=False)
    home.copy("copy.db")
    async with home.alice("copy.db") as alice:
        await alice.agent.create_invitation(pq=False)
    async with home.alice() as alice:
        await alice.event(ServiceAll)
        kinds = [type(event) for event in alice.unseen]
        assert ServiceUp in kinds
        found = await alice.event(ServiceUp)
        assert (found.queues.count, found.expected.count, found.as_expected) == (2, 1, False)
