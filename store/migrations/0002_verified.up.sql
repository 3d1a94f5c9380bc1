-- A token that was never ACTIVE may not subscribe. Older servers let only ACTIVE and dead tokens do so.
ALTER TABLE tokens ADD COLUMN verified INTEGER NOT NULL DEFAULT 0; -- it was ACTIVE once

UPDATE tokens SET verified = 1
WHERE status = 'ACTIVE' OR token_key IN (SELECT token_key FROM subscriptions);

-- A deleted token with many subscriptions stays, without its keys, until the last of them is gone.
CREATE INDEX tokens_deleted ON tokens (token_key) WHERE status = 'deleted';

-- What a token uses, to bound it. A row stays at 0 when the last subscription goes: routers are bounded for life.
CREATE TABLE token_routers (
    token_key     INTEGER NOT NULL REFERENCES tokens ON DELETE CASCADE,
    server_key    INTEGER NOT NULL REFERENCES smp_servers,
    subscriptions INTEGER NOT NULL,
    PRIMARY KEY (token_key, server_key)
) WITHOUT ROWID;

CREATE INDEX token_routers_of_server ON token_routers (server_key);

INSERT INTO token_routers SELECT token_key, server_key, count(*) FROM subscriptions GROUP BY 1, 2;

-- Routers that nobody uses are deleted, and their keys are not used again.
ALTER TABLE totals ADD COLUMN last_server INTEGER NOT NULL DEFAULT 0; -- the highest server_key ever given

UPDATE totals SET last_server = (SELECT ifnull(max(server_key), 0) FROM smp_servers);
