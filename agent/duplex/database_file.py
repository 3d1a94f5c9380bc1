"""The agent's file: for one agent at a time, and encrypted if the user gives a key."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from store.database_files import Connect, make_private, open_to_read, open_to_write
from store.interface import StoreError, StoreUnavailable
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
    """One agent at a time, whatever link it comes by: two would send the same things twice. The lock dies
    with the process."""
    with open(os.open(path.resolve().with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600), "rb+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreUnavailable(f"{path} is in use by another agent") from None
        yield


def writer(path: Path, key: str | None, **options: Any) -> Callable[[], sqlite3.Connection]:
    """For the agent that has the lock, and the thread that is to use the connection; `check_key` says whether
    it can."""
    return partial(_opened, open_to_write, path, key, **options)


def reader(path: Path, key: str | None, **options: Any) -> Callable[[], sqlite3.Connection]:
    """As `writer`, for anybody."""
    return partial(_opened, open_to_read, path, key, **options)


def _opened(
    opened: Callable[..., sqlite3.Connection], path: Path, key: str | None, **options: Any
) -> sqlite3.Connection:
    if key is not None:
        return opened(path, partial(_sqlcipher_connect(), key=key), **options)
    db = opened(path, **options)
    db.row_factory = sqlite3.Row
    return db


def _sqlcipher_connect() -> Connect:
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
    path = path.resolve()  # of a link, only the link would be replaced
    with locked(path), store_errors(path):
        with closing(reader(path, old)()) as db:
            check_key(db, path, old)
        draft = path.with_name(f"{path.name}.new")
        draft.unlink(missing_ok=True)
        make_private(draft)
        with closing(writer(path, old or "", isolation_level=None)()) as db:
            # Nobody may read it any more: their log would be taken for that of the new file.
            db.execute("PRAGMA journal_mode = DELETE").fetchone()
            db.execute("ATTACH DATABASE ? AS draft KEY ?", (str(draft), new or ""))
            db.execute("SELECT sqlcipher_export('draft')").fetchone()
            for name in KEPT:
                (value,) = db.execute(f"PRAGMA main.{name}").fetchone()
                db.execute(f"PRAGMA draft.{name} = {value}")
            db.execute("DETACH DATABASE draft")
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)
