"""The shortest of the drills of several daemons; `several_daemons.py` has all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.drills.cluster import cluster
from tests.postgres import running_cluster

SECONDS = 8.0


async def test_a_daemon_dies_and_then_the_database_restarts(tmp_path: Path) -> None:
    with running_cluster() as postgres:
        async with cluster(tmp_path, postgres.new_database(), routers=2, queues=180) as made:

            async def fail() -> None:
                made.kill(made.daemons[0])
                await made.owned_by(made.daemons[1])
                await asyncio.to_thread(postgres.stop)
                await asyncio.to_thread(postgres.start)

            (await made.suffer(SECONDS, fail)).check("kill -9 of one of two, then restart of the database")
