-- Keys are never used again after a deletion (AUTOINCREMENT): other parts of the server hold them in memory.

CREATE TABLE smp_servers (
    server_key       INTEGER PRIMARY KEY,
    hosts            TEXT    NOT NULL, -- separated by commas, in the order of the address
    port             TEXT    NOT NULL, -- empty: the default port
    key_hash         BLOB    NOT NULL,
    chain            BLOB,             -- service certificates, DER, a counted list of 16-bit length and bytes
    private_key      BLOB,             -- of the service certificate, PKCS#8 DER
    service_id       BLOB,
    associated_count INTEGER NOT NULL DEFAULT 0,
    associated_hash  BLOB    NOT NULL DEFAULT (zeroblob(16)), -- XOR of the MD5 of associated notifier ids
    UNIQUE (hosts, port, key_hash)
);

CREATE TABLE tokens (
    token_key    INTEGER PRIMARY KEY AUTOINCREMENT,
    token_id     BLOB    NOT NULL UNIQUE,
    device_token BLOB    NOT NULL, -- as on the wire: provider and token
    verify_key   BLOB    NOT NULL,
    dh_private   BLOB    NOT NULL,
    dh_secret    BLOB    NOT NULL,
    code         BLOB    NOT NULL,
    status       TEXT    NOT NULL,
    cron_minutes INTEGER NOT NULL DEFAULT 0,
    cron_due     INTEGER,
    updated_on   INTEGER NOT NULL, -- start of the day
    UNIQUE (device_token, verify_key)
);

CREATE INDEX tokens_cron_due ON tokens (cron_due) WHERE status = 'ACTIVE' AND cron_due IS NOT NULL;

CREATE INDEX tokens_not_active ON tokens (updated_on) WHERE status <> 'ACTIVE';

CREATE TABLE subscriptions (
    sub_key         INTEGER PRIMARY KEY AUTOINCREMENT,
    subscription_id BLOB    NOT NULL UNIQUE,
    token_key       INTEGER NOT NULL REFERENCES tokens ON DELETE CASCADE,
    server_key      INTEGER NOT NULL REFERENCES smp_servers,
    notifier_id     BLOB    NOT NULL,
    notifier_key    BLOB    NOT NULL,
    state           TEXT    NOT NULL,
    detail          TEXT    NOT NULL DEFAULT '', -- the router's words, for ERR
    associated      INTEGER NOT NULL DEFAULT 0,
    retry_count     INTEGER NOT NULL DEFAULT 0,
    retry_at        INTEGER,
    UNIQUE (server_key, notifier_id)
);

-- Also the parent key of notifications.
CREATE UNIQUE INDEX subscriptions_of_token ON subscriptions (token_key, sub_key);

-- Pages of a router's queues. Without the state, so that most changes of state leave it alone.
CREATE INDEX subscriptions_of_server ON subscriptions (server_key, associated, sub_key);

-- Few, so that all the others can be counted without looking at them.
CREATE INDEX subscriptions_dead ON subscriptions (state)
WHERE state IN ('AUTH', 'DELETED', 'END', 'ERR', 'SERVICE');

CREATE INDEX subscriptions_retry ON subscriptions (server_key, retry_at) WHERE retry_at IS NOT NULL;

-- Last notifications that no accepted push has carried yet. Appended in order and soon gone again: a block of
-- them changes few pages, where a table ordered by token would change one for each.
CREATE TABLE unsent_notifications (
    seq         INTEGER PRIMARY KEY, -- rises with every NMSG of the server
    token_key   INTEGER NOT NULL,
    sub_key     INTEGER NOT NULL,
    received_at INTEGER NOT NULL,
    nonce       BLOB    NOT NULL,
    meta        BLOB    NOT NULL,
    UNIQUE (token_key, sub_key),
    FOREIGN KEY (token_key, sub_key) REFERENCES subscriptions (token_key, sub_key) ON DELETE CASCADE
);

-- The newest ones that were pushed, a few for each token. One of a queue that has an unsent one is out of date.
CREATE TABLE sent_notifications (
    token_key   INTEGER NOT NULL,
    sub_key     INTEGER NOT NULL,
    seq         INTEGER NOT NULL,
    received_at INTEGER NOT NULL,
    nonce       BLOB    NOT NULL,
    meta        BLOB    NOT NULL,
    PRIMARY KEY (token_key, sub_key),
    FOREIGN KEY (token_key, sub_key) REFERENCES subscriptions (token_key, sub_key) ON DELETE CASCADE
) WITHOUT ROWID;

-- One row, kept in the transactions that change what it counts: counting a million rows takes too long.
CREATE TABLE totals (
    only_row             INTEGER PRIMARY KEY CHECK (only_row = 1),
    tokens               INTEGER NOT NULL,
    active_tokens        INTEGER NOT NULL,
    subscriptions        INTEGER NOT NULL,
    active_subscriptions INTEGER NOT NULL,
    last_seq             INTEGER NOT NULL -- the highest seq of a notification ever given
);

INSERT INTO totals VALUES (1, 0, 0, 0, 0, 0);
