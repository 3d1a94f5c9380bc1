UPDATE subscriptions SET state = CASE WHEN v.lost > v.served THEN 'INACTIVE' ELSE 'ACTIVE' END
FROM smp_servers v
WHERE v.server_key = subscriptions.server_key AND associated = 1 AND v.served > as_of;

UPDATE subscriptions SET state = 'INACTIVE'
FROM smp_servers v
WHERE v.server_key = subscriptions.server_key AND state = 'ACTIVE' AND v.lost > as_of
    AND NOT (associated = 1 AND v.served > as_of);

ALTER TABLE subscriptions DROP COLUMN as_of;

ALTER TABLE smp_servers DROP COLUMN active_associated;

ALTER TABLE smp_servers DROP COLUMN active_count;

ALTER TABLE smp_servers DROP COLUMN served;

ALTER TABLE smp_servers DROP COLUMN lost;
