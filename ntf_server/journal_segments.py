"""Journal segments on disk: an open Arrow stream that survives kill -9, sealed into Parquet or JSON Lines.

The open segment is a plain Arrow IPC stream whose every batch is complete once written, so a process that
dies leaves a readable file. Sealing turns it into `date=YYYY-MM-DD/<writer>-<first seq>.parquet`: written
under a hidden name, fsynced, renamed. A crash between any two of these steps is repaired by `recover` in the
next process; sealing twice gives the same name and the same events.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from ntf_server.clock import MICROSECONDS, SECONDS_PER_DAY
from ntf_server.journal_items import JournalItem, ReceivedBlock, Row, events_in, keeps_contract
from store.journal_files import ARROW_TYPES, SCHEMA, atomic_file, sync_folder, write_parquet
from store.journal_schema import CONTRACT, GIVEN_COLUMNS, OPEN_PREFIX, JournalEvent, epoch_of, pseudonym

if TYPE_CHECKING:
    from ntf_server.journal import FileFormat, WriterConfig

log = logging.getLogger(__name__)

RESOLUTIONS = {event: contract.resolution_us for event, contract in CONTRACT.items()}
RECEIVED_RESOLUTION = RESOLUTIONS[JournalEvent.NTF_RECEIVED]
TIMESTAMP = ARROW_TYPES["timestamp_us"]
DAY_US = SECONDS_PER_DAY * MICROSECONDS
MAX_TEXT = 100  # longer texts are no host, status or class: cut, so that no peer can fill the journal
PSEUDONYMS_KEPT = 100_000  # about 15 MB; ids that come again are looked up, not hashed again

ARROW_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)


class SegmentWriter:
    """Appends events to segments of one writer. Used from one thread at a time; never raises for a bad disk.

    What could not be written waits for the next call, up to `buffered_events`; the oldest beyond that are
    counted in `lost`.
    """

    def __init__(self, config: WriterConfig, writer_id: bytes) -> None:
        self.written = 0
        self.rejected = 0
        self.lost = 0
        self._config = config
        self._folder = config.folder
        self._writer_id = writer_id
        self._segment_us = int(config.segment_seconds * MICROSECONDS)
        self._pending: list[JournalItem] = []
        self._pseudonyms = Pseudonyms(config.key)
        self._epoch = epoch_of(config.key)
        self._open: OpenSegment | None = None
        self._unsealed: list[Path] = []
        self._failing = False

    def write(self, items: list[JournalItem], now: int) -> None:
        """Append events, seal what is due at `now` (microseconds)."""
        items = self._pending + items if self._pending else items
        self._pending = []
        done = 0
        try:
            for run in runs_of_one_day(items):
                self._append(run)
                done += len(run)
            self._seal_if_due(now)
            self._seal_leftovers()
        except OSError as error:
            self._keep(items[done:])
            if not self._failing:
                log.warning("journal: cannot write to %s: %s", self._folder, error.strerror)
        self._failing = bool(self._pending)

    def close(self) -> None:
        """Seal the open segment; if the disk refuses, the next process does it."""
        try:
            self._rotate()
            self._seal_leftovers()
        except OSError as error:
            log.warning("journal: cannot seal a segment in %s: %s", self._folder, error.strerror)
        self.lost += sum(map(events_in, self._pending))
        self._pending = []

    def recover(self) -> None:
        """Seal what processes that died have left open; those of living ones are locked and left alone."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in sorted(self._folder.glob(f"{OPEN_PREFIX}*")):
                seal_abandoned(path, self._folder, self._config.format)
        except OSError as error:
            log.warning("journal: cannot recover segments in %s: %s", self._folder, error.strerror)

    def _keep(self, items: list[JournalItem]) -> None:
        waiting = sum(map(events_in, items))
        dropped = 0
        while waiting > self._config.buffered_events:
            events = events_in(items[dropped])
            waiting -= events
            self.lost += events
            dropped += 1
        self._pending = items[dropped:]

    def _append(self, items: list[JournalItem]) -> None:
        opened_at = time_of(items[0])
        if self._open is not None and self._open.day != opened_at // DAY_US:
            self._rotate()
        events = self._batch(items)
        if self._open is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open = OpenSegment(self._folder, self._writer_id, self.written, opened_at)
        self._open.append(events)
        self.written += events.num_rows

    def _batch(self, items: list[JournalItem]) -> pa.Table:
        kept = list(filter(keeps_contract, items))
        try:
            batch = self._convert(kept)
        except ARROW_ERRORS:
            kept = [item for item in kept if self._is_good(item)]
            batch = self._convert(kept)
        if bad := sum(map(events_in, items)) - sum(map(events_in, kept)):
            self.rejected += bad
            log.warning("journal: %d events left out that broke its contract", bad)
        return batch

    def _is_good(self, item: JournalItem) -> bool:
        try:
            self._convert([item])
        except ARROW_ERRORS:
            return False
        return True

    def _convert(self, items: list[JournalItem]) -> pa.Table:
        blocks = [item for item in items if isinstance(item, ReceivedBlock)]
        rows = [item for item in items if not isinstance(item, ReceivedBlock)]
        parts = []
        if blocks:
            parts.append(self._convert_blocks(blocks, self.written))
        if rows:
            parts.append(self._convert_rows(rows, self.written + sum(part.num_rows for part in parts)))
        return pa.Table.from_batches(parts, SCHEMA)

    def _convert_blocks(self, blocks: list[ReceivedBlock], seq: int) -> pa.RecordBatch:
        ends = list(accumulate(len(block.ids) for block in blocks))
        size = ends[-1]
        known = {
            "time": spread(
                [block.time - block.time % RECEIVED_RESOLUTION for block in blocks], ends, pa.int64()
            ).view(TIMESTAMP),
            "event": pa.repeat(JournalEvent.NTF_RECEIVED.value, size),
            "server": spread(texts([block.server for block in blocks]), ends, pa.string()),
            "token": self._names([token for block in blocks for token, _ in block.ids]),
            "subscription": self._names([subscription for block in blocks for _, subscription in block.ids]),
        }
        return self._record_batch(known, seq, size)

    def _convert_rows(self, rows: list[Row], seq: int) -> pa.RecordBatch:
        times = [time - time % RESOLUTIONS[event] for time, event, _ in rows]
        known = {
            "time": pa.array(times, pa.int64()).view(TIMESTAMP),
            "event": pa.array([event for _, event, _ in rows], pa.string()),
        }
        for name in GIVEN_COLUMNS:
            values: list[Any] = [columns.get(name) for _, _, columns in rows]
            kind = SCHEMA.field(name).type
            if name in ("token", "subscription"):
                known[name] = self._names(values)
            else:
                known[name] = pa.array(texts(values) if kind == pa.string() else values, kind)
        return self._record_batch(known, seq, len(rows))

    def _record_batch(self, known: Mapping[str, pa.Array], seq: int, size: int) -> pa.RecordBatch:
        ids = {
            "writer": pa.repeat(pa.scalar(self._writer_id, pa.binary()), size),
            "seq": pa.arange(seq, seq + size),
            "epoch": pa.repeat(pa.scalar(self._epoch, pa.int64()), size),
        }
        columns = {**ids, **known}
        arrays = [columns[f.name] if f.name in columns else pa.nulls(size, f.type) for f in SCHEMA]
        return pa.record_batch(arrays, schema=SCHEMA)

    def _names(self, ids: Sequence[bytes | None]) -> pa.Array:
        return pa.array(list(map(self._pseudonyms.__getitem__, ids)), pa.binary())

    def _seal_if_due(self, now: int) -> None:
        segment = self._open
        if segment is None:
            return
        too_old = now - segment.opened_at >= self._segment_us or now < segment.opened_at - self._segment_us
        if too_old or segment.size >= self._config.segment_bytes:
            self._rotate()

    def _rotate(self) -> None:
        """End the open segment; a disk that refuses the sealed form leaves it for `_seal_leftovers`."""
        if self._open is not None:
            segment, self._open = self._open, None
            segment.close()
            self._unsealed.append(segment.path)

    def _seal_leftovers(self) -> None:
        while self._unsealed:
            seal(self._unsealed[0], self._folder, self._config.format)
            del self._unsealed[0]
            pa.default_memory_pool().release_unused()  # which only this thread can: some 15 MB


