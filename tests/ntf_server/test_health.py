"""Live and ready: what they say when parts of the server are missing."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ntf_demo.fake_push.faults import Fault
from ntf_server import own_routers, setup, store_watch, subscriber
from ntf_server.app import App, running
from protocol.addresses import SmpQueueNtf, SmpServer
from protocol.crypto import Ed25519PrivateKey
from protocol.encoding import NO_ENTITY, EntityId
from protocol.errors import QUOTA
from protocol.ntf_commands import IdSub, Snew
from smp_router.config import RouterConfig
from smp_router.router import Router
from tests.drills.world import DEADLINE, World, world
from tests.http import get
from tests.ntf_server.conftest import active_device, make_app, make_config
from tests.ntf_server.ntf_client import NtfClient
from tests.ports import free_port
from tests.store.test_failures import largest_file
from tests.waiting import until

READY, NOT_READY = "HTTP/1.1 200", "HTTP/1.1 503"


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_watch, "INTERVAL", 0.05)
    monkeypatch.setattr(own_routers, "COUNT_INTERVAL", 0.05)
    monkeypatch.setattr(own_routers, "SHOW_INTERVAL", 0.05)
    monkeypatch.setattr(subscriber, "STATUS_INTERVAL", 0.05)


@asynccontextmanager
async def server(folder: Path, **sections: Any) -> AsyncIterator[tuple[App, int]]:
    port = free_port()
    config = make_config(folder, METRICS={"port": port}, **sections)
    async with running(make_app(folder, config)) as app:
        await answers(port, READY)
        yield app, port


async def answers(port: int, status: str, text: str = "") -> str:
    """Wait until `/health/ready` says so."""
    async with asyncio.timeout(DEADLINE):
        while not ((page := await get(port, "/health/ready")).startswith(status) and text in page):
            assert (await get(port, "/health/live")).startswith(READY)
            await asyncio.sleep(0.02)
    return page.partition("\r\n\r\n")[2]


async def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with server(tmp_path) as (_, port):
        with largest_file(100):
            page = await answers(port, NOT_READY)
            assert page.startswith("not ready\n- store: ")
            assert "full" in page or "size limit" in page
        assert await answers(port, READY) == "ready\n"
    assert caplog.text.count("the store is unavailable") == 1
    assert "the store is up again after" in caplog.text


async def test_a_database_that_another_program_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_watch, "LIMIT", 0.2)
    async with server(tmp_path) as (_, port):
        other = sqlite3.connect(tmp_path / "data" / setup.DATABASE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert "- store: no write reached the disk within 0.2 s\n" in await answers(port, NOT_READY)
        other.close()
        await answers(port, READY)


async def test_a_damaged_database(tmp_path: Path) -> None:
    """Also if only some of its pages are, and others can still be written."""
    async with server(tmp_path) as (app, port):
        client = await NtfClient.open(app.address)
        for _ in range(20):
            await active_device(app, client)
        path = tmp_path / "data" / setup.DATABASE
        with sqlite3.connect(path, isolation_level=None) as folded:
            folded.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        folded.close()
        with path.open("r+b") as file:
            pages = path.stat().st_size // 4096
            for number in range(2, pages):
                file.seek(number * 4096)
                file.write(b"\xff" * 4096)
        page = await answers(port, NOT_READY)
        client.close()
    assert "is damaged: restore it from a backup" in page


async def test_own_routers_must_be_subscribed(tmp_path: Path) -> None:
    port = free_port()
    async with Router.start(host="127.0.0.1") as router:
        own = {"own_hosts": ("127.0.0.1",), "allow_private_routers": True}
        config = make_config(tmp_path, METRICS={"port": port}, SUBSCRIBER=own)
        async with running(make_app(tmp_path, config)) as app:
            await subscribe(app, router, 3)
            name = router.address.host_port
            await figures(port, name, up=1, queues=3, pending=0)
            assert await answers(port, READY) == "ready\n"
    async with running(make_app(tmp_path, config)):  # the router is gone
        missing = f"- own routers: 0 of 3 queues are subscribed; routers that are down: {name}\n"
        await answers(port, NOT_READY, missing)
        await figures(port, name, up=0, queues=0, pending=3)


async def test_metrics_name_a_bounded_number_of_own_routers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_routers, "MOST_SHOWN", 1)
    port = free_port()
    own = {"own_hosts": ("127.0.0.1",), "allow_private_routers": True}
    config = make_config(tmp_path, METRICS={"port": port}, SUBSCRIBER=own)
    async with (
        Router.start(host="127.0.0.1") as first,
        Router.start(host="127.0.0.1") as second,
        running(make_app(tmp_path, config)) as app,
    ):
        for router in (first, second):
            await subscribe(app, router, 1)
        await until(lambda: len(app.subscriber.own_routers()) == 2)
        shown, hidden = (known.name for known, _ in app.subscriber.own_routers())
        await subscribe(app, first if shown == first.address.host_port else second, 1)
        await figures(port, shown, up=1, queues=2, pending=0)
        assert f'server="{hidden}"' not in await get(port, "/metrics")


async def test_an_own_router_that_is_none_any_more_has_no_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is remembered of routers goes with them: one that comes back is reported like a new one."""
    port = free_port()
    own = {"own_hosts": ("127.0.0.1",), "allow_private_routers": True}
    config = make_config(tmp_path, METRICS={"port": port}, SUBSCRIBER=own)
    async with running(make_app(tmp_path, config)) as app:
        async with Router.start(host="127.0.0.1") as router:
            await subscribe(app, router, 1)
            name = router.address.host_port
            await figures(port, name, up=1)
        down = f"own router {name} is down"
        await until(lambda: caplog.text.count(down) == 1)
        monkeypatch.setattr(own_routers, "MOST_SHOWN", 0)
        async with asyncio.timeout(DEADLINE):
            while f'server="{name}"' in await get(port, "/metrics"):
                await asyncio.sleep(0.05)
        monkeypatch.setattr(own_routers, "MOST_SHOWN", 1)
        await until(lambda: caplog.text.count(down) == 2)


