DROP TABLE statement_listening;

DROP TABLE statement_registrations;

DROP TABLE statement_devices;

DROP INDEX pending_statements_expired;

ALTER TABLE pending_statements DROP COLUMN received_at;

ALTER TABLE pending_statements DROP COLUMN expires_at;

ALTER TABLE pending_statements DROP COLUMN expiry;

ALTER TABLE pending_statements DROP COLUMN signature;

ALTER TABLE pending_statements DROP COLUMN topics;

CREATE TABLE statement_records (
    push_key        INTEGER PRIMARY KEY AUTOINCREMENT,
    subscription_id BLOB    NOT NULL,
    statement_hash  BLOB    NOT NULL,
    sender          BLOB    NOT NULL,
    topic           BLOB    NOT NULL,
    accepted_at     INTEGER NOT NULL,
    sent_at         INTEGER, -- a provider took it
    keep_until      INTEGER NOT NULL,
    UNIQUE (subscription_id, statement_hash)
);

INSERT INTO statement_records
SELECT push_key, subscription_id, statement_hash, sender, topic, accepted_at, sent_at, keep_until FROM statement_pushes;

DELETE FROM sqlite_sequence WHERE name = 'statement_records';

INSERT INTO sqlite_sequence (name, seq) SELECT 'statement_records', seq FROM sqlite_sequence WHERE name = 'statement_pushes';

DROP TABLE statement_pushes;

ALTER TABLE statement_records RENAME TO statement_pushes;

CREATE INDEX statement_pushes_expired ON statement_pushes (keep_until);

DROP INDEX statement_subscriptions_renewed;

ALTER TABLE statement_subscriptions DROP COLUMN renewed_at;

ALTER TABLE statement_subscriptions DROP COLUMN proven;

ALTER TABLE statement_subscriptions DROP COLUMN device_id;

DROP INDEX statement_rules_new;

ALTER TABLE statement_rules DROP COLUMN baseline;

ALTER TABLE statement_rules DROP COLUMN created_at;
