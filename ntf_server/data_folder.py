"""The folder of the data: one process uses it at a time, and a database that vanished is an error."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from store.database_files import beside
from store.interface import StoreVanished

LOCK_FILE = "ntf-server.lock"
MADE_MARK = "database.made"
"In the folder of the identity, which is rarely on the same volume as the data."

_PID_DIGITS = 32
_ATTEMPTS, _PAUSE = 3, 0.02
"Seconds between attempts to get the folder: `holder` has its lock for some microseconds."


class FolderInUse(Exception):
    """Another process holds the folder; the message names it."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """For as long as the block runs, nobody else gets in. The lock ends with the process, however it ends."""
    descriptor = _lock(folder)
    try:
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int:
    path, refusals = folder / LOCK_FILE, 0
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
            # Otherwise the previous holder removed the file after it was opened here: open the new one.
        except BlockingIOError:
            refusals += 1
            if refusals == _ATTEMPTS:
                pid = _pid(descriptor)
                os.close(descriptor)
                raise FolderInUse(f"{folder} is in use by process {pid}: stop it first") from None
            time.sleep(_PAUSE)
        os.close(descriptor)


def _pid(descriptor: int) -> str:
    return os.pread(descriptor, _PID_DIGITS, 0).decode("ascii", "replace").strip() or "unknown"


def holder(folder: Path) -> str | None:
    """The process that has the folder now."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _pid(descriptor)
    finally:
        os.close(descriptor)


def expect_database(config_dir: Path, database: Path) -> None:
    """StoreVanished if there was a database and now there is none, or an empty file."""
    if has_database(config_dir) and not (database.is_file() and database.stat().st_size):
        raise StoreVanished(
            f"{database} is missing or empty, but this server had a database: mount its volume or restore a"
            f" backup; {begin_anew(config_dir)}"
        )


def expect_log(database: Path) -> None:
    """StoreVanished if a server uses the database and the log that it writes to was taken away: nobody else
    can read what is in it."""
    gone = [file for file in beside(database) if not file.exists()]
    if gone and (process := holder(database.parent)) is not None:
        raise StoreVanished(
            f"{gone[0]} is missing although process {process} uses the database: it is starting or stopping,"
            " or the file was removed; wait until the server runs or has stopped, then repeat the command"
        )


def has_database(config_dir: Path) -> bool:
    """Whether one was made."""
    return (config_dir / MADE_MARK).exists()


def begin_anew(config_dir: Path) -> str:
    return f"to begin with an empty one, remove {config_dir / MADE_MARK}"


def remember_database(config_dir: Path) -> None:
    (config_dir / MADE_MARK).touch(mode=0o600)
