UPDATE subscriptions s SET state = CASE WHEN v.lost > v.served THEN 'INACTIVE' ELSE 'ACTIVE' END
FROM smp_servers v
WHERE v.server_key = s.server_key AND s.associated AND v.served > s.as_of;

UPDATE subscriptions s SET state = 'INACTIVE'
FROM smp_servers v
WHERE v.server_key = s.server_key AND s.state = 'ACTIVE' AND v.lost > s.as_of
    AND NOT (s.associated AND v.served > s.as_of);

ALTER TABLE subscriptions DROP COLUMN as_of;

ALTER TABLE smp_servers DROP COLUMN lost, DROP COLUMN served, DROP COLUMN active_count, DROP COLUMN active_associated;
