"""PostgreSQL behind PgBouncer: with sessions everything works, without them no store is opened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from store.interface import StoreError
from store.leases import HANDED_OVER, PUSH_PARTS
from store.postgres import PostgresStore
from store.tables_postgres import connected
from tests.ntf_server.test_cli import init, ntf_server
from tests.postgres import PostgresCluster, running_pooler
from tests.store.builders import active_token, new_subscription, nmsg, subscribe

REFUSED = "behind a pooler that keeps no sessions: set its pool_mode to session"


@pytest.fixture(scope="module")
def session_pooler(postgres: PostgresCluster) -> Iterator[Callable[[str], str]]:
    with running_pooler(postgres, "session") as through:
        yield through


@pytest.fixture(scope="module", params=["transaction", "statement"])
def other_pooler(request: pytest.FixtureRequest, postgres: PostgresCluster) -> Iterator[Callable[[str], str]]:
    with running_pooler(postgres, request.param) as through:
        yield through


async def test_daemons_share_a_database_through_sessions(
    postgres: PostgresCluster, session_pooler: Callable[[str], str]
) -> None:
    url = session_pooler(postgres.new_database())
    first, second = PostgresStore(url, name="first"), PostgresStore(url, name="second")
    for store in (first, second):
        await store.open()
        await store.leases.join()
    try:
        assert len((await first.leases.balance()).gained) > PUSH_PARTS // 2
        token = await active_token(first)
        created = await asyncio.gather(*(subscribe(second, new_subscription(token.key)) for _ in range(50)))
        await first.leases.balance()
        heard = [notice.verb for notice in await first.leases.notices(60)]
        assert HANDED_OVER in heard
        assert len(await first.leases.handed_over()) == len(created)
        key, queue = created[0].server_key, created[0].queue
        (stored,) = await first.add_notifications(key, [nmsg(queue.notifier_id)], received_at=1)
        assert stored is not None
        for durable, wanted in ((True, "on"), (False, "off")):
            async with first._pools.get(durable=durable).acquire() as db:
                assert await db.fetchval("SHOW synchronous_commit") == wanted
    finally:
        await first.close()
        await second.close()


async def test_without_sessions_nothing_is_begun(
    tmp_path: Path, postgres: PostgresCluster, other_pooler: Callable[[str], str]
) -> None:
    direct = postgres.new_database()
    url = other_pooler(direct)
    with pytest.raises(StoreError, match=REFUSED):
        await PostgresStore(url).open()
    assert init(tmp_path).returncode == 0
    env = {"NTF_STORE_DATABASE": "postgres", "NTF_STORE_URL": url}
    for command in ("start", "migrate"):
        refused = ntf_server(command, "--config-dir", tmp_path / "c", env=env)
        assert refused.returncode == 2
        assert REFUSED in refused.stderr.splitlines()[-1]
    async with connected(direct) as db:
        assert await db.fetchval("SELECT to_regnamespace('ntf')") is None
