"""A copy of a database that is in use, and the proof that it is whole."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from store.database_files import open_to_read, open_to_write
from store.interface import StoreError
from store.migrate import schema_version
from store.sqlite_errors import store_errors

PAGES_PER_STEP = 2000
"About 8 MB: the writer of a running server waits for none of it, a full disk is noticed soon."


def copy_database(source: Path, target: Path, progress: Callable[[int, int], None] | None = None) -> int:
    """Copy `source`, which a server may be using, to `target`, which must not exist; returns its version.

    One read transaction sees one state of the database, so what is written meanwhile is not in the copy.
    """
    target.touch(mode=0o600, exist_ok=False)
    told = None if progress is None else lambda _, left, total: progress(total - left, total)
    try:
        with store_errors(source), closing(_open(source)) as db, closing(open_to_write(target)) as copy:
            db.execute("BEGIN")
            db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            db.backup(copy, pages=PAGES_PER_STEP, progress=told)
            copy.execute("PRAGMA journal_mode = DELETE")  # one file, whatever the server used
        return check_database(target)
    except BaseException:
        target.unlink()
        raise


def check_database(path: Path) -> int:
    """The schema's version; a StoreError if the file is damaged or not ours."""
    with store_errors(path), closing(_open(path)) as db:
        version = schema_version(db)
        (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        if found == "ok" and db.execute("PRAGMA foreign_key_check").fetchone() is not None:
            found = "rows refer to rows that are missing"
    if found != "ok":
        raise StoreError(f"{path} is damaged: {' '.join(found.split())}")
    return version


def _open(path: Path) -> sqlite3.Connection:
    return open_to_read(path, isolation_level=None)
