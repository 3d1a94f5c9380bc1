"""Telling good segments from bad ones, without Spark."""

import base64
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from analytics.times import DAY_US
from store.journal_files import SCHEMA, check_columns, with_all_columns
from store.journal_schema import COLUMNS, ColumnType

EVENT_ID = ["writer", "seq"]
NEEDED = [*EVENT_ID, "time"]
EPOCH = datetime.fromtimestamp(0, UTC)
REQUIRED = [column.name for column in COLUMNS if column.required]
REPETITIVE = [c.name for c in COLUMNS if c.type in ("string", "binary") and c.name not in NEEDED]
"Columns that need not be expanded to be checked."

MOST = {
    **dict.fromkeys(("count", "expected", "changed", "total"), 2**40),
    **dict.fromkeys(("latency_us", "uptime_us"), 2**60),
}
"Larger numbers are damage, which must not make sums of good events overflow."


@dataclass(frozen=True, slots=True)
class Segment:
    """One checked segment. `error` says why it cannot be used; otherwise its event ids lie in the range.

    `repeats` is true if it holds an event more than once; `days` are those that its events are of.
    """

    path: str
    rows: int = 0
    first: tuple[bytes, int] = (b"", 0)
    last: tuple[bytes, int] = (b"", 0)
    repeats: bool = False
    days: tuple[str, ...] = ()
    error: str | None = None

    def to_list(self) -> list[Any]:
        """For a manifest, without the path."""
        ids = [*self.first, *self.last]
        ids = [i.hex() if isinstance(i, bytes) else i for i in ids]
        return [self.rows, *ids, self.repeats, list(self.days), self.error]

    @classmethod
    def from_list(cls, path: str, known: Sequence[Any]) -> "Segment":
        """As `to_list` gave it."""
        rows, writer, first, last_writer, last, repeats, days, error = known
        ids = (bytes.fromhex(writer), first), (bytes.fromhex(last_writer), last)
        return cls(path, rows, *ids, repeats, tuple(days), error)


@dataclass(frozen=True)
class Checked:
    """The outcome for a whole journal."""

    good: list[Segment]
    bad: list[Segment]

    @property
    def rows(self) -> int:
        """Events in good segments, copies included."""
        return sum(segment.rows for segment in self.good)


def check_segment(path: str, content: bytes) -> Segment:
    """Read one whole segment; any damage is an error, never an exception."""
    ids: list[pa.Table] = []
    try:
        for events in read_jsonl(content) if path.endswith(".jsonl") else read_parquet(content):
            check_numbers(events)
            ids.append(events.select(NEEDED))
        return with_range(path, pa.concat_tables(ids)) if ids else Segment(path)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        return Segment(
            path, error=f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        )


def check_numbers(events: pa.Table) -> None:
    """Raise ValueError if one cannot be."""
    for name, most in MOST.items():
        found = pc.min_max(events.column(name)).as_py()
        if found["min"] is not None and not -most <= found["min"] <= found["max"] <= most:
            raise ValueError(f"{name} is {max(found.values(), key=abs)}")


def read_parquet(content: bytes) -> Iterator[pa.Table]:
    """The row groups of a Parquet segment, after reading every page of every column."""
    metadata = pq.read_metadata(io.BytesIO(content))
    schema = metadata.schema.to_arrow_schema()
    check_columns(schema)
    packed = [name for name in REPETITIVE if name in schema.names]
    file = pq.ParquetFile(
        io.BytesIO(content), metadata=metadata, read_dictionary=packed, page_checksum_verification=True
    )
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, use_threads=False)
        table.validate(full=True)
        if any(table.column(name).null_count for name in REQUIRED):
            raise ValueError("a required column has empty values")
        yield with_all_columns(table)


def read_jsonl(content: bytes) -> Iterator[pa.Table]:
    """The events of a JSON Lines segment."""
    if content and not content.endswith(b"\n"):
        raise ValueError("the last line is cut off")
    rows = [json.loads(line) for line in content.splitlines()]
    if any(name not in row for row in rows for name in REQUIRED):
        raise ValueError("a required column is missing")
    values = {c.name: [from_json(c.type, row.get(c.name)) for row in rows] for c in COLUMNS}
    yield pa.table([pa.array(values[column.name], column.type) for column in SCHEMA], schema=SCHEMA)


def from_json(kind: ColumnType, value: Any) -> Any:
    """A value as JSON Lines has it."""
    if value is not None and kind == "binary":
        return base64.b64decode(value, validate=True)
    return datetime.fromisoformat(value) if value is not None and kind == "timestamp_us" else value


def with_range(path: str, ids: pa.Table) -> Segment:
    """The segment with the range its event ids lie in."""
    if ids.num_rows == 0:
        return Segment(path)
    writers, numbers = pc.min_max(ids.column("writer")), pc.min_max(ids.column("seq"))
    first = (writers["min"].as_py(), numbers["min"].as_py())
    last = (writers["max"].as_py(), numbers["max"].as_py())
    one_writer = first[0] == last[0]
    in_order = one_writer and is_rising(ids.column("seq"))
    repeats = not in_order and ids.group_by(EVENT_ID).aggregate([]).num_rows != ids.num_rows
    return Segment(path, ids.num_rows, first, last, repeats, days_of(ids.column("time")))


def is_rising(numbers: pa.ChunkedArray) -> bool:
    """Whether each is above the one before it, as a daemon writes them."""
    return bool(pc.all(pc.greater(numbers[1:], numbers[:-1]), min_count=0).as_py())


def days_of(times: pa.ChunkedArray) -> tuple[str, ...]:
    """The UTC days of the times, in order."""
    ends = pc.min_max(times.cast(pa.int64()))
    first, last = ends["min"].as_py() // DAY_US, ends["max"].as_py() // DAY_US
    numbers = [first]
    if last != first:
        days = pc.divide(pc.floor_temporal(times, unit="day").cast(pa.int64()), DAY_US)
        numbers = sorted(pc.unique(days).to_pylist())
    return tuple(str((EPOCH + timedelta(days=number)).date()) for number in numbers)


def split_overlapping(segments: Iterable[Segment]) -> tuple[list[Segment], list[Segment]]:
    """Segments whose event ids no other can hold, and those that may share some with another."""
    ordered = sorted((s for s in segments if s.rows), key=lambda s: (s.first, s.last, s.path))
    alone: list[Segment] = []
    overlapping: list[Segment] = []
    cluster: list[Segment] = []
    reach: tuple[bytes, int] | None = None
    for segment in ordered:
        if reach is not None and segment.first > reach:
            (alone if is_alone(cluster) else overlapping).extend(cluster)
            cluster, reach = [], None
        cluster.append(segment)
        reach = segment.last if reach is None else max(reach, segment.last)
    (alone if is_alone(cluster) else overlapping).extend(cluster)
    return alone, overlapping


def is_alone(cluster: list[Segment]) -> bool:
    """Whether no event of these segments can be there twice."""
    return len(cluster) == 1 and not cluster[0].repeats
