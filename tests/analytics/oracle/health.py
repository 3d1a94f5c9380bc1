"""Subscription health per SMP server: which servers lose our subscriptions, worst first.

What a server lost counts by its size and by how long it lasted: see `analytics.outages`.
"""

from analytics.outages import RouterLog
from tests.analytics.oracle.warehouse import Rows, Warehouse

OUTAGE_EVENTS = """
SELECT server, epoch, us, event, changed, "count", expected, total, latency_us FROM (
  SELECT * FROM life WHERE event IN ('smp_connected', 'smp_disconnected', 'smp_service_subscribed',
    'smp_service_reset', 'smp_drift', 'smp_healed')
  UNION ALL BY NAME
  SELECT server, epoch, us, 'regained' AS event, count(*) AS "count", min(writer) AS writer, min(seq) AS seq
  FROM life WHERE event = 'sub_status_changed' AND status_from = 'INACTIVE' AND status_to = 'ACTIVE'
  GROUP BY server, epoch, us)
ORDER BY us, writer, seq
"""

OUTAGES = """
CREATE TABLE outages (server VARCHAR, kind VARCHAR, start_us BIGINT, size BIGINT, end_us BIGINT,
  heal_us BIGINT)
"""

LISTED = """
SELECT o.server, o.kind, o.start_us AS start, o.end_us AS "end", o.size AS subscriptions,
  greatest(o.size, (SELECT count(*) FROM subs s WHERE s.server = o.server AND s.first_us <= o.start_us
    AND coalesce(s.gone_us, $end) > o.start_us)) AS of_subscriptions,
  o.heal_us / 1e6 AS heal_s, o.end_us IS NULL AS is_open
FROM outages o WHERE coalesce(o.end_us, $end) >= $start ORDER BY o.start_us, o.server
"""

PENALTIES = {
    "not active": "50 * (1 - coalesce(active / nullif(subscriptions, 0), 1))",
    "unavailable": "least(20, 20 * 100 * (1 - coalesce(availability, 1)))",
    "lost subscriptions": "least(15, 30 * coalesce(drift_size / nullif(subscriptions, 0), 0))",
    "outside the service": "5 * (1 - coalesce(service_coverage, 1))",
    "flapping": "least(10, 5 * coalesce(flaps / nullif(subscriptions, 0), 0))",
    "disconnects": "least(10, disconnects / greatest(1, ($end - $start) / $day))",
    "slow to recover": "least(10, coalesce(mean_recover_s, 0) / 60)",
}
"Points that a server loses, by reason."
POINTS = ", ".join(f'{points} AS "for {reason}"' for reason, points in PENALTIES.items())
LOST_POINTS = " - ".join(f'"for {reason}"' for reason in PENALTIES)
REASONS = ", ".join(f"CASE WHEN \"for {reason}\" >= 1 THEN '{reason}' END" for reason in PENALTIES)

NOT_COUNTED = "last_active_us, mean_recover_s, longest_heal_s, service_coverage, lost_us, sub_us"
"Unknown where others are 0, of a server with no such rows."

HEALTH = f"""
WITH st AS (
  SELECT server, count(*) AS subscriptions, count(*) FILTER (status = 'ACTIVE') AS believed,
    count(*) FILTER (status = 'INACTIVE') AS inactive,
    count(*) FILTER (status IN ('NEW', 'PENDING')) AS pending, count(*) FILTER (status = 'END') AS ended,
    count(*) FILTER (status = 'AUTH') AS auth, count(*) FILTER (status = 'DELETED') AS deleted,
    subscriptions - believed - inactive - pending - ended - auth - deleted AS error,
    max(CASE WHEN status = 'ACTIVE' THEN $end ELSE last_active_us END) AS last_active_us
  FROM states GROUP BY server),
held AS (
  SELECT server, sum(greatest(0, least(coalesce(gone_us, $end), $end) - greatest(first_us, $start))) AS sub_us
  FROM subs GROUP BY server),
ev AS (
  SELECT server, count(*) FILTER (event = 'sub_status_changed' AND status_from = 'ACTIVE') AS flaps,
    count(*) FILTER (event = 'smp_drift') AS drift_events,
    coalesce(sum(abs(expected - "count")) FILTER (event = 'smp_drift'), 0) AS drift_size,
    arg_max("count" / nullif(total, 0), us) FILTER (event = 'smp_service_subscribed') AS service_coverage
  FROM life WHERE us >= $start AND server IS NOT NULL GROUP BY server),
out AS (
  SELECT server, count(*) FILTER (kind = 'disconnected' AND start_us >= $start) AS disconnects,
    avg(heal_us) FILTER (kind = 'disconnected') / 1e6 AS mean_recover_s,
    max(heal_us) FILTER (kind <> 'disconnected') / 1e6 AS longest_heal_s,
    count(*) FILTER (end_us IS NULL) AS open_outages,
    coalesce(sum(size) FILTER (end_us IS NULL AND kind = 'lost'), 0) AS lost_now,
    coalesce(sum(size) FILTER (end_us IS NULL AND kind <> 'lost'), 0) AS down_now,
    sum(size * greatest(0, least(coalesce(end_us, $end), $end) - greatest(start_us, $start))) AS lost_us
  FROM outages WHERE coalesce(end_us, $end) >= $start GROUP BY server),
i AS (
  SELECT server, {NOT_COUNTED}, coalesce(COLUMNS(* EXCLUDE (server, {NOT_COUNTED})), 0)
  FROM st FULL JOIN ev USING (server) FULL JOIN out USING (server) LEFT JOIN held USING (server)),
j AS (
  SELECT *, greatest(0, least(believed - lost_now, subscriptions - lost_now - down_now)) AS active,
    greatest(0, 1 - coalesce(lost_us, 0) / nullif(sub_us, 0)) AS availability FROM i),
k AS (
  SELECT *, active / nullif(subscriptions, 0) AS active_share, {POINTS} FROM j)
SELECT server, greatest(0, 100 - {LOST_POINTS}) AS score, concat_ws(', ', {REASONS}) AS reasons,
  subscriptions, active, active_share, greatest(0, believed - active) AS lost, inactive, pending, ended, auth,
  deleted, error, availability, ($end - last_active_us) / 1e6 AS seconds_since_active, flaps, disconnects,
  mean_recover_s, drift_events, drift_size, longest_heal_s, open_outages, service_coverage
FROM k ORDER BY score, server
"""

