"""What a router can see of who has which queues: sessions of their own, and PINGs that mean nothing."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agent.duplex.agent import DuplexConfig, open_duplex
from agent.duplex.events import Deleted, Fetched, QueueDeleted, ServerUp, SwitchProgress
from agent.errors import Prohibited
from ntf_demo.demo import playground
from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from protocol.smp_messages import Ids, Nkey, Pfwd, Prxy, Send, SmpMessage, Sub
from smp_client.dialer import NetworkConfig
from smp_client.proxy import ProxyConfig, ProxyPolicy
from smp_router.authentication import Request
from smp_router.broker import Broker
from smp_router.client import Client
from smp_router.commands import Response, respond
from smp_router.config import RouterConfig
from smp_router.router import Router
from tests.agent.duplex.world import Person, config, connect
from tests.agent.notifications.world import settle, verified, watched
from tests.smp_client.test_dialer import SocksProxy
from tests.waiting import until

FREQUENTLY = 0.01


class Watcher:
    """What routers see in each session."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queues: dict[Client, set[EntityId]] = defaultdict(set)
        self.commands: dict[Client, list[type]] = defaultdict(list)

        def watch(broker: Broker, client: Client, request: Request) -> Response:
            self.commands[client].append(type(request.message))
            if request.entity_id:
                self.queues[client].add(request.entity_id)
            answer = respond(broker, client, request)
            if isinstance(answer, SmpMessage) and isinstance(answer, Ids):
                self.queues[client].add(answer.recipient_id)
            return answer

        monkeypatch.setattr("smp_router.session.respond", watch)

    def most(self) -> int:
        """Queues that one session was about."""
        return max(map(len, self.queues.values()))

    def sessions_with(self, kind: type) -> int:
        return sum(kind in commands for commands in self.commands.values())

    def count(self, kind: type) -> int:
        return sum(commands.count(kind) for commands in self.commands.values())


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Watcher:
    return Watcher(monkeypatch)


def private(path: Path, *servers: SmpServer) -> DuplexConfig:
    return replace(config(path, *servers), separate_sessions=True)


@asynccontextmanager
async def opened(made: DuplexConfig) -> AsyncIterator[Person]:
    async with open_duplex(made) as agent:
        yield Person(agent)


async def say(writer: Person, connection_id: int, reader: Person, body: bytes) -> None:
    await writer.agent.send(connection_id, body)
    assert (await reader.reads()).body == body


@pytest.mark.parametrize("separate", [True, False])
async def test_each_session_is_about_one_queue(tmp_path: Path, watcher: Watcher, separate: bool) -> None:
    """Links, two contacts at one router, messages both ways and a restart; or all of it in one session."""
    async with Router.start() as router:
        alices = replace(private(tmp_path / "alice.db", router.address), separate_sessions=separate)
        bobs = replace(private(tmp_path / "bob.db", router.address), separate_sessions=separate)
        async with opened(alices) as alice, opened(bobs) as bob:
            first, second = await connect(alice, bob, pq=False), await connect(alice, bob, pq=False)
            await say(alice, first[0], bob, b"one")
            await say(bob, second[1], alice, b"two")
            _, link = await alice.agent.create_short_invitation(b"profile")
            assert await bob.agent.link_data(link) == b"profile"
        async with opened(alices) as alice, opened(bobs) as bob:
            await say(bob, first[1], alice, b"three")
            await say(alice, second[0], bob, b"four")
        assert (watcher.most() == 1) is separate


@pytest.mark.parametrize("separate", [True, False])
async def test_separate_sessions_take_separate_circuits(tmp_path: Path, separate: bool) -> None:
    """Tor uses another circuit for each user name."""
    async with Router.start() as router:
        proxy = SocksProxy(int(router.address.port))
        async with await asyncio.start_server(proxy.handle, "127.0.0.1", 0) as listener:
            url = f"socks5://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            made = config(tmp_path / "alice.db", replace(router.address, hosts=("abc.onion",)))
            network = NetworkConfig(socks_proxy=url)
            async with opened(replace(made, network=network, separate_sessions=separate)) as alice:
                for _ in range(2):
                    await alice.agent.create_invitation()
    assert len(set(proxy.users)) == (len(proxy.asked) if separate else 0)
    assert len(proxy.asked) >= (2 if separate else 1)


async def test_the_session_of_a_queue_ends_with_it(tmp_path: Path) -> None:
    async with (
        Router.start() as router,
        opened(private(tmp_path / "alice.db", router.address)) as alice,
    ):
        made = [(await alice.agent.create_invitation(pq=False))[0] for _ in range(3)]
        for connection_id in made:
            await alice.event(ServerUp, lambda up, wanted=connection_id: up.connection_ids == (wanted,))  # type: ignore[misc]
        assert router.connections == 3
        for left, connection_id in reversed(list(enumerate(made))):
            await alice.agent.delete(connection_id)
            await alice.event(Deleted)
            await until(lambda expected=left: router.connections == expected)
        await until(lambda: not alice.agent._links._kept)


