"""SQLCipher in place of SQLite: the same calls, the same errors. Needs the extra `encryption`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlcipher3 import dbapi2


@contextmanager
def _as_sqlite() -> Iterator[None]:
    """Its errors are classes of their own; the store knows those of SQLite."""
    try:
        yield
    except dbapi2.Error as error:
        same = getattr(sqlite3, type(error).__name__, sqlite3.DatabaseError)(*error.args)
        same.sqlite_errorcode, same.sqlite_errorname = error.sqlite_errorcode, error.sqlite_errorname
        raise same from None


class _Cursor(dbapi2.Cursor):  # type: ignore[misc]
    def execute(self, *arguments: Any) -> Any:
        with _as_sqlite():
            return super().execute(*arguments)

    def executemany(self, *arguments: Any) -> Any:
        with _as_sqlite():
            return super().executemany(*arguments)

    def executescript(self, *arguments: Any) -> Any:
        with _as_sqlite():
            return super().executescript(*arguments)

    def fetchone(self) -> Any:
        with _as_sqlite():
            return super().fetchone()

    def __next__(self) -> Any:
        with _as_sqlite():
            return super().__next__()


class Connection(dbapi2.Connection):  # type: ignore[misc]
    def cursor(self, factory: Any = _Cursor) -> Any:
        return super().cursor(factory)

    def execute(self, *arguments: Any) -> Any:
        return self.cursor().execute(*arguments)

    def executemany(self, *arguments: Any) -> Any:
        return self.cursor().executemany(*arguments)

    def executescript(self, *arguments: Any) -> Any:
        return self.cursor().executescript(*arguments)


def connect(path: str, key: str, **options: Any) -> sqlite3.Connection:
    """A connection that stands in for one of sqlite3; an empty key is for a file that is not encrypted."""
    with _as_sqlite():
        db: sqlite3.Connection = dbapi2.connect(path, factory=Connection, **options)
    db.row_factory = dbapi2.Row
    db.execute("PRAGMA cipher_log_level = NONE")  # a wrong key is told of once, by us
    if key:
        quoted = key.replace("'", "''")
        db.execute(f"PRAGMA key = '{quoted}'")
    return db
