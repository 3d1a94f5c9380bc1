"""The two ways to open an SQLite file: no program drops the locks of another or touches its log."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from store import migrate
from store.database_files import beside, open_to_read, open_to_write
from store.interface import StoreUnavailable, StoreVanished
from store.sqlite import SqliteStore
from store.sqlite_engine import DatabaseFile
from store.sqlite_errors import store_errors
from store.tables_sqlite import ChangeLog, SqliteTables
from tests.beside import locked_files, needs_locks
from tests.ntf_server.test_backup import AS_NOBODY
from tests.test_architecture import ROOT

WRITER = """
import os, signal, sys
from pathlib import Path
from store.database_files import open_to_write
db = open_to_write(Path(sys.argv[1]), isolation_level=None)
db.execute("PRAGMA journal_mode = WAL")
db.execute("CREATE TABLE IF NOT EXISTS told (text)")
db.execute("INSERT INTO told VALUES ('in the log')")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A database whose program was killed: what it wrote last is in the log only."""
    path = tmp_path / "killed.db"
    done = subprocess.run([sys.executable, "-c", WRITER, str(path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    return path


def contents(path: Path) -> list[bytes]:
    """Of the database and its log; the index is rebuilt by whoever comes first."""
    return [file.read_bytes() for file in beside(path)[:2]]


def told(path: Path) -> list[tuple[str]]:
    with closing(open_to_read(path)) as db:
        return db.execute("SELECT text FROM told").fetchall()


def test_a_log_that_a_crash_has_left_is_read_and_left_alone(killed: Path) -> None:
    before = contents(killed)
    assert before[1]
    assert told(killed) == [("in the log",)]
    assert contents(killed) == before
    beside(killed)[2].unlink()
    assert told(killed) == [("in the log",)]
    assert contents(killed) == before


def test_reading_neither_creates_nor_changes(killed: Path) -> None:
    missing = killed.with_name("missing.db")
    with pytest.raises(StoreUnavailable, match="cannot be opened"), store_errors(missing):
        open_to_read(missing)
    assert not missing.exists()
    before = contents(killed)
    with closing(open_to_read(killed)) as db, pytest.raises(sqlite3.OperationalError, match="readonly"):
        db.execute("INSERT INTO told VALUES ('more')")
    assert contents(killed) == before


def test_the_change_log_of_a_move_leaves_the_log_alone(tmp_path: Path) -> None:
    """Also when it is the last to close the file: a server may be about to start."""
    path = tmp_path / "ntf.db"
    migrate.migrate(path)
    with closing(open_to_write(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute("CREATE TABLE told (text)")
        db.execute("INSERT INTO told VALUES (zeroblob(8000000))")
        database, log_before = contents(path)
        with closing(SqliteTables(path)) as tables, closing(ChangeLog(tables)) as changes:
            changes.start()
            db.close()
    database_after, log_after = contents(path)
    assert database_after == database
    assert log_after.startswith(log_before)


@needs_locks
def test_opening_again_keeps_the_locks(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    with closing(open_to_write(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE told (text)")
        inodes = {file.stat().st_ino for file in (path, beside(path)[2])}
        assert inodes <= locked_files(os.getpid())
        path.chmod(0o644)
        for opened in (open_to_write, open_to_read):
            opened(path).close()
            assert inodes <= locked_files(os.getpid()), opened
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@needs_locks
async def test_an_open_store_holds_its_locks(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    store = SqliteStore(path)
    await store.open()
    reading = SqliteStore(path, read_only=True)
    await reading.open()
    assert (await reading.counts()).tokens == 0
    with pytest.raises(StoreUnavailable, match="not open for writing"):
        await reading.check()
    await reading.close()
    held = locked_files(os.getpid())
    assert {file.stat().st_ino for file in (path, beside(path)[2])} <= held
    await store.close()
    assert not beside(path)[1].exists()


@pytest.mark.parametrize("odd", ["a b#c?d%20e.db", "ü.db"])
def test_any_name(tmp_path: Path, odd: str) -> None:
    path = tmp_path / odd
    with closing(open_to_write(path)) as db:
        db.execute("CREATE TABLE told (text)")
    assert told(path) == []
    assert [file.name for file in tmp_path.iterdir()] == [odd]


def test_a_link_to_a_database(tmp_path: Path) -> None:
    """SQLite makes the log beside the file itself: it is private, remembered, and missed when it is gone."""
    (tmp_path / "volume").mkdir()
    path, real = tmp_path / "ntf.db", tmp_path / "volume" / "real.db"
    path.symlink_to("volume/real.db")
    with closing(open_to_write(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE told (text)")
        assert beside(path) == beside(real)
        for file in beside(real):
            file.chmod(0o644)
        open_to_write(path).close()
        assert {stat.S_IMODE(file.stat().st_mode) for file in beside(path)} == {0o600}
        remembered = DatabaseFile(path)
        remembered.remember()
        remembered.check()
        path.unlink()
        path.symlink_to("volume/another.db")
        (tmp_path / "volume" / "another.db").write_bytes(real.read_bytes())
        with pytest.raises(StoreVanished, match=r"ntf\.db was removed"):
            remembered.check()
        path.unlink()
        path.symlink_to("volume/real.db")
        remembered.check()
        beside(real)[1].unlink()
        with pytest.raises(StoreVanished, match=r"real\.db-wal was removed"):
            remembered.check()


@needs_locks
def test_a_file_that_is_being_created_is_not_yet_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing the descriptor that made it would drop the locks of whoever had opened it meanwhile."""
    path = tmp_path / "ntf.db"
    made, go_on = threading.Event(), threading.Event()
    close = os.close

    def hesitate(descriptor: int) -> None:
        made.set()
        go_on.wait()
        close(descriptor)

    monkeypatch.setattr(os, "close", hesitate)
    creating = threading.Thread(target=lambda: open_to_write(path).close())
    creating.start()
    made.wait()
    opened: list[object] = []

    def open_too(how: Callable[[Path], sqlite3.Connection]) -> None:
        how(path).close()
        opened.append(how)

    others = [threading.Thread(target=open_too, args=(how,)) for how in (open_to_read, open_to_write)]
    for other in others:
        other.start()
    others[0].join(0.2)
    opened_early = list(opened)
    go_on.set()
    for thread in (creating, *others):
        thread.join()
    assert opened_early == []
    assert set(opened) == {open_to_read, open_to_write}


