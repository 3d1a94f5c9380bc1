"""SQLite's errors as the store's, in words for an operator."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from store.interface import StoreDamaged, StoreError, StoreUnavailable

_PRIMARY_CODE = 0xFF
"SQLite's extended result codes carry the kind of failure in their low byte."

_MESSAGES = {
    sqlite3.SQLITE_BUSY: "is locked by another process",
    sqlite3.SQLITE_LOCKED: "is locked",
    sqlite3.SQLITE_FULL: "cannot grow: the disk is full",
    sqlite3.SQLITE_READONLY: "is read-only: check the owner and mode of the file and its folder",
    sqlite3.SQLITE_PERM: "may not be accessed: check the owner and mode of the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: check that the folder exists and may be written",
    sqlite3.SQLITE_IOERR: "cannot be read or written: the disk failed or a size limit was reached",
    sqlite3.SQLITE_NOMEM: "cannot be used: out of memory",
    sqlite3.SQLITE_CORRUPT: "is damaged: restore it from a backup",
    sqlite3.SQLITE_NOTADB: "is not a database or is damaged: restore it from a backup",
}
_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


def store_error(error: sqlite3.Error, path: Path) -> StoreError:
    """What `error` means. SQLite names tables and columns in its texts, never values."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return StoreError(f"{path}: {error}")
    message = _MESSAGES.get(code & _PRIMARY_CODE)
    if message is None:
        return StoreError(f"{path}: {error} ({error.sqlite_errorname})")
    kind = StoreDamaged if code & _PRIMARY_CODE in _DAMAGE else StoreUnavailable
    return kind(f"{path} {message} ({error.sqlite_errorname})")


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise store_error(error, path) from error
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be opened: {error.strerror}") from error
