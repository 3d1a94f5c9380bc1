"""The two ways to open an SQLite file: to write, for the program that owns it, and to read, for all others.

Nothing else opens a database or the files beside it. SQLite holds its locks as POSIX locks, which belong to
the process: closing any descriptor of a file drops all of them, those of open connections included.
The next program that closes the database then takes itself for the last one and removes the log, while this
one goes on writing to it.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

Connect = Callable[..., sqlite3.Connection]
"`sqlite3.connect`, or what takes its place for an encrypted file."

_OTHERS = 0o077
_creating = threading.Lock()
"Of a file that is being created, no thread of this process has a connection."


def beside(path: Path) -> tuple[Path, Path, Path]:
    """The database, its write-ahead log and the index of that: SQLite makes them beside the file itself, not
    beside a symbolic link to it."""
    path = path.resolve()
    return path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")


def open_to_write(path: Path, connect: Connect = sqlite3.connect, **options: Any) -> sqlite3.Connection:
    """A missing file is created. Only the owner can use it; SQLite gives its -wal and -shm the same mode."""
    make_private(path)
    return connect(_uri(path, "rw"), uri=True, **options)


def open_to_read(path: Path, connect: Connect = sqlite3.connect, **options: Any) -> sqlite3.Connection:
    """Beside any number of programs that use the file. Such a connection can neither change nor create a
    database, nor fold or remove the log, also as the last one; a log that a crash has left is read."""
    with _creating:
        return connect(_uri(path, "ro"), uri=True, **options)


def make_private(path: Path) -> None:
    """Create the file if it is missing, and remove the permissions of others."""
    with _creating, suppress(FileExistsError):
        # Of a file that was not there nobody can hold a lock, so this descriptor may be closed.
        os.close(os.open(path.resolve(), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    for file in beside(path):
        with suppress(FileNotFoundError):
            mode = file.stat().st_mode
            if mode & _OTHERS:
                file.chmod(mode & 0o700)


def _uri(path: Path, mode: str) -> str:
    return f"{path.resolve().as_uri()}?mode={mode}"
