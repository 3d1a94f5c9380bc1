"""Schema versions: numbered SQL files, each applied or taken back in one transaction.

The version is kept in SQLite's `user_version`, and `application_id` says that the file is ours.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path

from store.interface import SchemaError
from store.policy import BUSY_TIMEOUT
from store.sqlite_errors import store_errors

APPLICATION_ID = 0x4E544653
"'NTFS': a file with another id is not touched."

_FILE_NAME = re.compile(r"(\d{4})_(\w+)\.(up|down)\.sql")


@dataclass(frozen=True, slots=True)
class Step:
    """One migration in one direction; `version` is the schema's after it."""

    version: int
    name: str
    is_down: bool
    sql: str = field(repr=False)

    def __str__(self) -> str:
        return f"{'undo' if self.is_down else 'apply'} {self.name} -> version {self.version}"


@cache
def _files() -> dict[tuple[int, str], tuple[str, str]]:
    """(number, up or down) to (name, SQL)."""
    found = {}
    for file in resources.files("store.migrations").iterdir():
        if match := _FILE_NAME.fullmatch(file.name):
            found[int(match[1]), match[3]] = (f"{match[1]}_{match[2]}", file.read_text(encoding="utf-8"))
    return found


def latest_version() -> int:
    return max(number for number, _ in _files())


def schema_version(db: sqlite3.Connection) -> int:
    """The version of our database, 0 for an empty file; SchemaError for anything else."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if version == application_id == tables == 0:
        return 0
    if application_id != APPLICATION_ID:
        raise SchemaError("the database file belongs to another program")
    if version > latest_version():
        raise SchemaError(
            f"the database has schema version {version}, this program knows versions up to"
            f" {latest_version()}: install the later program again or migrate down with it"
        )
    return int(version)


def plan(current: int, to: int) -> list[Step]:
    """The steps from one version to another, in order."""
    if not 0 <= to <= latest_version():
        raise SchemaError(f"there is no schema version {to}: choose 0 to {latest_version()}")
    if to >= current:
        numbers = range(current + 1, to + 1)
        return [Step(number, *_named(number, "up")) for number in numbers]
    return [Step(number - 1, *_named(number, "down")) for number in range(current, to, -1)]


def _named(number: int, direction: str) -> tuple[str, bool, str]:
    name, sql = _files()[number, direction]
    return name, direction == "down", sql


def apply(db: sqlite3.Connection, steps: list[Step]) -> None:
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


def migrate(path: Path, *, to: int | None = None, dry_run: bool = False) -> list[Step]:
    """Bring the database at `path` to a version (the latest if None) while no server uses it.

    Returns the steps done, or with `dry_run` the steps to do. A missing file is created by steps up only.
    """
    target = latest_version() if to is None else to
    if not path.exists():
        steps = plan(0, target)
        if dry_run or not steps:
            return steps
    with store_errors(path), closing(connect(path)) as db:
        steps = plan(schema_version(db), target)
        if not dry_run:
            apply(db, steps)
    return steps


def connect(path: Path) -> sqlite3.Connection:
    """A connection in autocommit mode to a file only its owner can read; SQLite gives its helper files
    (-wal, -shm) the same mode."""
    protect(path)
    return sqlite3.connect(path, timeout=BUSY_TIMEOUT, isolation_level=None)


def protect(path: Path) -> None:
    """Create the file if it is missing, and take it from everybody but its owner."""
    os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))
    for file in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        if file.exists() and file.stat().st_mode & 0o077:
            file.chmod(file.stat().st_mode & 0o700)


def schema_dump(db: sqlite3.Connection) -> str:
    """The schema as SQL text, as the documentation shows it."""
    rows = db.execute(
        "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
    )
    return "\n\n".join(f"{sql};" for (sql,) in rows) + "\n"
