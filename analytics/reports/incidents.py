"""Incidents: gaps in received notifications, mass disconnects, and what restarts cost."""

from collections.abc import Mapping

ENOUGH_SAMPLES = 3  # fewer and one bad week would be half of its own baseline
RESTORED_PERCENT = 99
FEWEST = 3  # less happens every day and is about single people


def many_lost(what: str, table: str, place: str, went: str, more: str = "") -> str:
    """SQL: what of `table` a `place` refused within an hour, and whether that is settled.

    `went` gives them with `reason`, when they went (`us`), came back (`back_us`) or were deleted (`gone_us`).
    """
    return f"""
WITH {went},
held AS (
  SELECT {place}, count(*) AS held FROM {table} WHERE coalesce(gone_us, :end) >= :start GROUP BY {place}),
settled AS (SELECT *, coalesce(back_us, gone_us) IS NOT NULL AS is_settled FROM went)
SELECT min(us) AS start, CASE WHEN bool_and(is_settled) THEN max(least(back_us, gone_us)) END AS `end`,
  {place}, reason, count(*) AS {what}, max(held) AS of_{what}, {more} count(back_us) AS came_back,
  greatest(1, max(least(back_us, gone_us) - us) / 1e6) AS heal_s, NOT bool_and(is_settled) AS is_open
FROM settled JOIN held USING ({place}) GROUP BY {place}, reason, us - us % :hour
HAVING count(*) >= greatest({FEWEST}, :refused_share * max(held))
ORDER BY start, {place}, reason NULLS LAST"""


REFUSED = """known AS (
  SELECT subscription, min(us) AS active_us FROM history
  WHERE event IN ('sub_created', 'sub_status_changed') AND status_to = 'ACTIVE' GROUP BY subscription),
moved AS (SELECT * FROM life WHERE event = 'sub_status_changed'),
lost AS (
  SELECT * FROM moved
  WHERE us >= :start AND status_to NOT IN ('NEW', 'PENDING', 'ACTIVE', 'INACTIVE', 'DELETED')),
went AS (
  SELECT l.subscription, l.server, l.status_to AS reason, l.us, s.gone_us, min(b.us) AS back_us
  FROM lost l JOIN known k ON k.subscription = l.subscription AND k.active_us <= l.us
    JOIN subs s ON s.subscription = l.subscription
    LEFT JOIN moved b ON b.subscription = l.subscription AND b.status_to = 'ACTIVE' AND b.us >= l.us
  GROUP BY l.writer, l.seq, l.subscription, l.server, l.status_to, l.us, s.gone_us)"""

INVALID = """called AS (
  SELECT l.writer, l.seq, l.token, l.provider, l.error AS reason, l.us, t.gone_us
  FROM life l JOIN token_lives t ON t.token = l.token WHERE l.event = 'token_invalid' AND l.us >= :start),
held_by AS (
  SELECT c.writer, c.seq, count(*) AS subscriptions FROM called c
    JOIN subs s ON s.token = c.token AND s.first_us <= c.us AND coalesce(s.gone_us, :end) >= c.us
  GROUP BY c.writer, c.seq),
back AS (
  SELECT c.writer, c.seq, min(b.us) AS back_us FROM called c
    JOIN life b ON b.token = c.token AND b.event = 'token_verified' AND b.us >= c.us
  GROUP BY c.writer, c.seq),
went AS (
  SELECT c.token, c.provider, c.reason, c.us, c.gone_us, coalesce(h.subscriptions, 0) AS subscriptions,
    k.back_us
  FROM called c LEFT JOIN held_by h ON h.writer = c.writer AND h.seq = c.seq
    LEFT JOIN back k ON k.writer = c.writer AND k.seq = c.seq)"""
HOLDING = "sum(subscriptions) AS subscriptions,"

