"""Every statement of the store in PostgreSQL finds its rows by an index, at a million of them."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import store
from store import postgres_leases, subscriptions
from store.postgres import PostgresStore
from store.postgres_migrate import SCHEMA
from store.sql_store import Sql
from store.tables import TABLES
from store.tables_postgres import NewPostgresTables, PostgresTables
from tests.postgres import PostgresCluster

SUBSCRIPTIONS, TOKENS, ROUTERS = 1_000_000, 200_000, 20_000
BUSY_ROUTERS = 1000
FEWER = 100_000
"Of what there are less of than subscriptions, and still too many to read."
SMALL = {
    "daemons": "those that run, and some that ran",
    "totals": "a row for each daemon",
    "schema_version": "a row for each migration",
    "statement_listening": "a row",
}
"All other tables are filled."
ON_PURPOSE = {
    "postgres_leases._COUNTS": "all leases, few for each router: which daemon has too many",
    "postgres_leases._FREE": "all leases of a daemon that is given up; of none, nothing is read",
    "routers._COUNTS": "counts what is unsent, every 15 seconds",
    "routers._SERVERS": "all routers, once at the start of a daemon that is alone",
    "routers._UNUSED_SERVERS": "all routers, every ten minutes, by one daemon",
    "statement_reports._RULES": "counts rules, every minute and for an operator",
    "statement_reports._SUBSCRIPTIONS": "counts subscriptions, as often",
    "statement_reports._WAITING": "counts pushes to be made, as often",
}
"Statements whose answer is about all rows."

# Ids in the order of the keys: indexes that grow at their end are made in a quarter of the time.
_FILL = f"""
SET search_path = {SCHEMA};
SET session_replication_role = replica;
INSERT INTO smp_servers (hosts, port, key_hash)
    SELECT 'r' || n || '.example.org', '', int8send(n) FROM generate_series(1::bigint, {ROUTERS}) n;
INSERT INTO leases (duty, id, owner) SELECT 'router', server_key, server_key % 3 FROM smp_servers;
INSERT INTO tokens
    (token_id, device_token, verify_key, dh_private, dh_secret, code, status, cron_due, updated_on)
    SELECT int8send(n), int8send(n), '', '', '', '',
        CASE n % 50 WHEN 0 THEN 'REGISTERED' ELSE 'ACTIVE' END, CASE n % 10 WHEN 0 THEN n END, n % 1000
    FROM generate_series(1::bigint, {TOKENS}) n;
INSERT INTO subscriptions (subscription_id, token_key, server_key, notifier_id, notifier_key, state, retry_at)
    SELECT int8send(n), n % {TOKENS} + 1, n % {ROUTERS} + 1, int8send(n), '',
        CASE n % 100 WHEN 0 THEN 'END' ELSE 'ACTIVE' END, CASE n % 100 WHEN 0 THEN n END
    FROM generate_series(1::bigint, {SUBSCRIPTIONS}) n;
INSERT INTO token_routers SELECT token_key, server_key, count(*) FROM subscriptions GROUP BY 1, 2;
INSERT INTO unsent_notifications (token_key, sub_key, received_at, nonce, meta)
    SELECT token_key, sub_key, 1, '', '' FROM subscriptions WHERE sub_key % 10 = 0;
INSERT INTO sent_notifications (token_key, sub_key, seq, received_at, nonce, meta)
    SELECT token_key, sub_key, sub_key, 1, '', '' FROM subscriptions WHERE sub_key % 5 = 1;
-- Most wait at a few routers, some at very many: of daemons that went away, or that have too much to do.
INSERT INTO handovers SELECT server_key, sub_key FROM subscriptions
    WHERE server_key <= {BUSY_ROUTERS} OR sub_key % 10 = 0;
INSERT INTO handovers SELECT 1, -n FROM generate_series(1, {FEWER}) n;
INSERT INTO statement_subscriptions
    (subscription_id, client_id, channel, device_token, is_call, created_at, updated_at, renewed_at, proven)
    SELECT int8send(n), int8send(n % 50000), 'apns',
        int8send(n), false, 0, 0, n, n % 2 = 0 FROM generate_series(1::bigint, {FEWER}) n;
INSERT INTO statement_rules
    SELECT int8send(n), int8send(n % 1000), n, 0, CASE n % 1000 WHEN 0 THEN 1 ELSE 0 END
    FROM generate_series(1::bigint, {FEWER}) n;
