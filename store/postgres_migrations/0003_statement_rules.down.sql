DROP TABLE statement_listening;

DROP TABLE statement_registrations, statement_devices;

DROP INDEX pending_statements_expired;

ALTER TABLE pending_statements
    DROP COLUMN topics, DROP COLUMN signature, DROP COLUMN expiry, DROP COLUMN expires_at, DROP COLUMN received_at;

DROP INDEX statement_pushes_dropped, statement_pushes_of_subscription;

ALTER TABLE statement_pushes DROP COLUMN device_id, DROP COLUMN outcome;

DELETE FROM statement_pushes p USING statement_pushes later
WHERE later.subscription_id = p.subscription_id AND later.statement_hash = p.statement_hash AND later.push_key > p.push_key;

ALTER TABLE statement_pushes ADD UNIQUE (subscription_id, statement_hash);

DROP INDEX statement_subscriptions_renewed;

ALTER TABLE statement_subscriptions DROP COLUMN device_id, DROP COLUMN proven, DROP COLUMN renewed_at;

DROP INDEX statement_rules_new;

ALTER TABLE statement_rules DROP COLUMN created_at, DROP COLUMN baseline;
