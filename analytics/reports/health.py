"""Subscription health per SMP server: which servers lose our subscriptions, worst first.

What a server lost counts by its size and by how long it lasted: see `analytics.outages`.
"""

from collections.abc import Mapping

PENALTIES = {
    "not active": "50 * (1 - coalesce(active / nullif(subscriptions, 0), 1))",
    "unavailable": "least(20, 20 * 100 * (1 - coalesce(availability, 1)))",
    "lost subscriptions": "least(15, 30 * coalesce(drift_size / nullif(subscriptions, 0), 0))",
    "outside the service": "5 * (1 - coalesce(service_coverage, 1))",
    "flapping": "least(10, 5 * coalesce(flaps / nullif(subscriptions, 0), 0))",
    "disconnects": "least(10, disconnects / greatest(1, (:end - :start) / :day))",
    "slow to recover": "least(10, coalesce(mean_recover_s, 0) / 60)",
}
"Points that a server loses, by reason."
POINTS = ", ".join(f"{points} AS `for {reason}`" for reason, points in PENALTIES.items())
LOST_POINTS = " - ".join(f"`for {reason}`" for reason in PENALTIES)
REASONS = ", ".join(f"CASE WHEN `for {reason}` >= 1 THEN '{reason}' END" for reason in PENALTIES)

COUNTED = (
    "subscriptions believed inactive pending ended auth deleted error flaps drift_events drift_size"
    " disconnects open_outages lost_now down_now"
)
"Of a server with no such rows 0; anything else is unknown then."
COUNTS = ", ".join(f"coalesce({name}, 0) AS {name}" for name in COUNTED.split())