TABLES: Mapping[str, str] = {
    # When did a router send far fewer notifications than it usually does at that hour?
    "incidents_gaps": f"""
WITH got AS (
  SELECT server, hour_us, sum(entries) AS received FROM traffic
  WHERE event = 'ntf_received' AND server IS NOT NULL GROUP BY server, hour_us),
spans AS (
  SELECT server, min(hour_us) + :hour AS from_us, :end - :end % :hour AS to_us FROM got GROUP BY server),
every AS (
  SELECT server, explode(CASE WHEN to_us > from_us THEN sequence(from_us, to_us - 1, :hour) END) AS hour_us
  FROM spans),
filled AS (
  SELECT server, hour_us, coalesce(received, 0) AS received FROM every LEFT JOIN got USING (server, hour_us)),
usual AS (
  SELECT *, CASE WHEN count(*) OVER weekly >= {ENOUGH_SAMPLES} THEN median(received) OVER weekly
                 WHEN count(*) OVER daily >= {ENOUGH_SAMPLES} THEN median(received) OVER daily END AS baseline
  FROM filled WINDOW weekly AS (PARTITION BY server, hour_us div :hour % 168),
                     daily AS (PARTITION BY server, hour_us div :hour % 24)),
low AS (
  SELECT *, hour_us - :hour * row_number() OVER (PARTITION BY server ORDER BY hour_us) AS island FROM usual
  WHERE baseline > 0 AND baseline - received >= :gap_sigmas * sqrt(baseline)
    AND received <= :gap_share * baseline)
SELECT server, min(hour_us) AS start, max(hour_us) + :hour AS `end`, sum(received) AS received,
  sum(baseline) AS expected, sum(baseline) - sum(received) AS missed
FROM low GROUP BY server, island HAVING max(hour_us) + :hour > :start ORDER BY start, server""",
    # When did many routers go away at once?
    "incidents_disconnects": """
WITH d AS (
  SELECT server, changed, us, us - us % :minute AS minute_us FROM life
  WHERE event = 'smp_disconnected' AND us >= :start),
seen AS (
  SELECT day_us, count(DISTINCT server) AS servers_seen FROM (
    SELECT us - us % :day AS day_us, server FROM life WHERE server IS NOT NULL
    UNION SELECT hour_us - hour_us % :day, server FROM traffic WHERE server IS NOT NULL)
  GROUP BY day_us),
spread AS (SELECT *, explode(array(minute_us, minute_us - :minute)) AS from_us FROM d),
many AS (
  SELECT from_us, count(DISTINCT server) AS servers FROM spread GROUP BY from_us
  HAVING count(DISTINCT server) >= :mass_servers),
pairs AS (
  SELECT from_us, servers_seen FROM many
    JOIN seen ON day_us = (from_us + :minute) - (from_us + :minute) % :day
  WHERE servers >= :mass_share * servers_seen),
marked AS (
  SELECT *, from_us - :minute * CAST(row_number() OVER (ORDER BY from_us) AS BIGINT) AS island FROM pairs),
spans AS (
  SELECT min(from_us) AS from_us, max(from_us) + 2 * CAST(:minute AS BIGINT) AS to_us,
    max(servers_seen) AS servers_seen
  FROM marked GROUP BY island)
SELECT min(us) AS start, max(us) AS `end`, count(DISTINCT server) AS servers,
  max(servers_seen) AS servers_seen, coalesce(sum(changed), 0) AS subscriptions
FROM d JOIN spans ON us >= from_us AND us < to_us GROUP BY from_us ORDER BY start""",
    # What did restarts of a daemon cost?
    "incidents_restarts": f"""
WITH follow AS (
  SELECT *, started_with AS subscriptions, lag(last_us) OVER own AS before_us, lag(stopped) OVER own AS clean
  FROM runs WHERE started_us IS NOT NULL WINDOW own AS (PARTITION BY daemon ORDER BY started_us, writer)),
activated AS (
  SELECT writer, bool_or(event = 'sub_created') AS is_new,
    min(us) FILTER (WHERE event = 'sub_status_changed' AND status_to = 'ACTIVE') AS us
  FROM life WHERE event IN ('sub_status_changed', 'sub_created') GROUP BY writer, subscription),
single AS (SELECT writer, us, 1 AS number FROM activated WHERE us IS NOT NULL AND NOT is_new),
by_service AS (
  SELECT writer, us, least(`count`, expected) AS number FROM life WHERE event = 'smp_service_subscribed'
  QUALIFY row_number() OVER (PARTITION BY writer, server ORDER BY us, seq) = 1),
made AS (
  SELECT writer, us, sum(number) OVER (PARTITION BY writer ORDER BY us) AS done
  FROM (SELECT * FROM single UNION ALL SELECT * FROM by_service)),
restored AS (
  SELECT writer, min(us) AS restored_us FROM made JOIN runs USING (writer)
  WHERE started_with > 0 AND done * 100 >= started_with * {RESTORED_PERCENT} GROUP BY writer),
others AS (
  SELECT f.writer, count(*) AS running FROM follow f JOIN runs r ON r.writer <> f.writer
    AND r.daemon <> f.daemon AND r.started_us <= f.started_us
    AND r.last_us >= coalesce(f.before_us, f.started_us)
  GROUP BY f.writer)
SELECT started_us AS start, restored_us AS `end`, daemon, subscriptions,
  CASE WHEN before_us IS NOT NULL THEN greatest(0, started_us - before_us) / 1e6 END AS down_s, clean,
  CASE WHEN restored_us IS NOT NULL THEN greatest(0, restored_us - started_us) / 1e6 END AS restore_s,
  coalesce(running, 0) AS others_running
FROM follow LEFT JOIN restored USING (writer) LEFT JOIN others USING (writer)
WHERE started_us >= :start ORDER BY start, daemon NULLS LAST""",
    # When was each daemon last alive?
    "incidents_daemons": """
WITH last AS (
  SELECT * FROM runs WHERE daemon IS NOT NULL
  QUALIFY row_number() OVER (PARTITION BY daemon ORDER BY last_us DESC, writer) = 1)
SELECT daemon, last_us AS last_seen, stopped AS clean, ended_with AS subscriptions,
  greatest(0, :until - last_us) / 1e6 AS silent_s
FROM last QUALIFY last_us >= :start OR last_us = max(last_us) OVER () ORDER BY last_us DESC, daemon""",
    # When did a push provider take nothing?
    "incidents_providers": """
WITH ended AS (
  SELECT writer, last_us, stopped OR lead(first_us) OVER (PARTITION BY daemon ORDER BY first_us) IS NOT NULL
    AS is_over FROM runs),
up AS (SELECT * FROM life WHERE event = 'provider_up'),
down AS (SELECT * FROM life WHERE event = 'provider_down'),
followed AS (
  SELECT d.provider, d.us AS start_us, d.error, u.`count` AS waited, u.latency_us,
    coalesce(u.us, CASE WHEN is_over THEN last_us END) AS end_us
  FROM down d JOIN ended e ON e.writer = d.writer
    LEFT JOIN up u ON u.writer = d.writer AND u.provider = d.provider AND u.seq > d.seq
  QUALIFY row_number() OVER (PARTITION BY d.writer, d.seq ORDER BY u.seq) = 1)
SELECT start_us AS start, end_us AS `end`, provider, error AS reason, waited,
  coalesce(latency_us, end_us - start_us) / 1e6 AS heal_s, end_us IS NULL AS is_open
FROM followed WHERE coalesce(end_us, :end) >= :start ORDER BY start, provider""",
    # When did a router refuse many subscriptions?
    "incidents_refused": many_lost("subscriptions", "subs", "server", REFUSED),
    # When did a provider call many tokens invalid?
    "incidents_tokens": many_lost("tokens", "token_lives", "provider", INVALID, HOLDING),
    # What could the journal not hold?
    "incidents_losses": """
SELECT us AS start, error AS reason, `count` AS events FROM life
WHERE event = 'events_lost' AND us >= :start ORDER BY start, reason""",
}
