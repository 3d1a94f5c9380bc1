"""Two daemons on one database: one watches the topics, and when it is killed the other does."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg

from ntf_demo.fake_push.faults import Fault
from ntf_demo.fake_push.server import wall_clock
from ntf_demo.statement_gateway import gateway_parts, signed_statement
from store.leases import STATEMENTS
from tests.ntf_server.statements.process import ALICE, DEVICES, TOPIC, daemon, of, register
from tests.postgres import PostgresCluster
from tests.waiting import DEADLINE, until

LEASE = 4.0
TAKEN_OVER = 30.0
_WATCHER = "SELECT name FROM ntf.leases JOIN ntf.daemons ON daemon_id = owner WHERE duty = $1"
_UNKNOWN = "SELECT count(*) FROM ntf.pending_statements"


async def test_the_watcher_is_killed(tmp_path: Path, postgres: PostgresCluster) -> None:
    assert await taken_over(tmp_path, postgres.new_database(), LEASE) < TAKEN_OVER


async def taken_over(folder: Path, url: str, lease_seconds: float) -> float:
    """Seconds from the watcher's death until what was published then reached every device; each push is made
    once, also that of which nobody knows whether it was."""
    async with gateway_parts(folder, postgres_url=url) as world:
        store = replace(world.config.STORE, lease_seconds=lease_seconds)
        world.config = replace(world.config, STORE=store)
        async with daemon(world, "one") as one, daemon(world, "two") as two:
            watcher = {"one": one, "two": two}[await _ask(url, _WATCHER, STATEMENTS.duty)]
            other = two if watcher is one else one
            await register(world, other.port)
            await until(lambda: world.node.subscriptions == 1)
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"before"))
            await until(lambda: len(of(world, b"before")) == 3)
            await _outcomes_are_stored(url)
            for api in ("apns", "fcm"):
                world.push.add_fault(Fault(api=api, action="silence", processed=True))
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"in flight"))
            await until(lambda: len(of(world, b"in flight")) == 3)
            watcher.process.kill()
            await watcher.process.wait()
            killed_at = wall_clock()
            world.push.clear_faults()
            await until(lambda: world.node.subscriptions == 0)
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"while nobody watches"))
            await until(lambda: len(of(world, b"while nobody watches")) == 3)
            seconds = wall_clock() - killed_at
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"after"))
            await until(lambda: len(of(world, b"after")) == 3)
            assert world.node.subscriptions == 1
    for data in (b"before", b"in flight", b"while nobody watches", b"after"):
        assert Counter(push.token for push in of(world, data)) == Counter(DEVICES.values())
    return seconds


async def _outcomes_are_stored(url: str) -> None:
    """A kill before that would have them pushed again."""
    async with asyncio.timeout(DEADLINE):
        while await _ask(url, _UNKNOWN):
            await asyncio.sleep(0.01)


async def _ask(url: str, sql: str, *arguments: object) -> Any:
    db = await asyncpg.connect(url)
    try:
        return await db.fetchval(sql, *arguments)
    finally:
        await db.close()
