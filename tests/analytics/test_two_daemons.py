"""The journals of two daemons that share a database read as one in the reports."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from ntf_demo.fake_push.server import FakePushConfig, FakePushServer
from ntf_server import ownership
from ntf_server.app import running
from ntf_server.setup import JOURNAL_FOLDER
from protocol.addresses import SmpQueueNtf
from protocol.device_token import ApnsToken, Provider
from smp_router.load import LoadQueue
from smp_router.router import Router
from tests.analytics.test_daemon_journal import report_on
from tests.ntf_server.conftest import changed, code_of, make_app
from tests.ntf_server.life import journal_config
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.postgres import PostgresCluster
from tests.waiting import until

QUEUES = 4
"Of each of two routers."


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "BALANCE_INTERVAL", 0.1)
    monkeypatch.setattr(ownership, "LATE_READING", 0.2)


class Traffic:
    """Routers with queues of one device, and what they sent."""

    def __init__(self, routers: list[Router], push: FakePushServer) -> None:
        self.routers = routers
        self.push = push
        self.queues = [(router, router.load.create_queues(QUEUES)) for router in routers]
        self.accepted = 1
        "Pushes; the first is the verification."

    async def subscribe(self, device: Device, client: NtfClient) -> None:
        for router, queues in self.queues:
            for queue in queues:
                name = SmpQueueNtf(router.address, queue.notifier_id)
                await device.subscribe(client, name, queue.notifier_key)
        await self.subscribed()

    async def subscribed(self) -> None:
        await until(lambda: all(len(router.subscribed_notifiers()) == QUEUES for router, _ in self.queues))

    async def notify(self, number: int) -> None:
        """Each router once, and wait for the push."""
        for router, queues in self.queues:
            queue: LoadQueue = queues[number]
            await router.load.emit([queue], 1)
            self.accepted += 1
            await until(lambda: len(self.push.pushes) == self.accepted)


async def live(folder: Path, url: str, traffic: Traffic) -> None:
    """Both daemons work; the first stops, and the second goes on alone."""
    config = changed(journal_config(folder, traffic.push), PUSH={"interval": 0.1})
    async with AsyncExitStack() as lasting, AsyncExitStack() as short:
        for name, stack in (("first", short), ("second", lasting)):
            shared = {"database": "postgres", "url": url, "daemon": name, "lease_seconds": 4.0}
            app = await stack.enter_async_context(running(make_app(folder, changed(config, STORE=shared))))
        client = await NtfClient.open(app.address)
        device = Device.make(ApnsToken(Provider.APNS_TEST, b"ab" * 32))
        await device.register(client)
        await until(lambda: len(traffic.push.pushes) == 1)
        await device.verify(client, await code_of(app, device))
        await traffic.subscribe(device, client)
        async with asyncio.timeout(60):
            while [one.routers for one in await app.store.ownership.daemons()] != [1, 1]:
                await asyncio.sleep(0.05)
        await traffic.subscribed()
        await traffic.notify(0)
        await short.aclose()
        await traffic.subscribed()
        await traffic.notify(1)
        client.close()


async def test_reports_read_them_as_one(
    spark: SparkSession, quick: None, tmp_path: Path, postgres: PostgresCluster
) -> None:
    async with (
        Router.start() as one,
        Router.start() as other,
        FakePushServer(FakePushConfig(folder=tmp_path / "push")) as push,
    ):
        await live(tmp_path, postgres.new_database(), Traffic([one, other], push))
    tables = report_on(spark, tmp_path / "data" / JOURNAL_FOLDER, tmp_path / "rollups")
    routers = {row["server"]: row for row in tables["health"]}
    assert {(row["subscriptions"], row["active"], row["lost"]) for row in routers.values()} == {
        (QUEUES, QUEUES, 0)
    }
    assert len(routers) == 2
    assert not any(outage["is_open"] for outage in tables["health_outages"])
    assert sum(row["received"] for row in tables["health_hours"]) == 4
    (provider,) = tables["delivery_providers"]
    assert (provider["sent"], provider["failed"]) == (4, 0)
    assert [(row["stage"], row["tokens"]) for row in tables["tokens_funnel"]] == [
        ("registered", 1),
        ("confirmed", 1),
        ("active", 1),
    ]
    assert {row["daemon"] for row in tables["incidents_restarts"]} == {"first", "second"}
    assert tables["incidents_losses"] == []
    (day,) = tables["capacity_daily"][-1:]
    assert (day["subscriptions"], day["tokens"]) == (QUEUES * 2, 1)
