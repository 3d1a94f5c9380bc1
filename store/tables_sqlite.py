"""The tables of an SQLite store: one in use, whose changes can be followed, or one that is being made."""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from store import migrate
from store.database_files import open_to_read, open_to_write
from store.interface import SchemaError
from store.policy import BUSY_TIMEOUT
from store.sqlite_errors import store_errors
from store.tables import COUNT_TOKEN_ROUTERS, PAGE, SOURCE_NOTE, TABLES, Key, Marks, Row, Table

_MARKS = """
SELECT tokens, active_tokens, subscriptions, active_subscriptions, last_seq, last_server,
    {}
FROM totals
"""
_COUNTED = ("tokens", "subscriptions", "statement_subscriptions", "statement_pushes")
"Tables whose highest key ever given SQLite keeps, in the order of `Marks`."
_LAST = "(SELECT ifnull(max(seq), 0) FROM sqlite_sequence WHERE name = '{}')"
_SET_TOTALS = """
UPDATE totals SET tokens = ?, active_tokens = ?, subscriptions = ?, active_subscriptions = ?, last_seq = ?,
    last_server = ?
"""
_EVENTS = {"INSERT": "NEW", "UPDATE": "NEW", "DELETE": "OLD"}
_LOG = """
CREATE TABLE moving_changes (
    seq   INTEGER PRIMARY KEY AUTOINCREMENT,
    place INTEGER NOT NULL,
    key1  BLOB NOT NULL,
    key2  BLOB NOT NULL,
    key3  BLOB NOT NULL
)
"""
_LOG_KEYS = "CREATE UNIQUE INDEX moving_changed_keys ON moving_changes (place, key1, key2, key3)"
# Without REPLACE: in a trigger, the statement that fired it decides about conflicts.
_TRIGGER = """
CREATE TRIGGER {name} AFTER {event} ON {table} BEGIN
    DELETE FROM moving_changes WHERE place = {place} AND key1 = {key1} AND key2 = {key2} AND key3 = {key3};
    INSERT INTO moving_changes (place, key1, key2, key3) VALUES ({place}, {key1}, {key2}, {key3});
END
"""


def _is_there(db: sqlite3.Connection, table: str) -> bool:
    return db.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (table,)).fetchone() is not None


