-- The statement gateway. Keys are never used again after a deletion: other parts of the server hold them in memory.
CREATE TABLE statement_subscriptions (
    sub_key         INTEGER PRIMARY KEY AUTOINCREMENT,
    subscription_id BLOB    NOT NULL UNIQUE, -- UUID
    client_id       BLOB    NOT NULL,        -- sr25519 public key
    channel         TEXT    NOT NULL,        -- apns, voip or fcm
    device_token    BLOB    NOT NULL UNIQUE, -- provider and token
    is_call         INTEGER NOT NULL,
    created_at      INTEGER NOT NULL,
    updated_at      INTEGER NOT NULL
);

CREATE INDEX statement_subscriptions_of_client ON statement_subscriptions (client_id);

CREATE TABLE statement_rules (
    topic   BLOB    NOT NULL,
    sender  BLOB    NOT NULL,
    sub_key INTEGER NOT NULL REFERENCES statement_subscriptions ON DELETE CASCADE,
    PRIMARY KEY (topic, sender, sub_key)
) WITHOUT ROWID;

CREATE INDEX statement_rules_of_subscription ON statement_rules (sub_key);

-- Signed requests that were carried out: none counts twice.
CREATE TABLE statement_requests (
    request_id  BLOB    PRIMARY KEY,
    valid_until INTEGER NOT NULL
) WITHOUT ROWID;

CREATE INDEX statement_requests_expired ON statement_requests (valid_until);

-- How often a sender woke a client lately.
CREATE TABLE statement_rates (
    sender       BLOB    NOT NULL,
    client_id    BLOB    NOT NULL,
    accepted     BLOB    NOT NULL, -- times, eight bytes each
    silent_until REAL    NOT NULL,
    idle_at      INTEGER NOT NULL, -- says nothing from then on
    PRIMARY KEY (sender, client_id)
) WITHOUT ROWID;

CREATE INDEX statement_rates_idle ON statement_rates (idle_at);

-- Pushes that were decided on, whatever became of them. They outlive their subscription.
CREATE TABLE statement_pushes (
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

CREATE INDEX statement_pushes_expired ON statement_pushes (keep_until);

-- Those of them still to be made.
CREATE TABLE pending_statements (
    push_key  INTEGER PRIMARY KEY,
    sub_key   INTEGER NOT NULL REFERENCES statement_subscriptions ON DELETE CASCADE,
    data      BLOB    NOT NULL,
    attempted INTEGER NOT NULL DEFAULT 0 -- handed to a provider; what became of it is not known
);

CREATE INDEX pending_statements_of_subscription ON pending_statements (sub_key);

CREATE INDEX pending_statements_attempted ON pending_statements (push_key) WHERE attempted;
