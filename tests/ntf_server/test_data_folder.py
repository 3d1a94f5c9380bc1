"""One process per data folder, and a database that is not there any more is an error."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

import pytest

from ntf_server.app import App, running
from ntf_server.data_folder import (
    LOCK_FILE,
    FolderInUse,
    expect_database,
    held,
    holder,
    remember_database,
)
from protocol.errors import ErrorType
from protocol.ntf_commands import Err, Tchk, Tkn
from store.interface import StoreVanished
from tests.ntf_server.conftest import active_device, make_app, make_config
from tests.ntf_server.ntf_client import NtfClient
from tests.ntf_server.test_cli import TIMEOUT, init, ntf_server, started
from tests.postgres import PostgresCluster


def test_nobody_else_touches_the_data_of_a_running_server(tmp_path: Path) -> None:
    init(tmp_path)
    where = ("--config-dir", tmp_path / "c")
    with started(tmp_path) as (process, _):
        for command in (("start",), ("start", "--maintenance"), ("migrate",), ("delete", "--yes")):
            refused = ntf_server(*command, *where)
            assert refused.returncode == 2, command
            # Among lines of the log, which a thread of its own writes.
            told = f"ntf-server: {tmp_path / 'd'} is in use by process {process.pid}: stop it first"
            assert told in refused.stderr.splitlines()
            assert "Traceback" not in refused.stderr
        assert (tmp_path / "c" / "ntf-server.ini").exists()
        process.kill()
        process.wait(TIMEOUT)
        assert ntf_server("migrate", *where).returncode == 0, "a killed server holds nothing"
        deleted = ntf_server("delete", "--yes", *where)
        assert deleted.returncode == 0, deleted.stderr
    assert not (tmp_path / "d").exists()


def test_a_lock_file_that_was_removed_is_no_lock(tmp_path: Path) -> None:
    with held(tmp_path):
        with pytest.raises(FolderInUse), held(tmp_path):
            pass
        (tmp_path / LOCK_FILE).unlink()
    with held(tmp_path), pytest.raises(FolderInUse), held(tmp_path):
        pass


def test_who_only_asks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` and `doctor` lock the file for a moment to see whether a server does."""
    with held(tmp_path):
        pass
    with (tmp_path / LOCK_FILE).open("rb") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(asking, fcntl.LOCK_UN))
        with held(tmp_path):
            assert holder(tmp_path) == str(os.getpid())
    assert holder(tmp_path) is None


@pytest.mark.parametrize("loss", ["file", "empty file", "folder"])
def test_a_database_that_vanished_is_no_empty_start(tmp_path: Path, loss: str) -> None:
    init(tmp_path)
    where = ("--config-dir", tmp_path / "c")
    assert ntf_server("start", "--maintenance", *where).returncode == 0
    database = tmp_path / "d" / "ntf-server.db"
    if loss == "folder":
        shutil.rmtree(database.parent)
    else:
        database.unlink()
    if loss == "empty file":
        database.touch()
    for command in ("start", "migrate"):
        refused = ntf_server(command, *where)
        assert refused.returncode == 2
        assert refused.stderr.splitlines()[-1].startswith(f"ntf-server: {database} is missing or empty")
        assert "Traceback" not in refused.stderr
    assert not database.exists() or not database.stat().st_size
    (tmp_path / "c" / "database.made").unlink()
    assert ntf_server("start", "--maintenance", *where).returncode == 0


def test_a_postgres_database_that_vanished_is_no_empty_start(
    tmp_path: Path, postgres: PostgresCluster
) -> None:
    init(tmp_path)
    where = ("--config-dir", tmp_path / "c")
    kept, empty = (
        {"NTF_STORE_DATABASE": "postgres", "NTF_STORE_URL": postgres.new_database()} for _ in range(2)
    )
    assert ntf_server("start", "--maintenance", *where, env=kept).returncode == 0
    assert ntf_server("start", "--maintenance", *where, env=kept).returncode == 0
    for _ in range(2):
        refused = ntf_server("start", *where, env=empty)
        assert refused.returncode == 2
        assert refused.stderr.splitlines()[-1].startswith("ntf-server: the PostgreSQL database is empty")
        assert "Traceback" not in refused.stderr
    assert ntf_server("migrate", "--to", 0, "--yes", *where, env=kept).returncode == 0
    assert ntf_server("start", "--maintenance", *where, env=empty).returncode == 0


def test_a_database_taken_down_on_purpose_may_be_made_again(tmp_path: Path) -> None:
    init(tmp_path)
    where = ("--config-dir", tmp_path / "c")
    assert ntf_server("start", "--maintenance", *where).returncode == 0
    assert ntf_server("migrate", "--to", 0, "--yes", *where).returncode == 0
    assert ntf_server("start", "--maintenance", *where).returncode == 0


def test_the_identity_remembers(tmp_path: Path) -> None:
    expect_database(tmp_path, tmp_path / "ntf.db")
    remember_database(tmp_path)
    remember_database(tmp_path)
    with pytest.raises(StoreVanished):
        expect_database(tmp_path, tmp_path / "ntf.db")


@pytest.mark.parametrize(
    ("end", "loss"),
    [("", "removed"), ("", "emptied"), ("", "replaced")]
    + [(end, loss) for end in ("-wal", "-shm") for loss in ("removed", "replaced")],
)
async def test_a_database_taken_away_ends_the_server_with_an_error(
    tmp_path: Path, end: str, loss: str
) -> None:
    """Or its log, or the index of that: others would find none of what the server writes. What it has written
    to a log that was taken away is in the database afterwards."""
    config = make_config(tmp_path)
    app: App = make_app(tmp_path, config)
    database = tmp_path / "data" / f"ntf-server.db{end}"
    with pytest.raises(ExceptionGroup) as ended:
        async with running(app):
            client = await NtfClient.open(app.address)
            device = await active_device(app, client)
            copy = database.read_bytes()
            if loss != "emptied":
                database.unlink()
            if loss != "removed":
                database.write_bytes(copy if loss == "replaced" else b"")
            # Nothing is answered from, or written to, a file that nobody will find again.
            answer = await device.ask(client, Tchk())
            assert answer == Err(ErrorType(b"STORE unavailable"))
            assert await client.is_closed_by_server()
    assert ended.group_contains(StoreVanished, match="removed, emptied or replaced")
    if end:
        app = make_app(tmp_path, config)
        async with running(app):
            client = await NtfClient.open(app.address)
            assert isinstance(await device.ask(client, Tchk()), Tkn)
