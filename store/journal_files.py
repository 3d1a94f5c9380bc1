"""The journal's Arrow schema and its Parquet files, for whoever writes or rewrites segments."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

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


def write_parquet(batches: Sequence[pa.RecordBatch], file: IO[bytes]) -> None:
    """Write one whole segment."""
    with parquet_writer(file) as writer:
        writer.write_table(pa.Table.from_batches(batches, SCHEMA))


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
