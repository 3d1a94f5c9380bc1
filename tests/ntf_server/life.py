"""A daemon with a journal, a client, a router and a push provider in one process."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ntf_demo.fake_push.server import FakePushServer
from ntf_server.app import App
from ntf_server.config import Config
from protocol.addresses import SmpQueueNtf
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import EntityId
from protocol.statuses import TokenStatus
from smp_router.load import LoadQueue
from smp_router.router import Router
from tests.ntf_server.conftest import changed, code_of, make_config
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.store.builders import queue_states
from tests.waiting import DEADLINE


def journal_config(folder: Path, push: FakePushServer) -> Config:
    provider = {
        "allow_test_provider": True,
        "key_id": "TEST",
        "team_id": "TEST",
        "test_host": "127.0.0.1",
        "test_port": push.port,
        "test_ca_file": push.ca_file,
    }
    return changed(make_config(folder), APNS=provider, JOURNAL={"enabled": True})


@dataclass
class Life:
    """A daemon, a client, a router and a provider, and what was done with them."""

    app: App
    client: NtfClient
    router: Router
    push: FakePushServer
    database: Path
    subs: dict[str, EntityId] = field(default_factory=dict)

    async def register(self, token: bytes | None = None) -> Device:
        """A device whose verification push was accepted."""
        device = Device.make(ApnsToken(Provider.APNS_TEST, token or os.urandom(32).hex().encode()))
        await device.register(self.client)
        await self.confirmed(device)
        return device

    async def confirmed(self, device: Device) -> None:
        async with asyncio.timeout(DEADLINE):
            while True:
                record = await self.app.store.token_by_device(device.token, device.key.public.der)
                if record is not None and record.status is TokenStatus.CONFIRMED:
                    return
                await asyncio.sleep(0.02)

    async def active(self, token: bytes | None = None) -> Device:
        device = await self.register(token)
        await device.verify(self.client, await code_of(self.app, device))
        return device

    async def subscribe(self, device: Device, queue: LoadQueue) -> EntityId:
        name = SmpQueueNtf(self.router.address, queue.notifier_id)
        return await device.subscribe(self.client, name, queue.notifier_key)

    def sql(self, statement: str, *values: Any) -> list[Any]:
        with closing(sqlite3.connect(self.database, timeout=DEADLINE)) as db, db:
            return db.execute(statement, values).fetchall()

    def state(self, name: str) -> str:
        return self.states()[self.subs[name]]

    def count(self, state: str) -> int:
        return list(self.states().values()).count(state)

    def states(self) -> dict[EntityId, str]:
        with closing(sqlite3.connect(self.database, timeout=DEADLINE)) as db:
            return {queue.subscription_id: queue.state.value for queue in queue_states(db)}
