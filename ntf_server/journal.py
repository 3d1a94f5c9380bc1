"""The event journal: what happened, without secrets, as Parquet segments partitioned by day.

`Journal.record` only appends a tuple to a bounded list. A dedicated thread, fed by `run()`, replaces ids by
keyed pseudonyms, appends Arrow batches to the open segment and seals it by size and time (see
`ntf_server.journal_segments`).
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ntf_server.config import JournalConfig
from store.journal_schema import WRITER_ID_SIZE, JournalEvent

log = logging.getLogger(__name__)

MEGABYTE = 1 << 20
FLUSH_EVENTS = 10_000  # written as soon as so many wait: small enough to stay in the processor's cache

FileFormat = Literal["parquet", "jsonl"]
Row = tuple[Any, ...]
"""One event, without a number or pseudonyms: its wall time in seconds, its name and all `GIVEN_COLUMNS`."""
ReceivedBlock = tuple[float, str, Sequence[tuple[bytes, bytes]]]
"""The notifications of one received block: its time, the server, and (token id, subscription id), raw."""


@dataclass(frozen=True, kw_only=True)
class WriterConfig:
    """How the journal is written."""

    folder: Path
    key: bytes = field(repr=False)
    format: FileFormat = "parquet"
    segment_bytes: int = JournalConfig.segment_mb * MEGABYTE
    "An open segment is sealed when it has grown to this size (before compression)."
    segment_seconds: float = JournalConfig.segment_seconds
    "An open segment is sealed when it is this old."
    flush_seconds: float = 1.0
    "Events wait at most about this long in memory: what a kill -9 can cost."
    buffered_events: int = 200_000
    "Events held in memory while the disk is slow, by the loop and by the thread each; more are dropped and"
    " counted."


class EventSink:
    """Where the daemon's parts report what happened; never blocks, never raises. This one forgets it: the
    journal is off."""

    is_on = False
    "Whether anything is kept: if not, what happens often need not be told."

    def record(
        self,
        event: JournalEvent,
        *,
        server: str | None = None,
        provider: str | None = None,
        token: bytes | None = None,
        subscription: bytes | None = None,
        kind: str | None = None,
        status_from: str | None = None,
        status_to: str | None = None,
        latency_us: int | None = None,
        error: str | None = None,
        count: int | None = None,
        expected: int | None = None,
        changed: int | None = None,
        total: int | None = None,
        daemon: str | None = None,
        uptime_us: int | None = None,
    ) -> None:
        """Note one event, now, with the columns that `store.journal_schema.CONTRACT` asks for; None is as
        good as absent. Ids are raw here and pseudonyms on disk; `error` is a class, not a text."""

    def record_received(self, server: str, ids: Sequence[tuple[bytes, bytes]]) -> None:
        """Note one received notification per (token id, subscription id): a whole block in one call."""


class Journal(EventSink):
    """Writes events to segments. The owner runs `run()` in its task group and ends it with `stop()`.

    Events recorded before `run()` starts wait in memory. An event that breaks the contract is left out and
    counted.
    """

    is_on = True

    def __init__(
        self, config: WriterConfig, now: Callable[[], float], writer_id: bytes | None = None
    ) -> None:
        self._config = config
        self._now = now
        self._rows: list[Row] = []
        self._blocks: list[ReceivedBlock] = []
        self._buffered = 0
        self._limit = config.buffered_events
        self._wake_at = min(FLUSH_EVENTS, config.buffered_events)
        self._wake = asyncio.Event()
        self._stopping = False
        self._refused = 0
        self._failed = 0
        # Imported here: pyarrow takes half a second and 60 MB, for those who want a journal.
        from ntf_server.journal_segments import SegmentWriter

        self._segments = SegmentWriter(config, writer_id or os.urandom(WRITER_ID_SIZE))

    @property
    def recorded(self) -> int:
        """Events on disk or on their way there."""
        return self._segments.written + self._buffered

    @property
    def dropped(self) -> int:
        """Events lost because the disk did not keep up for too long."""
        return self._refused + self._failed + self._segments.lost

    @property
    def rejected(self) -> int:
        """Events left out because they broke the contract or had a value of the wrong kind."""
        return self._segments.rejected

    def record(
        self,
        event: JournalEvent,
        server: str | None = None,
        provider: str | None = None,
        token: bytes | None = None,
        subscription: bytes | None = None,
        kind: str | None = None,
        status_from: str | None = None,
        status_to: str | None = None,
        latency_us: int | None = None,
        error: str | None = None,
        count: int | None = None,
        expected: int | None = None,
        changed: int | None = None,
        total: int | None = None,
        daemon: str | None = None,
        uptime_us: int | None = None,
    ) -> None:
        """Costs a third of a microsecond; call from the event loop's thread. Columns are not keyword-only
        here: Python would look up their defaults by name, one by one."""
        if self._buffered >= self._wake_at and not self._admit(1):
            return
        self._buffered += 1
        self._rows.append(
            (
                self._now(),
                event,
                server,
                provider,
                token,
                subscription,
                kind,
                status_from,
                status_to,
                latency_us,
                error,
                count,
                expected,
                changed,
                total,
                daemon,
                uptime_us,
            )
        )

    def record_received(self, server: str, ids: Sequence[tuple[bytes, bytes]]) -> None:
        if self._buffered + len(ids) > self._wake_at and not self._admit(len(ids)):
            return
        self._buffered += len(ids)
        self._blocks.append((self._now(), server, ids))

    def _admit(self, events: int) -> bool:
        self._wake.set()
        if self._buffered + events <= self._limit:
            return True
        self._refused += events
        return False

    def stop(self) -> None:
        """Make `run()` write what is buffered, seal the segment and return."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Write until `stop()` or cancellation; either way what was recorded is sealed before it ends."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal") as thread:
            try:
                await loop.run_in_executor(thread, self._segments.recover)
                while not self._stopping:
                    await self._pause()
                    await loop.run_in_executor(thread, self._write, *self._take())
            finally:
                # Runs after any write still under way; a second cancellation is waited out by the executor.
                await loop.run_in_executor(thread, self._finish, *self._take())

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.flush_seconds):
                await self._wake.wait()
        self._wake.clear()

    def _take(self) -> tuple[list[Row], list[ReceivedBlock]]:
        # On the loop's thread like `record`, so nothing can be added to a list that was already taken.
        taken = self._rows, self._blocks
        self._rows, self._blocks, self._buffered = [], [], 0
        return taken

    def _write(self, rows: list[Row], blocks: list[ReceivedBlock]) -> None:
        """Whatever goes wrong with the journal costs events, never the daemon."""
        try:
            self._segments.write(rows, blocks, self._now())
        except Exception as error:
            self._failed += events_in(rows, blocks)
            log.error("journal: %s while writing", type(error).__name__)

    def _finish(self, rows: list[Row], blocks: list[ReceivedBlock]) -> None:
        self._write(rows, blocks)
        self._segments.close()


def events_in(rows: list[Row], blocks: list[ReceivedBlock]) -> int:
    return len(rows) + sum(len(ids) for _, _, ids in blocks)
