"""Of several daemons one watches; the others leave the store's rules alone."""

from __future__ import annotations

import asyncio
import os
from typing import Any, cast

import pytest

from ntf_demo.fake_node.server import FakeNode
from ntf_server.clock import SystemClock
from ntf_server.config import LimitsConfig, StatementsConfig
from ntf_server.limits import AddressLimits
from ntf_server.statements import service
from ntf_server.statements.api import GatewayApi
from ntf_server.statements.service import StatementGateway
from store.leases import Lease, SoleOwner
from store.statement_records import GatewayCounts, Purged
from tests.ntf_server.statements.builders import topic
from tests.ntf_server.statements.test_pipeline import Recorder
from tests.waiting import until
from transport.budget import CpuBudget


class Asked(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.reads = self.purges = 0

    async def watched_topics(self, limit: int) -> list[bytes]:
        self.reads += 1
        return [topic(1)]

    async def gateway_counts(self) -> GatewayCounts:
        return GatewayCounts({}, rules=1, topics=1, waiting=0, heard_at=None)

    async def purge_statements(self, now: int, limit: int, *, unrenewed_before: int = 0) -> Purged:
        self.purges += 1
        return Purged()


class Lot(SoleOwner):
    """Falls to this daemon when a test says so."""

    is_shared = True
    is_ours = False

    def owns(self, lease: Lease) -> bool:
        return self.is_ours


async def test_rules_are_read_by_the_one_that_watches(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "OWNERSHIP_INTERVAL", 0.001)
    store, lot = Asked(), Lot()
    config, clock, addresses = (
        StatementsConfig(enabled=True, node=node.url, port=0),
        SystemClock(),
        AddressLimits(LimitsConfig()),
    )
    api = GatewayApi(cast("Any", store), config, clock, os.urandom, addresses=addresses, budget=CpuBudget())
    gateway = StatementGateway(cast("Any", store), store, config, clock, api, lot)
    running = asyncio.create_task(gateway.run())
    try:
        await until(lambda: store.purges > 0)
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert (store.reads, node.subscriptions) == (0, 0)
        lot.is_ours = True
        await until(lambda: node.watched == {topic(1)})
        assert store.reads > 0
        lot.is_ours = False
        await until(lambda: node.subscriptions == 0)
    finally:
        running.cancel()
        await asyncio.wait([running])