@contextmanager
def _writing(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


class SqliteTables:
    """Reads the rows of a store; a server may be using it."""

    def __init__(self, path: Path, opened: Callable[..., sqlite3.Connection] = open_to_read) -> None:
        self.path = path
        with store_errors(path):
            self.db = opened(path, timeout=BUSY_TIMEOUT, isolation_level=None)

    def close(self) -> None:
        self.db.close()

    def check_schema(self) -> None:
        if migrate.schema_version(self.db) != migrate.STEPS.latest:
            raise SchemaError(f"{self.path} has an old schema: run `ntf-server migrate` first")

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Everything read within is of one moment."""
        self.db.execute("BEGIN")
        try:
            yield
        finally:
            self.db.execute("ROLLBACK")

    async def page(self, table: Table, after: Key, upto: Marks | None) -> list[Row]:
        keys = ", ".join(table.key)
        limits = upto.limits(table) if upto else ""
        return self.db.execute(
            f"SELECT {', '.join(table.columns)} FROM {table.name}"
            f" WHERE ({keys}) > ({', '.join('?' * len(after))}){limits} ORDER BY {keys} LIMIT {PAGE}",
            after,
        ).fetchall()

    async def count(self, table: Table) -> int:
        (count,) = self.db.execute(f"SELECT count(*) FROM {table.name}").fetchone()
        return int(count)

    def has_change_log(self) -> bool:
        """Whether a move that did not end left one."""
        return _is_there(self.db, "moving_log")

    async def marks(self) -> Marks:
        return Marks(*self.db.execute(_MARKS.format(", ".join(map(_LAST.format, _COUNTED)))).fetchone())


class ChangeLog:
    """Which rows of a store in use changed since `start`: triggers note their keys, each once.

    It writes beside the server, but leaves the server's log alone: it never folds it, and while `tables` has
    the file open, SQLite does not take this connection for the last one when it is closed.
    """

    def __init__(self, tables: SqliteTables) -> None:
        self._db = tables.db
        with store_errors(tables.path):
            self._writer = open_to_write(tables.path, timeout=BUSY_TIMEOUT, isolation_level=None)
            self._writer.execute("PRAGMA wal_autocheckpoint = 0")

    def close(self) -> None:
        """Before `tables` is closed."""
        self._writer.close()

    def start(self) -> str:
        """The name of this log; one that is there already, with what it noted, is continued."""
        with _writing(self._writer) as db:
            if not _is_there(db, "moving_log"):
                db.execute("CREATE TABLE moving_log (name TEXT NOT NULL)")
                db.execute("INSERT INTO moving_log VALUES (?)", (secrets.token_hex(16),))
                db.execute(_LOG)
                db.execute(_LOG_KEYS)
                for name, sql in self._triggers():
                    db.execute(sql.format(name=name))
        (name,) = self._db.execute("SELECT name FROM moving_log").fetchone()
        return str(name)

    def remove(self) -> bool:
        """Whether there was one."""
        found = _is_there(self._db, "moving_log")
        with _writing(self._writer) as db:
            for name, _ in self._triggers():
                db.execute(f"DROP TRIGGER IF EXISTS {name}")
            for table in ("moving_changes", "moving_log"):
                db.execute(f"DROP TABLE IF EXISTS {table}")
        return found

    @staticmethod
    def _triggers() -> Iterator[tuple[str, str]]:
        for place, table in enumerate(TABLES):
            for event, row in _EVENTS.items():
                key1, key2, key3 = ([f"{row}.{column}" for column in table.key] + ["0", "0"])[:3]
                yield (
                    f"moving_{table.name}_{event.lower()}",
                    _TRIGGER.format(
                        name="{name}",
                        event=event,
                        table=table.name,
                        place=place,
                        key1=key1,
                        key2=key2,
                        key3=key3,
                    ),
                )

    def size(self) -> int:
        (size,) = self._db.execute("SELECT count(*) FROM moving_changes").fetchone()
        return int(size)

    def last(self) -> int:
        (last,) = self._db.execute("SELECT ifnull(max(seq), 0) FROM moving_changes").fetchone()
        return int(last)

    def keys(self, table: Table) -> list[Key]:
        width = len(table.key)
        place = TABLES.index(table)
        rows = self._db.execute("SELECT key1, key2, key3 FROM moving_changes WHERE place = ?", (place,))
        return [row[:width] for row in rows]

    def rows(self, table: Table, keys: Sequence[Key]) -> list[Row]:
        """Those that still exist."""
        match = " AND ".join(f"{column} = ?" for column in table.key)
        sql = f"SELECT {', '.join(table.columns)} FROM {table.name} WHERE {match}"
        found = (self._db.execute(sql, key).fetchone() for key in keys)
        return [row for row in found if row is not None]

    def forget(self, last: int) -> None:
        """What was noted up to then; a row that changed again has a later note."""
        with _writing(self._writer) as db:
            db.execute("DELETE FROM moving_changes WHERE seq <= ?", (last,))


class NewSqliteTables(SqliteTables):
    """A store that is being made, in a file beside its place."""

    def __init__(self, path: Path) -> None:
        self._place = path
        self._open()

    def _open(self) -> None:
        moving = self._place.with_name(f"{self._place.name}.moving")
        migrate.migrate(moving)
        super().__init__(moving, open_to_write)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA foreign_keys = ON")
        self.db.execute("CREATE TABLE IF NOT EXISTS moving_notes (name TEXT PRIMARY KEY, note TEXT)")

    @staticmethod
    def is_there(path: Path) -> bool:
        """Whether one is being made, or was begun."""
        return path.with_name(f"{path.name}.moving").exists()

    @staticmethod
    def remove(path: Path) -> None:
        """Remove an unfinished copy; the caller holds the folder."""
        for end in ("", "-wal", "-shm", "-journal"):
            path.with_name(f"{path.name}.moving{end}").unlink(missing_ok=True)

    async def begin(self, source: str) -> None:
        before = await self.note(SOURCE_NOTE)
        if before is not None and before != source:
            self.close()
            self.remove(self._place)
            self._open()
        await self.put_note(SOURCE_NOTE, source)

    async def count_token_routers(self) -> None:
        with _writing(self.db):
            for sql in COUNT_TOKEN_ROUTERS:
                self.db.execute(sql)

    async def append(self, table: Table, rows: Sequence[Row], note: str) -> None:
        marks = ", ".join("?" * len(table.columns))
        with _writing(self.db):
            self.db.executemany(
                f"INSERT INTO {table.name} ({', '.join(table.columns)}) VALUES ({marks})", rows
            )
            self._put_note(table.name, note)

    async def note(self, name: str) -> str | None:
        row = self.db.execute("SELECT note FROM moving_notes WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    async def put_note(self, name: str, note: str) -> None:
        with _writing(self.db):
            self._put_note(name, note)

    def _put_note(self, name: str, note: str) -> None:
        self.db.execute("REPLACE INTO moving_notes VALUES (?, ?)", (name, note))

    async def set_marks(self, marks: Marks) -> None:
        totals, lasts = marks[: -len(_COUNTED)], marks[-len(_COUNTED) :]
        with _writing(self.db):
            self.db.execute(_SET_TOTALS, totals)
            counted = list(zip(_COUNTED, lasts, strict=True))
            self.db.executemany("DELETE FROM sqlite_sequence WHERE name = ?", [(name,) for name in _COUNTED])
            self.db.executemany("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", counted)

    async def prepare_use(self) -> None:
        self.db.execute("PRAGMA optimize")

    def finish(self) -> None:
        """Put the store in its place, where there must be none."""
        self.db.execute("DROP TABLE moving_notes")
        self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.db.execute("PRAGMA journal_mode = DELETE")
        self.close()
        os.link(self.path, self._place)  # fails if there is one, where a renaming would replace it
        self.path.unlink()
        folder = os.open(self._place.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