HOURS = """
WITH taken AS (
  SELECT server, us - us % $hour AS hour_us, us,
    coalesce(sum("count") FILTER (status_to = 'ACTIVE'), 0) AS believed,
    coalesce(sum("count") FILTER (status_to IN ('NEW', 'PENDING')), 0) AS pending
  FROM life l WHERE event = 'smp_sampled' AND us >= $start
    AND NOT EXISTS (FROM outages o WHERE o.server = l.server AND o.kind <> 'lost'
      AND l.us BETWEEN o.start_us AND coalesce(o.end_us, $end))  -- what is lost must not count twice
  GROUP BY ALL),
sampled AS (
  SELECT server, hour_us, arg_max(believed, us) AS believed, arg_max(pending, us) AS pending
  FROM taken GROUP BY ALL),
net AS (SELECT server, us - us % $hour AS hour_us, sum(change) AS net FROM sub_changes GROUP BY ALL),
level AS (
  SELECT server, hour_us, sum(net) OVER (PARTITION BY server ORDER BY hour_us) AS subscriptions FROM net),
lost AS (
  SELECT server, hour_us, max(size) AS lost, sum(size * (least(coalesce(end_us, $end), hour_us + $hour)
      - greatest(start_us, hour_us))) / 1e6 AS lost_seconds
  FROM (SELECT *, unnest(range(start_us - start_us % $hour, coalesce(end_us, $end), $hour)) AS hour_us
        FROM outages WHERE coalesce(end_us, $end) >= $start)
  WHERE hour_us >= $first_hour GROUP BY ALL),
got AS (
  SELECT server, hour_us, sum(entries) AS received FROM hours
  WHERE event = 'ntf_received' AND hour_us >= $first_hour GROUP BY ALL),
known AS (
  SELECT server, hour_us, believed, pending, coalesce(lost, 0) AS lost,
    coalesce(lost_seconds, 0) AS lost_seconds, coalesce(received, 0) AS received
  FROM sampled FULL JOIN lost USING (server, hour_us) FULL JOIN got USING (server, hour_us)
  WHERE server IS NOT NULL)
SELECT k.server, k.hour_us AS hour, subscriptions::BIGINT AS subscriptions,
  greatest(0, round(coalesce(believed, subscriptions) - lost_seconds / 3600))::BIGINT AS active,
  coalesce(pending, 0)::BIGINT AS pending, lost, lost_seconds, received
FROM known k ASOF LEFT JOIN level l ON k.server = l.server AND k.hour_us >= l.hour_us ORDER BY 1, 2
"""


def tables(warehouse: Warehouse) -> dict[str, Rows]:
    """The report's tables by name."""
    add_outages(warehouse)
    return {
        "health": warehouse.rows(HEALTH),
        "health_outages": warehouse.rows(LISTED),
        "health_hours": warehouse.rows(HOURS),
    }


def add_outages(warehouse: Warehouse) -> None:
    """Make the table `outages`."""
    over = warehouse.rows("SELECT epoch, until_us FROM epochs WHERE until_us IS NOT NULL")
    ends = {row["epoch"]: row["until_us"] for row in over}
    logs: dict[tuple[str, int], RouterLog] = {}
    for row in warehouse.rows(OUTAGE_EVENTS):
        logs.setdefault((row["server"], row["epoch"]), RouterLog(row["server"])).see(row)
    for (_, epoch), log in logs.items():
        if epoch in ends:
            log.end(ends[epoch])
    found = [outage for log in logs.values() for outage in log.outages]
    warehouse.db.execute(OUTAGES)
    rows = [(o.server, o.kind, o.start_us, o.size, o.end_us, o.heal_us) for o in found]
    if rows:
        warehouse.db.executemany("INSERT INTO outages VALUES (?, ?, ?, ?, ?, ?)", rows)
