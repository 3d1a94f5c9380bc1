"""The journal's Arrow schema and its Parquet files, for whoever writes or rewrites segments."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from store.journal_schema import COLUMNS, ColumnType

ARROW_TYPES: dict[ColumnType, pa.DataType] = {
    "timestamp_us": pa.timestamp("us", tz="UTC"),
    "string": pa.string(),
    "binary": pa.binary(),
    "int64": pa.int64(),
}
SCHEMA = pa.schema([pa.field(c.name, ARROW_TYPES[c.type], nullable=not c.required) for c in COLUMNS])

DELTA_COLUMNS = ("time", "seq")
PLAIN_COLUMNS = (*DELTA_COLUMNS, "latency_us")
ROW_GROUP = 65_536
"Events. More take more memory, fewer make larger files: each group has dictionaries of its own."
PIECE = 2_048
"Events. Batches are what a second brought, and many small ones take more memory than what is in them."

Events = TypeVar("Events", pa.Table, pa.RecordBatch)


def check_columns(schema: pa.Schema) -> None:
    """Known columns must have their types, required ones must be there; unknown ones are ignored."""
    for column in SCHEMA:
        index = schema.get_field_index(column.name)
        if index < 0 and not column.nullable:
            raise ValueError(f"column {column.name} is missing")
        if index >= 0 and schema.field(index).type != column.type:
            raise ValueError(f"column {column.name} is {schema.field(index).type}, not {column.type}")


def with_all_columns(events: Events) -> Events:
    """Columns that came later are empty in what an older version wrote; unknown ones are left out."""
    for column in SCHEMA:
        if column.name not in events.column_names:
            events = events.append_column(column, pa.nulls(events.num_rows, column.type))
    return events.select(SCHEMA.names)


def parquet_writer(file: IO[bytes] | str) -> Any:
    """A Parquet writer for journal events; its pages carry checksums, so that damage is noticed."""
    return pq.ParquetWriter(
        file,
        SCHEMA,
        compression="zstd",
        use_dictionary=[name for name in SCHEMA.names if name not in PLAIN_COLUMNS],
        column_encoding=dict.fromkeys(DELTA_COLUMNS, "DELTA_BINARY_PACKED"),
        write_statistics=list(DELTA_COLUMNS),  # nobody looks for a range of anything else
        write_page_checksum=True,
    )


def write_parquet(batches: Iterable[pa.RecordBatch], file: IO[bytes]) -> None:
    """Write one whole segment, in row groups: a large one takes no more memory than a group."""
    pieces = (joined(group) for group in together(batches, PIECE))
    with parquet_writer(file) as writer:
        for group in together(pieces, ROW_GROUP):
            writer.write_table(pa.Table.from_batches(group))


def together(batches: Iterable[pa.RecordBatch], events: int) -> Iterator[list[pa.RecordBatch]]:
    """The batches, in order, as many at a time as have at least so many events."""
    group: list[pa.RecordBatch] = []
    missing = events
    for batch in batches:
        group.append(batch)
        missing -= batch.num_rows
        if missing <= 0:
            yield group
            group, missing = [], events
    if group:
        yield group


def joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of them; a single one is not copied."""
    return pa.concat_batches(batches) if len(batches) > 1 else batches[0]


@contextmanager
def atomic_file(target: Path) -> Iterator[IO[bytes]]:
    """A file for the owner only that appears under its name whole and durable, or not at all.

    Until then its name begins with a dot, which readers of a journal ignore.
    """
    draft = target.with_name(f".{target.name}.draft")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.rename(target)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make renames within the folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