def test_others_get_no_permissions(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    mask = os.umask(0)
    try:
        with closing(open_to_write(path, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("CREATE TABLE told (text)")
            for file in beside(path):
                assert stat.S_IMODE(file.stat().st_mode) == 0o600
                file.chmod(0o666)
            open_to_write(path).close()
            for file in beside(path):
                assert stat.S_IMODE(file.stat().st_mode) == 0o600
    finally:
        os.umask(mask)


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root can be others")
def test_somebody_who_may_not_write(killed: Path) -> None:
    """Reads while the -shm is there; without it SQLite cannot read, and the error says what to check."""
    read = "import sys; from pathlib import Path; from tests.store.test_database_files import look; look()"
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "ntf.db"
        for file in beside(killed):
            shutil.copy(file, home)
            (Path(home) / file.name).rename(path.with_name(file.name.replace("killed", "ntf")))
        for file in beside(path):
            file.chmod(0o644)
        Path(home).chmod(0o755)
        command = [*AS_NOBODY, sys.executable, "-B", "-c", read, str(path)]
        seen = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert seen.stdout == "[('in the log',)]\n", seen.stderr
        beside(path)[2].unlink()
        seen = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert "cannot be opened" in seen.stdout, seen.stdout + seen.stderr
        assert not beside(path)[2].exists()


def look() -> None:
    path = Path(sys.argv[1])
    try:
        with store_errors(path):
            print(told(path))
    except StoreUnavailable as error:
        print(error)


def test_a_file_is_remembered_with_its_log(tmp_path: Path) -> None:
    path = tmp_path / "ntf.db"
    with closing(open_to_write(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE told (text)")
        file = DatabaseFile(path)
        file.remember()
        file.check()
    with pytest.raises(StoreUnavailable, match="-wal was removed"):
        file.check()
