"""Two daemons on one PostgreSQL, in this process: what an operator sees, and that words reach the owner."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ntf_server import ownership
from ntf_server.app import App, running
from ntf_server.clock import SystemClock
from ntf_server.config import Config
from ntf_server.ownership import CLOCK_AHEAD
from protocol.addresses import SmpQueueNtf
from smp_router.router import Router
from store.leases import FREED, PUSH_PARTS, Notice, TimeTold
from tests.ntf_server.conftest import active_device, changed, make_app, make_config
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.ports import free_port
from tests.postgres import PostgresCluster
from tests.waiting import DEADLINE, until

ROUTERS = 2


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "BALANCE_INTERVAL", 0.1)
    monkeypatch.setattr(ownership, "LATE_READING", 0.2)


@asynccontextmanager
async def daemon(folder: Path, config: Config, url: str, name: str) -> AsyncIterator[App]:
    shared = {"database": "postgres", "url": url, "daemon": name, "lease_seconds": 4.0}
    async with running(make_app(folder, changed(config, STORE=shared))) as app:
        yield app


async def owned(app: App) -> dict[str, tuple[int, int]]:
    """Routers and parts of the pushes, by the daemon's name."""
    return {one.name: (one.routers, one.pushes) for one in await app.store.ownership.daemons()}


class World:
    """Daemons `first` and `second`, and two routers, one for each of them."""

    def __init__(self, apps: list[App], routers: list[Router], ports: list[int]) -> None:
        self.apps = apps
        self.routers = routers
        self.ports = ports

    async def subscribe(self, device: Device, client: NtfClient) -> None:
        """A queue at each router."""
        for router in self.routers:
            (queue,) = router.load.create_queues(1)
            await device.subscribe(client, SmpQueueNtf(router.address, queue.notifier_id), queue.notifier_key)

    async def are_subscribed(self) -> bool:
        return all(router.subscribed_notifiers() for router in self.routers)

    async def say(self, number: int, *lines: str) -> list[str]:
        """Lines that the control port of a daemon answers, the greeting and the login left out."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ports[number])
        writer.write("\n".join(("auth root", *lines, "quit", "")).encode())
        answer = (await reader.read()).decode().splitlines()
        writer.close()
        return answer[2:]


@asynccontextmanager
async def two_daemons(folder: Path, postgres: PostgresCluster) -> AsyncIterator[World]:
    config = make_config(
        folder,
        AUTH={"control_port_admin_password": "root"},
        SUBSCRIBER={"allow_private_routers": True, "use_service_credentials": False},
    )
    url, ports = postgres.new_database(), [free_port(), free_port()]
    async with AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(Router.start()) for _ in range(ROUTERS)]
        apps = []
        for name, port in zip(("first", "second"), ports, strict=True):
            with_port = changed(config, TRANSPORT={"control_port": port})
            apps.append(await stack.enter_async_context(daemon(folder, with_port, url, name)))
        yield World(apps, routers, ports)


@pytest.fixture
async def world(quick: None, tmp_path: Path, postgres: PostgresCluster) -> AsyncIterator[World]:
    async with two_daemons(tmp_path, postgres) as made:
        client = await NtfClient.open(made.apps[0].address)
        await made.subscribe(await active_device(made.apps[0], client), client)
        client.close()

        async def is_shared() -> bool:
            half = (1, PUSH_PARTS // 2)
            return await owned(made.apps[0]) == {"first": half, "second": half}

        await until(is_shared)
        await until(made.are_subscribed)
        yield made


async def test_the_control_port_shows_who_owns_what(world: World) -> None:
    expected: list[dict[str, Any]] = [
        {"name": "first", "is_this": True, "routers": 1, "pushes": PUSH_PARTS // 2},
        {"name": "second", "is_this": False, "routers": 1, "pushes": PUSH_PARTS // 2},
    ]
    shown = [json.loads(line) for line in await world.say(0, "daemons")]
    assert [one | same for one, same in zip(shown, expected, strict=True)] == shown
    assert sum(one["chores"] for one in shown) == 1
    watched = {json.loads((await world.say(number, "subs"))[0])["server"] for number in range(2)}
    assert watched == {str(router.address) for router in world.routers}


async def test_resubscribe_reaches_the_owner_from_any_control_port(world: World) -> None:
    router = world.routers[0]
    (queue,) = router.subscribed_notifiers()
    answers = []
    for number in range(2):
        before = router.receiver(queue)
        answers += await world.say(number, f"resubscribe {router.address}")

        async def is_subscribed_anew(before: tuple[str, int] | None = before) -> bool:
            """By another session; while it connects, being asked again changes nothing."""
            return router.receiver(queue) not in (None, before)

        await until(is_subscribed_anew)
    assert sorted(answers) == ["not of this daemon: the others were told", "ok"]


async def test_a_queue_is_subscribed_by_the_owner_of_its_router_as_soon_as_that_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks by himself here."""
    monkeypatch.setattr(ownership, "LOOK_INTERVAL", 10 * DEADLINE)
    for app in world.apps:
        assert app.store.leases is not None
        await app.store.leases.say(Notice(FREED, ()))  # the pause under way ends
    before = [router.subscribed_notifiers() for router in world.routers]
    for app in world.apps:
        client = await NtfClient.open(app.address)
        await world.subscribe(await active_device(app, client), client)
        client.close()

    async def are_all_subscribed() -> bool:
        now = [router.subscribed_notifiers() for router in world.routers]
        return [len(queues) for queues in now] == [len(queues) + len(world.apps) for queues in before]

    await until(are_all_subscribed)


async def test_routers_that_another_daemon_had_meanwhile_are_subscribed_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former owner's session lives on, but its queues went to the other daemon's."""
    monkeypatch.setattr(ownership, "LATE_READING", 3.0)  # it gets them back before it has left
    half, everything = (1, PUSH_PARTS // 2), (2, PUSH_PARTS)
    first, second = world.apps
    leases = first.store.leases
    assert leases is not None
    monkeypatch.setattr(leases, "renew", hang := Hang(leases.renew))

    async def is_taken() -> bool:
        return await owned(second) == {"second": everything}

    async def is_shared() -> bool:
        return await owned(second) == {"first": half, "second": half}

    await until(is_taken)
    await until(world.are_subscribed)
    hang.over.set()
    await until(is_shared)
    await until(world.are_subscribed)


class Hang:
    """A call that does not go through for a while."""

    def __init__(self, call: Callable[[], Awaitable[TimeTold]]) -> None:
        self._call = call
        self.over = asyncio.Event()

    async def __call__(self) -> TimeTold:
        await self.over.wait()
        return await self._call()


class HourAhead(SystemClock):
    def now(self) -> float:
        return super().now() + 3600


async def test_a_wrong_clock_is_named_and_not_believed(
    tmp_path: Path, postgres: PostgresCluster, caplog: pytest.LogCaptureFixture
) -> None:
    config = changed(make_config(tmp_path), STORE={"database": "postgres", "url": postgres.new_database()})
    async with running(make_app(tmp_path, config, clock=HourAhead())) as app:
        assert app._clock.now() == pytest.approx(SystemClock().now(), abs=5)
        assert CLOCK_AHEAD._value.get() == pytest.approx(3600, abs=5)
    assert "this machine's clock is 3600 s ahead of the database's" in caplog.text
