"""Schema versions of SQLite databases, each applied or taken back in one transaction.

The version is kept in SQLite's `user_version`, and `application_id` says that the file is ours.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from store.database_files import open_to_read, open_to_write
from store.interface import SchemaError
from store.policy import BUSY_TIMEOUT
from store.schema_steps import Migration, SchemaSteps
from store.sqlite_errors import store_errors

APPLICATION_ID = 0x4E544653
"'NTFS': a file with another id is not touched."

STEPS = SchemaSteps("store.migrations")


def schema_version(db: sqlite3.Connection) -> int:
    """The version of our database, 0 for an empty file; SchemaError for anything else."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if version == application_id == tables == 0:
        return 0
    if application_id != APPLICATION_ID:
        (_, _, file) = db.execute("PRAGMA database_list").fetchone()
        raise SchemaError(f"{file} belongs to another program: choose another folder for the data")
    STEPS.check(version)
    return int(version)


def apply(db: sqlite3.Connection, steps: list[Migration]) -> None:
    """Run the steps on a connection in autocommit mode. A step that fails leaves the version before it."""
    for step in steps:
        db.execute("BEGIN IMMEDIATE")
        try:
            for statement in _statements(step.sql):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {step.version}")
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute("COMMIT")
        except sqlite3.Error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def _statements(sql: str) -> Iterator[str]:
    """`executescript` would commit before it starts, so statements are run one by one."""
    statement = ""
    for line in sql.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def migrate(path: Path, *, to: int | None = None, dry_run: bool = False) -> list[Migration]:
    """Bring the database at `path` to a version (the latest if None) while no server uses it.

    Returns the steps done, or with `dry_run` the steps to do. A missing file is created by steps up only.
    """
    target = STEPS.latest if to is None else to
    if not path.exists():
        steps = STEPS.plan(0, target)
        if dry_run or not steps:
            return steps
    connect = open_to_read if dry_run else open_to_write
    with store_errors(path), closing(connect(path, timeout=BUSY_TIMEOUT, isolation_level=None)) as db:
        steps = STEPS.plan(schema_version(db), target)
        if not dry_run:
            apply(db, steps)
    return steps


def schema_dump(db: sqlite3.Connection) -> str:
    """The schema as SQL text, as the documentation shows it."""
    rows = db.execute(
        "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
    )
    return "\n\n".join(f"{sql};" for (sql,) in rows) + "\n"
