DROP TABLE token_routers;

-- What was being deleted becomes a dead token, which housekeeping removes.
UPDATE totals SET tokens = tokens + (SELECT count(*) FROM tokens WHERE status = 'deleted');

UPDATE tokens SET status = 'INVALID', device_token = x'414E00', updated_on = 0 WHERE status = 'deleted';

DROP INDEX tokens_deleted;

ALTER TABLE tokens DROP COLUMN verified;

ALTER TABLE totals DROP COLUMN last_server;
