"""Incidents: gaps in received notifications, mass disconnects, and what restarts cost."""

from tests.analytics.oracle.warehouse import Rows, Warehouse

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
WITH follow AS (
  SELECT *, started_with AS subscriptions, lag(last_us) OVER own AS before_us, lag(stopped) OVER own AS clean
  FROM runs WHERE started_us IS NOT NULL WINDOW own AS (PARTITION BY daemon ORDER BY started_us, writer)),
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
  WHERE started_with > 0 AND done * 100 >= started_with * {RESTORED_PERCENT} GROUP BY writer),
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

DAEMONS = """
SELECT daemon, last_us AS last_seen, stopped AS clean, ended_with AS subscriptions,
  greatest(0, $until - last_us) / 1e6 AS silent_s
FROM runs WHERE daemon IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY daemon ORDER BY last_us DESC, writer) = 1
  AND (last_us >= $start OR last_us = max(last_us) OVER ()) ORDER BY last_us DESC, daemon
"""

PROVIDERS = """
WITH ended AS (
  SELECT writer, last_us, stopped OR lead(first_us) OVER (PARTITION BY daemon ORDER BY first_us) IS NOT NULL
    AS is_over FROM runs),
followed AS (
  SELECT d.provider, d.us AS start_us, d.error, u."count" AS waited, u.latency_us,
    coalesce(u.us, CASE WHEN is_over THEN last_us END) AS end_us
  FROM life d JOIN ended USING (writer) LEFT JOIN life u ON u.event = 'provider_up'
    AND u.writer = d.writer AND u.provider = d.provider AND u.seq > d.seq
  WHERE d.event = 'provider_down' QUALIFY row_number() OVER (PARTITION BY d.writer, d.seq ORDER BY u.seq) = 1)
SELECT start_us AS start, end_us AS "end", provider, error AS reason, waited,
  coalesce(latency_us, end_us - start_us) / 1e6 AS heal_s, end_us IS NULL AS is_open
FROM followed WHERE coalesce(end_us, $end) >= $start ORDER BY start, provider
"""

FEWEST = 3  # less happens every day and is about single people


def many_lost(what: str, table: str, place: str, went: str, more: str = "") -> str:
    """SQL: what of `table` a `place` refused within an hour, and whether that is settled.

    `went` gives them with `reason`, when they went (`us`), came back (`back_us`) or were deleted (`gone_us`).
    """
    return f"""
WITH {went},
held AS (SELECT {place}, count(*) AS held FROM {table} WHERE coalesce(gone_us, $end) >= $start
         GROUP BY {place})
SELECT min(us) AS start, CASE WHEN bool_and(settled) THEN max(least(back_us, gone_us)) END AS "end",
  {place}, reason, count(*) AS {what}, any_value(held) AS of_{what}, {more} count(back_us) AS came_back,
  greatest(1, max(least(back_us, gone_us) - us) / 1e6) AS heal_s, NOT bool_and(settled) AS is_open
FROM (SELECT *, coalesce(back_us, gone_us) IS NOT NULL AS settled FROM went) JOIN held USING ({place})
GROUP BY {place}, reason, us - us % $hour
HAVING count(*) >= greatest({FEWEST}, $refused_share * any_value(held)) ORDER BY start, {place}, reason
"""


REFUSED = """known AS (
  SELECT subscription, min(us) FILTER (status_to = 'ACTIVE') AS active_us FROM history
  WHERE event IN ('sub_created', 'sub_status_changed') GROUP BY subscription),
went AS (
  SELECT l.subscription, l.server, l.status_to AS reason, l.us, s.gone_us,
    (SELECT min(b.us) FROM life b WHERE b.subscription = l.subscription AND b.status_to = 'ACTIVE'
       AND b.us >= l.us AND b.event = 'sub_status_changed') AS back_us
  FROM life l JOIN known k ON k.subscription = l.subscription AND k.active_us <= l.us
    JOIN subs s ON s.subscription = l.subscription
  WHERE l.event = 'sub_status_changed' AND l.us >= $start
    AND l.status_to NOT IN ('NEW', 'PENDING', 'ACTIVE', 'INACTIVE', 'DELETED'))"""

INVALID = """went AS (
  SELECT l.token, l.provider, l.error AS reason, l.us, t.gone_us,
    (SELECT count(*) FROM subs s WHERE s.token = l.token AND s.first_us <= l.us
       AND coalesce(s.gone_us, $end) >= l.us) AS subscriptions,
    (SELECT min(b.us) FROM life b WHERE b.token = l.token AND b.event = 'token_verified' AND b.us >= l.us)
      AS back_us
  FROM life l JOIN token_lives t USING (token) WHERE l.event = 'token_invalid' AND l.us >= $start)"""
HOLDING = "sum(subscriptions)::BIGINT AS subscriptions,"

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
        "incidents_daemons": warehouse.rows(DAEMONS),
        "incidents_providers": warehouse.rows(PROVIDERS),
        "incidents_refused": warehouse.rows(many_lost("subscriptions", "subs", "server", REFUSED)),
        "incidents_tokens": warehouse.rows(many_lost("tokens", "token_lives", "provider", INVALID, HOLDING)),
        "incidents_losses": warehouse.rows(LOSSES),
    }
