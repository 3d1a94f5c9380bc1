-- When a rule was made, and what became of every statement that it met.
ALTER TABLE statement_rules
    ADD COLUMN created_at double precision NOT NULL DEFAULT 0,
    ADD COLUMN baseline   smallint NOT NULL DEFAULT 0; -- what the node stored before: 0 known, 1 to be read, 2 being read

CREATE INDEX statement_rules_new ON statement_rules (topic, sub_key) WHERE baseline > 0;

ALTER TABLE statement_subscriptions
    ADD COLUMN device_id  bytea NOT NULL DEFAULT '', -- hash of the device token
    ADD COLUMN proven     boolean NOT NULL DEFAULT false, -- the device took a push
    ADD COLUMN renewed_at bigint NOT NULL DEFAULT 0; -- when its client was last heard of

UPDATE statement_subscriptions s SET device_id = subscription_id, renewed_at = updated_at, proven = EXISTS (
    SELECT 1 FROM statement_pushes p WHERE p.subscription_id = s.subscription_id AND p.sent_at IS NOT NULL
);

CREATE INDEX statement_subscriptions_renewed ON statement_subscriptions (renewed_at);

-- Statements that met a rule, each once for a device. They outlive the subscription.
ALTER TABLE statement_pushes
    ADD COLUMN device_id bytea NOT NULL DEFAULT '',
    ADD COLUMN outcome   text NOT NULL DEFAULT 'waiting';

UPDATE statement_pushes SET device_id = subscription_id, outcome = CASE WHEN sent_at IS NULL THEN 'waiting' ELSE 'sent' END;

ALTER TABLE statement_pushes DROP CONSTRAINT statement_pushes_subscription_id_statement_hash_key;

ALTER TABLE statement_pushes ADD UNIQUE (device_id, statement_hash);

CREATE INDEX statement_pushes_of_subscription ON statement_pushes (subscription_id);

CREATE INDEX statement_pushes_dropped ON statement_pushes (device_id, push_key)
WHERE outcome IN ('stored', 'limited', 'device_limited');

ALTER TABLE pending_statements
    ADD COLUMN topics      bytea NOT NULL DEFAULT '', -- all of the statement, 32 bytes each
    ADD COLUMN signature   bytea NOT NULL DEFAULT '',
    ADD COLUMN expiry      bytea NOT NULL DEFAULT '', -- as the statement has it
    ADD COLUMN expires_at  bigint NOT NULL DEFAULT 0,
    ADD COLUMN received_at double precision NOT NULL DEFAULT 0; -- 0: nobody knows

UPDATE pending_statements n SET (topics, expires_at) = (p.topic, p.keep_until)
FROM statement_pushes p WHERE p.push_key = n.push_key;

CREATE INDEX pending_statements_expired ON pending_statements (expires_at);

-- How much a device was sent lately, whoever the senders were.
CREATE TABLE statement_devices (
    device_id bytea PRIMARY KEY,
    accepted  bytea NOT NULL, -- seconds and numbers of pushes, eight bytes each
    dropped   bigint NOT NULL, -- statements that are remembered because they were not pushed
    idle_at   bigint NOT NULL -- unless there are such statements, it says nothing from then on
);

CREATE INDEX statement_devices_idle ON statement_devices (idle_at) WHERE dropped = 0;

-- Devices that were registered and did not show their code yet.
CREATE TABLE statement_registrations (
    registration_key bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    subscription_id  bytea   NOT NULL UNIQUE, -- of the subscription that it becomes
    client_id        bytea   NOT NULL,
    channel          text    NOT NULL,
    device_token     bytea   NOT NULL,
    is_call          boolean NOT NULL,
    code             bytea   NOT NULL,
    created_at       bigint  NOT NULL,
    UNIQUE (client_id, device_token)
);

CREATE INDEX statement_registrations_created ON statement_registrations (created_at);

-- Until when the node was heard: what it stores and was not heard of came later.
CREATE TABLE statement_listening (
    part  bigint PRIMARY KEY, -- of the topics
    until double precision NOT NULL
);