INSERT INTO statement_requests SELECT int8send(n), n FROM generate_series(1::bigint, {FEWER}) n;
INSERT INTO statement_rates
    SELECT int8send(n), int8send(n), '', 0, n
    FROM generate_series(1::bigint, {FEWER}) n;
INSERT INTO statement_pushes
    (device_id, subscription_id, statement_hash, sender, topic, accepted_at, keep_until, outcome)
    SELECT int8send(n % 20000), int8send(n % 20000), int8send(n), int8send(n % 1000), '', 0, n,
        CASE n % 10 WHEN 0 THEN 'limited' ELSE 'sent' END
    FROM generate_series(1::bigint, {FEWER}) n;
INSERT INTO pending_statements (push_key, sub_key, data, attempted, expires_at)
    SELECT n, n, '', n % 100 = 0, n FROM generate_series(1::bigint, {FEWER}) n;
INSERT INTO statement_devices
    SELECT int8send(n), '', n % 2, n FROM generate_series(1::bigint, {FEWER}) n;
INSERT INTO statement_registrations
    (subscription_id, client_id, channel, device_token, is_call, code, created_at)
    SELECT int8send(n), int8send(n), 'apns', int8send(n), false, '', n
    FROM generate_series(1::bigint, {FEWER}) n;
SET session_replication_role = origin;
ANALYZE;
"""
_EMPTY = f"""
SELECT relname FROM pg_class WHERE relnamespace = '{SCHEMA}'::regnamespace AND relkind = 'r'
    AND reltuples < {ROUTERS}
"""
_PARTIAL = "SELECT indexrelid::regclass::text FROM pg_index WHERE indpred IS NOT NULL"
# Deleting or changing a row looks for those that refer to it: no plan shows that.
_UNINDEXED_REFERENCES = f"""
SELECT conrelid::regclass || ' ' || conname FROM pg_constraint c
WHERE contype = 'f' AND connamespace = '{SCHEMA}'::regnamespace AND NOT EXISTS (
    SELECT FROM pg_index i WHERE i.indrelid = c.conrelid AND i.indpred IS NULL
        AND (i.indkey::int2[])[0:cardinality(conkey) - 1] @> conkey)
