"""What a daemon asks of PostgreSQL at once, and how long it waits for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import asyncpg
import pytest

from store.interface import StoreUnavailable
from store.postgres import PostgresStore
from store.postgres_engine import RELAXED_CONNECTIONS
from tests.postgres import PostgresCluster
from tests.store.builders import active_token, new_subscription, nmsg, subscribe

BLOCKS, NMSGS = 50, 4
_CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'limited'"


async def test_blocks_that_wait_are_one_trip(
    postgres: PostgresCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PostgresStore(postgres.new_database())
    await store.open()
    try:
        token = await active_token(store)
        created = [await subscribe(store, new_subscription(token.key)) for _ in range(NMSGS)]
        block = [nmsg(one.queue.notifier_id) for one in created]
        key = created[0].server_key
        await store.add_notifications(key, block, received_at=1)  # it has a connection now
        asked: Counter[str] = Counter()
        for name in ("fetch", "fetchval", "fetchrow", "execute"):
            monkeypatch.setattr(asyncpg.Connection, name, counted(asked, name))
        await asyncio.gather(*(store.add_notifications(key, block, received_at=2) for _ in range(BLOCKS)))
        # The first block goes at once, those that came meanwhile together.
        assert asked.total() <= 2
    finally:
        await store.close()


def counted(asked: Counter[str], name: str) -> Any:
    call = getattr(asyncpg.Connection, name)

    async def run(*arguments: Any, **options: Any) -> Any:
        asked[name] += 1
        return await call(*arguments, **options)

    return run


async def test_there_are_no_more_connections_than_allowed(postgres: PostgresCluster) -> None:
    url = postgres.new_database()
    store = PostgresStore(url, name="limited", pool_size=2)
    await store.open()
    await store.leases.join()
    db = await asyncpg.connect(url)
    try:
        token = await active_token(store)
        for _ in range(5):
            await asyncio.gather(
                *(store.counts() for _ in range(50)),
                *(store.tokens_by_key([token.key]) for _ in range(50)),
                *(subscribe(store, new_subscription(token.key)) for _ in range(50)),
                *(store.set_sent([]) for _ in range(50)),
            )
            leases = 1
            assert await db.fetchval(_CONNECTIONS) <= 2 + RELAXED_CONNECTIONS + leases
    finally:
        await db.close()
        await store.close()


async def test_a_lock_of_somebody_else_is_waited_for_only_so_long(postgres: PostgresCluster) -> None:
    url = postgres.new_database()
    store = PostgresStore(url, statement_timeout=0.2)
    await store.open()
    db = await asyncpg.connect(url)
    try:
        token = await active_token(store)
        locked = db.transaction()
        await locked.start()
        await db.execute("LOCK TABLE ntf.tokens")
        with pytest.raises(StoreUnavailable, match="in time"):
            await store.set_cron(token.key, 20, 100)
        with pytest.raises(StoreUnavailable, match="in time"):
            await store.tokens_by_key([token.key])
        await locked.rollback()
        assert await store.set_cron(token.key, 20, 100)
    finally:
        await db.close()
        await store.close()
