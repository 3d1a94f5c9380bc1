"""The rollups of a journal as tables that reports ask in SQL.

`life`, `hours` and `tokens` are the rollups (see `analytics.rollups`) up to the window's end, without events
whose times cannot be. From them come `subs` (one row per subscription ever seen) and `states` (those that
live), `token_lives`, `token_activity` and `sub_changes` (changes of the number of active tokens and of
subscriptions), `contacts` (one row per router) and `runs` (one row per process of a daemon). Times are
microseconds.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from analytics.inputs import Limits, Window
from analytics.results import Row as Row
from analytics.results import Rows as Rows
from analytics.times import DAY_US, HOUR_US, MINUTE_US, SECOND_US

EARLIEST_US = 1_577_836_800 * SECOND_US
"2020-01-01: no journal is older."
SLACK_US = HOUR_US
"Events this much before a process began or after it last told its age may still be its own."

LOAD: Mapping[str, str] = {
    "life": "SELECT * EXCLUDE (date, time), epoch_us(time) AS us",
    "hours": "SELECT * EXCLUDE (date)",
    "tokens": "SELECT * EXCLUDE (date), epoch_us(CAST(date AS TIMESTAMP)) AS day_us",
}
FILES = "read_parquet($files, hive_partitioning = true, union_by_name = true)"

CLOCKS = """
CREATE TABLE writers AS
WITH told AS (SELECT writer, median(us - uptime_us)::BIGINT AS began_us, max(uptime_us) AS uptime_us
              FROM life WHERE uptime_us IS NOT NULL GROUP BY writer)
SELECT *, began_us - $slack AS from_us, began_us + uptime_us + $slack AS to_us FROM told
WHERE began_us BETWEEN $earliest AND $now + $day;

CREATE TABLE bounds AS
SELECT coalesce(min(from_us), $earliest) AS from_us, coalesce(max(to_us), $now + $day) AS to_us FROM writers;

CREATE TABLE put_aside AS
SELECT l.writer, l.seq, l.us FROM life l LEFT JOIN writers w USING (writer) CROSS JOIN bounds b
WHERE l.us NOT BETWEEN coalesce(w.from_us, b.from_us) AND coalesce(w.to_us, b.to_us);
DELETE FROM life WHERE (writer, seq) IN (SELECT (writer, seq) FROM put_aside);

CREATE TABLE traffic_aside AS
SELECT hour_us AS us, number FROM hours, bounds WHERE hour_us NOT BETWEEN from_us - $hour AND to_us;
DELETE FROM hours WHERE hour_us IN (SELECT us FROM traffic_aside);
DELETE FROM tokens WHERE day_us < (SELECT from_us - $day FROM bounds) OR day_us > (SELECT to_us FROM bounds);
"""

ORDERED = """
CREATE TABLE ordered AS
SELECT * REPLACE (max(us) OVER (PARTITION BY writer ORDER BY seq ROWS UNBOUNDED PRECEDING) AS us) FROM life;
DROP TABLE life;
ALTER TABLE ordered RENAME TO life
"""
"""Times are more or less coarse, so two events of one process may seem to have happened in another order than
they did; their numbers know better."""

CUT = """
DELETE FROM life WHERE us >= $end;
DELETE FROM hours WHERE hour_us >= $end;
DELETE FROM tokens WHERE day_us >= $end;
"""

EPOCHS = """
CREATE TABLE epochs AS
WITH used AS (SELECT daemon, epoch, min(us) AS from_us, max(us) AS last_us FROM life
              WHERE daemon IS NOT NULL GROUP BY ALL),
followed AS (
  SELECT epoch, last_us, lead(from_us) OVER (PARTITION BY daemon ORDER BY from_us) AS until_us FROM used),
changed AS (SELECT *, max(until_us) OVER (PARTITION BY epoch) AS changed_us FROM followed)
SELECT epoch,
  CASE WHEN bool_and(until_us IS NOT NULL OR last_us < changed_us) THEN max(until_us) END AS until_us
FROM changed GROUP BY epoch;
"""
"""A key is over when every daemon that had it has another, or was gone by then. What was known by a daemon
that is only gone may still live."""

LIVES = """
CREATE TABLE runs AS
SELECT writer, max(daemon) AS daemon, min(us) AS first_us, max(us) AS last_us,
  min(us) FILTER (event = 'server_started') AS started_us,
  arg_min("count", seq) FILTER (event = 'server_started') AS started_with,
  arg_max(coalesce(total, "count"), seq) FILTER (daemon IS NOT NULL) AS ended_with,
  bool_or(event = 'server_stopped') AS stopped
