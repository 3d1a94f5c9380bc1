"""Of several daemons one watches; the others leave the store's rules alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from ntf_demo.fake_node.server import FakeNode
from ntf_server.clock import Clock, SystemClock
from ntf_server.config import LimitsConfig, StatementsConfig
from ntf_server.limits import AddressLimits
from ntf_server.statements import service
from ntf_server.statements.api import GatewayApi
from ntf_server.statements.service import StatementGateway
from store.leases import Lease, SoleOwner
from store.statement_records import GatewayCounts, Purged
from tests.ntf_server.dispatch.clock import START, SimulatedClock
from tests.ntf_server.statements.builders import topic
from tests.ntf_server.statements.test_pipeline import Recorder
from tests.waiting import until
from transport.budget import CpuBudget


class Asked(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.purges: list[int] = []
        "Subscriptions that were not renewed since then are to go."

    async def watched_topics(self, limit: int) -> list[bytes]:
        self.reads += 1
        return [topic(1)]

    async def gateway_counts(self) -> GatewayCounts:
        return GatewayCounts({}, rules=1, topics=1, waiting=0, heard_at=None)

    async def purge_statements(self, now: int, limit: int, *, unrenewed_before: int = 0) -> Purged:
        self.purges.append(unrenewed_before)
        return Purged()


class Lot(SoleOwner):
    """Falls to this daemon when a test says so."""

    is_shared = True
    is_ours = False

    def owns(self, lease: Lease) -> bool:
        return self.is_ours


@asynccontextmanager
async def running_gateway(
    node: FakeNode, store: Asked, lot: Lot, clock: Clock, **settings: Any
) -> AsyncIterator[None]:
    config = StatementsConfig(enabled=True, node=node.url, port=0, **settings)
    api = GatewayApi(
        *(cast("Any", store), config, clock, os.urandom),
        addresses=AddressLimits(LimitsConfig()),
        budget=CpuBudget(),
    )
    gateway = StatementGateway(cast("Any", store), store, config, clock, api, lot)
    running = asyncio.create_task(gateway.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_rules_are_read_by_the_one_that_watches(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "OWNERSHIP_INTERVAL", 0.001)
    store, lot = Asked(), Lot()
    async with running_gateway(node, store, lot, SystemClock()):
        await until(lambda: bool(store.purges))
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert (store.reads, node.subscriptions) == (0, 0)
        lot.is_ours = True
        await until(lambda: node.watched == {topic(1)})
        assert store.reads > 0
        lot.is_ours = False
        await until(lambda: node.subscriptions == 0)


@pytest.mark.parametrize(("days", "since"), [(180, int(START) - 180 * 86_400), (0, 0)])
async def test_subscriptions_end_that_are_not_renewed(node: FakeNode, days: int, since: int) -> None:
    store = Asked()
    async with running_gateway(node, store, Lot(), SimulatedClock(), subscription_days=days):
        await until(lambda: bool(store.purges))
    assert store.purges[0] == since
