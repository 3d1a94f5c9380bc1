"""Incidents: gaps in received notifications, mass disconnects, and what restarts cost."""

from analytics.warehouse import Rows, Warehouse

ENOUGH_SAMPLES = 3  # fewer and one bad week would be half of its own baseline
RESTORED_PERCENT = 99

GAPS = f"""
WITH got AS (SELECT server, hour_us, sum(entries) AS received FROM hours
             WHERE event = 'ntf_received' AND server IS NOT NULL GROUP BY ALL),
whole AS (SELECT server, unnest(range(min(hour_us) + $hour, $end - $end % $hour, $hour)) AS hour_us
          FROM got GROUP BY server),
filled AS (SELECT server, hour_us, coalesce(received, 0) AS received
           FROM whole LEFT JOIN got USING (server, hour_us)),
usual AS (
  SELECT *, CASE WHEN count(*) OVER week >= {ENOUGH_SAMPLES} THEN median(received) OVER week
                 WHEN count(*) OVER daily >= {ENOUGH_SAMPLES} THEN median(received) OVER daily END AS baseline
  FROM filled WINDOW week AS (PARTITION BY server, hour_us // $hour % 168),
                     daily AS (PARTITION BY server, hour_us // $hour % 24)),
low AS (
  SELECT *, hour_us - $hour * row_number() OVER (PARTITION BY server ORDER BY hour_us) AS island FROM usual
  WHERE baseline > 0 AND baseline - received >= $gap_sigmas * sqrt(baseline)
    AND received <= $gap_share * baseline)
SELECT server, min(hour_us) AS start, max(hour_us) + $hour AS "end", sum(received)::BIGINT AS received,
  sum(baseline) AS expected, sum(baseline) - sum(received) AS missed
FROM low GROUP BY server, island HAVING max(hour_us) + $hour > $start ORDER BY start, server
"""

MASS = """
WITH d AS (
  SELECT server, changed, us, us - us % $minute AS minute_us FROM life
  WHERE event = 'smp_disconnected' AND us >= $start),
seen AS (
  SELECT day_us, count(DISTINCT server) AS servers_seen FROM (
    SELECT us - us % $day AS day_us, server FROM life WHERE server IS NOT NULL
    UNION SELECT hour_us - hour_us % $day, server FROM hours WHERE server IS NOT NULL) GROUP BY 1),
spread AS (SELECT *, unnest([minute_us, minute_us - $minute]) AS from_us FROM d),
pairs AS (
  SELECT from_us, servers_seen FROM spread
  JOIN seen ON day_us = (from_us + $minute) - (from_us + $minute) % $day
  GROUP BY ALL HAVING count(DISTINCT server) >= greatest($mass_servers, $mass_share * servers_seen)),
marked AS (SELECT *, from_us - $minute * row_number() OVER (ORDER BY from_us) AS island FROM pairs),
spans AS (SELECT min(from_us) AS a, max(from_us) + 2 * $minute AS b, max(servers_seen) AS servers_seen
          FROM marked GROUP BY island)
SELECT min(us) AS start, max(us) AS "end", count(DISTINCT server) AS servers,
  any_value(servers_seen) AS servers_seen,
  coalesce(sum(changed), 0)::BIGINT AS subscriptions
FROM spans JOIN d ON us >= a AND us < b GROUP BY a ORDER BY start
"""

RESTARTS = f"""
WITH runs AS (
  SELECT writer, max(daemon) AS daemon, min(us) FILTER (event = 'server_started') AS started_us,
    arg_min("count", seq) FILTER (event = 'server_started') AS subscriptions, max(us) AS last_us,
    bool_or(event = 'server_stopped') AS stopped
  FROM life GROUP BY writer HAVING started_us IS NOT NULL),
follow AS (
  SELECT *, lag(last_us) OVER own AS before_us, lag(stopped) OVER own AS clean FROM runs
  WINDOW own AS (PARTITION BY daemon ORDER BY started_us, writer)),
single AS (
  SELECT writer, min(us) FILTER (event = 'sub_status_changed' AND status_to = 'ACTIVE') AS us, 1 AS number
  FROM life WHERE event IN ('sub_status_changed', 'sub_created')
  GROUP BY writer, subscription HAVING us IS NOT NULL AND count(*) FILTER (event = 'sub_created') = 0),
by_service AS (
  SELECT writer, us, least("count", expected) AS number FROM life WHERE event = 'smp_service_subscribed'
  QUALIFY row_number() OVER (PARTITION BY writer, server ORDER BY us, seq) = 1),
made AS (
  SELECT writer, us, sum(number) OVER (PARTITION BY writer ORDER BY us) AS done
  FROM (FROM single UNION ALL FROM by_service)),
restored AS (
  SELECT writer, min(us) AS restored_us FROM made JOIN runs USING (writer)
  WHERE subscriptions > 0 AND done * 100 >= subscriptions * {RESTORED_PERCENT} GROUP BY writer),
others AS (
  SELECT f.writer, count(*) AS running FROM follow f JOIN runs r ON r.writer <> f.writer
    AND r.daemon <> f.daemon AND r.started_us <= f.started_us AND r.last_us >= coalesce(f.before_us,
      f.started_us)
  GROUP BY f.writer)
SELECT started_us AS start, restored_us AS "end", daemon, subscriptions,
  CASE WHEN before_us IS NOT NULL THEN greatest(0, started_us - before_us) / 1e6 END AS down_s, clean,
  CASE WHEN restored_us IS NOT NULL THEN greatest(0, restored_us - started_us) / 1e6 END AS restore_s,
    coalesce(running, 0) AS others_running
FROM follow LEFT JOIN restored USING (writer) LEFT JOIN others USING (writer)
WHERE started_us >= $start ORDER BY start, daemon
"""

LOSSES = """
SELECT us AS start, error AS reason, "count" AS events FROM life
WHERE event = 'events_lost' AND us >= $start ORDER BY us
"""


def tables(warehouse: Warehouse) -> dict[str, Rows]:
    """The report's tables by name."""
    return {
        "incidents_gaps": warehouse.rows(GAPS),
        "incidents_disconnects": warehouse.rows(MASS),
        "incidents_restarts": warehouse.rows(RESTARTS),
        "incidents_losses": warehouse.rows(LOSSES),
    }
