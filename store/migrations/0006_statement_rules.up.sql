-- When a rule was made, and what became of every statement that it met.
ALTER TABLE statement_rules ADD COLUMN created_at REAL NOT NULL DEFAULT 0;

ALTER TABLE statement_rules ADD COLUMN baseline INTEGER NOT NULL DEFAULT 0; -- what the node stored before: 0 known, 1 to be read, 2 being read

CREATE INDEX statement_rules_new ON statement_rules (topic, sub_key) WHERE baseline > 0;

ALTER TABLE statement_subscriptions ADD COLUMN device_id BLOB NOT NULL DEFAULT x''; -- hash of the device token

ALTER TABLE statement_subscriptions ADD COLUMN proven INTEGER NOT NULL DEFAULT 0; -- the device took a push

ALTER TABLE statement_subscriptions ADD COLUMN renewed_at INTEGER NOT NULL DEFAULT 0; -- when its client was last heard of

UPDATE statement_subscriptions SET device_id = subscription_id, renewed_at = updated_at, proven = EXISTS (
    SELECT 1 FROM statement_pushes p
    WHERE p.subscription_id = statement_subscriptions.subscription_id AND p.sent_at IS NOT NULL
);

CREATE INDEX statement_subscriptions_renewed ON statement_subscriptions (renewed_at);

-- Statements that met a rule, each once for a device. They outlive the subscription.
CREATE TABLE statement_records (
    push_key        INTEGER PRIMARY KEY AUTOINCREMENT,
    device_id       BLOB    NOT NULL,
    subscription_id BLOB    NOT NULL,
    statement_hash  BLOB    NOT NULL,
    sender          BLOB    NOT NULL,
    topic           BLOB    NOT NULL,
    accepted_at     INTEGER NOT NULL,
    sent_at         INTEGER, -- a provider took it
    keep_until      INTEGER NOT NULL,
    outcome         TEXT    NOT NULL,
    UNIQUE (device_id, statement_hash)
);

INSERT INTO statement_records
SELECT push_key, subscription_id, subscription_id, statement_hash, sender, topic, accepted_at, sent_at, keep_until,
    CASE WHEN sent_at IS NULL THEN 'waiting' ELSE 'sent' END
FROM statement_pushes;

DELETE FROM sqlite_sequence WHERE name = 'statement_records';

INSERT INTO sqlite_sequence (name, seq) SELECT 'statement_records', seq FROM sqlite_sequence WHERE name = 'statement_pushes';

DROP TABLE statement_pushes;

ALTER TABLE statement_records RENAME TO statement_pushes;

CREATE INDEX statement_pushes_expired ON statement_pushes (keep_until);

CREATE INDEX statement_pushes_of_subscription ON statement_pushes (subscription_id);

CREATE INDEX statement_pushes_dropped ON statement_pushes (device_id, push_key)
WHERE outcome IN ('stored', 'limited', 'device_limited');

ALTER TABLE pending_statements ADD COLUMN topics BLOB NOT NULL DEFAULT x''; -- all of the statement, 32 bytes each

ALTER TABLE pending_statements ADD COLUMN signature BLOB NOT NULL DEFAULT x'';

ALTER TABLE pending_statements ADD COLUMN expiry BLOB NOT NULL DEFAULT x''; -- as the statement has it

ALTER TABLE pending_statements ADD COLUMN expires_at INTEGER NOT NULL DEFAULT 0;

ALTER TABLE pending_statements ADD COLUMN received_at REAL NOT NULL DEFAULT 0; -- 0: nobody knows

UPDATE pending_statements SET (topics, expires_at) = (p.topic, p.keep_until)
FROM statement_pushes p WHERE p.push_key = pending_statements.push_key;

CREATE INDEX pending_statements_expired ON pending_statements (expires_at);

-- How much a device was sent lately, whoever the senders were.
CREATE TABLE statement_devices (
    device_id BLOB    PRIMARY KEY,
    accepted  BLOB    NOT NULL, -- seconds and numbers of pushes, eight bytes each
    dropped   INTEGER NOT NULL, -- statements that are remembered because they were not pushed
    idle_at   INTEGER NOT NULL  -- unless there are such statements, it says nothing from then on
) WITHOUT ROWID;

CREATE INDEX statement_devices_idle ON statement_devices (idle_at) WHERE dropped = 0;

-- Devices that were registered and did not show their code yet.
CREATE TABLE statement_registrations (
    registration_key INTEGER PRIMARY KEY AUTOINCREMENT,
    subscription_id  BLOB    NOT NULL UNIQUE, -- of the subscription that it becomes
    client_id        BLOB    NOT NULL,
    channel          TEXT    NOT NULL,
    device_token     BLOB    NOT NULL,
    is_call          INTEGER NOT NULL,
    code             BLOB    NOT NULL,
    created_at       INTEGER NOT NULL,
    UNIQUE (client_id, device_token)
);

CREATE INDEX statement_registrations_created ON statement_registrations (created_at);

-- Until when the node was heard: what it stores and was not heard of came later.
CREATE TABLE statement_listening (
    part  INTEGER PRIMARY KEY, -- of the topics
    until REAL NOT NULL
);
