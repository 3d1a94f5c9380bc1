"""The log of an SQLite store is folded into the database while the store is open."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from store import sqlite_engine
from store.sqlite import SqliteStore
from tests.store.builders import active_token, new_subscription

SECONDS = 30.0


async def test_the_log_is_folded_beside_the_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_engine, "FOLDED_PAGES", 100)  # far fewer than SQLite itself folds at
    path = tmp_path / "ntf.db"
    store = SqliteStore(path)
    await store.open()
    try:
        token = await active_token(store)
        before = path.stat().st_size
        for _ in range(2):  # once more, with a log that was folded
            news = [new_subscription(token.key) for _ in range(200)]
            await store.create_subscriptions(news)
            async with asyncio.timeout(SECONDS):
                while path.stat().st_size <= before:
                    await asyncio.sleep(0.01)
            before = path.stat().st_size
            assert None not in await store.subscriptions([new.subscription_id for new in news])
    finally:
        await store.close()


async def test_a_fold_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_engine, "FOLDED_PAGES", 1)
    path = tmp_path / "ntf.db"
    store = SqliteStore(path)
    await store.open()
    try:
        folded = asyncio.Event()
        fold = sqlite_engine._fold
        failures = [sqlite3.OperationalError("disk I/O error")]

        def failing(db: sqlite3.Connection) -> None:
            if failures:
                raise failures.pop()
            fold(db)
            loop.call_soon_threadsafe(folded.set)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(sqlite_engine, "_fold", failing)
        async with asyncio.timeout(SECONDS):
            while not folded.is_set():
                await active_token(store)
        assert not failures
    finally:
        await store.close()
