"""Derived tables by name: what became of tokens, subscriptions, routers and daemons, and their traffic.

Queries name each other's tables, those of `analytics.warehouse` (`life`, `hours`, `tokens`, `history`,
`snapshot_rows`) and the parameters of `Warehouse.values`. A table is made when the first query needs it.
Times are microseconds; `us` is when something happened.
"""

from collections.abc import Mapping

from analytics.rollups_schema import BUCKETS_PER_OCTAVE

PERCENTS = (50, 95, 99)
PERCENTILES = ", ".join(
    f"min(CASE WHEN up_to >= 0.{p}D * whole AND up_to - n < 0.{p}D * whole"
    f" THEN pow(2, (bucket + (0.{p}D * whole - up_to + n) / n) / {BUCKETS_PER_OCTAVE}) / 1000 END)"
    f" AS latency_ms_p{p}"
    for p in PERCENTS
)
"From a latency's bucket, its pushes `n`, those `up_to` its upper bound and the `whole`: interpolated."

DERIVED: Mapping[str, str] = {
    # When was each key of the pseudonyms given up? When every daemon that had it has another, or was gone by
    # then. What was known by a daemon that is only gone may still live.
    "epochs": """
WITH used AS (
  SELECT daemon, epoch, min(us) AS from_us, max(us) AS last_us FROM life
  WHERE daemon IS NOT NULL GROUP BY daemon, epoch),
followed AS (
  SELECT epoch, last_us, lead(from_us) OVER (PARTITION BY daemon ORDER BY from_us) AS until_us FROM used),
changed AS (SELECT *, max(until_us) OVER (PARTITION BY epoch) AS changed_us FROM followed)
SELECT epoch,
  CASE WHEN bool_and(until_us IS NOT NULL OR last_us < changed_us) THEN max(until_us) END AS until_us
FROM changed GROUP BY epoch""",
    # What did each process of a daemon do?
    "runs": """
SELECT writer, max(daemon) AS daemon, min(us) AS first_us, max(us) AS last_us,
  min(us) FILTER (WHERE event = 'server_started') AS started_us,
  min_by(`count`, seq) FILTER (WHERE event = 'server_started' AND `count` IS NOT NULL) AS started_with,
  max_by(coalesce(total, `count`), seq)
    FILTER (WHERE daemon IS NOT NULL AND coalesce(total, `count`) IS NOT NULL) AS ended_with,
  bool_or(event = 'server_stopped') AS stopped
FROM life GROUP BY writer""",
    # What is known of each subscription ever seen, and when did it go?
    "subs": """
WITH steps AS (
  SELECT subscription, server, token, epoch, event, status_from, us, struct(us, writer, seq) AS place,
    CASE WHEN event = 'sub_created' THEN coalesce(status_to, 'NEW') ELSE status_to END AS status
  FROM history WHERE event IN ('sub_created', 'sub_status_changed', 'sub_deleted')),
own AS (
  SELECT subscription, max_by(server, place) FILTER (WHERE server IS NOT NULL) AS server,
    max_by(token, place) FILTER (WHERE token IS NOT NULL) AS token, max(epoch) AS epoch,
    max_by(status, place) FILTER (WHERE status IS NOT NULL) AS status,
    max(us) FILTER (WHERE status IS NOT NULL) AS status_us, min(us) AS first_us,
    max(us) FILTER (WHERE status = 'ACTIVE' OR status_from = 'ACTIVE') AS active_us,
    min(us) FILTER (WHERE event = 'sub_deleted') AS deleted_us
  FROM steps GROUP BY subscription),
token_ends AS (
  SELECT token, min(us) AS deleted_us FROM history WHERE event = 'token_deleted' GROUP BY token)
SELECT o.subscription, o.server, o.token, o.epoch, o.status, o.status_us, o.first_us, o.active_us,
  least(o.deleted_us, t.deleted_us, e.until_us) AS gone_us
FROM own o LEFT JOIN token_ends t ON t.token = o.token LEFT JOIN epochs e ON e.epoch = o.epoch""",
    # When was each router in contact, and when not?
    "contacts": """
WITH heard AS (
  SELECT server, max(hour_us) AS us, min(hour_us) AS first_us FROM traffic
  WHERE event = 'ntf_received' GROUP BY server),
seen AS (
  SELECT server, max(us) FILTER (WHERE event = 'smp_disconnected') AS disconnected_us,
    max(us) FILTER (WHERE event = 'smp_service_subscribed') AS service_us,
    max(us) FILTER (WHERE event IN ('smp_connected', 'smp_service_subscribed')
      OR status_to = 'ACTIVE' AND event IN ('sub_created', 'sub_status_changed')) AS contact_us,
    min(us) AS first_us
  FROM history WHERE server IS NOT NULL GROUP BY server)
SELECT server, disconnected_us, service_us, greatest(contact_us, heard.us) AS contact_us,
  least(seen.first_us, heard.first_us) AS first_us
FROM seen FULL JOIN heard USING (server)""",
    # What state is each living subscription in?
    "states": """
WITH living AS (
  SELECT s.*, c.disconnected_us, coalesce(status = 'ACTIVE' AND c.disconnected_us > s.status_us
    AND NOT coalesce(c.service_us > c.disconnected_us, false), false) AS cut_off
  FROM subs s LEFT JOIN contacts c ON c.server = s.server WHERE gone_us IS NULL)
SELECT subscription, token, server, first_us,
  CASE WHEN cut_off THEN 'INACTIVE' ELSE coalesce(status, 'unknown') END AS status,
  CASE WHEN cut_off THEN disconnected_us ELSE active_us END AS last_active_us
FROM living""",
    # What became of each token ever seen?
    "token_lives": """
WITH own AS (
  SELECT token, max_by(provider, struct(us, writer, seq)) FILTER (WHERE provider IS NOT NULL) AS provider,
    max_by(event, struct(us, writer, seq)) AS last_event, min(us) AS first_us, max(epoch) AS epoch,
    min(us) FILTER (WHERE event = 'token_deleted') AS deleted_us,
    min(us) FILTER (WHERE event = 'token_registered') AS registered_us,
    min(us) FILTER (WHERE event = 'token_confirmed') AS confirmed_us,
    min(us) FILTER (WHERE event = 'token_verified') AS verified_us
  FROM history WHERE startswith(event, 'token_') GROUP BY token),
pushed AS (SELECT token, max(last_push_us) AS last_push_us FROM tokens GROUP BY token)
SELECT o.token, provider, last_event, first_us, o.epoch, registered_us, confirmed_us, verified_us,
  least(deleted_us, e.until_us) AS gone_us, last_push_us
FROM own o LEFT JOIN pushed p ON p.token = o.token LEFT JOIN epochs e ON e.epoch = o.epoch""",
    # When did the numbers of active tokens and of each router's subscriptions change, and by how much?
    "changes": """
WITH moves AS (
  SELECT token, us, writer, seq, CAST(event = 'token_verified' AS INT) AS active FROM history
  WHERE event IN ('token_verified', 'token_registered', 'token_replaced', 'token_deleted', 'token_invalid')
  UNION ALL
  SELECT token, until_us, CAST('epoch' AS BINARY), 0, 0 FROM token_lives JOIN epochs USING (epoch)
  WHERE until_us IS NOT NULL),
steps AS (
  SELECT us, active - coalesce(lag(active) OVER (PARTITION BY token ORDER BY us, writer, seq), 0) AS token
  FROM moves),
listed AS (
  SELECT us, CAST(NULL AS STRING) AS server, token, 0 AS sub FROM steps
  UNION ALL SELECT first_us, server, 0, 1 FROM subs
  UNION ALL SELECT gone_us, server, 0, -1 FROM subs WHERE gone_us IS NOT NULL)
SELECT us - us % :hour AS hour_us, server, sum(token) AS token, sum(sub) AS sub FROM listed GROUP BY ALL""",
    # How many active tokens and subscriptions were there at the end of each day?
    "daily_totals": """
WITH days AS (
  SELECT explode(sequence(:trend_start - :trend_start % :day, :end - 1, :day)) AS day_us),
net AS (
  SELECT greatest(hour_us - hour_us % :day, :trend_start - :trend_start % :day - :day) AS day_us,
    sum(token) AS token, sum(sub) AS sub
  FROM changes GROUP BY 1),
known AS (
  SELECT day_us, days.day_us IS NOT NULL AS is_asked, coalesce(token, 0) AS token, coalesce(sub, 0) AS sub
  FROM days FULL JOIN net USING (day_us)),
summed AS (
  SELECT *, sum(token) OVER (ORDER BY day_us) AS tokens, sum(sub) OVER (ORDER BY day_us) AS subscriptions
  FROM known)
SELECT day_us, token AS tokens_net, sub AS subscriptions_net, tokens, subscriptions
FROM summed WHERE is_asked""",
    # How much was received and pushed in each hour, of whatever latency?
    "traffic": """
SELECT hour_us, event, server, provider, kind, error, sum(number) AS number, sum(entries) AS entries,
  sum(total) AS total
FROM hours GROUP BY ALL""",
    # How late were pushes by hour, by provider, and by both and router? `by_what` says which.
    "latencies": f"""
WITH counted AS (
  SELECT hour_us AS hour, provider, server, bucket, sum(number) AS number, sum(entries) AS entries
  FROM hours WHERE event = 'push_sent' AND hour_us >= :first_hour GROUP BY ALL),
grouped AS (
  SELECT CASE WHEN grouping(server) = 0 THEN 'router' WHEN grouping(hour) = 0 THEN 'hour' ELSE 'provider' END
    AS by_what, hour, provider, server, bucket, sum(number) AS n, sum(entries) AS e
  FROM counted GROUP BY GROUPING SETS (
    (hour, bucket), (provider, bucket), (hour, provider, server, bucket))),
placed AS (
  SELECT *, sum(n) OVER (PARTITION BY by_what, hour, provider, server ORDER BY bucket NULLS LAST) AS up_to,
    sum(n) OVER (PARTITION BY by_what, hour, provider, server) AS whole
  FROM grouped)
SELECT by_what, hour, provider, server, sum(n) AS pushes, sum(e) AS entries, {PERCENTILES}
FROM placed GROUP BY by_what, hour, provider, server""",
    # What lost and regained subscriptions, in the order of each router and key?
    "outage_events": """
SELECT server, epoch, event, us, changed, `count`, expected, total, latency_us, until_us, writer, seq
FROM (
  SELECT server, epoch, event, us, changed, `count`, expected, total, latency_us, writer, seq FROM life
  WHERE event IN ('smp_connected', 'smp_disconnected', 'smp_service_subscribed', 'smp_service_reset',
    'smp_drift', 'smp_healed')
  UNION ALL
  SELECT server, epoch, 'regained', us, NULL, count(*), NULL, NULL, NULL, min(writer), min(seq) FROM life
  WHERE event = 'sub_status_changed' AND status_from = 'INACTIVE' AND status_to = 'ACTIVE'
  GROUP BY server, epoch, us)
LEFT JOIN epochs USING (epoch)""",
    # Which subscriptions got no notifications, from when to when? See `analytics.outages`.
    "outages": """
SELECT * FROM find_outages(TABLE(outage_events) PARTITION BY (server, epoch) ORDER BY (us, writer, seq))""",
    # Which subscriptions could be deleted, and why?
    "stale": """
WITH dead AS (
  SELECT token, true AS on_dead FROM token_lives
  WHERE gone_us IS NULL AND :end - coalesce(last_push_us, first_us) >= :dead_token_days * :day),
unreachable AS (
  SELECT server, true AS unreachable FROM contacts
  WHERE CASE WHEN contact_us IS NULL THEN first_us
    WHEN disconnected_us > contact_us THEN disconnected_us END <= :end - :unreachable_days * :day),
reasons AS (
  SELECT s.*, filter(array(
    CASE WHEN last_active_us IS NULL AND first_us <= :end - :never_active_days * :day THEN 'never active' END,
    CASE WHEN status <> 'ACTIVE' AND last_active_us <= :end - :inactive_days * :day
      THEN 'inactive too long' END,
    CASE WHEN unreachable THEN 'server unreachable' END,
    CASE WHEN on_dead THEN 'dead token' END), reason -> reason IS NOT NULL) AS reasons
  FROM states s LEFT JOIN unreachable u ON u.server = s.server LEFT JOIN dead d ON d.token = s.token)
SELECT * FROM reasons WHERE size(reasons) > 0""",
}
