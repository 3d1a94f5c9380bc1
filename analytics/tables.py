"""A report's tables as files: one plain Parquet and one plain CSV file each, times with their zone."""

import csv
import io
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from analytics.times import SECOND_US
from analytics.warehouse import Rows

TIME_COLUMNS = frozenset(
    {"start", "end", "hour", "day", "first_seen", "last_active", "last_push", "last_seen"}
)
"Columns of any table that are times, in microseconds."
TIME = pa.timestamp("us", tz="UTC")


def as_parquet(rows: Rows) -> bytes:
    """All rows in one file."""
    arrays = [column(rows, name) for name in rows.columns]
    file = io.BytesIO()
    pq.write_table(pa.table(arrays, names=rows.columns), file, compression="zstd")
    return file.getvalue()


def column(rows: Rows, name: str) -> pa.Array:
    """One column; a time, or whatever its values are."""
    values = [row[name] for row in rows]
    return pa.array(values, pa.int64()).cast(TIME) if name in TIME_COLUMNS else pa.array(values)


def as_csv(rows: Rows) -> str:
    """All rows in one file; times in ISO 8601."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(rows.columns)
    writer.writerows([plain(name, row[name]) for name in rows.columns] for row in rows)
    return file.getvalue()


def plain(name: str, value: Any) -> Any:
    """A value as text for people and programs."""
    if value is None:
        return ""
    if name in TIME_COLUMNS:
        return iso_time(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return value


def iso_time(us: int) -> str:
    """A time with its zone, to the second unless there is more to say."""
    precision = "seconds" if us % SECOND_US == 0 else "microseconds"
    moment = datetime.fromtimestamp(us // SECOND_US, UTC).replace(microsecond=us % SECOND_US)
    return moment.isoformat(timespec=precision)