async def test_a_queue_moves_to_a_session_of_its_own(tmp_path: Path, watcher: Watcher) -> None:
    async with Router.start() as one, Router.start() as two:
        servers = one.address, two.address
        async with (
            opened(private(tmp_path / "alice.db", *servers)) as alice,
            opened(private(tmp_path / "bob.db", *servers)) as bob,
        ):
            hers, his = await connect(alice, bob, pq=False)
            await alice.agent.switch(hers)
            await alice.event(SwitchProgress, lambda event: event.phase == "completed")
            await say(bob, his, alice, b"to the new one")
        assert watcher.most() == 1


async def test_lost_sessions_are_opened_again(tmp_path: Path, watcher: Watcher) -> None:
    async with (
        Router.start() as router,
        opened(private(tmp_path / "alice.db", router.address)) as alice,
        opened(private(tmp_path / "bob.db", router.address)) as bob,
    ):
        hers, his = await connect(alice, bob, pq=False)
        before = watcher.sessions_with(Sub)
        router.faults.drop_connections()
        await until(lambda: watcher.sessions_with(Sub) == before + 2)
        await say(alice, hers, bob, b"hello")
        await say(bob, his, alice, b"hello")


async def test_a_deleted_queue_is_told_of_and_left(tmp_path: Path, watcher: Watcher) -> None:
    async with (
        Router.start() as router,
        opened(private(tmp_path / "alice.db", router.address)) as alice,
    ):
        connection_id, _ = await alice.agent.create_invitation(pq=False)
        await alice.event(ServerUp)
        (queue,) = router.state.queues
        router.faults.send_deld([queue.recipient_id])
        assert await alice.event(QueueDeleted) == QueueDeleted(connection_id, False)
        router.faults.drop_connections()
        await until(lambda: not alice.agent._links._kept)
        assert watcher.sessions_with(Sub) == 1


async def test_a_proxy_sees_one_queue_in_each_session(tmp_path: Path, watcher: Watcher) -> None:
    own = RouterConfig(private_relays=True)
    async with Router.start(own) as proxy, Router.start() as router:
        made = private(tmp_path / "alice.db", proxy.address)
        policy = ProxyConfig(policy=ProxyPolicy.UNKNOWN, proxies=(proxy.address,), known=(proxy.address,))
        async with (
            opened(replace(made, proxy=policy)) as alice,
            opened(config(tmp_path / "bob.db", router.address)) as bob,
        ):
            pairs = [await connect(alice, bob, pq=False) for _ in range(2)]
            for hers, _ in pairs:
                await say(alice, hers, bob, b"hello")
                await say(alice, hers, bob, b"hello again")
        assert watcher.sessions_with(Pfwd) == watcher.count(Prxy) == 2


async def test_notifiers_are_made_in_the_sessions_of_their_queues(tmp_path: Path, watcher: Watcher) -> None:
    async with playground(tmp_path / "servers") as world:
        router = world.router.address
        async with opened(private(tmp_path / "alice.db", router)) as alice:
            for _ in range(3):
                await alice.agent.create_invitation(pq=False)
            await verified(world, alice.agent.notifications)
            await watched(world, alice, 3)
            await settle(alice)
        assert watcher.count(Nkey) == watcher.sessions_with(Nkey) == 3


async def test_a_device_that_sleeps_reads_each_queue_in_its_own_session(
    tmp_path: Path, watcher: Watcher
) -> None:
    async with Router.start() as router:
        made = private(tmp_path / "alice.db", router.address)
        async with opened(config(tmp_path / "bob.db", router.address)) as bob:
            async with opened(made) as alice:
                pairs = [await connect(alice, bob, pq=False) for _ in range(2)]
            watcher.queues.clear()
            for _, his in pairs:
                await bob.agent.send(his, b"wake up")
            await settle(bob)
            senders = set(watcher.queues)
            async with opened(replace(made, subscribe=False)) as alice:
                await alice.agent.notifications.on_push('{"checkMessages":true}')
                for _ in pairs:
                    assert (await alice.reads()).body == b"wake up"
                await alice.event(Fetched)
        sleepers = [queues for client, queues in watcher.queues.items() if client not in senders]
        assert [len(queues) for queues in sleepers] == [1, 1]


def test_a_service_needs_one_session(tmp_path: Path) -> None:
    with pytest.raises(Prohibited, match="one session"):
        replace(private(tmp_path / "alice.db"), services=True)


# Cover traffic


async def test_cover_traffic_goes_on_in_silence(tmp_path: Path, watcher: Watcher) -> None:
    async with Router.start() as router:
        made = replace(private(tmp_path / "alice.db", router.address), cover_traffic=FREQUENTLY)
        async with opened(made) as alice:
            for _ in range(2):
                await alice.agent.create_address()
            for _ in range(2):
                await alice.event(ServerUp)
            (first, second) = [client for client in watcher.queues if watcher.queues[client]]
            before = {client: len(watcher.commands[client]) for client in (first, second)}
            await until(lambda: all(len(watcher.commands[c]) >= n + 20 for c, n in before.items()))
            assert {kind.__name__ for c, n in before.items() for kind in watcher.commands[c][n:]} == {"Ping"}
        assert watcher.count(Send) == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_cover_traffic_has_a_pace(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(Prohibited, match="positive"):
        replace(private(tmp_path / "alice.db"), cover_traffic=seconds)
