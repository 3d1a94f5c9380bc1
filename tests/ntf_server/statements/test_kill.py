"""kill -9 while pushes are under way: nothing reaches a device twice, and what was not sent is."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

from ntf_demo.fake_push.faults import Fault
from ntf_demo.statement_gateway import GatewayWorld, gateway_parts, signed_statement
from tests.ntf_server.statements.process import ALICE, DEVICES, TOPIC, daemon, of, register
from tests.waiting import until


async def waiting_are(world: GatewayWorld, count: int, unknown: int) -> None:
    """So many pushes are to be made, and of so many of them nobody knows whether they were.

    One connection: one that is closed takes a lock, and the server would wait for it again and again."""
    sql = "SELECT count(*), count(*) FILTER (WHERE attempted) FROM pending_statements"
    with closing(sqlite3.connect(world.folder / "data" / "ntf-server.db")) as db:
        await until(lambda: db.execute(sql).fetchone() == (count, unknown))


async def test_a_push_without_an_answer_is_not_made_twice(tmp_path: Path) -> None:
    async with gateway_parts(tmp_path) as world:
        for api in ("apns", "fcm"):
            world.push.add_fault(Fault(api=api, action="silence", processed=True))
        async with daemon(world) as running:
            await register(world, running.port)
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"first"))
            await until(lambda: len(of(world, b"first")) == 3)
        await waiting_are(world, 3, 3)
        world.push.clear_faults()
        async with daemon(world):
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"second"))
            await until(lambda: len(of(world, b"second")) == 3)
            await waiting_are(world, 0, 0)
    assert Counter(push.token for push in of(world, b"first")) == Counter(DEVICES.values())


async def test_what_a_provider_refused_is_pushed_after_a_kill(tmp_path: Path) -> None:
    async with gateway_parts(tmp_path) as world:
        for api in ("apns", "fcm"):
            world.push.add_fault(Fault(api=api, status=503, reason="Shutdown"))
        async with daemon(world) as running:
            await register(world, running.port)
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"first"))
            await until(lambda: len(world.push.pushes) >= 3)
            await waiting_are(world, 3, 0)
        world.push.clear_faults()
        async with daemon(world):
            await until(lambda: len(of(world, b"first")) == 3)
    assert Counter(push.token for push in of(world, b"first")) == Counter(DEVICES.values())
