-- What happens to all queues of a router at once is a number in its row, and no write of theirs.
ALTER TABLE smp_servers ADD COLUMN lost INTEGER NOT NULL DEFAULT 0; -- number of the last loss of the connection

ALTER TABLE smp_servers ADD COLUMN served INTEGER NOT NULL DEFAULT 0; -- number of the last SOKS

ALTER TABLE smp_servers ADD COLUMN active_count INTEGER NOT NULL DEFAULT 0; -- queues that are ACTIVE now

ALTER TABLE smp_servers ADD COLUMN active_associated INTEGER NOT NULL DEFAULT 0; -- of them

ALTER TABLE subscriptions ADD COLUMN as_of INTEGER NOT NULL DEFAULT 0; -- the last such number that its state knows of

UPDATE smp_servers SET (active_count, active_associated) = (found.active, found.associated)
FROM (
    SELECT server_key, count(*) AS active, sum(associated) AS associated
    FROM subscriptions WHERE state = 'ACTIVE' GROUP BY server_key
) AS found
WHERE found.server_key = smp_servers.server_key;
