"""`ntf-server migrate --to postgres` and back, as an operator runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from ntf_server import moving
from ntf_server.asking import ProgressLines
from ntf_server.config import CONFIG_FILE, Config, load_config
from ntf_server.data_folder import held
from store import tables_postgres, tables_sqlite
from store.interface import StoreError
from store.postgres import PostgresStore
from store.records import Counts
from store.sqlite import SqliteStore
from store.tables_postgres import connected
from tests.ntf_server.test_cli import TIMEOUT, init, ntf_server, started
from tests.postgres import PostgresCluster
from tests.store.test_tables import fill

ROOT = Path(__file__).parents[2]


async def counts_of(store: SqliteStore | PostgresStore) -> Counts:
    await store.open()
    counts = await store.counts()
    await store.close()
    return counts


async def filled_server(folder: Path, times: int = 1) -> Counts:
    assert init(folder).returncode == 0
    store = SqliteStore(folder / "d" / "ntf-server.db")
    await store.open()
    for _ in range(times):
        await fill(store)
    counts = await store.counts()
    await store.close()
    return counts


async def test_there_and_back(tmp_path: Path, postgres: PostgresCluster) -> None:
    before = await filled_server(tmp_path)
    url = postgres.new_database()
    env, where = {"NTF_STORE_URL": url}, ("--config-dir", tmp_path / "c")
    looked = ntf_server("migrate", "--to", "postgres", "--dry-run", *where, env=env)
    assert "subscriptions: 6 rows to move" in looked.stdout
    moved = ntf_server("migrate", "--to", "postgres", *where, env=env)
    assert moved.returncode == 0, moved.stderr
    assert "the same in both" in moved.stdout
    assert "database = postgres" in (tmp_path / "c" / CONFIG_FILE).read_text()
    assert not (tmp_path / "d" / "ntf-server.db").exists()
    assert len(list((tmp_path / "d").glob("replaced-*/ntf-server.db"))) == 1
    assert await counts_of(PostgresStore(url)) == before
    again = ntf_server("migrate", "--to", "postgres", *where, env=env)
    assert (again.returncode, again.stderr) == (2, "ntf-server: [STORE] database is postgres already\n")
    with started(tmp_path, env=env) as (process, _):
        in_use = ntf_server("migrate", "--to", "sqlite", *where, env=env)
        assert in_use.returncode == 2
        assert "is in use by" in in_use.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0
    before = await counts_of(PostgresStore(url))  # a server has pushed, and found no routers
    back = ntf_server("migrate", "--to", "sqlite", *where, env=env)
    assert back.returncode == 0, back.stderr
    assert await counts_of(SqliteStore(tmp_path / "d" / "ntf-server.db")) == before
    async with connected(url) as db:
        schemas = await db.fetch("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'ntf%'")
        assert [row[0][:10] for row in schemas] == ["ntf_moved_"]
    with started(tmp_path):
        pass


async def test_refusals_are_one_line(tmp_path: Path, postgres: PostgresCluster) -> None:
    await filled_server(tmp_path)
    where = ("--config-dir", tmp_path / "c")
    for arguments, expected in (
        (("--to", "postgres"), "[STORE] url must be"),
        (("--to", "sqlite"), "is sqlite already"),
        (("--to", "mysql"), "neither a schema version nor"),
        (("--online",), "--online goes with"),
    ):
        failed = ntf_server("migrate", *arguments, *where)
        assert failed.returncode == 2
        assert expected in failed.stderr.splitlines()[-1]
    env = {"NTF_STORE_URL": postgres.new_database()}
    with started(tmp_path):
        failed = ntf_server("migrate", "--to", "postgres", *where, env=env)
        assert failed.returncode == 2
        assert failed.stderr.count("\n") == 1
        assert "--online" in failed.stderr


async def test_schema_versions_of_postgres(tmp_path: Path, postgres: PostgresCluster) -> None:
    assert init(tmp_path).returncode == 0
    where = ("--config-dir", tmp_path / "c")
    env = {"NTF_STORE_URL": postgres.new_database(), "NTF_STORE_DATABASE": "postgres"}
    assert "version 1" in ntf_server("migrate", "--dry-run", *where, env=env).stdout
    assert "done" in ntf_server("migrate", *where, env=env).stdout
    assert "nothing to do" in ntf_server("migrate", *where, env=env).stdout
    assert ntf_server("migrate", "--to", 0, *where, answer="no\n", env=env).returncode == 1
    assert ntf_server("migrate", "--to", 0, "--yes", *where, env=env).returncode == 0
    assert "there is no schema version 99" in ntf_server("migrate", "--to", 99, *where, env=env).stderr


def moved_under_load(folder: Path, url: str) -> list[list[str]]:
    """Move a store while a process writes to it; what that process was promised before it was killed."""
    command = [sys.executable, "-m", "ntf_server", "migrate", "--to", "postgres", "--online"]
    command += ["--config-dir", str(folder / "c")]
    storm = [sys.executable, "-m", "tests.store.storm", str(folder / "d" / "ntf-server.db")]
    with held(folder / "d"), subprocess.Popen(storm, stdout=subprocess.PIPE, text=True, cwd=ROOT) as writer:
        env = os.environ | {"NTF_STORE_URL": url}
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(200)]
        mover = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert mover.stdout is not None
        seen = ""
        while "Stop the server now" not in seen:
            seen = mover.stdout.readline()
            assert seen, "it ended before"
            lines += [writer.stdout.readline() for _ in range(20)]
        writer.kill()
        lines += writer.stdout.readlines()
    out, _ = mover.communicate(timeout=TIMEOUT)
    assert mover.returncode == 0, out
    return [line.split() for line in lines if line.endswith("\n")]


async def test_online_loses_nothing_that_was_acknowledged(tmp_path: Path, postgres: PostgresCluster) -> None:
    await filled_server(tmp_path, times=20)
    url = postgres.new_database()
    told = moved_under_load(tmp_path, url)
    deleting = {words[1] for words in told if words[0] == "deleting"}
    promised = {words[1] for words in told if words[0] == "subscription"} - deleting
    nonces = {words[1]: words[2] for words in told if words[0] == "notification" and words[1] in promised}
    async with connected(url) as db:
        await db.execute("SET search_path = ntf")
        kept = {row[0].hex() for row in await db.fetch("SELECT subscription_id FROM subscriptions")}
        notifications = await db.fetch(
            "SELECT subscription_id, nonce FROM unsent_notifications JOIN subscriptions USING (sub_key)"
        )
    assert promised
    assert promised <= kept
    found = {row[0].hex(): row[1].hex() for row in notifications}
    assert {name: found.get(name) for name in nonces} == nonces


class Interrupted(Exception):
    """Of the test."""


async def test_an_interrupted_move_goes_on(
    tmp_path: Path, postgres: PostgresCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both directions, from the page where it was."""
    before = await filled_server(tmp_path, times=5)
    monkeypatch.setattr(tables_sqlite, "PAGE", 7)
    monkeypatch.setattr(tables_postgres, "PAGE", 7)
    env = {"NTF_STORE_URL": postgres.new_database()}
    seen: list[tuple[str, int]] = []
    stop_at = ("subscriptions", 14)

    def fail(self: ProgressLines, what: str, done: int, total: int) -> None:
        seen.append((what, done))
        if seen.count(stop_at) == 1 and seen[-1] == stop_at:
            raise Interrupted

    monkeypatch.setattr(ProgressLines, "__call__", fail)
    config_dir = tmp_path / "c"
    moves: dict[str, Callable[[Config], Awaitable[int]]] = {
        "postgres": lambda config: moving.to_postgres(config_dir, config, online=False),
        "sqlite": lambda config: moving.to_sqlite(config_dir, config),
    }
    for to, move in moves.items():
        seen.clear()
        config = load_config(config_dir / CONFIG_FILE, env)
        with pytest.raises(Interrupted):
            await move(config)
        assert await move(config) == 0
        after = seen[seen.index(stop_at) + 1 :]
        assert after[0] == ("subscriptions", 21)
        assert f"database = {to}" in (config_dir / CONFIG_FILE).read_text()
    assert await counts_of(SqliteStore(tmp_path / "d" / "ntf-server.db")) == before


