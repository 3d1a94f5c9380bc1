"""No statement reads a whole table: a million subscriptions is an ordinary database."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from types import ModuleType

import pytest

from store import (
    migrate,
    sqlite_notifications,
    sqlite_routers,
    sqlite_statements,
    sqlite_subscriptions,
    sqlite_tokens,
)

LARGE = "tokens|subscriptions|sent_notifications|statement_\\w+"
"Tables that are read by index only."


def statements(module: ModuleType) -> Iterator[str]:
    for value in vars(module).values():
        for text in (
            value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
        ):
            if isinstance(text, str) and re.match(r"\s*(SELECT|UPDATE|DELETE|REPLACE|INSERT)\b", text):
                yield text


STATEMENTS = [
    statement
    for module in (
        sqlite_notifications,
        sqlite_routers,
        sqlite_statements,
        sqlite_subscriptions,
        sqlite_tokens,
    )
    for statement in statements(module)
    if "VALUES" not in statement and "FROM {} n" not in statement and "associated = {}" not in statement
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_large_tables_are_searched_not_scanned(statement: str) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        migrate.apply(db, migrate.STEPS.plan(0, migrate.STEPS.latest))
        runnable = re.sub(r"[?:]\w*", "1", statement.format("1, 1"))
        plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {runnable}")]
    assert plan
    scans = [step for step in plan if re.match(rf"SCAN ({LARGE}|[nost])\b", step)]
    assert all("USING" in step for step in scans), plan


def test_pages_are_read_in_order_without_sorting() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        migrate.apply(db, migrate.STEPS.plan(0, migrate.STEPS.latest))
        for page in sqlite_routers._PAGES.values():
            plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {page}", (1, 1, 1))]
            assert not [step for step in plan if "TEMP B-TREE" in step]