"""

STATEMENT = re.compile(r"\s*\(?\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b")
TABLE = re.compile(r"\b(?:FROM|JOIN|INTO|UPDATE)\s+[a-z]")


def modules() -> list[str]:
    """Those with SQL of a daemon; what moves whole stores makes its statements, see below."""
    names = [module.name for module in pkgutil.iter_modules(store.__path__) if not module.ispkg]
    return [
        name for name in names if not name.startswith(("sqlite_", "postgres_migrat", "tables", "importing"))
    ]


def statements() -> Iterator[tuple[str, str]]:
    """Name and text of every statement: constants of the modules."""
    for module in modules():
        for name, value in vars(importlib.import_module(f"store.{module}")).items():
            for one in value.values() if isinstance(value, dict) else [value]:
                text = one.postgres if isinstance(one, Sql) else one
                is_text = isinstance(one, Sql) or module.startswith("postgres_")
                if is_text and isinstance(text, str) and STATEMENT.match(text) and "{}" not in text:
                    yield f"{module}.{name}", text


STATEMENTS = list(statements())


@pytest.fixture(scope="module")
def database(postgres: PostgresCluster) -> str:
    return postgres.new_database()


@pytest.fixture
async def filled(database: str) -> AsyncIterator[asyncpg.Connection]:
    """Once for all tests here."""
    db = await asyncpg.connect(database)
    if await db.fetchval("SELECT to_regnamespace($1)", SCHEMA) is None:
        opened = PostgresStore(database)
        await opened.open()
        await opened.close()
        await db.execute(_FILL)
    await db.execute(f"SET search_path = {SCHEMA}")
    yield db
    await db.close()


def test_no_statement_hides_in_a_function() -> None:
    for module in modules():
        tree = ast.parse(Path(store.__path__[0], f"{module}.py").read_text(encoding="utf-8"))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    text = node.value
                    assert not (STATEMENT.match(text) and TABLE.search(text)), f"{module}: {text}"


async def test_every_table_is_filled(filled: asyncpg.Connection) -> None:
    assert {row[0] for row in await filled.fetch(_EMPTY)} == set(SMALL)
    assert await filled.fetchval("SELECT count(*) FROM subscriptions") == SUBSCRIPTIONS


async def test_every_statement_uses_an_index(filled: asyncpg.Connection) -> None:
    assert len(STATEMENTS) > 60
    await filled.execute("SET plan_cache_mode = force_generic_plan")
    slow = {name: found for name, text in STATEMENTS if (found := await reads_whole(filled, text))}
    assert {name: found for name, found in slow.items() if name not in ON_PURPOSE} == {}
    assert set(ON_PURPOSE) == set(slow), "no longer needed"


async def test_queues_of_others_that_wait_are_not_read(filled: asyncpg.Connection) -> None:
    """Nor more of ours than are asked for. A plan does not tell: how much it reads depends on the rows."""
    waiting = await filled.fetchval("SELECT count(DISTINCT server_key) FROM handovers")
    limit = 50
    for owner, found in ((1, limit), (77, 0)):  # the latter owns nothing
        asked = postgres_leases._HANDED_OVER.replace("$1", str(owner)).replace("$2", str(limit))
        plan = await filled.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {asked}")
        root = json.loads(plan)[0]["Plan"]
        assert root["Actual Rows"] == found
        assert rows_read(root, "handovers") <= waiting + limit


def rows_read(node: dict[str, Any], relation: str) -> float:
    below = sum(rows_read(child, relation) for child in node.get("Plans", ()))
    here = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
    return below + (here if node.get("Relation Name") == relation else 0)


async def test_references_are_indexed(filled: asyncpg.Connection) -> None:
    assert await filled.fetch(_UNINDEXED_REFERENCES) == []


class Filled(NewPostgresTables):
    """Moves rows into tables that are large already."""

    schema = SCHEMA
    use = PostgresTables.use


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
async def test_moving_uses_indexes(filled: asyncpg.Connection, table: Any) -> None:
    asked: list[str] = []
    tables = Filled(filled)
    await tables.use()
    undone = filled.transaction()
    await undone.start()
    await filled.execute("SET LOCAL session_replication_role = replica")  # others refer to what is deleted
    with filled.query_logger(lambda record: asked.append(record.query)):
        rows = await tables.page(table, table.before_all, None)
        keys = [table.key_of(row) for row in rows[:100]]
        assert await tables.rows(table, keys)
        await tables.upsert(table, rows[:100])
        await tables.delete(table, keys)
        await filled.execute("SELECT 1")  # the logger hears of each with the next
    found = [text for text in asked if STATEMENT.match(text) and table.name in text]
    assert len(found) >= 4
    await filled.execute("SET plan_cache_mode = force_generic_plan")
    for text in found:
        assert await reads_whole(filled, text) == set(), text
    await undone.rollback()


async def reads_whole(db: asyncpg.Connection, text: str) -> set[str]:
    """Tables, and indexes of them, that a statement reads from end to end, whatever its arguments."""
    parameters = max((int(number) for number in re.findall(r"\$(\d+)", text)), default=0)
    await db.execute(f"PREPARE asked AS {text}")
    arguments = f"({', '.join(['NULL'] * parameters)})" if parameters else ""
    plan = await db.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE asked{arguments}")
    await db.execute("DEALLOCATE asked")
    return set(whole(json.loads(plan)[0]["Plan"], {row[0] for row in await db.fetch(_PARTIAL)}))


def whole(node: dict[str, Any], partial: set[str], limited: bool = False) -> Iterator[str]:
    """A partial index holds what is looked for; with a limit, an index is read as far as that."""
    limited = limited or node["Node Type"] == "Limit"
    relation, index = node.get("Relation Name", ""), node.get("Index Name", "")
    if relation not in SMALL and not relation.startswith("moving_changed_"):
        if node["Node Type"] == "Seq Scan":
            yield relation
        if index and "Index Cond" not in node and index not in partial and not limited:
            yield f"{relation} by {index}"
    for child in node.get("Plans", ()):
        yield from whole(child, partial, limited)


async def test_a_plan_made_before_there_are_rows_is_good_for_later(postgres: PostgresCluster) -> None:
    """A prepared statement keeps its plan: SNEW must not read all queues of a router to find one."""
    url = postgres.new_database()
    empty = PostgresStore(url)
    await empty.open()
    await empty.close()
    db = await asyncpg.connect(url)
    parameters = "text[], text[], bytea[], bytea[], bool[]"
    await db.execute(f"PREPARE found({parameters}) AS {subscriptions._FOUND.postgres}")
    plan = [row[0] for row in await db.fetch("EXPLAIN EXECUTE found('{a}', '{1}', '{a}', '{a}', '{t}')")]
    await db.close()
    assert any("subscriptions_server_key_notifier_id_key" in step for step in plan)
    assert not any("subscriptions_of_server" in step for step in plan)
