"""The agent's file: for one agent at a time, and encrypted if the user gives a key."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from store.interface import StoreError, StoreUnavailable
from store.migrate import protect
from store.sqlite_errors import store_errors

KEPT = ("user_version", "application_id")
"Numbers of a file that an export leaves out."


KEY_VARIABLE = "NTF_AGENT_KEY"


class WrongKey(StoreError):
    """The file cannot be read with this key, or without one."""


def user_key(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The key in this file, or else in the environment; None if there is none."""
    if file is None:
        return environment.get(KEY_VARIABLE) or None
    try:
        key = file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError):
        raise StoreError(f"the key in {file} cannot be read") from None
    if not key:
        raise StoreError(f"the key in {file} is empty")
    return key


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One agent at a time: two would send the same things twice. The lock dies with the process."""
    with open(os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600), "rb+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreUnavailable(f"{path} is in use by another agent") from None
        yield


def opener(path: Path, key: str | None, **options: Any) -> Callable[[], sqlite3.Connection]:
    """For the thread that is to use the connection; `check_key` says whether it can."""
    if key is not None:
        connect = _sqlcipher_connect()
        return lambda: connect(str(path), key, **options)

    def plain() -> sqlite3.Connection:
        db: sqlite3.Connection = sqlite3.connect(path, **options)
        db.row_factory = sqlite3.Row
        return db

    return plain


def _sqlcipher_connect() -> Callable[..., sqlite3.Connection]:
    try:
        from store import sqlcipher
    except ImportError:
        raise StoreError("encryption needs the extra: pip install 'ntf-server[encryption]'") from None
    return sqlcipher.connect


def check_key(db: sqlite3.Connection, path: Path, key: str | None) -> None:
    """Raises WrongKey."""
    try:
        db.execute("SELECT 1 FROM sqlite_schema").fetchone()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_NOTADB:
            raise
        how = "without a key: it is encrypted or damaged" if key is None else "with this key"
        raise WrongKey(f"{path} cannot be read {how}") from None


def change_key(path: Path, old: str | None, new: str | None) -> None:
    """Write the file anew with another key, or with none. Raises WrongKey; no agent may be using the file.

    It takes the place of the old one when it is complete and on the disk.
    """
    with locked(path), store_errors(path):
        with closing(opener(path, old)()) as db:
            check_key(db, path, old)
        draft = path.with_name(f"{path.name}.new")
        draft.unlink(missing_ok=True)
        protect(draft)
        with closing(_sqlcipher_connect()(str(path), old or "", isolation_level=None)) as db:
            db.execute("ATTACH DATABASE ? AS draft KEY ?", (str(draft), new or ""))
            db.execute("SELECT sqlcipher_export('draft')").fetchone()
            for name in KEPT:
                (value,) = db.execute(f"PRAGMA main.{name}").fetchone()
                db.execute(f"PRAGMA draft.{name} = {value}")
            db.execute("DETACH DATABASE draft")
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)