async def figures(port: int, name: str, **wanted: int) -> None:
    lines = [f'simplex_ntf_smp_router_{key}{{server="{name}"}} {value}.0' for key, value in wanted.items()]
    async with asyncio.timeout(DEADLINE):
        while not set(lines) <= set((await get(port, "/metrics")).splitlines()):
            await asyncio.sleep(0.05)


async def subscribe(app: App, router: Router, count: int) -> None:
    client = await NtfClient.open(app.address)
    device = await active_device(app, client)
    for queue in router.load.create_queues(count):
        new = Snew(device.token_id, SmpQueueNtf(router.address, queue.notifier_id), queue.notifier_key)
        assert isinstance(await client.ask(new, NO_ENTITY, device.key), IdSub)
    client.close()


async def test_a_provider_that_refuses_us(tmp_path: Path) -> None:
    async with world(tmp_path, seconds=2.0) as drill:
        port = drill.daemon.metrics_port
        await answers(port, READY)
        drill.push.add_fault(Fault(api="apns", status=403, reason="InvalidProviderToken"))
        refused = "- providers: none takes pushes; AT refuses us: APNs answered 403 InvalidProviderToken"
        assert refused in await answers_while_pushing(drill, NOT_READY)
        drill.push.clear_faults()
        await answers_while_pushing(drill, READY)
        log = drill.daemon.log.read_text()
    assert log.count("provider AT refuses us: APNs answered 403") == 1
    assert "provider AT is up again after" in log


async def answers_while_pushing(drill: World, status: str) -> str:
    async with asyncio.timeout(DEADLINE):
        while True:
            for queue in drill.unused:
                await drill.router.load.emit([queue], 1, fresh=True)
                page = await get(drill.daemon.metrics_port, "/health/ready")
                if page.startswith(status):
                    return page
                await asyncio.sleep(0.1)


