-- What happens to all queues of a router at once is a number in its row, and no write of theirs.
ALTER TABLE smp_servers
    ADD COLUMN lost              bigint NOT NULL DEFAULT 0, -- number of the last loss of the connection
    ADD COLUMN served            bigint NOT NULL DEFAULT 0, -- number of the last SOKS
    ADD COLUMN active_count      bigint NOT NULL DEFAULT 0, -- queues that are ACTIVE now
    ADD COLUMN active_associated bigint NOT NULL DEFAULT 0; -- of them

ALTER TABLE subscriptions ADD COLUMN as_of bigint NOT NULL DEFAULT 0; -- the last such number that its state knows of

UPDATE smp_servers v SET active_count = found.active, active_associated = found.associated
FROM (
    SELECT server_key, count(*) AS active, count(*) FILTER (WHERE associated) AS associated
    FROM subscriptions WHERE state = 'ACTIVE' GROUP BY server_key
) found
WHERE found.server_key = v.server_key;
