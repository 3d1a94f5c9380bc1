"""Journal segments on disk: an open Arrow stream that survives kill -9, sealed into Parquet or JSON Lines.

The open segment is a plain Arrow IPC stream whose every batch is complete once written, so a process that
dies leaves a readable file. Sealing turns it into `date=YYYY-MM-DD/<writer>-<first seq>.parquet`: written
under a hidden name, fsynced, renamed. A crash between any two of these steps is repaired by `recover` in the
next process; sealing twice gives the same name and the same events.
"""

from __future__ import annotations

import base64
import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ntf_server.clock import MICROSECONDS, SECONDS_PER_DAY
from ntf_server.journal import FileFormat, ReceivedBlock, Row, WriterConfig, events_in
from store.journal_files import (
    ARROW_TYPES,
    SCHEMA,
    atomic_file,
    check_columns,
    sync_folder,
    with_all_columns,
    write_parquet,
)
from store.journal_schema import CONTRACT, GIVEN_COLUMNS, OPEN_PREFIX, JournalEvent, epoch_of, pseudonym

log = logging.getLogger(__name__)

EMPTY = SCHEMA.empty_table()
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
        self._numbered = 0
        self._waiting = EMPTY
        self._pseudonyms = Pseudonyms(config.key)
        self._epoch = epoch_of(config.key)
        self._open: OpenSegment | None = None
        self._unsealed: list[Path] = []

    def write(self, rows: list[Row], blocks: list[ReceivedBlock], now: float) -> None:
        """Append events, seal what is due at `now`."""
        was_failing = self._waiting.num_rows > 0
        waiting = by_day(pa.concat_tables([self._waiting, self._convert(rows, blocks)]))
        self._waiting = EMPTY
        try:
            while waiting:
                self._append(waiting[0], now)
                del waiting[0]
            self._seal_if_due(now)
            self._seal_leftovers()
        except OSError as error:
            if not was_failing:
                log.warning("journal: cannot write to %s: %s", self._folder, error.strerror)
        self._keep(waiting)

    def close(self) -> None:
        """Seal the open segment; if the disk refuses, the next process does it."""
        try:
            self._rotate()
            self._seal_leftovers()
        except OSError as error:
            log.warning("journal: cannot seal a segment in %s: %s", self._folder, error.strerror)
        self.lost += self._waiting.num_rows
        self._waiting = EMPTY

    def recover(self) -> None:
        """Seal what processes that died have left open; those of living ones are locked and left alone."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in sorted(self._folder.glob(f"{OPEN_PREFIX}*")):
                seal_abandoned(path, self._folder, self._config.format)
        except OSError as error:
            log.warning("journal: cannot recover segments in %s: %s", self._folder, error.strerror)

    def _keep(self, waiting: list[pa.Table]) -> None:
        events = pa.concat_tables([EMPTY, *waiting])
        excess = max(0, events.num_rows - self._config.buffered_events)
        self.lost += excess
        self._waiting = events.slice(excess).combine_chunks()  # else seconds of an outage pile up in pieces

    def _append(self, events: pa.Table, now: float) -> None:
        day = day_of(events)
        if self._open is not None and self._open.day != day:
            self._rotate()
        if self._open is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open = OpenSegment(self._folder, self._writer_id, events["seq"][0].as_py(), day, now)
        self._open.append(events)
        self.written += events.num_rows

    def _convert(self, rows: list[Row], blocks: list[ReceivedBlock]) -> pa.Table:
        """All events, column by column; those that break the contract are left out and counted."""
        batches = converted(self._from_blocks, blocks) + converted(self._from_rows, rows)
        events = pa.Table.from_batches(batches, SCHEMA)
        if bad := events_in(rows, blocks) - events.num_rows:
            self.rejected += bad
            log.warning("journal: %d events left out that broke its contract", bad)
        return events

    def _from_blocks(self, blocks: list[ReceivedBlock]) -> pa.RecordBatch:
        times, servers, ids = zip(*blocks, strict=True)
        ends = list(accumulate(map(len, ids)))
        resolution = CONTRACT[JournalEvent.NTF_RECEIVED].resolution_us
        return self._record_batch(
            {
                "time": spread(cut(times, resolution), ends),
                "event": pa.repeat(JournalEvent.NTF_RECEIVED.value, ends[-1]),
                "server": spread(texts(servers), ends),
                "token": self._names([token for block in ids for token, _ in block]),
                "subscription": self._names([subscription for block in ids for _, subscription in block]),
            }
        )

    def _from_rows(self, rows: list[Row]) -> pa.RecordBatch:
        flat: list[Any] = []
        for row in rows:  # not by zip: its iterators, one for each row, keep the garbage collector busy
            flat += row
        times, names, *values = (flat[place :: len(rows[0])] for place in range(len(rows[0])))
        events = texts(names).dictionary_encode()
        resolutions = [CONTRACT[JournalEvent(name)].resolution_us for name in events.dictionary.to_pylist()]
        given = dict(zip(GIVEN_COLUMNS, map(self._column, GIVEN_COLUMNS, values), strict=True))
        good = keeping_contract(events, given)
        time = cut(times, pa.array(resolutions, pa.int64()).take(events.indices))
        known = {"time": time, "event": events.dictionary_decode(), **given}
        if good.false_count:
            known = {name: column.filter(good) for name, column in known.items()}
        return self._record_batch(known)

    def _column(self, name: str, values: Sequence[Any]) -> pa.Array:
        kind = SCHEMA.field(name).type
        if values[0] is None and values.count(None) == len(values):
            return pa.nulls(len(values), kind)
        if kind == pa.binary():
            return self._names(values)
        return texts(values) if kind == pa.string() else pa.array(values, kind)

    def _names(self, ids: Sequence[bytes | None]) -> pa.Array:
        return pa.array(list(map(self._pseudonyms.__getitem__, ids)), pa.binary())

    def _record_batch(self, known: Mapping[str, pa.Array]) -> pa.RecordBatch:
        size = len(known["event"])
        first, self._numbered = self._numbered, self._numbered + size
        columns = {
            "writer": pa.repeat(pa.scalar(self._writer_id, pa.binary()), size),
            "seq": pa.arange(first, self._numbered),
            "epoch": pa.repeat(pa.scalar(self._epoch, pa.int64()), size),
            **known,
        }
        arrays = [columns[f.name] if f.name in columns else pa.nulls(size, f.type) for f in SCHEMA]
        return pa.record_batch(arrays, schema=SCHEMA)

    def _seal_if_due(self, now: float) -> None:
        segment = self._open
        if segment is None:
            return
        age = now - segment.opened_at
        if abs(age) >= self._config.segment_seconds or segment.size >= self._config.segment_bytes:
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


def converted(convert: Callable[[list[Any]], pa.RecordBatch], items: list[Any]) -> list[pa.RecordBatch]:
    """The items without those that have a value of the wrong kind: found by trying ever smaller parts."""
    if not items:
        return []
    try:
        return [convert(items)]
    except ARROW_ERRORS:
        half = len(items) // 2
        return converted(convert, items[:half]) + converted(convert, items[half:]) if half else []


def keeping_contract(events: pa.DictionaryArray, given: Mapping[str, pa.Array]) -> pa.BooleanArray:
    """Which events have all columns that they must and none that they may not.

    Those of one name with the same columns have the same shape, a number, and are judged once.
    """
    bits = {name: 1 << bit for bit, name in enumerate(given)}
    shapes = pc.multiply(events.indices.cast(pa.int64()), 1 << len(given))
    for name, column in given.items():
        if column.null_count < len(column):
            shapes = pc.add(shapes, pc.if_else(column.is_valid(), bits[name], 0))

    def is_good(shape: int) -> bool:
        event = JournalEvent(events.dictionary[shape >> len(given)].as_py())
        return CONTRACT[event].allows({name for name, bit in bits.items() if shape & bit})

    good = filter(is_good, shapes.drop_null().unique().to_pylist())
    return pc.is_in(shapes, pa.array(good, pa.int64()))


def cut(times: Sequence[float], resolution_us: pa.Array | int) -> pa.Array:
    """Wall times as the journal has them, no finer than the resolution."""
    exact = pc.multiply(pa.array(times, pa.float64()), MICROSECONDS).cast(pa.int64(), safe=False)
    return pc.multiply(pc.divide(exact, resolution_us), resolution_us).view(ARROW_TYPES["timestamp_us"])


def spread(values: pa.Array, ends: Sequence[int]) -> pa.Array:
    """Each value repeated up to its end position."""
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int64()), values))


def texts(values: Sequence[str | None]) -> pa.Array:
    """Values cut to `MAX_TEXT`; quick where all are the same, as they mostly are."""
    distinct = {value: value and value[:MAX_TEXT] for value in set(values)}
    if len(distinct) == 1:
        return pa.repeat(pa.scalar(distinct[values[0]], pa.string()), len(values))
    return pa.array(list(map(distinct.__getitem__, values)), pa.string())


def day_of(events: pa.Table | pa.RecordBatch) -> int:
    """Of the first one."""
    return int(events["time"][0].value) // DAY_US


def by_day(events: pa.Table) -> list[pa.Table]:
    """The events of each day, in order."""
    days = pc.divide(events["time"].cast(pa.int64()), DAY_US)
    distinct = days.unique()
    return [events] if len(distinct) == 1 else [events.filter(pc.equal(days, day)) for day in distinct]


class Pseudonyms(dict[bytes | None, bytes | None]):
    """Pseudonyms by id, computed on first use."""

    def __init__(self, key: bytes) -> None:
        super().__init__({None: None})
        self._key = key

    def __missing__(self, entity_id: bytes) -> bytes:
        if len(self) > PSEUDONYMS_KEPT:
            self.clear()
            self[None] = None
        self[entity_id] = name = pseudonym(self._key, entity_id)
        return name


class OpenSegment:
    """An Arrow IPC stream being appended to. After a failed append the file ends with the last good batch."""

    def __init__(self, folder: Path, writer_id: bytes, first_seq: int, day: int, opened_at: float) -> None:
        self.opened_at = opened_at
        self.day = day
        self.path = folder / f"{OPEN_PREFIX}{writer_id.hex()}-{first_seq:015d}.arrows"
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.size = 0
        self._write(SCHEMA.serialize())

    def append(self, events: pa.Table) -> None:
        """Write the events whole or not at all."""
        self._write(*(batch.serialize() for batch in events.to_batches() if batch.num_rows))

    def _write(self, *messages: pa.Buffer) -> None:
        try:
            for message in messages:
                view = memoryview(message)
                while view:
                    view = view[os.write(self._fd, view) :]
        except OSError:
            os.ftruncate(self._fd, self.size)
            os.lseek(self._fd, self.size, os.SEEK_SET)
            raise
        self.size += sum(message.size for message in messages)

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
    except ValueError as error:
        log.warning("journal: %s is left as it is: %s", path, error)
    finally:
        os.close(fd)


def seal(path: Path, folder: Path, file_format: FileFormat) -> None:
    """Turn an open segment into its final file and remove it."""
    batches = whole_batches(path)
    if (first := next(batches, None)) is not None:
        day = datetime.fromtimestamp(day_of(first) * SECONDS_PER_DAY, UTC)
        partition = folder / f"date={day:%Y-%m-%d}"
        partition.mkdir(mode=0o700, exist_ok=True)
        target = partition / f"{path.stem.removeprefix(OPEN_PREFIX)}.{file_format}"
        with atomic_file(target) as file:
            (write_parquet if file_format == "parquet" else write_jsonl)(chain([first], batches), file)
        sync_folder(folder)
    path.unlink(missing_ok=True)


def whole_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow stream up to its end or to the first that is cut off or damaged.

    Another version may have written it; a `ValueError` says that it is none of ours.
    """
    try:
        with pa.OSFile(str(path)) as file:
            stream = pa.ipc.open_stream(file)
            check_columns(stream.schema)
            for batch in stream:
                batch.validate(full=True)
                yield batch if stream.schema == SCHEMA else with_all_columns(batch).cast(SCHEMA)
    except pa.ArrowException:
        return
    except OSError as error:
        if error.errno is not None:  # the disk; Arrow has no number for a stream that is cut off
            raise


def write_jsonl(batches: Iterable[pa.RecordBatch], file: Any) -> None:
    """Write one JSON object per event; times in ISO 8601, binary values in base64, absent values left out."""
    for batch in batches:
        for row in batch.to_pylist():
            file.write(json.dumps({k: as_json(v) for k, v in row.items() if v is not None}).encode() + b"\n")


def as_json(value: object) -> object:
    """A column's value as JSON."""
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds")
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
