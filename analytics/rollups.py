"""Daily rollups: all that the reports need of a journal.

Nine events of ten are received notifications and pushes. They are summed by hour and by token; everything
else (`life`) is kept as it is. A day's rollups depend on that day's events only, and rollups of several days
together are those of all their events, so days can be made anew one by one, anywhere: `roll_up` is given the
bytes of a day's segments and returns those of its rollups.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from analytics.rollups_schema import BUCKETS_PER_OCTAVE, TRAFFIC
from analytics.segments import Segment, Take, check_segment, split_overlapping
from analytics.times import DAY_US, HOUR_US
from store.journal_files import SCHEMA

TRAFFIC_NAMES = ", ".join(f"'{event.value}'" for event in TRAFFIC)
OF_DAY = f"epoch_us(time) // {DAY_US} = $day"
ROLLUPS: Mapping[str, str] = {
    "life": f"""
SELECT {", ".join(f'"{name}"' for name in SCHEMA.names)} FROM events
WHERE event NOT IN ({TRAFFIC_NAMES}) AND {OF_DAY}""",
    "hours": f"""
SELECT epoch_us(time) // {HOUR_US} * {HOUR_US} AS hour_us, event, server, provider, kind, error,
  CASE WHEN latency_us IS NOT NULL THEN floor(log2(greatest(latency_us, 1)) * {BUCKETS_PER_OCTAVE})::INT END
    AS bucket, count(*) AS number,
  sum(coalesce("count", 1))::BIGINT AS entries, sum(coalesce(total, "count", 1))::BIGINT AS total
FROM events WHERE event IN ({TRAFFIC_NAMES}) AND {OF_DAY} GROUP BY ALL""",
    "tokens": f"""
SELECT token, count(*) FILTER (event = 'ntf_received') AS received,
  count(*) FILTER (event <> 'ntf_received') AS pushes,
  max(epoch_us(time)) FILTER (event <> 'ntf_received') AS last_push_us
FROM events WHERE event IN ('ntf_received', 'push_sent', 'cron_sent') AND token IS NOT NULL AND {OF_DAY}
GROUP BY token""",
}
"Of any part of a day's events."
JOINED: Mapping[str, str] = {
    "life": "SELECT * FROM parts",
    "hours": """
SELECT hour_us, event, server, provider, kind, error, bucket, sum(number)::BIGINT AS number,
  sum(entries)::BIGINT AS entries, sum(total)::BIGINT AS total FROM parts GROUP BY ALL""",
    "tokens": """
SELECT token, sum(received)::BIGINT AS received, sum(pushes)::BIGINT AS pushes,
  max(last_push_us) AS last_push_us FROM parts GROUP BY token""",
}
"Of a whole day, from those of its parts."

Contents = Iterable[tuple[str, bytes | None]]
"Names of segments and what is in them, None if they are gone; can be iterated more than once."
Parts = dict[str, list[pa.Table]]


@dataclass(frozen=True)
class Made:
    """What was made of a day: its segments checked, and Parquet files of those rollups that have rows."""

    day: str
    segments: list[Segment]
    rollups: dict[str, bytes]


def roll_up(day: str, contents: Contents) -> Made:
    """Read all segments once, check them and sum them up; those that share events, a second time together."""
    roller = Roller(day)
    segments, parts = [], {}
    for name, content in contents:
        found: Parts = {}
        segments.append(looked_at(name, content, roller.into(found)))
        parts[name] = found
    alone, overlapping = split_overlapping(segment for segment in segments if segment.error is None)
    counted = [parts[segment.path] for segment in alone]
    if overlapping:
        counted.append(roller.each_event_once(contents, {segment.path for segment in overlapping}))
    return Made(day, segments, roller.joined(counted))


def looked_at(name: str, content: bytes | None, take: Take) -> Segment:
    """A checked segment."""
    if content:
        return check_segment(name, content, take)
    return Segment(name, error="the file is gone" if content is None else "the file is empty")


@cache
def database() -> duckdb.DuckDBPyConnection:
    """One for all days: making one takes as long as summing up a quiet day."""
    return duckdb.connect(config={"threads": 1})


class Roller:
    """Sums up events of one day, some at a time."""

    def __init__(self, day: str) -> None:
        self._db = database().cursor()
        self._day = (date.fromisoformat(day) - date(1970, 1, 1)).days if day else None

    def into(self, parts: Parts) -> Take:
        """Who is given events, and adds their rollups to `parts`."""

        def take(events: pa.Table) -> None:
            for name, query in ROLLUPS.items():
                found = self._ask(query, "events", events, day=self._day)
                if found.num_rows:
                    parts.setdefault(name, []).append(found)

        return take

    def each_event_once(self, contents: Contents, names: set[str]) -> Parts:
        """Rollups of segments that may hold copies of each other's events."""
        tables: list[pa.Table] = []
        for name, content in contents:
            if name in names:
                looked_at(name, content, tables.append)
        copies = pa.concat_tables(table.cast(SCHEMA) for table in tables)
        events = self._ask("SELECT DISTINCT ON (writer, seq) * FROM copies", "copies", copies)
        parts: Parts = {}
        self.into(parts)(events)
        return parts

    def joined(self, parts: Sequence[Parts]) -> dict[str, bytes]:
        """One file for each rollup that has rows."""
        files = {}
        for name, query in JOINED.items():
            tables = [table for part in parts for table in part.get(name, ())]
            if tables:
                whole = tables[0] if len(tables) == 1 else self._ask(query, "parts", pa.concat_tables(tables))
                buffer = io.BytesIO()
                pq.write_table(whole, buffer, compression="zstd")
                files[name] = buffer.getvalue()
        return files

    def _ask(self, query: str, name: str, table: pa.Table, **values: object) -> pa.Table:
        self._db.register(name, table)
        try:
            return self._db.sql(query, params=values or None).to_arrow_table()
        except duckdb.DataError as error:  # of one segment, which is a bad one then
            raise ValueError(str(error)) from error
        finally:
            self._db.unregister(name)
