"""Every statement of the store in PostgreSQL finds its rows by an index, however many there are."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator

import asyncpg
import pytest

import store
from store.postgres import PostgresStore
from tests.postgres import PostgresCluster

TOKENS, QUEUES, ROUTERS = 60_000, 300_000, 5_000

BIG = (
    "tokens",
    "subscriptions",
    "unsent_notifications",
    "sent_notifications",
    "token_routers",
    "smp_servers",
    "statement_subscriptions",
    "statement_rules",
    "statement_rates",
    "statement_pushes",
    "pending_statements",
)
ON_PURPOSE = {
    "postgres_notifications._COUNTS": "counts what is unsent, every 15 seconds",
    "postgres_routers._SERVERS": "all routers, once at the start of a daemon that is alone",
    "postgres_routers._UNUSED_SERVERS": "all routers, every ten minutes, by one daemon",
}
"Statements whose answer is about all rows."

_FILL = f"""
SET search_path = ntf;
SET session_replication_role = replica;
INSERT INTO smp_servers (hosts, port, key_hash)
    SELECT 'r' || n || '.example.org', '', decode(md5(n::text), 'hex') FROM generate_series(1, {ROUTERS}) n;
INSERT INTO leases (duty, id) SELECT 'router', server_key FROM smp_servers;
INSERT INTO tokens
    (token_id, device_token, verify_key, dh_private, dh_secret, code, status, cron_due, updated_on)
    SELECT decode(md5(n::text), 'hex'), decode(md5('d' || n), 'hex'), '', '', '', '',
        CASE n % 50 WHEN 0 THEN 'REGISTERED' ELSE 'ACTIVE' END, CASE n % 10 WHEN 0 THEN n END, n % 1000
    FROM generate_series(1, {TOKENS}) n;
INSERT INTO subscriptions (subscription_id, token_key, server_key, notifier_id, notifier_key, state, retry_at)
    SELECT decode(md5(n::text), 'hex'), n % {TOKENS} + 1, n % {ROUTERS} + 1, decode(md5('n' || n), 'hex'), '',
        CASE n % 100 WHEN 0 THEN 'END' ELSE 'ACTIVE' END, CASE n % 100 WHEN 0 THEN n END
    FROM generate_series(1, {QUEUES}) n;
INSERT INTO token_routers SELECT token_key, server_key, count(*) FROM subscriptions GROUP BY 1, 2;
INSERT INTO unsent_notifications (token_key, sub_key, received_at, nonce, meta)
    SELECT token_key, sub_key, 1, '', '' FROM subscriptions WHERE sub_key % 3 = 0;
INSERT INTO sent_notifications (token_key, sub_key, seq, received_at, nonce, meta)
    SELECT token_key, sub_key, sub_key, 1, '', '' FROM subscriptions WHERE sub_key % 3 = 1;
INSERT INTO statement_subscriptions
    (subscription_id, client_id, channel, device_token, is_call, created_at, updated_at)
    SELECT decode(md5(n::text), 'hex'), decode(md5('c' || n / 2), 'hex'), 'apns',
        decode(md5('d' || n), 'hex'), false, 1, 1 FROM generate_series(1, {TOKENS}) n;
INSERT INTO statement_rules (topic, sender, sub_key)
    SELECT decode(md5('t' || n), 'hex'), decode(md5('s' || n), 'hex'), n % {TOKENS} + 1
    FROM generate_series(1, {QUEUES}) n;
INSERT INTO statement_rates SELECT sender, topic, '', 0, n FROM (
    SELECT sender, topic, row_number() OVER () n FROM statement_rules LIMIT {TOKENS}) r;
INSERT INTO statement_pushes (subscription_id, statement_hash, sender, topic, accepted_at, keep_until)
    SELECT decode(md5(n::text), 'hex'), decode(md5('h' || n), 'hex'), '', '', n, n
    FROM generate_series(1, {TOKENS}) n;
INSERT INTO pending_statements SELECT push_key, push_key, '', push_key % 1000 = 0 FROM statement_pushes;
SET session_replication_role = origin;
ANALYZE;
"""


STATEMENT = re.compile(r"\s*\(?\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b")


def statements() -> Iterator[tuple[str, str]]:
    """Name and text of every statement: constants of the modules."""
    for module in pkgutil.iter_modules(store.__path__):
        if not module.name.startswith("postgres_") or module.ispkg or module.name == "postgres_migrate":
            continue
        for name, value in vars(importlib.import_module(f"store.{module.name}")).items():
            for text in value.values() if isinstance(value, dict) else [value]:
                if isinstance(text, str) and STATEMENT.match(text) and "{}" not in text:
                    yield f"{module.name}.{name}", text


STATEMENTS = list(statements())


@pytest.fixture(scope="module")
def filled(postgres: PostgresCluster) -> str:
    return postgres.new_database()


async def test_every_statement_uses_an_index(filled: str) -> None:
    assert len(STATEMENTS) > 60
    opened = PostgresStore(filled)
    await opened.open()
    await opened.close()
    db = await asyncpg.connect(filled)
    await db.execute(_FILL)
    await db.execute("SET plan_cache_mode = force_generic_plan")
    slow = []
    for name, text in STATEMENTS:
        plan = await plan_of(db, text)
        scanned = set(re.findall(r"Seq Scan on (\w+)", plan)) & set(BIG)
        if scanned and name not in ON_PURPOSE:
            slow.append(f"{name} reads all of {scanned}:\n{text}\n{plan}")
    await db.close()
    assert not slow, "\n\n".join(slow)


async def plan_of(db: asyncpg.Connection, text: str) -> str:
    """As it is run again and again, whatever its arguments."""
    parameters = max((int(number) for number in re.findall(r"\$(\d+)", text)), default=0)
    await db.execute(f"PREPARE asked AS {text}")
    arguments = f"({', '.join(['NULL'] * parameters)})" if parameters else ""
    rows = await db.fetch(f"EXPLAIN EXECUTE asked{arguments}")
    await db.execute("DEALLOCATE asked")
    return "\n".join(row[0] for row in rows)
