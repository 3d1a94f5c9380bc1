"""Tables of connections, as numbered steps: a file of an earlier version is brought to the last."""

from __future__ import annotations

import sqlite3

from store.interface import SchemaError

APPLICATION_ID = 0x534D5041
"'SMPA': a file with another id is not touched."

STEPS = (
    """
CREATE TABLE connections (
    connection_id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    agent_version INTEGER NOT NULL,
    pq_support INTEGER NOT NULL,
    sync_state TEXT NOT NULL DEFAULT 'ok',
    last_local_id INTEGER NOT NULL DEFAULT 0,
    last_rcv_id INTEGER NOT NULL DEFAULT 0,
    last_rcv_hash BLOB NOT NULL DEFAULT x'',
    last_snd_id INTEGER NOT NULL DEFAULT 0,
    last_snd_hash BLOB NOT NULL DEFAULT x'',
    deleted INTEGER NOT NULL DEFAULT 0,
    wants_notifications INTEGER NOT NULL DEFAULT 1
) STRICT;
CREATE TABLE receive_queues (
    queue_id INTEGER PRIMARY KEY AUTOINCREMENT,
    connection_id INTEGER NOT NULL REFERENCES connections ON DELETE CASCADE,
    server TEXT NOT NULL,
    recipient_id BLOB NOT NULL,
    recipient_key BLOB NOT NULL,
    router_secret BLOB NOT NULL,
    e2e_key BLOB NOT NULL,
    e2e_secret BLOB,
    sender_id BLOB NOT NULL,
    sender_key BLOB,
    status TEXT NOT NULL,
    client_version INTEGER NOT NULL,
    mode TEXT,
    is_primary INTEGER NOT NULL DEFAULT 1,
    replaces INTEGER,
    switch TEXT,
    deleting INTEGER NOT NULL DEFAULT 0,
    last_broker_ts INTEGER,
    UNIQUE (server, recipient_id)
) STRICT;
CREATE INDEX receive_queues_connection ON receive_queues (connection_id);
CREATE TABLE send_queues (
    queue_id INTEGER PRIMARY KEY AUTOINCREMENT,
    connection_id INTEGER NOT NULL REFERENCES connections ON DELETE CASCADE,
    server TEXT NOT NULL,
    sender_id BLOB NOT NULL,
    auth_key BLOB NOT NULL,
    e2e_key BLOB NOT NULL,
    e2e_secret BLOB NOT NULL,
    status TEXT NOT NULL,
    client_version INTEGER NOT NULL,
    mode TEXT,
    is_primary INTEGER NOT NULL DEFAULT 1,
    replaces INTEGER,
    switch TEXT
) STRICT;
CREATE INDEX send_queues_connection ON send_queues (connection_id);
CREATE TABLE ratchets (
    connection_id INTEGER PRIMARY KEY REFERENCES connections ON DELETE CASCADE,
    keys BLOB,
    state BLOB
) STRICT;
CREATE TABLE skipped_keys (
    connection_id INTEGER NOT NULL REFERENCES connections ON DELETE CASCADE,
    header_key BLOB NOT NULL,
    number INTEGER NOT NULL,
    key BLOB NOT NULL,
    iv BLOB NOT NULL,
    PRIMARY KEY (connection_id, header_key, number)
) STRICT;
CREATE TABLE confirmations (
    connection_id INTEGER PRIMARY KEY REFERENCES connections ON DELETE CASCADE,
    reply_queue BLOB NOT NULL,
    info BLOB NOT NULL
) STRICT;
CREATE TABLE invitations (
    invitation_id INTEGER PRIMARY KEY AUTOINCREMENT,
    connection_id INTEGER NOT NULL REFERENCES connections ON DELETE CASCADE,
    link TEXT NOT NULL,
    info BLOB NOT NULL,
    accepted INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX invitations_connection ON invitations (connection_id);
CREATE TABLE received_messages (
    connection_id INTEGER NOT NULL REFERENCES connections ON DELETE CASCADE,
    local_id INTEGER NOT NULL,
    queue_id INTEGER NOT NULL,
    broker_id BLOB NOT NULL,
    broker_ts INTEGER NOT NULL,
    message_id INTEGER NOT NULL,
    message_hash BLOB NOT NULL,
    content BLOB NOT NULL,
    integrity TEXT NOT NULL,
    is_acked INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 1,
    received_at INTEGER NOT NULL,
    PRIMARY KEY (connection_id, local_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE sent_messages (
    connection_id INTEGER NOT NULL REFERENCES connections ON DELETE CASCADE,
    local_id INTEGER NOT NULL,
    kind TEXT NOT NULL,
    message_id INTEGER NOT NULL,
    message_hash BLOB NOT NULL,
    plaintext BLOB,
    size INTEGER NOT NULL,
    seal BLOB,
    params BLOB,
    notification INTEGER NOT NULL,
    queued_at INTEGER NOT NULL,
    fast_delay INTEGER NOT NULL,
    fast_elapsed INTEGER NOT NULL DEFAULT 0,
    slow_delay INTEGER NOT NULL,
    slow_elapsed INTEGER NOT NULL DEFAULT 0,
    receipt TEXT,
    PRIMARY KEY (connection_id, local_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX sent_messages_id ON sent_messages (connection_id, message_id);
CREATE TABLE deliveries (
    queue_id INTEGER NOT NULL REFERENCES send_queues ON DELETE CASCADE,
    local_id INTEGER NOT NULL,
    connection_id INTEGER NOT NULL REFERENCES connections ON DELETE CASCADE,
    PRIMARY KEY (queue_id, local_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX deliveries_message ON deliveries (connection_id, local_id);
CREATE TABLE seen_hashes (
    connection_id INTEGER NOT NULL REFERENCES connections ON DELETE CASCADE,
    kind TEXT NOT NULL,
    hash BLOB NOT NULL,
    seen_at INTEGER NOT NULL,
    PRIMARY KEY (connection_id, kind, hash)
) STRICT;
CREATE INDEX seen_hashes_age ON seen_hashes (seen_at);
CREATE TABLE links (
    connection_id INTEGER PRIMARY KEY REFERENCES connections ON DELETE CASCADE,
    link_id BLOB NOT NULL,
    link_key BLOB NOT NULL,
    root_key BLOB NOT NULL,
    fixed BLOB NOT NULL,
    is_address INTEGER NOT NULL
) STRICT;
CREATE TABLE link_keys (
    server TEXT NOT NULL,
    link_id BLOB NOT NULL,
    auth_key BLOB NOT NULL,
    PRIMARY KEY (server, link_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE commands (
    command_id INTEGER PRIMARY KEY AUTOINCREMENT,
    connection_id INTEGER NOT NULL REFERENCES connections ON DELETE CASCADE,
    kind TEXT NOT NULL,
    arguments BLOB NOT NULL,
    delay INTEGER NOT NULL,
    elapsed INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX commands_connection ON commands (connection_id, command_id);
""",
    """
ALTER TABLE receive_queues ADD COLUMN last_broker_id BLOB;
CREATE TABLE ntf_token (
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
    cron INTEGER NOT NULL
) STRICT;
CREATE TABLE deleted_ntf_tokens (
    key INTEGER PRIMARY KEY,
    server TEXT NOT NULL,
    token_id BLOB NOT NULL,
    auth_key BLOB NOT NULL
) STRICT;
CREATE TABLE ntf_subscriptions (
    queue_id INTEGER PRIMARY KEY REFERENCES receive_queues ON DELETE CASCADE,
    smp_server TEXT NOT NULL,
    ntf_server TEXT NOT NULL,
    token_id BLOB NOT NULL,
    action TEXT,
    due INTEGER NOT NULL,
    notifier_key BLOB NOT NULL,
    dh_key BLOB NOT NULL,
    notifier_id BLOB,
    dh_secret BLOB,
    subscription_id BLOB,
    status TEXT NOT NULL
) STRICT;
CREATE INDEX ntf_subscriptions_smp ON ntf_subscriptions (smp_server, action, due);
CREATE INDEX ntf_subscriptions_ntf ON ntf_subscriptions (ntf_server, action, due);
CREATE INDEX ntf_subscriptions_notifier ON ntf_subscriptions (smp_server, notifier_id);
""",
    """
CREATE TABLE services (
    server TEXT PRIMARY KEY,
    certificate BLOB NOT NULL,
    private_key BLOB NOT NULL,
    service_id BLOB
) STRICT, WITHOUT ROWID;
ALTER TABLE receive_queues ADD COLUMN service_id BLOB;
""",
    """
ALTER TABLE commands ADD COLUMN queue_id INTEGER NOT NULL DEFAULT 0;
""",
    """
ALTER TABLE deleted_ntf_tokens RENAME TO answered_tokens;
CREATE TABLE deleted_ntf_tokens (
    key INTEGER PRIMARY KEY,
    server TEXT NOT NULL,
    token_id BLOB,
    auth_key BLOB NOT NULL,
    device_token BLOB,
    dh_public_key BLOB
) STRICT;
INSERT INTO deleted_ntf_tokens (key, server, token_id, auth_key)
    SELECT key, server, token_id, auth_key FROM answered_tokens;
DROP TABLE answered_tokens;
""",
    """
CREATE TABLE deleted_ntf_subscriptions (
    key INTEGER PRIMARY KEY,
    server TEXT NOT NULL,
    token_id BLOB NOT NULL,
    auth_key BLOB NOT NULL,
    subscription_id BLOB,
    smp_server TEXT NOT NULL,
    notifier_id BLOB NOT NULL,
    notifier_key BLOB NOT NULL
) STRICT;
CREATE INDEX deleted_ntf_subscriptions_server ON deleted_ntf_subscriptions (server);
ALTER TABLE ntf_token ADD COLUMN replacement BLOB;
CREATE TABLE new_queues (
    connection_id INTEGER PRIMARY KEY REFERENCES connections ON DELETE CASCADE,
    server TEXT NOT NULL,
    mode TEXT NOT NULL,
    recipient_key BLOB NOT NULL,
    dh_key BLOB NOT NULL,
    e2e_key BLOB NOT NULL,
    corr_id BLOB NOT NULL,
    user_data BLOB NOT NULL
) STRICT;
ALTER TABLE send_queues ADD COLUMN continued_at INTEGER;
ALTER TABLE sent_messages ADD COLUMN taken_at INTEGER;
ALTER TABLE connections ADD COLUMN sync_rounds INTEGER NOT NULL DEFAULT 0;
ALTER TABLE connections ADD COLUMN sync_due INTEGER;
ALTER TABLE connections ADD COLUMN sync_keys BLOB;
CREATE INDEX connections_sync ON connections (sync_due) WHERE sync_due IS NOT NULL;
ALTER TABLE commands DROP COLUMN attempts;
INSERT INTO commands (connection_id, kind, arguments, delay, queue_id)
    SELECT connection_id, 'delete_queue', x'', 2000000, queue_id FROM receive_queues
    WHERE deleting AND queue_id NOT IN (SELECT queue_id FROM commands);
""",
    # Who joined is not known of connections that were made before; what matters is that both sides differ.
    """
ALTER TABLE connections ADD COLUMN joined INTEGER NOT NULL DEFAULT 0;
UPDATE connections AS c SET joined = ifnull((
    SELECT r.sender_id > s.sender_id FROM receive_queues r JOIN send_queues s USING (connection_id)
    WHERE connection_id = c.connection_id
    ORDER BY r.is_primary DESC, r.replaces IS NOT NULL, s.is_primary DESC, s.replaces IS NOT NULL LIMIT 1
), 0);
""",
)


def _marks(db: sqlite3.Connection) -> tuple[int, int]:
    """Of a file: how many steps it has, and of which program it is."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    return version, application_id


def is_current(db: sqlite3.Connection) -> bool:
    """Whether `prepare` has nothing to do."""
    return _marks(db) == (len(STEPS), APPLICATION_ID)


def prepare(db: sqlite3.Connection) -> None:
    """Make or upgrade the tables; SchemaError for a file that is not ours or is of a later program."""
    version, application_id = _marks(db)
    if application_id not in (0, APPLICATION_ID):
        raise SchemaError("the database file belongs to another program")
    if version > len(STEPS):
        raise SchemaError("the database file was made by a later version of this program")
    for number, step in enumerate(STEPS[version:], version + 1):
        marks = f"PRAGMA user_version = {number}; PRAGMA application_id = {APPLICATION_ID};"
        db.executescript(f"BEGIN IMMEDIATE; {step} {marks} COMMIT;")
