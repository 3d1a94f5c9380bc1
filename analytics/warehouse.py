"""The rollups of a journal as tables of one window, and what the reader of a report has to know about them.

`life`, `hours` and `tokens` are the rollups up to the window's end, without events whose times cannot be;
`history` is `life` with what a snapshot adds. `analytics.lives` has the tables derived from them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from analytics.errors import JournalNotFoundError, UnreadableError
from analytics.files import Folder
from analytics.inputs import Limits, Window
from analytics.lives import DERIVED
from analytics.outages import register_outages
from analytics.results import Row, Rows
from analytics.rollups import SCHEMAS
from analytics.tables import Tables, together
from analytics.times import DAY_US, HOUR_US, MINUTE_US, SECOND_US

EARLIEST_US = 1_577_836_800 * SECOND_US
"2020-01-01: no journal is older."
SLACK_US = HOUR_US
"Events this much before a process began or after it last told its age may still be its own."
EVENTS_PER_PART = 100_000
"Of one writer: more are ordered by several tasks."
TREND_DAYS = 56  # how growth was before says little; a report of one day has a trend, too
FOREVER_US = 2**62
SPANS = {"minute": MINUTE_US, "hour": HOUR_US, "day": DAY_US}
SNAPSHOTS = {
    "tokens": "taken TIMESTAMP, epoch BIGINT, token BINARY, provider STRING, status STRING",
    "subscriptions": "taken TIMESTAMP, epoch BIGINT, subscription BINARY, token BINARY, server STRING,"
    " status STRING",
}
"What is read of snapshots: see `analytics.snapshot`."


BASE: Mapping[str, str] = {
    # When did each process run, by its own clock?
    "writers": """
WITH reported AS (
  SELECT writer, CAST(round(median(us - uptime_us)) AS BIGINT) AS began_us, max(uptime_us) AS uptime_us
  FROM all_life WHERE uptime_us IS NOT NULL GROUP BY writer)
SELECT writer, began_us - :slack AS from_us, began_us + uptime_us + :slack AS to_us FROM reported
WHERE began_us BETWEEN :earliest AND :now + :day""",
    # When can anything have happened?
    "bounds": """
SELECT coalesce(min(from_us), :earliest) AS first_us, coalesce(max(to_us), :now + :day) AS last_us
FROM writers""",
    # Which events happened when they say?
    "believed": """
SELECT l.* FROM all_life l LEFT JOIN writers w ON w.writer = l.writer CROSS JOIN bounds b
WHERE us BETWEEN coalesce(w.from_us, b.first_us) AND coalesce(w.to_us, b.last_us)""",
    # In which order did they happen? Times are more or less coarse, so two events of one process may seem to
    # have happened in another order than they did; their numbers know better.
    "ordered": """
WITH parts AS (
  SELECT writer, seq div :part AS part, max(us) AS us FROM believed GROUP BY writer, seq div :part),