async def test_hosts_of_ours_with_other_keys_are_not_our_routers(tmp_path: Path) -> None:
    """Any client may name our host with a wrong port or key, also beside a host of its own."""
    port = free_port()
    async with Router.start(host="127.0.0.1") as router, Router.start(host="127.0.0.1") as foreign:
        own = {"own_hosts": ("127.0.0.1",), "allow_private_routers": True}
        config = make_config(tmp_path, METRICS={"port": port}, SUBSCRIBER=own)
        async with running(make_app(tmp_path, config)) as app:
            await subscribe(app, router, 3)
            name = router.address.host_port
            await figures(port, name, up=1, queues=3, pending=0)
            named = [
                SmpServer(("127.0.0.1",), str(free_port()), router.address.key_hash),
                SmpServer(("127.0.0.1",), router.address.port, bytes(32)),
                SmpServer(("127.0.0.2", "127.0.0.1"), foreign.address.port, foreign.address.key_hash),
            ]
            client = await NtfClient.open(app.address)
            device = await active_device(app, client)
            (queue,) = foreign.load.create_queues(1)
            for server in named:
                await device.subscribe(client, SmpQueueNtf(server, queue.notifier_id), queue.notifier_key)

            def attempted() -> bool:
                statuses = app.subscriber.status()
                up = sum(status.subscribed for status in statuses)
                return up == sum(status.last_error is not None for status in statuses) == 2

            async def foreign_is_counted() -> bool:
                lines = (await get(port, "/metrics")).splitlines()
                return any(
                    line.startswith("simplex_ntf_smp_") and "active_sub_count_other 1.0" in line
                    for line in lines
                )

            await until(attempted)
            client.close()
            assert [known.name for known, _ in app.subscriber.own_routers()] == [name]
            assert await answers(port, READY) == "ready\n"
            await until(foreign_is_counted)
            page = await get(port, "/metrics")
            assert named[0].host_port not in page
            assert 'server="127.0.0.2' not in page


async def test_queues_that_do_not_exist_do_not_end_readiness(tmp_path: Path) -> None:
    """Any client may name them, as many as it likes; an own router refuses each."""
    port = free_port()
    own = {"own_hosts": ("127.0.0.1",), "allow_private_routers": True}
    config = make_config(tmp_path, METRICS={"port": port}, SUBSCRIBER=own)
    async with (
        Router.start(RouterConfig(address_failures_burst=20), host="127.0.0.1") as router,
        running(make_app(tmp_path, config)) as app,
    ):
        await subscribe(app, router, 3)
        name = router.address.host_port
        await figures(port, name, up=1, queues=3, pending=0)
        client = await NtfClient.open(app.address)
        device = await active_device(app, client)
        for _ in range(5):
            news = [
                Snew(device.token_id, nowhere(router), Ed25519PrivateKey(os.urandom(32))) for _ in range(30)
            ]
            answers = await client.ask_many([(new, NO_ENTITY, device.key) for new in news])
            assert all(isinstance(answer, IdSub) for answer in answers)
            await until(lambda: app.subscriber.status()[0].waiting == 0)
            await figures(port, name, up=1, queues=3, pending=0)
            assert (await get(port, "/health/ready")).startswith(READY)
        client.close()
        assert router.counts["connections"] == 1


async def test_queues_that_were_just_named_do_not_end_readiness(tmp_path: Path) -> None:
    """However many: those that an own router refused for now do."""
    port = free_port()
    own = {"own_hosts": ("127.0.0.1",), "allow_private_routers": True}
    config = make_config(tmp_path, METRICS={"port": port}, SUBSCRIBER=own)
    async with Router.start(host="127.0.0.1") as router, running(make_app(tmp_path, config)) as app:
        await subscribe(app, router, 3)
        name = router.address.host_port
        await figures(port, name, up=1, queues=3, pending=0)
        client = await NtfClient.open(app.address)
        device = await active_device(app, client)
        router.faults.black_hole()  # the first of these is asked for without an answer; then the others wait
        for _ in range(12):
            await device.subscribe(client, nowhere(router), Ed25519PrivateKey(os.urandom(32)))
        await figures(port, name, up=1, queues=3, pending=11)
        assert (await get(port, "/health/ready")).startswith(READY)
        router.faults.black_hole(False)
        router.faults.answer_errors("NSUB", QUOTA)
        router.faults.drop_connections()
        missing = "- own routers: 3 of 15 queues are subscribed"
        await answers(port, NOT_READY, missing)
        client.close()


def nowhere(router: Router) -> SmpQueueNtf:
    return SmpQueueNtf(router.address, EntityId(os.urandom(24)))