FROM life GROUP BY writer;

CREATE TABLE token_ends AS
SELECT token, min(us) AS deleted_us FROM history WHERE event = 'token_deleted' GROUP BY token;

CREATE TABLE subs AS
WITH steps AS (
  SELECT subscription, server, token, epoch, event, status_from, us, (us, writer, seq) AS place,
    CASE WHEN event = 'sub_created' THEN coalesce(status_to, 'NEW') ELSE status_to END AS status
  FROM history WHERE event IN ('sub_created', 'sub_status_changed', 'sub_deleted')),
own AS (
  SELECT subscription, arg_max(server, place) AS server, arg_max(token, place) AS token,
    any_value(epoch) AS epoch, arg_max(status, place) FILTER (status IS NOT NULL) AS status,
    max(us) FILTER (status IS NOT NULL) AS status_us, min(us) AS first_us,
    max(us) FILTER (status = 'ACTIVE' OR status_from = 'ACTIVE') AS active_us,
    min(us) FILTER (event = 'sub_deleted') AS deleted_us
  FROM steps GROUP BY subscription)
SELECT own.* EXCLUDE (deleted_us), least(own.deleted_us, t.deleted_us, e.until_us) AS gone_us
FROM own LEFT JOIN token_ends t USING (token) LEFT JOIN epochs e USING (epoch);

CREATE TABLE contacts AS
WITH heard AS (SELECT server, max(hour_us) AS us, min(hour_us) AS first_us FROM hours
               WHERE event = 'ntf_received' GROUP BY server),
seen AS (SELECT server, max(us) FILTER (event = 'smp_disconnected') AS disconnected_us,
    max(us) FILTER (event = 'smp_service_subscribed') AS service_us,
    max(us) FILTER (event IN ('smp_connected', 'smp_service_subscribed') OR status_to = 'ACTIVE'
                    AND event IN ('sub_created', 'sub_status_changed')) AS contact_us, min(us) AS first_us
  FROM history WHERE server IS NOT NULL GROUP BY server)
SELECT server, disconnected_us, service_us, greatest(contact_us, heard.us) AS contact_us,
  least(seen.first_us, heard.first_us) AS first_us
FROM seen FULL JOIN heard USING (server);

CREATE TABLE states AS
WITH living AS (SELECT s.*, c.disconnected_us, coalesce(status = 'ACTIVE' AND c.disconnected_us > s.status_us
    AND NOT coalesce(c.service_us > c.disconnected_us, false), false) AS cut_off
  FROM subs s LEFT JOIN contacts c USING (server) WHERE gone_us IS NULL)
SELECT subscription, token, server, first_us,
  CASE WHEN cut_off THEN 'INACTIVE' ELSE coalesce(status, 'unknown') END AS status,
  CASE WHEN cut_off THEN disconnected_us ELSE active_us END AS last_active_us FROM living;

CREATE TABLE token_lives AS
WITH own AS (
  SELECT token, arg_max(provider, (us, writer, seq)) AS provider, arg_max(event, (us, writer,
    seq)) AS last_event,
    min(us) AS first_us, any_value(epoch) AS epoch, min(us) FILTER (event = 'token_deleted') AS deleted_us,
    min(us) FILTER (event = 'token_registered') AS registered_us,
    min(us) FILTER (event = 'token_confirmed') AS confirmed_us,
    min(us) FILTER (event = 'token_verified') AS verified_us
  FROM history WHERE starts_with(event, 'token_') GROUP BY token),
pushed AS (SELECT token, max(last_push_us) AS last_push_us FROM tokens GROUP BY token)
SELECT own.* EXCLUDE (deleted_us), least(own.deleted_us, e.until_us) AS gone_us, last_push_us
FROM own LEFT JOIN pushed USING (token) LEFT JOIN epochs e USING (epoch);

CREATE TABLE token_activity AS
WITH moves AS (
  SELECT token, us, writer, seq, (event = 'token_verified')::INT AS active FROM history
  WHERE event IN ('token_verified', 'token_registered', 'token_replaced', 'token_deleted', 'token_invalid')
  UNION ALL
  SELECT token, until_us, 'epoch'::BLOB, 0, 0 FROM token_lives JOIN epochs USING (epoch)
  WHERE until_us IS NOT NULL)
