"""A rule that is in the database is found, whatever was remembered of the rules: others write too,
transactions are undone, and there is room for so many only."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from store import rule_filter
from store.interface import StoreError
from store.rule_filter import RuleFilter
from store.sqlite import SqliteStore
from store.statement_rate import WINDOW
from store.statement_records import Accepted, Rule, RuleEdit
from tests.store.test_contract_statements import NOW, accept, edit, rule, statement, subscribed

NO_COMMIT_AFTER_A_DELETION = """
CREATE TABLE never (id INTEGER PRIMARY KEY);
CREATE TABLE wrong (id INTEGER REFERENCES never DEFERRABLE INITIALLY DEFERRED);
CREATE TRIGGER wrong AFTER DELETE ON statement_rules BEGIN INSERT INTO wrong VALUES (1); END;
"""
RULES = 3000
MOST_IN_VAIN = 1 / 8


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(folder / "ntf.db")
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    async with opened(tmp_path) as store:
        yield store


async def is_found(store: SqliteStore, wanted: Rule) -> bool:
    return bool((await accept(store, statement(wanted))).pushes)


async def test_room_is_made_for_new_rules(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_filter, "SMALLEST", 8)
    made = await subscribed(store, rule())
    kept: set[Rule] = set()
    for number in range(60):
        new, gone = {rule() for _ in range(10)}, set(random.sample(sorted(kept), len(kept) // 3))
        await edit(store, made, RuleEdit.ADD, *new)
        await edit(store, made, RuleEdit.REMOVE, *gone)
        kept = (kept | new) - gone
        asked = random.sample(sorted(kept), min(len(kept), 20))
        came = [statement(one) for one in (*asked, *gone)]
        found = await accept(store, *came, now=NOW + number * WINDOW)
        assert len(found.pushes) == len(asked)


async def test_few_questions_are_in_vain(
    tmp_path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule_filter, "SMALLEST", 8)
    rules = [rule() for _ in range(RULES)]
    await subscribed(store, *rules)
    others = [rule() for _ in range(RULES)]
    known = RuleFilter()
    with closing(sqlite3.connect(tmp_path / "ntf.db")) as db:
        assert known.possible(db, rules) == rules
        assert len(known.possible(db, others)) < RULES * MOST_IN_VAIN
        # Rules that came and went leave their bits, until there are too many.
        for _ in range(20):
            known.add([rule() for _ in range(RULES)])
            assert len(known.possible(db, others)) < RULES * MOST_IN_VAIN


async def test_rules_that_another_process_added(tmp_path: Path, store: SqliteStore) -> None:
    made = await subscribed(store, first := rule())
    assert await is_found(store, first)
    for wanted in (rule(), rule()):
        async with opened(tmp_path) as other:
            await edit(other, made, RuleEdit.ADD, wanted)
            assert await is_found(store, wanted)


async def test_rules_that_were_added_while_the_store_was_closed(tmp_path: Path, store: SqliteStore) -> None:
    made = await subscribed(store, first := rule())
    assert await is_found(store, first)
    await store.close()
    async with opened(tmp_path) as other:
        await edit(other, made, RuleEdit.ADD, wanted := rule())
    await store.open()
    assert await is_found(store, wanted)


async def test_rules_whose_deletion_was_undone(tmp_path: Path, store: SqliteStore) -> None:
    """In the transaction in which a statement was looked up, and whose commit failed."""
    made = await subscribed(store, wanted := rule())
    with closing(sqlite3.connect(tmp_path / "ntf.db")) as db:
        db.executescript(NO_COMMIT_AFTER_A_DELETION)
    removed, found = await asyncio.gather(
        edit(store, made, RuleEdit.REMOVE, wanted), accept(store, statement(wanted)), return_exceptions=True
    )
    assert isinstance(removed, StoreError)
    assert isinstance(found, Accepted)
    assert len(found.pushes) == 1
