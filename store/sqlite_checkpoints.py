"""SQLite's log is folded into the database beside the writes.

SQLite itself does that in the commit that makes the log long enough, and all writes wait for it: 20 to 60 ms.
It remains the last resort, for a log that grows faster than it is folded here.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3

import aiosqlite

from store.sqlite_engine import run_in_thread

FOLDED_PAGES = 3_000
"About so many pages are in the log when it is folded."
COMMIT_PAGES = 3
"Pages that a commit changes beside those of its rows."


class Checkpoints:
    """Works on a connection of its own. `start` and `stop` own the task that does."""

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection
        self._task: asyncio.Task[None] | None = None
        self._due = asyncio.Event()
        self._ending = False
        self._rows = 0
        self._pages = 0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._serve(), name="store checkpoints")

    async def stop(self) -> None:
        self._ending = True
        self._due.set()
        if self._task is not None:
            await self._task

    def committed(self, rows: int) -> None:
        """The writer has changed so many rows since it was opened; with this commit, those that are new."""
        self._pages += rows - self._rows + COMMIT_PAGES
        self._rows = rows
        if self._pages >= FOLDED_PAGES:
            self._pages = 0
            self._due.set()

    async def _serve(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            if self._ending:
                return
            with contextlib.suppress(sqlite3.Error):  # the writer meets the same fault, and tells
                await run_in_thread(self._connection, _fold)


def _fold(db: sqlite3.Connection) -> None:
    """Waits for nobody: what others still read, or write now, is left for the next time."""
    db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