SELECT us, active - coalesce(lag(active) OVER (PARTITION BY token ORDER BY us, writer, seq), 0) AS change
FROM moves;

CREATE TABLE sub_changes AS
SELECT server, first_us AS us, 1 AS change FROM subs
UNION ALL SELECT server, gone_us, -1 FROM subs WHERE gone_us IS NOT NULL;
"""

DAILY_TOTALS = """
days AS (SELECT unnest(range($start - $start % $day, $end, $day)) AS day_us),
changes AS (
  SELECT us, 0 AS token, change AS sub FROM sub_changes UNION ALL SELECT us, change, 0 FROM token_activity),
net AS (
  SELECT greatest(us - us % $day, $start - $start % $day - $day) AS day_us, sum(token) AS token,
    sum(sub) AS sub FROM changes GROUP BY 1),
totals AS (
  SELECT day_us, coalesce(token, 0)::BIGINT AS tokens_net, coalesce(sub, 0)::BIGINT AS subscriptions_net,
    coalesce(sum(token) OVER so_far, 0)::BIGINT AS tokens,
    coalesce(sum(sub) OVER so_far, 0)::BIGINT AS subscriptions
  FROM (FROM days UNION SELECT day_us FROM net) LEFT JOIN net USING (day_us)
  WINDOW so_far AS (ORDER BY day_us) QUALIFY day_us IN (FROM days))
"""
"For `WITH`: one row per day of the window with active tokens and subscriptions at its end."


@dataclass
class Warehouse:
    """Tables, and the window they are asked for."""

    db: duckdb.DuckDBPyConnection
    window: Window
    limits: Limits
    until: int
    "The end of the time asked for, or now: the journal may have ended before."

    def rows(self, query: str, **more: Any) -> "Rows":
        """A query's rows. `$start`, `$end`, `$until`, `$first_hour` and the limits can be used in it."""
        cursor = self.db.execute(query, used_in(query, {**self.values(), **more}))
        names = [column[0] for column in cursor.description]
        return Rows(names, [dict(zip(names, row, strict=True)) for row in cursor.fetchall()])

    def run(self, query: str, **more: Any) -> None:
        """A statement without an answer."""
        self.db.execute(query, used_in(query, {**self.values(), **more}))

    def values(self) -> dict[str, Any]:
        """What queries may refer to."""
        limits = {name: getattr(self.limits, name) for name in Limits.__slots__}
        window = {"start": self.window.start, "end": self.window.end, "first_hour": self.window.first_hour}
        spans = {"hour": HOUR_US, "day": DAY_US, "minute": MINUTE_US}
        return {**limits, **window, **spans, "until": self.until}


def used_in(query: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a query refers to: DuckDB takes no others."""
    return {name: value for name, value in values.items() if f"${name}" in query}


@contextmanager
def open_warehouse(rollups: Path, window: Window, limits: Limits, now_us: int) -> Iterator[Warehouse]:
    """Load rollups, put impossible times aside and work out all lives."""
    with duckdb.connect() as db:
        yield fill(Warehouse(db, window, limits, min(window.end, now_us)), rollups, now_us)


def fill(warehouse: Warehouse, rollups: Path, now_us: int) -> Warehouse:
    """Make its tables."""
    db = warehouse.db
    for name, query in LOAD.items():
        db.execute(f"CREATE TABLE {name} AS {query} FROM {FILES}", {"files": f"{rollups / name}/*/*.parquet"})
    spans = {"slack": SLACK_US, "earliest": EARLIEST_US, "now": now_us, "day": DAY_US, "hour": HOUR_US}
    run_all(db, CLOCKS, spans)
    run_all(db, ORDERED, {})
    run_all(db, CUT, {"end": warehouse.window.end})
    run_all(db, EPOCHS + "CREATE TABLE history AS SELECT * FROM life;", {})
    run_all(db, LIVES, warehouse.values())
    return warehouse


def run_all(db: duckdb.DuckDBPyConnection, script: str, values: Mapping[str, Any]) -> None:
    """Several statements, each with the values it refers to."""
    for statement in script.split(";"):
        if statement.strip():
            db.execute(statement, used_in(statement, values))
