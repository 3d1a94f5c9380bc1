"""Every table of every report once more, in DuckDB: an independent computation to compare with.

Written from the documentation of the reports, in another language and with other means (window functions
where Spark aggregates, joins where Spark uses windows). Times are microseconds.
"""

from collections.abc import Mapping
from typing import Any

import duckdb

from analytics.inputs import Limits, Window

DAY = 86_400_000_000
HOUR = 3_600_000_000
MINUTE = 60_000_000

VIEWS = """
CREATE TEMP TABLE ev AS
WITH once AS (SELECT DISTINCT ON (writer, seq) *, epoch_us(time) AS told,
  event IN ('ntf_received', 'cron_sent') OR starts_with(event, 'push_') AS is_traffic FROM {source}),
placed AS (SELECT *, CASE WHEN is_traffic THEN told ELSE max(told) FILTER (NOT is_traffic)
  OVER (PARTITION BY writer ORDER BY seq) END AS us FROM once)
SELECT * FROM placed WHERE us < {end};

CREATE TEMP VIEW win AS SELECT * FROM ev WHERE us >= {start};

CREATE TEMP VIEW sub_rows AS
SELECT *, CASE WHEN event = 'sub_created' THEN coalesce(status_to, 'NEW') ELSE status_to END AS status,
       row_number() OVER (PARTITION BY subscription ORDER BY time DESC, writer DESC, seq DESC) AS back
FROM ev WHERE event IN ('sub_created', 'sub_status_changed', 'sub_deleted') AND subscription IS NOT NULL;

CREATE TEMP VIEW sub_last_status AS
SELECT subscription, status, us FROM sub_rows WHERE status IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY subscription ORDER BY back) = 1;

CREATE TEMP TABLE lives AS
SELECT s.subscription, any_value(s.server) AS server, any_value(s.token) AS token, min(s.us) AS first_us,
       any_value(l.status) AS own_status, any_value(l.us) AS own_us,
       max(s.us) FILTER (s.status = 'ACTIVE' OR s.status_from = 'ACTIVE') AS active_us,
       least(min(s.us) FILTER (s.event = 'sub_deleted'),
             (SELECT min(t.us) FROM ev t WHERE t.event = 'token_deleted' AND t.token = any_value(s.token))
       ) AS gone_us
FROM sub_rows s LEFT JOIN sub_last_status l USING (subscription) GROUP BY s.subscription;

CREATE TEMP TABLE contacts AS
SELECT server, max(us) FILTER (event = 'smp_disconnected') AS lost_us,
       max(us) FILTER (event = 'smp_service_subscribed') AS service_us,
       max(us) FILTER (event IN ('smp_connected', 'smp_service_subscribed', 'ntf_received')
                       OR (starts_with(event, 'sub_') AND status_to = 'ACTIVE')) AS contact_us,
       min(us) AS first_us
FROM ev WHERE server IS NOT NULL GROUP BY server;

CREATE TEMP TABLE states AS
SELECT l.subscription, l.token, l.server, l.first_us,
       CASE WHEN cut THEN 'INACTIVE' ELSE own_status END AS status,
       CASE WHEN cut THEN lost_us ELSE active_us END AS last_active_us
FROM (SELECT l.*, c.lost_us, coalesce(own_status = 'ACTIVE' AND c.lost_us > own_us
             AND NOT coalesce(c.service_us > c.lost_us, false), false) AS cut
      FROM lives l LEFT JOIN contacts c USING (server) WHERE gone_us IS NULL) l;

CREATE TEMP TABLE token_now AS
SELECT token, any_value(provider) AS provider, min(us) AS first_us,
       (SELECT t.event FROM ev t WHERE t.token = e.token AND starts_with(t.event, 'token_')
        ORDER BY t.time DESC, t.writer DESC, t.seq DESC LIMIT 1) AS last_event
FROM ev e WHERE starts_with(event, 'token_') AND token IS NOT NULL
GROUP BY token HAVING count(*) FILTER (event = 'token_deleted') = 0;

CREATE TEMP TABLE dead AS
SELECT n.*, p.last_push, {end} - coalesce(p.last_push, n.first_us) AS silent_us
FROM token_now n LEFT JOIN (SELECT token, max(us) AS last_push FROM ev
  WHERE event IN ('push_sent', 'cron_sent') GROUP BY token) p USING (token)
WHERE {end} - coalesce(p.last_push, n.first_us) >= {dead_token_days} * {DAY};

CREATE TEMP TABLE token_change AS
SELECT us, active - coalesce(lag(active) OVER (PARTITION BY token ORDER BY time, writer, seq), 0) AS change
FROM (SELECT *, CASE WHEN event = 'token_verified' THEN 1 ELSE 0 END AS active FROM ev WHERE token IS NOT NULL
      AND event IN ('token_verified', 'token_replaced', 'token_deleted', 'token_invalid'));

CREATE TEMP TABLE days AS
SELECT unnest(range({start} - {start} % {DAY}, {end}, {DAY})) AS day;
"""