async def test_a_move_that_was_interrupted_before_it_switched_goes_on(
    tmp_path: Path, postgres: PostgresCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await filled_server(tmp_path)
    env, config_dir = {"NTF_STORE_URL": postgres.new_database()}, tmp_path / "c"
    file = tmp_path / "d" / "ntf-server.db"

    async def move(to: str) -> int:
        config = load_config(config_dir / CONFIG_FILE, env)
        if to == "sqlite":
            return await moving.to_sqlite(config_dir, config)
        return await moving.to_postgres(config_dir, config, online=False)

    def fail(config_dir: Path, kind: str) -> None:
        raise Interrupted

    for to in ("postgres", "sqlite"):
        with monkeypatch.context() as patched:
            patched.setattr(moving, "_switch", fail)
            with pytest.raises(Interrupted):
                await move(to)
        assert await move(to) == 0
        assert f"database = {to}" in (config_dir / CONFIG_FILE).read_text()
    assert await counts_of(SqliteStore(file)) == before
    assert await move("postgres") == 0
    await counts_of(SqliteStore(file))  # another, that is empty
    with pytest.raises(StoreError, match="exists: put it aside first"):
        await move("sqlite")


async def test_what_was_left_can_be_removed(tmp_path: Path, postgres: PostgresCluster) -> None:
    await filled_server(tmp_path)
    path = tmp_path / "d" / "ntf-server.db"
    url = postgres.new_database()
    with closing(tables_sqlite.SqliteTables(path)) as tables, closing(tables_sqlite.ChangeLog(tables)) as log:
        log.start()
    async with connected(url) as db:
        await tables_postgres.NewPostgresTables(db).use()
    env, where = {"NTF_STORE_URL": url}, ("--config-dir", tmp_path / "c")
    begun = path.with_name("ntf-server.db.moving")
    begun.touch()
    with held(path.parent):  # somebody is writing it
        refused = ntf_server("migrate", "--cancel", *where, env=env)
    assert refused.returncode == 2
    assert "in use by process" in refused.stderr
    assert begun.exists()
    assert ntf_server("migrate", "--cancel", *where, env=env).stdout == "removed\n"
    assert not begun.exists()
    assert ntf_server("migrate", "--cancel", *where, env=env).stdout == "nothing to remove\n"