TABLES: Mapping[str, str] = {
    # How well is each router?
    "health": f"""
WITH st AS (
  SELECT *, subscriptions - believed - inactive - pending - ended - auth - deleted AS error FROM (
    SELECT server, count(*) AS subscriptions, count_if(status = 'ACTIVE') AS believed,
      count_if(status = 'INACTIVE') AS inactive, count_if(status IN ('NEW', 'PENDING')) AS pending,
      count_if(status = 'END') AS ended, count_if(status = 'AUTH') AS auth,
      count_if(status = 'DELETED') AS deleted,
      max(CASE WHEN status = 'ACTIVE' THEN :end ELSE last_active_us END) AS last_active_us
    FROM states GROUP BY server)),
held AS (
  SELECT server, sum(CAST(
    greatest(0, least(coalesce(gone_us, :end), :end) - greatest(first_us, :start)) AS DECIMAL(20))) AS sub_us
  FROM subs GROUP BY server),
ev AS (
  SELECT server, count_if(event = 'sub_status_changed' AND status_from = 'ACTIVE') AS flaps,
    count_if(event = 'smp_drift') AS drift_events,
    sum(abs(expected - `count`)) FILTER (WHERE event = 'smp_drift') AS drift_size,
    max_by(`count` / nullif(total, 0), struct(us, writer, seq))
      FILTER (WHERE event = 'smp_service_subscribed' AND `count` / nullif(total, 0) IS NOT NULL)
      AS service_coverage
  FROM life WHERE us >= :start AND server IS NOT NULL GROUP BY server),
away AS (
  SELECT server, count_if(kind = 'disconnected' AND start_us >= :start) AS disconnects,
    avg(heal_us) FILTER (WHERE kind = 'disconnected') / 1e6 AS mean_recover_s,
    max(heal_us) FILTER (WHERE kind <> 'disconnected') / 1e6 AS longest_heal_s,
    count_if(end_us IS NULL) AS open_outages,
    sum(size) FILTER (WHERE end_us IS NULL AND kind = 'lost') AS lost_now,
    sum(size) FILTER (WHERE end_us IS NULL AND kind <> 'lost') AS down_now,
    sum(CAST(size AS DECIMAL(14)) * CAST(greatest(0, least(coalesce(end_us, :end), :end)
      - greatest(start_us, :start)) AS DECIMAL(20))) AS lost_us
  FROM outages WHERE coalesce(end_us, :end) >= :start GROUP BY server),
i AS (
  SELECT server, last_active_us, mean_recover_s, longest_heal_s, service_coverage, lost_us, sub_us, {COUNTS}
  FROM st FULL JOIN ev USING (server) FULL JOIN away USING (server) LEFT JOIN held USING (server)),
j AS (
  SELECT *, greatest(0, least(believed - lost_now, subscriptions - lost_now - down_now)) AS active,
    greatest(0, 1 - CAST(coalesce(lost_us, 0) AS DOUBLE) / CAST(nullif(sub_us, 0) AS DOUBLE)) AS availability
  FROM i),
k AS (
  SELECT *, active / nullif(subscriptions, 0) AS active_share, {POINTS} FROM j)
SELECT server, greatest(0, 100 - {LOST_POINTS}) AS score, concat_ws(', ', {REASONS}) AS reasons,
  subscriptions, active, active_share, greatest(0, believed - active) AS lost, inactive, pending, ended, auth,
  deleted, error, availability, (:end - last_active_us) / 1e6 AS seconds_since_active, flaps, disconnects,
  mean_recover_s, drift_events, drift_size, longest_heal_s, open_outages, service_coverage
FROM k ORDER BY score, server NULLS LAST""",
    # Which subscriptions got no notifications, of how many, from when to when?
    "health_outages": """
WITH moves AS (
  SELECT server, first_us AS us, 1 AS change FROM subs
  UNION ALL SELECT server, greatest(first_us, gone_us), -1 FROM subs WHERE gone_us IS NOT NULL),
placed AS (
  SELECT server, us, change, CAST(NULL AS STRING) AS kind, CAST(NULL AS BIGINT) AS end_us,
    CAST(NULL AS BIGINT) AS size, CAST(NULL AS BIGINT) AS heal_us FROM moves
  UNION ALL SELECT server, start_us, 0, kind, end_us, size, heal_us FROM outages),
summed AS (SELECT *, sum(change) OVER (PARTITION BY server ORDER BY us) AS living FROM placed)
SELECT server, kind, us AS start, end_us AS `end`, size AS subscriptions,
  greatest(size, living) AS of_subscriptions, heal_us / 1e6 AS heal_s, end_us IS NULL AS is_open
FROM summed WHERE kind IS NOT NULL AND coalesce(end_us, :end) >= :start
ORDER BY start, server NULLS LAST, kind, end_us""",
    # How many subscriptions of each router were active and how many lost, hour by hour?
    "health_hours": """
WITH taken AS (
  SELECT server, us - us % :hour AS hour_us, us,
    coalesce(sum(`count`) FILTER (WHERE status_to = 'ACTIVE'), 0) AS believed,
    coalesce(sum(`count`) FILTER (WHERE status_to IN ('NEW', 'PENDING')), 0) AS pending
  FROM life l WHERE event = 'smp_sampled' AND us >= :start
    AND NOT EXISTS (SELECT 1 FROM outages o WHERE o.server = l.server AND o.kind <> 'lost'
      AND l.us BETWEEN o.start_us AND coalesce(o.end_us, :end))  -- what is lost must not count twice
  GROUP BY server, us),
sampled AS (
  SELECT server, hour_us, max_by(believed, us) AS believed, max_by(pending, us) AS pending
  FROM taken GROUP BY server, hour_us),
net AS (
  SELECT server, hour_us, sum(sub) AS net FROM changes WHERE server IS NOT NULL GROUP BY server, hour_us),
parts AS (
  SELECT *, start_us - start_us % :hour AS from_us, coalesce(end_us, :end) AS to_us FROM outages
  WHERE coalesce(end_us, :end) >= :start),
spread AS (
  SELECT *, explode(CASE WHEN to_us > from_us THEN sequence(from_us, to_us - 1, :hour) END) AS hour_us
  FROM parts),
lost AS (
  SELECT server, hour_us, max(size) AS lost,
    sum(size * (least(to_us, hour_us + :hour) - greatest(start_us, hour_us))) / 1e6 AS lost_seconds
  FROM spread WHERE hour_us >= :first_hour GROUP BY server, hour_us),
got AS (
  SELECT server, hour_us, sum(entries) AS received FROM traffic
  WHERE event = 'ntf_received' AND hour_us >= :first_hour GROUP BY server, hour_us),
known AS (
  SELECT server, hour_us, believed, pending, coalesce(lost, 0) AS lost,
    coalesce(lost_seconds, 0) AS lost_seconds, coalesce(received, 0) AS received, true AS is_known
  FROM sampled FULL JOIN lost USING (server, hour_us) FULL JOIN got USING (server, hour_us)
  WHERE server IS NOT NULL),
summed AS (
  SELECT *, sum(net) OVER (PARTITION BY server ORDER BY hour_us) AS subscriptions
  FROM known FULL JOIN net USING (server, hour_us))
SELECT server, hour_us AS hour, subscriptions,
  CAST(greatest(0, round(coalesce(believed, subscriptions) - lost_seconds / 3600)) AS BIGINT) AS active,
  coalesce(pending, 0) AS pending, lost, lost_seconds, received
FROM summed WHERE is_known ORDER BY server, hour""",
}