earlier AS (
  SELECT writer, part, max(us) OVER (PARTITION BY writer ORDER BY part
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS earlier_us FROM parts),
placed AS (
  SELECT *, max(us) OVER (PARTITION BY writer, seq div :part ORDER BY seq) AS placed_us FROM believed)
SELECT /*+ BROADCAST(e) */ p.* EXCEPT (us, placed_us, uptime_us, kind), greatest(placed_us, earlier_us) AS us
FROM placed p JOIN earlier e ON e.writer = p.writer AND e.part = p.seq div :part""",
    # Traffic is known by hours and days.
    "believed_hours": """
SELECT h.* EXCEPT (date) FROM all_hours h CROSS JOIN bounds b
WHERE hour_us BETWEEN first_us - :hour AND last_us""",
    "believed_tokens": """
SELECT t.* FROM all_tokens t CROSS JOIN bounds b WHERE day_us BETWEEN first_us - :day AND last_us""",
}
FACTS = """
WITH known AS (
  SELECT us, true AS is_exact, epoch FROM ordered UNION ALL SELECT hour_us, false, NULL FROM believed_hours),
aside AS (
  SELECT us, 1 AS n FROM all_life l LEFT JOIN writers w ON w.writer = l.writer CROSS JOIN bounds b
  WHERE us NOT BETWEEN coalesce(w.from_us, b.first_us) AND coalesce(w.to_us, b.last_us)
  UNION ALL
  SELECT hour_us, number FROM all_hours CROSS JOIN bounds
  WHERE hour_us NOT BETWEEN first_us - :hour AND last_us)
SELECT 'known' AS what, count(DISTINCT epoch) AS number, min(us) FILTER (WHERE is_exact) AS first_exact,
  min(us) AS first, max(us) AS last
FROM known WHERE us < :limit
UNION ALL SELECT 'aside', coalesce(sum(n), 0), NULL, min(us), max(us) FROM aside ORDER BY what"""
"""Of believable events before a time: how many keys, the first and the last. Received notifications are
known by the hour and may seem older than the start of their daemon. Of events put aside: how many, from when.
"""

SNAPSHOT: Mapping[str, str] = {
    # Which snapshot is taken for each key? The last before the window, else the first within it.
    "chosen": """
SELECT epoch, coalesce(max(us) FILTER (WHERE us <= :start), min(us)) AS us FROM (
  SELECT DISTINCT epoch, unix_micros(taken) AS us FROM snapshot_tokens)
WHERE us < :end GROUP BY epoch""",
    # What did tokens do to be as they were? Whatever it was, it seems to have happened just then.
    "token_rows": """
SELECT us, CAST('snapshot' AS BINARY) AS writer, CAST(0 AS BIGINT) AS seq, t.epoch, token, provider,
  CASE WHEN status = 'ACTIVE' THEN 'token_verified' WHEN status = 'CONFIRMED' THEN 'token_confirmed'
    WHEN startswith(status, 'INVALID') OR status = 'EXPIRED' THEN 'token_invalid'
    ELSE 'token_registered' END AS event
FROM snapshot_tokens t JOIN chosen c ON c.epoch = t.epoch AND c.us = unix_micros(taken)""",
    # And subscriptions?
    "subscription_rows": """
SELECT us, CAST('snapshot' AS BINARY) AS writer, CAST(0 AS BIGINT) AS seq, s.epoch, token, subscription,
  server, 'sub_created' AS event, status AS status_to
FROM snapshot_subscriptions s JOIN chosen c ON c.epoch = s.epoch AND c.us = unix_micros(taken)""",
}


class Rollups:
    """All days of all rollups, and which of their events can have happened when they say."""

    def __init__(self, session: SparkSession, folder: Folder, now_us: int, work: Folder) -> None:
        values = {"slack": SLACK_US, "earliest": EARLIEST_US, "now": now_us, "part": EVENTS_PER_PART}
        self.tables = Tables(session, BASE, {**values, **SPANS}, work)
        self.now_us = now_us
        self._path = folder.path
        self.work = work
        for name in SCHEMAS:
            self.tables.add(f"all_{name}", load(session, folder, name))

    def facts(self, before_us: int) -> tuple[Row, Row]:
        """About events that are not believable, and about those before a time that are."""
        with unreadable_as(
            f"the rollups in {self._path} are damaged; --full rebuilds those of days in the journal"
        ):
            query = FACTS.replace(":limit", str(before_us))
            aside, known = self.tables.rows("facts", self.tables.frame(query))
        return aside, known


@dataclass
class Warehouse:
    """Tables, the window they are asked for, and what the reader of a report has to know about them."""

    tables: Tables
    window: Window
    notes: list[str]
    first_us: int | None
    "When the journal's first event was."

    def frame(self, query: str) -> DataFrame:
        """A query's result, not computed yet."""
        return self.tables.frame(query)

    def rows(self, name: str, query: str, most: int | None = None) -> Rows:
        """The first rows of a query's result, or all."""
        return self.tables.rows(name, self.tables.frame(query), most)


def open_warehouse(
    rollups: Rollups,
    *,
    limits: Limits,
    start: int | None = None,
    end: int | None = None,
    snapshots: Folder | None = None,
) -> Warehouse:
    """Find the window that was asked for, and open its tables."""
    limit = FOREVER_US if end is None else end
    aside, found = rollups.facts(limit)
    window = find_window(found, start, end)
    first_us = found["first_exact"]
    until = rollups.now_us if end is None else min(end, rollups.now_us)
    trend = min(
        window.start, max(window.start if first_us is None else first_us, window.end - TREND_DAYS * DAY_US)
    )
    values = {
        **{name: getattr(limits, name) for name in Limits.__slots__},
        "start": window.start,
        "end": window.end,
        "first_hour": window.first_hour,
        "until": until,
        "trend_start": trend,
    }
    tables = Tables(rollups.tables.session, {**SNAPSHOT, **DERIVED}, {**SPANS, **values}, rollups.work)
    register_outages(rollups.tables.session)
    for name, of, time in (("life", "ordered", "us"), ("hours", "believed_hours", "hour_us")):
        tables.add(name, rollups.tables.frame(f"SELECT * FROM {of} WHERE {time} < {window.end}"))
    tables.add("tokens", rollups.tables.frame(f"SELECT * FROM believed_tokens WHERE day_us < {window.end}"))
    add_history(tables, snapshots)
    notes = clock_notes(aside)
    if found["number"] > 1:
        notes += epoch_notes(tables, with_snapshot=snapshots is not None)
    return Warehouse(tables, window, notes, first_us)


def load(session: SparkSession, folder: Folder, name: str) -> DataFrame:
    """All days of a rollup, of which there may be none."""
    if folder.names(name):
        found = (
            session.read.schema(SCHEMAS[name])
            .option("__globPaths__", "false")
            .parquet(f"{folder.url}/{name}")
        )
    else:
        found = session.createDataFrame([], SCHEMAS[name])
    found = together(found)
    if name == "life":
        return found.selectExpr("* EXCEPT (time, date)", "unix_micros(time) AS us")
    if name == "tokens":
        return found.selectExpr("* EXCEPT (date)", "unix_micros(CAST(date AS TIMESTAMP)) AS day_us")
    return found


def find_window(found: Row, start: int | None, end: int | None) -> Window:
    """What was asked for; by default from the first believable event to the last."""
    first = found["first"] if found["first_exact"] is None else found["first_exact"]
    last = found["last"]
    if first is None:
        raise JournalNotFoundError("no readable events of the time asked for")
    window = Window(first if start is None else start, last + 1 if end is None else end)
    if window.start >= window.end:
        raise JournalNotFoundError(f"the last event is of {day_text(last)}, before the time asked for")
    return window


def add_history(tables: Tables, snapshots: Folder | None) -> None:
    """`life`, and what it may not know: tokens and subscriptions older than its first event or its key."""
    history = tables.frame("SELECT * FROM life")
    if snapshots is not None:
        for name, schema in SNAPSHOTS.items():
            if not snapshots.names(name):
                raise JournalNotFoundError(f"no snapshots in {snapshots.path}")
            reader = tables.session.read.schema(schema).option("__globPaths__", "false")
            tables.add(f"snapshot_{name}", reader.parquet(f"{snapshots.url}/{name}"))
        with unreadable_as(f"the snapshots in {snapshots.path} are damaged"):
            if not tables.rows("chosen", tables.frame("SELECT * FROM chosen")):
                raise JournalNotFoundError(
                    f"no snapshot before the end of the time asked for in {snapshots.path}"
                )
        for name in ("token_rows", "subscription_rows"):
            history = history.unionByName(tables.frame(f"SELECT * FROM {name}"), allowMissingColumns=True)
    tables.add("history", history)


def clock_notes(aside: Row) -> list[str]:
    """What was put aside because its time cannot be."""
    if not aside["number"]:
        return []
    return [
        f"{aside['number']:,} events were put aside: their times, from {day_text(aside['first'])} to"
        f" {day_text(aside['last'])}, do not fit the time that the daemon says it ran. A clock was wrong."
    ]


def epoch_notes(tables: Tables, *, with_snapshot: bool) -> list[str]:
    """Whether the key of the pseudonyms changed, and what that hides."""
    changes = tables.frame("SELECT until_us FROM epochs WHERE until_us IS NOT NULL ORDER BY until_us")
    notes = [
        f"The journal's key changed on {day_text(row['until_us'])}." for row in tables.rows("epochs", changes)
    ]
    if notes and not with_snapshot:
        notes[-1] += (
            " Tokens and subscriptions from before are known again once something happens to them,"
            " or with a snapshot taken since."
        )
    return notes


@contextmanager
def unreadable_as(problem: str) -> Iterator[None]:
    """Report files that Spark cannot read in one line."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise UnreadableError(f"{problem}: {str(error).splitlines()[0][:200]}") from error


def day_text(us: int) -> str:
    """A day for a sentence."""
    return f"{datetime.fromtimestamp(0, UTC) + timedelta(microseconds=us):%-d %B %Y}"