LATENCIES = ", ".join(f"quantile_disc(latency_us, 0.{p}) / 1000 AS latency_ms_p{p}" for p in (50, 95, 99))

TABLES: Mapping[str, str] = {
    "delivery_providers": """
SELECT provider, count(*) FILTER (event = 'push_sent') AS sent,
  count(*) FILTER (event = 'push_failed') AS failed,
  count(*) FILTER (event = 'push_retried') AS retried,
  coalesce(sum(coalesce("count", 1)) FILTER (event = 'push_sent'), 0) AS entries,
  coalesce(sum(total - "count") FILTER (event = 'push_sent'), 0) AS sent_again,
  coalesce(sum(coalesce("count", 1)) FILTER (event = 'push_coalesced'), 0) AS coalesced,
  coalesce(sum(coalesce("count", 1)) FILTER (event = 'push_trimmed'), 0) AS trimmed,
  count(*) FILTER (event = 'cron_sent') AS periodic,
  sent / nullif(sent + failed, 0) AS success_rate, failed / nullif(sent + failed, 0) AS failure_rate,
  retried / nullif(sent + failed + retried, 0) AS retry_rate, entries / nullif(sent, 0) AS coalescing_factor,
  quantile_disc(latency_us, 0.5) FILTER (event = 'push_sent') / 1000 AS latency_ms_p50,
  quantile_disc(latency_us, 0.95) FILTER (event = 'push_sent') / 1000 AS latency_ms_p95,
  quantile_disc(latency_us, 0.99) FILTER (event = 'push_sent') / 1000 AS latency_ms_p99
FROM win WHERE (starts_with(event, 'push_') OR event = 'cron_sent') AND provider IS NOT NULL
GROUP BY provider""",
    "delivery_hours": f"""
SELECT us - us % {HOUR} AS hour, count(*) AS pushes, sum(coalesce("count", 1)) AS entries, {LATENCIES}
FROM win WHERE event = 'push_sent' GROUP BY hour""",
    "delivery_latency": f"""
SELECT us - us % {HOUR} AS hour, provider, server,
  count(*) AS pushes, sum(coalesce("count", 1)) AS entries, {LATENCIES}
FROM win WHERE event = 'push_sent' GROUP BY ALL""",
    "delivery_errors": """
WITH a AS (SELECT * FROM win
  WHERE event IN ('push_sent', 'push_failed', 'push_retried') AND provider IS NOT NULL)
SELECT *, pushes / attempts AS share FROM (
  SELECT provider, event AS outcome, coalesce(error, 'unknown') AS error, count(*) AS pushes,
    (SELECT count(*) FROM a b WHERE b.provider = a.provider) AS attempts
  FROM a WHERE event <> 'push_sent' GROUP BY provider, outcome, coalesce(error, 'unknown'))""",
    "tokens_funnel": """
WITH t AS (SELECT token, min(us) FILTER (event = 'token_registered') AS r,
    min(us) FILTER (event = 'token_confirmed') AS c, min(us) FILTER (event = 'token_verified') AS a
  FROM ev WHERE token IS NOT NULL GROUP BY token HAVING r >= {start})
SELECT 'registered' AS stage, count(r) AS tokens, count(r) / nullif(count(r), 0) AS share,
  NULL AS seconds_p50, NULL AS seconds_p95 FROM t
UNION ALL SELECT 'confirmed', count(c), count(c) / nullif(count(r), 0),
  quantile_cont(c - r, 0.5) / 1e6, quantile_cont(c - r, 0.95) / 1e6 FROM t
UNION ALL SELECT 'active', count(a), count(a) / nullif(count(r), 0),
  quantile_cont(a - c, 0.5) / 1e6, quantile_cont(a - c, 0.95) / 1e6 FROM t""",
    "tokens_churn": """
WITH w AS (SELECT us - us % {DAY} AS day, event FROM win WHERE starts_with(event, 'token_'))
SELECT *, (deleted + invalid) / nullif(active_at_start, 0) AS churn_rate FROM (
SELECT d.day, count(*) FILTER (event = 'token_registered') AS registered,
  count(*) FILTER (event = 'token_confirmed') AS confirmed,
  count(*) FILTER (event = 'token_verified') AS verified,
  count(*) FILTER (event = 'token_replaced') AS replaced,
  count(*) FILTER (event = 'token_deleted') AS deleted,
  count(*) FILTER (event = 'token_invalid') AS invalid,
  coalesce((SELECT sum(change) FROM token_change c WHERE c.us < d.day), 0) AS active_at_start,
  coalesce((SELECT sum(change) FROM token_change c WHERE c.us < d.day + {DAY}), 0) AS active_at_end
FROM days d LEFT JOIN w USING (day) GROUP BY d.day)""",
    "tokens_invalid": """
SELECT coalesce(provider, 'unknown') AS provider, coalesce(error, 'unknown') AS reason, count(*) AS tokens,
  tokens / sum(count(*)) OVER (PARTITION BY coalesce(provider, 'unknown')) AS share
FROM win WHERE event = 'token_invalid' GROUP BY coalesce(provider, 'unknown'), coalesce(error, 'unknown')""",
    "tokens_dead": """
SELECT lower(hex(token)) AS token, provider, last_event, last_push, silent_us / {DAY} AS silent_days,
  (SELECT count(*) FROM states s WHERE s.token = dead.token) AS subscriptions FROM dead""",
    "stale_subscriptions": """
WITH s AS (SELECT s.*, coalesce(s.status, 'unknown') AS st,
    CASE WHEN c.contact_us IS NULL THEN c.first_us WHEN c.lost_us > c.contact_us THEN c.lost_us END AS down_us
  FROM states s LEFT JOIN contacts c USING (server)),
r AS (SELECT *, concat_ws(', ',
    CASE WHEN last_active_us IS NULL AND first_us <= {end} - {never_active_days} * {DAY}
      THEN 'never active' END,
    CASE WHEN st <> 'ACTIVE' AND last_active_us <= {end} - {inactive_days} * {DAY}
      THEN 'inactive too long' END,
    CASE WHEN down_us <= {end} - {unreachable_days} * {DAY} THEN 'server unreachable' END,
    CASE WHEN token IN (SELECT token FROM dead) THEN 'dead token' END) AS reasons FROM s)
SELECT lower(hex(subscription)) AS subscription, lower(hex(token)) AS token, server, st AS status,
  first_us AS first_seen, last_active_us AS last_active, reasons FROM r WHERE reasons <> ''""",
    "stale_summary": """
SELECT server, reason, count(*) AS subscriptions
FROM (SELECT server, unnest(string_split(reasons, ', ')) AS reason FROM ({stale_subscriptions}))
GROUP BY ALL""",
    "incidents_gaps": """
WITH r AS (SELECT server, us - us % {HOUR} AS hour, sum(coalesce("count", 1)) AS n FROM ev
  WHERE event = 'ntf_received' AND server IS NOT NULL GROUP BY ALL),
h AS (SELECT server,
    unnest(range(min(hour) + {HOUR}, (SELECT max(us) - max(us) % {HOUR} FROM ev), {HOUR})) AS hour
  FROM r GROUP BY server),
f AS (SELECT server, hour, coalesce(n, 0) AS received FROM h LEFT JOIN r USING (server, hour)),
b AS (SELECT *, CASE WHEN count(*) OVER week >= 3 THEN median(received) OVER week
    WHEN count(*) OVER day >= 3 THEN median(received) OVER day END AS baseline FROM f
  WINDOW week AS (PARTITION BY server, hour // {HOUR} % 168),
    day AS (PARTITION BY server, hour // {HOUR} % 24)),
l AS (SELECT * FROM b WHERE baseline > 0 AND received <= {gap_share} * baseline
  AND baseline - received >= {gap_sigmas} * sqrt(baseline)),
m AS (SELECT *, sum(fresh) OVER (PARTITION BY server ORDER BY hour) AS run FROM (SELECT *,
  CASE WHEN lag(hour) OVER (PARTITION BY server ORDER BY hour) = hour - {HOUR} THEN 0 ELSE 1 END AS fresh
  FROM l))
SELECT server, min(hour) AS start, max(hour) + {HOUR} AS "end", sum(received) AS received,
  sum(baseline) AS expected, expected - sum(received) AS missed
FROM m GROUP BY server, run HAVING max(hour) + {HOUR} > {start}""",
    "incidents_disconnects": """
WITH d AS (SELECT server, changed, us, us - us % {MINUTE} AS minute FROM win e
    WHERE event = 'smp_disconnected'
    AND server IS NOT NULL),
starts AS (SELECT DISTINCT minute AS m FROM d UNION SELECT DISTINCT minute - {MINUTE} FROM d),
p AS (SELECT m, count(DISTINCT server) AS servers, (SELECT count(DISTINCT server) FROM ev
      WHERE us // {DAY} = (m + {MINUTE}) // {DAY}) AS seen
  FROM starts JOIN d ON d.minute >= m AND d.minute < m + 2 * {MINUTE} GROUP BY m
  HAVING count(DISTINCT server) >= {mass_servers}),
q AS (SELECT *, sum(fresh) OVER (ORDER BY m) AS run FROM (SELECT *,
  CASE WHEN lag(m) OVER (ORDER BY m) = m - {MINUTE} THEN 0 ELSE 1 END AS fresh
  FROM p WHERE servers >= {mass_share} * seen)),
spans AS (SELECT run, min(m) AS a, max(m) + 2 * {MINUTE} AS b, max(seen) AS seen FROM q GROUP BY run)
SELECT min(us) AS start, max(us) AS "end", count(DISTINCT server) AS servers, max(seen) AS servers_seen,
  coalesce(sum(changed), 0) AS subscriptions FROM spans JOIN d ON d.us >= a AND d.us < b GROUP BY run""",
    "incidents_restarts": """
WITH p AS (SELECT writer, min(us) AS first_us, max(us) AS last_us,
    bool_or(event = 'server_stopped') AS stopped,
    min(us) FILTER (event = 'server_started') AS started, max(daemon) AS daemon
  FROM ev WHERE event NOT IN ('ntf_received', 'cron_sent') AND NOT starts_with(event,
    'push_') GROUP BY writer),
q AS (SELECT *, lag(last_us) OVER (ORDER BY first_us, writer) AS before,
    lag(stopped) OVER (ORDER BY first_us, writer) AS clean FROM p),
n AS (SELECT writer, "count" AS n FROM ev WHERE event = 'server_started'
  QUALIFY row_number() OVER (PARTITION BY writer ORDER BY time, seq) = 1),
a AS (SELECT writer, min(us) AS us, 1 AS k FROM ev e
    WHERE event = 'sub_status_changed' AND status_to = 'ACTIVE'
    AND subscription IS NOT NULL AND (writer, subscription) NOT IN (SELECT (writer, subscription) FROM ev
      WHERE event = 'sub_created' AND subscription IS NOT NULL) GROUP BY writer, subscription
  UNION ALL SELECT writer, us, coalesce("count", 1) FROM ev WHERE event = 'sub_status_changed'
    AND status_to = 'ACTIVE' AND subscription IS NULL
  UNION ALL (SELECT writer, us, "count" FROM ev WHERE event = 'smp_service_subscribed'
    QUALIFY row_number() OVER (PARTITION BY writer, server ORDER BY time, seq) = 1)),
c AS (SELECT writer, us, sum(k) OVER (PARTITION BY writer ORDER BY us) AS done FROM a),
r AS (SELECT c.writer, min(c.us) AS done_us FROM c JOIN n USING (writer)
  WHERE n.n > 0 AND c.done * 100 >= n.n * 99 GROUP BY c.writer)
SELECT started AS start, done_us AS "end", daemon, n.n AS subscriptions, (started - before) / 1e6 AS down_s,
  clean, (done_us - started) / 1e6 AS restore_s, 0 AS others_running
FROM q JOIN n USING (writer) LEFT JOIN r USING (writer) WHERE started >= {start}""",
    "capacity_daily": """
WITH sc AS (SELECT first_us AS us, 1 AS k FROM lives
  UNION ALL SELECT gone_us, -1 FROM lives WHERE gone_us IS NOT NULL)
SELECT d.day, coalesce((SELECT sum(change) FROM token_change WHERE us < d.day + {DAY}), 0) AS tokens,
  coalesce((SELECT sum(change) FROM token_change WHERE us >= d.day AND us < d.day + {DAY}), 0) AS tokens_net,
  coalesce((SELECT sum(k) FROM sc WHERE us < d.day + {DAY}), 0) AS subscriptions,
  coalesce((SELECT sum(k) FROM sc WHERE us >= d.day AND us < d.day + {DAY}), 0) AS subscriptions_net,
  coalesce(sum(coalesce("count", 1)) FILTER (event = 'ntf_received'), 0) AS notifications,
  count(*) FILTER (event = 'push_sent') AS pushes,
  count(DISTINCT token) FILTER (event = 'ntf_received') AS receiving_tokens,
  notifications / nullif(receiving_tokens, 0) AS notifications_per_token
FROM days d LEFT JOIN win ON us - us % {DAY} = d.day AND event IN ('ntf_received', 'push_sent')
GROUP BY d.day""",
}


class Reference:
    """The reports' tables over one journal, computed by DuckDB."""

    def __init__(self, files: str, window: Window, limits: Limits) -> None:
        names = {f: getattr(limits, f) for f in limits.__slots__}
        source = f"read_parquet('{files}', hive_partitioning = false)"
        self._values = {
            **names,
            "start": window.start,
            "end": window.end,
            "DAY": DAY,
            "HOUR": HOUR,
            "MINUTE": MINUTE,
            "source": source,
        }
        self._db = duckdb.connect()
        self._db.execute("SET TimeZone = 'UTC'")
        self._db.execute(VIEWS.format(**self._values))

    def _query(self, name: str) -> str:
        inner = {
            n: q.format(**self._values)
            for n, q in TABLES.items()
            if n in ("stale_subscriptions", "capacity_daily")
        }
        return TABLES[name].format(**self._values, **inner)

    def table(self, name: str) -> list[dict[str, Any]]:
        """All rows of a table, in no order."""
        result = self._db.execute(self._query(name))
        columns = [column[0] for column in result.description or []]
        return [dict(zip(columns, row, strict=True)) for row in result.fetchall()]

    def close(self) -> None:
        """Free the database."""
        self._db.close()
