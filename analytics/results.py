"""A report's tables for people and programs: rows of small ones, one Parquet and one CSV file of each."""

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from analytics.times import SECOND_US

Row = dict[str, Any]
TIME_COLUMNS = frozenset(
    {"start", "end", "hour", "day", "first_seen", "last_active", "last_push", "last_seen"}
)
"Columns of any table that are times, in microseconds."
TIME = pa.timestamp("us", tz="UTC")


class Rows(list[Row]):
    """The first rows of a table, which may be all; they know their columns even where there are none."""

    def __init__(self, columns: Sequence[str], rows: Iterable[Row], count: int | None = None) -> None:
        super().__init__(rows)
        self.columns = list(columns)
        self.count_of_all = len(self) if count is None else count

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows of the table."""
        return self.count_of_all == len(self)


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
