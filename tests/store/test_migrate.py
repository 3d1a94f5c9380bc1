from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from store import migrate, postgres_migrate
from store.database_files import open_to_write
from store.interface import SchemaError, StoreUnavailable
from store.records import TokenKey
from store.rows import DELETED_PAGE
from store.schema_steps import Migration
from store.sqlite import SqliteStore
from store.tables import SERVERS, SUBSCRIPTIONS, TOKENS
from store.tables_postgres import NewPostgresTables, connected
from store.tables_sqlite import SqliteTables
from tests.postgres import PostgresCluster
from tests.store.builders import active_token, find_token, new_subscription, queue_states

LATEST = migrate.STEPS.latest


def dump(path: Path) -> tuple[str, int, int]:
    with closing(sqlite3.connect(path)) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (application_id,) = db.execute("PRAGMA application_id").fetchone()
        return migrate.schema_dump(db), version, application_id


def test_up_down_up_gives_the_same_schema(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    up = migrate.migrate(path)
    assert [step.version for step in up] == list(range(1, LATEST + 1))
    first = dump(path)
    assert first[1:] == (LATEST, migrate.APPLICATION_ID)
    down = migrate.migrate(path, to=0)
    assert [step.version for step in down] == list(range(LATEST - 1, -1, -1))
    assert all(step.is_down for step in down)
    assert dump(path) == ("\n", 0, migrate.APPLICATION_ID)
    migrate.migrate(path)
    assert dump(path) == first
    assert migrate.migrate(path) == []


@pytest.mark.parametrize("version", range(1, LATEST + 1))
def test_every_version_can_be_reached_and_left(tmp_path: Path, version: int) -> None:
    path = tmp_path / "ntf.db"
    migrate.migrate(path, to=version)
    before = dump(path)
    migrate.migrate(path, to=version - 1)
    migrate.migrate(path, to=version)
    assert dump(path) == before


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    steps = migrate.migrate(path, dry_run=True)
    assert not path.exists()
    assert str(steps[0]) == "apply 0001_initial -> version 1"
    migrate.migrate(path)
    before = path.read_bytes()
    assert [str(step) for step in migrate.migrate(path, to=0, dry_run=True)][-1] == (
        "undo 0001_initial -> version 0"
    )
    assert path.read_bytes() == before


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    for version in (-1, LATEST + 1):
        with pytest.raises(SchemaError):
            migrate.migrate(path, to=version)
    assert not path.exists()


async def test_a_step_that_fails_is_undone(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    migrate.migrate(path)
    before = dump(path)
    broken = Migration(LATEST + 1, "broken", False, "CREATE TABLE extra (x);\nDROP TABLE nowhere;\n")
    with closing(open_to_write(path, isolation_level=None)) as db:
        with pytest.raises(sqlite3.OperationalError):
            migrate.apply(db, [broken])
        assert not db.in_transaction
    assert dump(path) == before


async def test_data_survive_opening_again(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    store = SqliteStore(path)
    await store.open()
    token = await active_token(store)
    await store.close()
    assert migrate.migrate(path) == []
    store = SqliteStore(path, read_only=True)
    await store.open()
    assert await find_token(store, token.token_id) == token
    await store.close()


def test_a_locked_database_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    migrate.migrate(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnavailable, match="locked"):
            migrate.migrate(path, to=0)


_OLD_TOKEN = """
INSERT INTO tokens (token_id, device_token, verify_key, dh_private, dh_secret, code, status, updated_on)
VALUES (?1, x'414E00', ?1, x'', x'', x'', ?2, 0)
"""
_OLD_SUBSCRIPTION = """
INSERT INTO subscriptions (subscription_id, token_key, server_key, notifier_id, notifier_key, state)
VALUES (?1, ?2, 1, ?1, x'', 'ACTIVE')
"""


async def test_tokens_of_an_older_server_keep_their_rights(tmp_path: Path) -> None:
    """Dead tokens with subscriptions were ACTIVE once; of others nobody knows, so they verify again."""
    path = tmp_path / "ntf.db"
    migrate.migrate(path, to=1)
    with closing(open_to_write(path, isolation_level=None)) as db:
        db.execute("INSERT INTO smp_servers (hosts, port, key_hash) VALUES ('router.example', '', x'00')")
        for number, status in enumerate(("ACTIVE", "INVALID,BAD", "INVALID,BAD", "REGISTERED"), 1):
            db.execute(_OLD_TOKEN, (b"%d" % number, status))
        for number, token in enumerate((1, 1, 2)):
            db.execute(_OLD_SUBSCRIPTION, (b"%d" % number, token))
        db.execute("UPDATE totals SET tokens = 4, active_tokens = 1, subscriptions = 3")
    store = SqliteStore(path)
    await store.open()
    tokens = await store.tokens_by_key([TokenKey(key) for key in range(1, 5)])
    assert [token.may_subscribe for token in tokens] == [True, True, False, False]
    deletion = await store.delete_token(TokenKey(1))
    assert deletion is not None
    assert deletion.tokens[0].subscriptions == 2
    await store.close()


async def test_going_back_leaves_a_deleted_token_to_the_older_server(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    store = SqliteStore(path)
    await store.open()
    token = await active_token(store)
    await store.create_subscriptions([new_subscription(token.key) for _ in range(2 * DELETED_PAGE)])
    await store.delete_token(token.key)
    await store.close()
    migrate.migrate(path, to=1)
    with closing(open_to_write(path, isolation_level=None)) as db:
        assert db.execute("SELECT status, updated_on FROM tokens").fetchall() == [("INVALID", 0)]
        assert db.execute("SELECT tokens, subscriptions FROM totals").fetchone() == (1, DELETED_PAGE)
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []


MARKED = [
    # Stored state, whether associated, what it is as of; and what it is by now, when 3 lost and 2 served it.
    ("ACTIVE", 0, 3, "ACTIVE"),
    ("ACTIVE", 0, 2, "INACTIVE"),
    ("PENDING", 0, 0, "PENDING"),
    ("END", 0, 0, "END"),
    ("PENDING", 1, 1, "INACTIVE"),
    ("PENDING", 1, 2, "PENDING"),
    ("ACTIVE", 1, 0, "INACTIVE"),
    ("ACTIVE", 1, 3, "ACTIVE"),
]
SERVED_LAST = ["ACTIVE", "ACTIVE", "PENDING", "END", "ACTIVE", "ACTIVE", "ACTIVE", "ACTIVE"]
"If it was 3 that served and 2 that lost it. The second of them knows of 2."
_MARKED_SUBSCRIPTION = """
INSERT INTO subscriptions
    (subscription_id, token_key, server_key, notifier_id, notifier_key, state, associated, as_of)
VALUES (?1, 1, 1, ?1, x'', ?2, ?3, ?4)
"""
_STATES = "SELECT state FROM subscriptions ORDER BY sub_key"


def fill_with_marked(db: sqlite3.Connection, lost: int, served: int) -> None:
    db.execute(
        "INSERT INTO smp_servers (hosts, port, key_hash, lost, served)"
        " VALUES ('router.example', '', x'00', ?, ?)",
        (lost, served),
    )
    db.execute(_OLD_TOKEN, (b"1", "ACTIVE"))
    for number, (state, associated, as_of, _) in enumerate(MARKED):
        db.execute(_MARKED_SUBSCRIPTION, (b"%d" % number, state, associated, as_of))


@pytest.mark.parametrize(
    ("lost", "served", "expected"), [(3, 2, [row[3] for row in MARKED]), (2, 3, SERVED_LAST)]
)
def test_going_back_writes_what_happened_to_whole_routers(
    tmp_path: Path, lost: int, served: int, expected: list[str]
) -> None:
    path = tmp_path / "ntf.db"
    migrate.migrate(path)
    with closing(open_to_write(path, isolation_level=None)) as db:
        fill_with_marked(db, lost, served)
        assert [queue.state.value for queue in queue_states(db)] == expected
    migrate.migrate(path, to=4)
    with closing(open_to_write(path, isolation_level=None)) as db:
        assert [state for (state,) in db.execute(_STATES)] == expected
    migrate.migrate(path)
    with closing(open_to_write(path, isolation_level=None)) as db:
        assert [queue.state.value for queue in queue_states(db)] == expected
        active = [
            associated
            for (_, associated, _, _), state in zip(MARKED, expected, strict=True)
            if state == "ACTIVE"
        ]
        sums = db.execute("SELECT active_count, active_associated FROM smp_servers").fetchone()
        assert sums == (len(active), sum(active))


async def test_going_back_in_postgres_does_the_same(tmp_path: Path, postgres: PostgresCluster) -> None:
    path, url = tmp_path / "ntf.db", postgres.new_database()
    migrate.migrate(path)
    with closing(open_to_write(path, isolation_level=None)) as db:
        fill_with_marked(db, 3, 2)
    async with connected(url) as moved:
        new = NewPostgresTables(moved)
        await new.use()
        source = SqliteTables(path)
        for table in (SERVERS, TOKENS, SUBSCRIPTIONS):
            await new.append(table, await source.page(table, table.before_all, None), "")
        source.close()
        await new.finish()
        expected = [row[3] for row in MARKED]
        for version in (1, None):
            await postgres_migrate.migrate(moved, to=version)
            await moved.execute(f"SET search_path = {postgres_migrate.SCHEMA}")
            assert [row[0] for row in await moved.fetch(_STATES)] == expected
        sums = await moved.fetchrow("SELECT active_count, active_associated FROM smp_servers")
        assert tuple(sums) == (2, 1)
