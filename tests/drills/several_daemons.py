"""Several daemons on one database: one dies, hangs, is cut off, or has a wrong clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ntf_server.config import StoreConfig
from tests.drills.cluster import LEASE, TAKEN_OVER, DatabaseProxy, cluster
from tests.drills.fake_clock import fake_clock
from tests.drills.world import DEADLINE
from tests.ntf_server.statements.test_takeover import taken_over
from tests.postgres import PostgresCluster, replicated_pair, running_cluster, running_pooler

SECONDS = 6.0
SNEWS = 25
"For each router."
HANDED_OVER = 1.0
"Seconds until a queue is subscribed that another daemon stored."
DURABLE = {"NTF_STORE_DURABILITY": "machine"}


async def test_killed(tmp_path: Path, postgres: PostgresCluster) -> None:
    async with cluster(tmp_path, postgres.new_database()) as made:

        async def kill() -> None:
            made.kill(made.daemons[0])
            await made.owned_by(made.daemons[1])

        (await made.suffer(SECONDS, kill)).check("kill -9 of one of two")


async def test_killed_behind_a_pooler(tmp_path: Path, postgres: PostgresCluster) -> None:
    url = postgres.new_database()
    with running_pooler(postgres, "session") as through:
        async with cluster(tmp_path, url, urls=[through(url)] * 2) as made:

            async def kill() -> None:
                made.kill(made.daemons[0])
                await made.owned_by(made.daemons[1])

            (await made.suffer(SECONDS, kill)).check("kill -9 of one of two behind PgBouncer")


async def test_killed_with_leases_as_by_default(tmp_path: Path, postgres: PostgresCluster) -> None:
    default = {"NTF_STORE_LEASE_SECONDS": str(StoreConfig().lease_seconds)}
    async with cluster(tmp_path, postgres.new_database(), env_of={0: default, 1: default}) as made:

        async def kill() -> None:
            made.kill(made.daemons[0])
            await made.owned_by(made.daemons[1])

        (await made.suffer(SECONDS, kill)).check("kill -9 of one of two, leases of 20 s")


async def test_stopped_in_order(tmp_path: Path, postgres: PostgresCluster) -> None:
    async with cluster(tmp_path, postgres.new_database()) as made:

        async def stop() -> None:
            await made.stop(made.daemons[0])

        outcome = await made.suffer(SECONDS, stop)
        outcome.check("SIGTERM of one of two")
        assert outcome.repeated == 0


async def test_hangs_past_its_lease(tmp_path: Path, postgres: PostgresCluster) -> None:
    async with cluster(tmp_path, postgres.new_database()) as made:

        async def hang() -> None:
            made.daemons[0].process.suspend()
            await made.owned_by(made.daemons[1])
            made.daemons[0].process.resume()

        (await made.suffer(SECONDS + LEASE * 2, hang)).check("SIGSTOP past the lease, SIGCONT")
        await made.shared()  # it came back as one of the two


async def test_database_restarts(tmp_path: Path) -> None:
    with running_cluster() as postgres:
        async with cluster(tmp_path, postgres.new_database()) as made:

            async def restart() -> None:
                await asyncio.to_thread(postgres.stop)
                await asyncio.to_thread(postgres.start)

            (await made.suffer(SECONDS, restart)).check("restart of the database")


async def test_database_is_away_for_longer_than_a_lease(tmp_path: Path) -> None:
    with running_cluster() as postgres:
        async with cluster(tmp_path, postgres.new_database()) as made:

            async def be_away() -> None:
                await asyncio.to_thread(postgres.stop)
                await asyncio.sleep(LEASE * 2)
                await asyncio.to_thread(postgres.start)

            (await made.suffer(SECONDS + LEASE * 2, be_away)).check("database away for two leases")


async def test_database_crashes(tmp_path: Path) -> None:
    """Commits wait for the disk, those of notifications, too."""
    with running_cluster() as postgres:
        async with cluster(tmp_path, postgres.new_database(), env_of={0: DURABLE, 1: DURABLE}) as made:

            async def crash() -> None:
                await asyncio.to_thread(postgres.stop, "immediate")
                await asyncio.to_thread(postgres.start)

            (await made.suffer(SECONDS, crash)).check("crash of the database")


async def test_fail_over_to_a_promoted_standby(tmp_path: Path) -> None:
    """Commits wait for the standby, those of notifications, too."""
    with replicated_pair() as (primary, standby):
        at_primary = primary.new_database()
        url = at_primary.replace(f":{primary.port}/", f":{primary.port},127.0.0.1:{standby.port}/")
        url += "?target_session_attrs=read-write"
        async with cluster(tmp_path, url, env_of={0: DURABLE, 1: DURABLE}) as made:

            async def fail_over() -> None:
                primary.kill()
                await asyncio.sleep(1)  # until somebody notices
                await asyncio.to_thread(standby.promote)

            (await made.suffer(SECONDS, fail_over)).check("fail-over to a promoted standby")


async def test_connections_are_cut_in_transactions(tmp_path: Path, postgres: PostgresCluster) -> None:
    url, proxy = postgres.new_database(), DatabaseProxy(postgres.port)
    async with proxy.running(), cluster(tmp_path, url, urls=[proxy.url(url), url]) as made:

        async def cut() -> None:
            for said in (b"COMMIT", b"unsent_notifications", b"daemons SET alive_until"):
                proxy.cut_at, before = said, proxy.cuts
                async with asyncio.timeout(DEADLINE):
                    while proxy.cuts == before:
                        proxy.cut()  # prepared statements are named once for each connection
                        await asyncio.sleep(0.2)
                proxy.cut_at = b""

        (await made.suffer(SECONDS, cut)).check("connections cut in transactions")


@pytest.mark.parametrize("is_silent", [False, True], ids=["refused", "silent"])
async def test_cut_off_from_the_database(tmp_path: Path, postgres: PostgresCluster, is_silent: bool) -> None:
    """One of two, for longer than its lease. Its routers still talk to it for a while."""
    url, proxy = postgres.new_database(), DatabaseProxy(postgres.port)
    async with proxy.running(), cluster(tmp_path, url, urls=[proxy.url(url), url]) as made:

        async def cut_off() -> None:
            async with proxy.away(is_silent=is_silent):
                await made.owned_by(made.daemons[1])
                await made.subscribed()

        name = "packets lost" if is_silent else "refused"
        outcome = await made.suffer(SECONDS + LEASE * 2, cut_off)
        outcome.check(f"one of two cut off from the database, {name}")
        await made.shared()


@pytest.mark.parametrize("is_deaf", [False, True], ids=["told", "looking"])
async def test_snew_at_another_daemon(tmp_path: Path, postgres: PostgresCluster, is_deaf: bool) -> None:
    """From the answer to the client until the owner of the router has subscribed the queue."""
    url, proxy = postgres.new_database(), DatabaseProxy(postgres.port)
    proxy.is_deaf = is_deaf
    async with proxy.running(), cluster(tmp_path, url, urls=[proxy.url(url)] * 2, queues=4) as made:
        seconds = sorted([each for world in made.worlds for each in await made.handed_over(world, SNEWS)])
        how = "looks by itself" if is_deaf else "is told"
        half = seconds[len(seconds) // 2]
        print(f"SNEW at another daemon, which {how}: {half:.3f} s, at most {seconds[-1]:.3f} s")
        assert seconds[-1] < HANDED_OVER


async def test_nobody_hears_the_others(tmp_path: Path, postgres: PostgresCluster) -> None:
    """Daemons never connect to each other. Here not even the database carries words between them."""
    url, proxy = postgres.new_database(), DatabaseProxy(postgres.port)
    proxy.is_deaf = True
    async with proxy.running(), cluster(tmp_path, url, urls=[proxy.url(url)] * 2) as made:

        async def snew() -> None:
            for world in made.worlds:
                await world.add_devices(1, 4)

        outcome = await made.suffer(SECONDS, snew)
        outcome.check("daemons cut off from each other")


async def test_clock_wrong_by_an_hour(tmp_path: Path, postgres: PostgresCluster) -> None:
    wrong = fake_clock(tmp_path, FAKETIME="+3600s")
    async with cluster(tmp_path, postgres.new_database(), env_of={0: wrong}) as made:

        async def nothing() -> None:
            pass

        outcome = await made.suffer(SECONDS, nothing)
        outcome.check("clock of one an hour ahead")
        assert outcome.repeated == 0
        assert len(await made.writers()) == 2


async def test_the_watcher_of_statements_is_killed(tmp_path: Path, postgres: PostgresCluster) -> None:
    """With leases as long as they are by default."""
    seconds = await taken_over(tmp_path, postgres.new_database(), StoreConfig().lease_seconds)
    print(f"statements: taken over after {seconds:.1f} s")
    assert seconds < TAKEN_OVER