def time_of(item: JournalItem) -> int:
    """When it happened, in microseconds."""
    return item.time if isinstance(item, ReceivedBlock) else item[0]


def spread(values: Sequence[Any], ends: Sequence[int], kind: pa.DataType) -> pa.Array:
    """Each value repeated up to its end position."""
    runs = pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int64()), pa.array(values, kind))
    return pc.run_end_decode(runs)


class Pseudonyms(dict[bytes | None, bytes | None]):
    """Pseudonyms by id, computed on first use."""

    def __init__(self, key: bytes) -> None:
        super().__init__({None: None})
        self._key = key

    def __missing__(self, entity_id: bytes | None) -> bytes | None:
        if entity_id is None:
            return None
        if len(self) > PSEUDONYMS_KEPT:
            self.clear()
        self[entity_id] = name = pseudonym(self._key, entity_id)
        return name


def runs_of_one_day(items: list[JournalItem]) -> Iterator[list[JournalItem]]:
    """The items in order, cut wherever the day changes."""
    days = [time_of(item) // DAY_US for item in items]
    start = 0
    for end in range(1, len(items) + 1):
        if end == len(items) or days[end] != days[start]:
            yield items[start:end]
            start = end


def texts(values: Sequence[str | None]) -> Sequence[str | None]:
    """Values cut to `MAX_TEXT`."""
    distinct = set(values)
    if all(v is None or len(v) <= MAX_TEXT for v in distinct):
        return values
    return [None if v is None else v[:MAX_TEXT] for v in values]


class OpenSegment:
    """An Arrow IPC stream being appended to. After a failed append the file ends with the last good batch."""

    def __init__(self, folder: Path, writer_id: bytes, first_seq: int, opened_at: int) -> None:
        self.opened_at = opened_at
        self.day = opened_at // DAY_US
        self.path = folder / f"{OPEN_PREFIX}{writer_id.hex()}-{first_seq:015d}.arrows"
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.size = 0
        self._write(SCHEMA.serialize().to_pybytes())

    def append(self, events: pa.Table) -> None:
        """Write the events whole or not at all."""
        self._write(b"".join(memoryview(batch.serialize()) for batch in events.to_batches()))

    def _write(self, messages: bytes) -> None:
        view = memoryview(messages)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            os.ftruncate(self._fd, self.size)
            os.lseek(self._fd, self.size, os.SEEK_SET)
            raise
        self.size += len(messages)

    def close(self) -> None:
        """Release the file; it stays where it is."""
        os.close(self._fd)


def seal_abandoned(path: Path, folder: Path, file_format: FileFormat) -> None:
    """Seal an open segment unless a living process holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seal(path, folder, file_format)
    except BlockingIOError:
        return
    finally:
        os.close(fd)


def seal(path: Path, folder: Path, file_format: FileFormat) -> None:
    """Turn an open segment into its final file and remove it."""
    batches = list(whole_batches(path))
    if batches:
        day = batches[0].column("time")[0].value // DAY_US
        partition = folder / f"date={datetime.fromtimestamp(day * SECONDS_PER_DAY, UTC):%Y-%m-%d}"
        partition.mkdir(mode=0o700, exist_ok=True)
        target = partition / f"{path.stem.removeprefix(OPEN_PREFIX)}.{file_format}"
        with atomic_file(target) as file:
            (write_parquet if file_format == "parquet" else write_jsonl)(batches, file)
        sync_folder(folder)
    path.unlink(missing_ok=True)


def whole_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow stream up to its end or to the first that is cut off or damaged."""
    content = path.read_bytes()  # what fails while reading is the disk; what fails below is the content
    with contextlib.suppress(pa.ArrowException, OSError):
        for batch in pa.ipc.open_stream(content):
            batch.validate(full=True)
            yield batch


def write_jsonl(batches: Sequence[pa.RecordBatch], file: Any) -> None:
    """Write one JSON object per event; times in ISO 8601, binary values in base64, absent values left out."""
    for batch in batches:
        for row in batch.to_pylist():
            file.write(json.dumps({k: as_json(v) for k, v in row.items() if v is not None}).encode() + b"\n")


def as_json(value: object) -> object:
    """A column's value as JSON."""
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds")
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
