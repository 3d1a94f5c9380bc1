"""Tables of the agent's state file."""

from __future__ import annotations

SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE token (
    key INTEGER PRIMARY KEY CHECK (key = 1),
    server TEXT NOT NULL,
    device_token BLOB NOT NULL,
    mode TEXT NOT NULL,
    period INTEGER NOT NULL,
    auth_key BLOB NOT NULL,
    dh_key BLOB NOT NULL,
    token_id BLOB,
    dh_secret BLOB,
    status TEXT NOT NULL,
    action TEXT,
    code BLOB,
    cron INTEGER
);
CREATE TABLE deleted_tokens (
    key INTEGER PRIMARY KEY,
    server TEXT NOT NULL,
    token_id BLOB NOT NULL,
    auth_key BLOB NOT NULL
);
CREATE TABLE connections (
    connection_id INTEGER PRIMARY KEY AUTOINCREMENT,
    wants_notifications INTEGER NOT NULL
);
CREATE TABLE receive_queues (
    connection_id INTEGER PRIMARY KEY REFERENCES connections ON DELETE CASCADE,
    server TEXT NOT NULL,
    recipient_key BLOB NOT NULL,
    dh_key BLOB NOT NULL,
    e2e_key BLOB NOT NULL,
    recipient_id BLOB,
    sender_id BLOB,
    router_secret BLOB,
    sender_key BLOB,
    last_number INTEGER NOT NULL,
    last_broker_ts INTEGER
);
CREATE TABLE send_queues (
    connection_id INTEGER PRIMARY KEY REFERENCES connections ON DELETE CASCADE,
    server TEXT NOT NULL,
    sender_id BLOB NOT NULL,
    auth_key BLOB NOT NULL,
    e2e_key BLOB NOT NULL,
    recipient_key BLOB NOT NULL,
    confirmed INTEGER NOT NULL,
    secured INTEGER NOT NULL,
    last_number INTEGER NOT NULL
);
CREATE TABLE outbox (
    key INTEGER PRIMARY KEY,
    connection_id INTEGER NOT NULL REFERENCES send_queues ON DELETE CASCADE,
    notification INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX outbox_connection ON outbox (connection_id, key);
CREATE TABLE messages (
    connection_id INTEGER NOT NULL REFERENCES connections ON DELETE CASCADE,
    message_id BLOB NOT NULL,
    broker_ts INTEGER NOT NULL,
    number INTEGER NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (connection_id, message_id)
);
CREATE TABLE subscriptions (
    connection_id INTEGER PRIMARY KEY REFERENCES receive_queues ON DELETE CASCADE,
    smp_server TEXT NOT NULL,
    ntf_server TEXT NOT NULL,
    token_id BLOB NOT NULL,
    action TEXT,
    due REAL NOT NULL,
    notifier_key BLOB NOT NULL,
    dh_key BLOB NOT NULL,
    notifier_id BLOB,
    dh_secret BLOB,
    subscription_id BLOB,
    status TEXT NOT NULL
);
CREATE INDEX subscriptions_smp ON subscriptions (smp_server, action, due);
CREATE INDEX subscriptions_ntf ON subscriptions (ntf_server, action, due);
CREATE INDEX subscriptions_notifier ON subscriptions (smp_server, notifier_id);
"""
