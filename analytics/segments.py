"""Telling good segments from bad ones, without Spark."""

import base64
import io
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from store.journal_files import SCHEMA
from store.journal_schema import COLUMNS

DATE_IN_PATH = re.compile(r"/date=(\d{4}-\d{2}-\d{2})/")
EVENT_ID = ["writer", "seq"]
REQUIRED = [column.name for column in COLUMNS if column.required]


class JournalNotFoundError(Exception):
    """There is no journal where one was expected."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One checked segment. `error` says why it cannot be used; otherwise its event ids lie in the range.

    `repeats` is true if it holds an event more than once.
    """

    path: str
    rows: int = 0
    first: tuple[bytes, int] = (b"", 0)
    last: tuple[bytes, int] = (b"", 0)
    repeats: bool = False
    error: str | None = None


@dataclass(frozen=True)
class Checked:
    """The outcome for a whole journal."""

    good: list[Segment] = field(default_factory=list)
    bad: list[Segment] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Events in good segments, copies included."""
        return sum(segment.rows for segment in self.good)


def plain_path(path: str) -> str:
    """A path in one of the two forms that Spark gives local ones."""
    return re.sub("^file:/+", "file:/", path)


def day_of(path: str) -> str | None:
    """The partition's day in a segment's path."""
    found = DATE_IN_PATH.search(path)
    return found[1] if found else None


def check_segment(path: str, content: bytes) -> Segment:
    """Read one whole segment; any damage is an error, never an exception."""
    try:
        ids = ids_of_jsonl(content) if path.endswith(".jsonl") else ids_of_parquet(content)
        return with_range(path, ids)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, MemoryError) as error:
        return Segment(
            path, error=f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        )


def ids_of_parquet(content: bytes) -> pa.Table:
    """Event ids of a Parquet segment, after reading every page of every column."""
    file = pq.ParquetFile(io.BytesIO(content), page_checksum_verification=True)
    check_columns(file.schema_arrow)
    ids = []
    for group in range(file.num_row_groups):
        table = file.read_row_group(group)
        table.validate(full=True)
        if any(table.column(name).null_count for name in REQUIRED):
            raise ValueError("a required column has empty values")
        ids.append(table.select(EVENT_ID))
    return pa.concat_tables(ids) if ids else SCHEMA.empty_table().select(EVENT_ID)


def check_columns(schema: pa.Schema) -> None:
    """Known columns must have their types, required ones must be there; unknown ones are ignored."""
    for column in SCHEMA:
        index = schema.get_field_index(column.name)
        if index < 0 and not column.nullable:
            raise ValueError(f"column {column.name} is missing")
        if index >= 0 and schema.field(index).type != column.type:
            raise ValueError(f"column {column.name} is {schema.field(index).type}, not {column.type}")


def ids_of_jsonl(content: bytes) -> pa.Table:
    """Event ids of a JSON Lines segment, after parsing every line."""
    if content and not content.endswith(b"\n"):
        raise ValueError("the last line is cut off")
    rows = [json.loads(line) for line in content.splitlines()]
    if any(name not in row for row in rows for name in REQUIRED):
        raise ValueError("a required column is missing")
    writers = pa.array([base64.b64decode(row["writer"], validate=True) for row in rows], pa.binary())
    return pa.table({"writer": writers, "seq": pa.array([row["seq"] for row in rows], pa.int64())})


def with_range(path: str, ids: pa.Table) -> Segment:
    """The segment with the range its event ids lie in."""
    if ids.num_rows == 0:
        return Segment(path)
    writers, numbers = pc.min_max(ids.column("writer")), pc.min_max(ids.column("seq"))
    first = (writers["min"].as_py(), numbers["min"].as_py())
    last = (writers["max"].as_py(), numbers["max"].as_py())
    distinct = ids.group_by(EVENT_ID).aggregate([]).num_rows
    return Segment(path, ids.num_rows, first, last, repeats=distinct != ids.num_rows)


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
