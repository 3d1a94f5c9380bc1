"""Figures that nobody counts as they happen: asked for now and then."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ntf_server.clock import Clock
from ntf_server.metrics import gauge
from store.interface import ControlStore, StoreError

INTERVAL = 15.0
LAG_INTERVAL = 0.5

TOKENS = gauge("tokens", "Tokens in the store")
ACTIVE_TOKENS = gauge("tokens_active", "Verified tokens in the store")
SUBSCRIPTIONS = gauge("subscriptions", "Subscriptions in the store")
ACTIVE_SUBSCRIPTIONS = gauge("subscriptions_active", "Subscriptions that are subscribed at their router")
UNSENT = gauge("notifications_unsent", "Last notifications that no accepted push has carried yet")
OLDEST = gauge(
    "notifications_oldest_unsent_seconds",
    "Age of the oldest notification that no accepted push has carried yet",
)
DATABASE = gauge("database_bytes", "Size of the database file and its log; 0 for a database server")
FREE = gauge("disk_free_bytes", "Free space where the data is")
LAG = gauge("loop_lag_seconds", "How late the event loop was in the last half second")
TASKS = gauge("loop_tasks", "Tasks of the event loop")
EXPIRY = gauge("certificate_expiry_timestamp_seconds", "When the online certificate ends, since 1970")


class Figures:
    """`run` keeps the gauges current; what cannot be found out now stays as it was."""

    def __init__(
        self,
        store: ControlStore,
        clock: Clock,
        data_dir: Path,
        database: Path | None,
        expiry: Callable[[], float],
    ) -> None:
        self._store = store
        self._clock = clock
        self._data_dir = data_dir
        self._database = database
        EXPIRY.set_function(expiry)

    async def run(self) -> None:
        while True:
            TASKS.set(len(asyncio.all_tasks()))
            with contextlib.suppress(OSError):
                DATABASE.set(await asyncio.to_thread(self._database_size))
                FREE.set((await asyncio.to_thread(shutil.disk_usage, self._data_dir)).free)
            with contextlib.suppress(StoreError):
                await self.count()
            await asyncio.sleep(INTERVAL)

    async def count(self) -> None:
        counts = await self._store.counts()
        TOKENS.set(counts.tokens)
        ACTIVE_TOKENS.set(counts.active_tokens)
        SUBSCRIPTIONS.set(counts.subscriptions)
        ACTIVE_SUBSCRIPTIONS.set(counts.active_subscriptions)
        UNSENT.set(counts.unsent_notifications)
        oldest = counts.oldest_unsent
        OLDEST.set(0 if oldest is None else max(0.0, self._clock.now() - oldest))

    def _database_size(self) -> int:
        if self._database is None:
            return 0
        files = (self._database, Path(f"{self._database}-wal"))
        return sum(os.stat(file).st_size for file in files if file.exists())


async def watch_loop() -> None:
    """Sleep, and see how much later than asked for the loop comes back."""
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + LAG_INTERVAL
        await asyncio.sleep(LAG_INTERVAL)
        LAG.set(max(0.0, clock() - due))
