"""Every command of every program beside a live server, router and agent: nothing promised is lost."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import sys
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from ntf_server.config import CONFIG_FILE
from ntf_server.data_folder import held
from store.sqlite import SqliteStore
from tests.beside import LONGEST, Neighbours, needs_locks, neighbours
from tests.docs.reference import PARSERS, _subcommands
from tests.ntf_server.test_backup import backup
from tests.ntf_server.test_cli import init, ntf_server
from tests.ntf_server.test_moving import filled_server
from tests.postgres import PostgresCluster
from tests.test_architecture import ROOT
from tests.waiting import until

MODULES = {
    "ntf-server": "ntf_server",
    "ntf-agent": "agent",
    "ntf-analytics": "analytics",
    "smp-router": "smp_router",
}
IN_USE = "in use by"
QUICK_CHECK = """
import sqlite3, sys
for path in sys.argv[1:]:
    for mode in ("ro", "rw"):
        db = sqlite3.connect(f"file:{path}?mode={mode}", uri=True, timeout=0.1)
        try:
            print(*db.execute("PRAGMA quick_check").fetchone())
        except sqlite3.DatabaseError as error:
            print(error)
        db.close()
"""
DEVICE = "a1" * 32


@dataclass(frozen=True)
class Beside:
    """A command, and how it ends beside the live ones."""

    arguments: Callable[[Neighbours], tuple[object, ...]] = lambda _: ()
    code: int | None = 0
    "None: it depends on the machine."
    says: str = ""
    until_line: bool = False
    "It serves until it is told to end."
    may_write: bool = False
    "It opens the database of a live program to write, and finds it locked."


def refused(arguments: Callable[[Neighbours], tuple[object, ...]] = lambda _: ()) -> Beside:
    return Beside(arguments, 2, IN_USE)


def refused_agent(*arguments: object) -> Beside:
    return Beside(lambda _: arguments, 1, "in use by another agent")


def config(*arguments: object) -> Callable[[Neighbours], tuple[object, ...]]:
    return lambda live: (*arguments, "--config-dir", live.config_dir)


UNREACHABLE = "postgresql://nobody@127.0.0.1:1/none"
NTF_ADDRESS = "ntf://" + "A" * 43 + "=@127.0.0.1:1"
LINK = "simplex:/invitation"

SERVER = {
    "init": [
        Beside(lambda live: ("--ip", "127.0.0.1", *new_server(live, "other"))),
        Beside(config("--ip", "127.0.0.1"), 2, "exists"),
        Beside(config("--ip", "127.0.0.1", "--force"), 2, "stop it first"),
    ],
    "status": [Beside(config(), says="server       answers")],
    "doctor": [Beside(config(), None), Beside(config("--fix", "--json"), None)],
    "cert": [Beside(config())],
    "test": [Beside(config("--provider", "apns-test", "--token", DEVICE), says="took it")],
    "start": [refused(config()), refused(config("--maintenance"))],
}
SERVER_DATA = {
    "backup": [Beside(lambda live: (live.folder / "b", "--identity", "--config-dir", live.config_dir))],
    "restore": [refused(lambda live: (live.folder / "b", "--config-dir", live.config_dir))],
    "migrate": [
        refused(config()),
        refused(config("--dry-run")),
        refused(config("--to", 0, "--yes")),
        refused(config("--to", "postgres")),
        Beside(config("--cancel"), says="nothing to remove"),
    ],
    "import": [refused(config("--url", UNREACHABLE))],
    "delete": [refused(config("--yes"))],
    "statements records": [Beside(config("--sender", "a1" * 32), says="no records")],
}
SERVER_DEMOS = {
    "demo": [Beside()],
    "fake-push": [Beside(lambda live: ("--folder", live.folder / "p"), until_line=True)],
    "fake-node": [Beside(lambda _: ("--port", 0), until_line=True)],
}
ROUTER = {
    "init": [
        Beside(lambda live: ("--ip", "127.0.0.1", "--config-dir", live.folder / "other router")),
        Beside(lambda live: ("--ip", "127.0.0.1", "--config-dir", live.router_dir), 1, "exist"),
    ],
    "start": [
        Beside(
            lambda live: ("--config-dir", live.router_dir, "--store", live.router_db),
            1,
            "is locked",
            may_write=True,
        )
    ],
    "cert": [Beside(lambda live: ("--config-dir", live.router_dir))],
    "control": [Beside(lambda live: ("--control", live.control, '{"do": "status"}'))],
}
AGENT = {
    "status": [Beside(says='"connection": 1')],
    "create": [refused_agent()],
    "join": [refused_agent(LINK)],
    "accept": [refused_agent(1)],
    "reject": [refused_agent(1)],
    "send": [refused_agent(1, "text")],
    "send-many": [refused_agent("text", 1)],
    "receive": [refused_agent()],
    "switch": [refused_agent(1)],
    "sync": [refused_agent(1)],
    "delete": [refused_agent(1)],
    "set-link-data": [refused_agent(1, "text")],
    "delete-link": [refused_agent(1)],
    "rekey": [refused_agent()],
    "notifications register": [refused_agent(NTF_ADDRESS, DEVICE)],
    "notifications verify": [refused_agent("AAAA", "AAAA")],
    "notifications check": [refused_agent()],
    "notifications unregister": [refused_agent()],
    "notifications on": [refused_agent()],
    "notifications off": [refused_agent()],
    "notifications push": [refused_agent()],
    "notifications listen": [refused_agent("--pushes", os.devnull)],
}
ANALYTICS = {
    "snapshot": [
        Beside(lambda live: ("--database", live.data_dir / "ntf-server.db", "--out", live.folder / "s"))
    ],
    "generate": [Beside(lambda live: ("--out", live.folder / "j", "--events", 5000, "--servers", 2))],
    "compact": [Beside(lambda live: ("--journal", live.data_dir / "journal"))],
    "retain": [Beside(lambda live: ("--journal", live.data_dir / "journal", "--days", 30))],
}
ON_SPARK = {
    "report": [
        Beside(lambda live: ("health", "--journal", live.data_dir / "journal", "--out", live.folder / "o"))
    ],
    "sql": [Beside(lambda live: ("--journal", live.data_dir / "journal"))],
    "stream": [
        Beside(lambda live: ("--journal", live.data_dir / "journal", "--out", live.folder / "t", "--once"))
    ],
}
"Each starts Spark and takes long: tests/drills/beside_spark.py."


def by_full_name(program: str, commands: Mapping[str, list[Beside]]) -> dict[str, list[Beside]]:
    return {f"{program} {command}": cases for command, cases in commands.items()}


GROUPS = {
    "server": by_full_name("ntf-server", SERVER),
    "data": by_full_name("ntf-server", SERVER_DATA),
    "demos": by_full_name("ntf-server", SERVER_DEMOS),
    "router": by_full_name("smp-router", ROUTER),
    "agent": by_full_name("ntf-agent", AGENT),
    "analytics": by_full_name("ntf-analytics", ANALYTICS),
}
MATRIX = {command: cases for group in GROUPS.values() for command, cases in group.items()}
AGAIN = (
    *("ntf-server status", "ntf-server doctor", "ntf-server backup", "ntf-server start", "smp-router start"),
    *("ntf-agent status", "ntf-agent receive", "ntf-agent rekey", "ntf-analytics snapshot"),
)
"Those that open databases, or try to."
SPARK_MATRIX = by_full_name("ntf-analytics", ON_SPARK)


def new_server(live: Neighbours, name: str) -> tuple[object, ...]:
    folder = live.folder / name
    return ("--config-dir", folder / "c", "--data-dir", folder / "d")


def leaves(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """The commands below this one that do something themselves."""
    below = list(_subcommands(parser))
    if not below:
        yield name
    for word, _, sub in below:
        yield from leaves(f"{name} {word}", sub)


def test_every_command_of_every_program_is_tried() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    assert scripts == {program: f"{module}.__main__:main" for program, module in MODULES.items()}
    assert scripts.keys() == PARSERS.keys()
    found = {leaf for program, make in PARSERS.items() for leaf in leaves(program, make())}
    assert found == MATRIX.keys() | SPARK_MATRIX.keys()


def test_the_health_check_of_the_container_is_tried() -> None:
    lines = (ROOT / "contrib" / "docker" / "Dockerfile").read_text("utf-8").splitlines()
    (check,) = [line.partition(" CMD ")[2] for line in lines if line.startswith("HEALTHCHECK ")]
    assert " ".join(json.loads(check)) in MATRIX


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Neighbours]:
    async with neighbours(tmp_path) as live:
        yield live


async def run(live: Neighbours, command: str, case: Beside) -> None:
    program, _, words = command.partition(" ")
    arguments: tuple[object, ...] = (*words.split(), *case.arguments(live))
    if program == "ntf-agent":
        arguments = (*live.agent_options(), *arguments)
    done = await live.programs.run(MODULES[program], *arguments, until_line=case.until_line)
    told = done.out + done.err
    assert "Traceback" not in told, told
    assert case.code is None or done.code == case.code, (command, told)
    assert case.says in told, (command, told)


async def run_quick_check(live: Neighbours) -> None:
    """What an operator does with SQLite's own tool, read-only as documented and without care."""
    databases = [str(each.database) for each in live.live.values()]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", QUICK_CHECK, *databases), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    in_use = b"database is locked"  # the router keeps its own for itself
    agent = b"file is not a database" if live.key else b"ok"
    assert out.splitlines() == [b"ok", b"ok", in_use, in_use, agent, agent]


def tokens_in(database: Path) -> set[bytes]:
    with closing(sqlite3.connect(database)) as db:
        return {row[0] for row in db.execute("SELECT token_id FROM tokens")}


@needs_locks
@pytest.mark.parametrize("group", GROUPS)
async def test_nothing_is_lost_beside_any_command(live: Neighbours, group: str) -> None:
    await check_nothing_is_lost(live, GROUPS[group])


@needs_locks
async def test_nothing_is_lost_beside_an_encrypted_agent_and_behind_links(tmp_path: Path) -> None:
    async with neighbours(tmp_path, key="it's a key", linked=True) as live:
        await check_nothing_is_lost(live, {command: MATRIX[command] for command in AGAIN})


async def check_nothing_is_lost(live: Neighbours, matrix: Mapping[str, list[Beside]]) -> None:
    live.check("the beginning")
    await run_quick_check(live)
    live.check("PRAGMA quick_check")
    for command, cases in matrix.items():
        for case in cases:
            before = {bytes(device.token_id) for device in live.promised.devices}
            live.modes()
            await run(live, command, case)
            live.check(command)
            modes = live.modes()
            assert case.may_write or {mode for _, mode in modes} <= {"ro"}, (command, modes)
            if command == "ntf-server backup":
                assert before <= tokens_in(live.folder / "b" / "ntf-server.db")
    await until(lambda: len(live.promised.devices) > 100 and len(live.promised.said) > 20, LONGEST)
    await live.kill()
    await live.start_servers()
    await live.start_agent()
    await live.check_promised()


async def online_move(live: Neighbours) -> asyncio.subprocess.Process:
    """It has copied everything and waits for the server's end."""
    move = ("migrate", "--to", "postgres", "--online", "--config-dir", live.config_dir)
    mover = await live.programs.start("ntf_server", *move)
    assert mover.stdout is not None
    line = b""
    while b"Stop the server now" not in line:
        line = await mover.stdout.readline()
        assert line, live.programs.log.read_text()
    return mover


@needs_locks
async def test_an_online_move_brings_what_clients_were_told(
    live: Neighbours, postgres: PostgresCluster
) -> None:
    for command in ("ntf-server status", "ntf-server backup"):
        await run(live, command, MATRIX[command][0])
    live.programs.env["NTF_STORE_URL"] = postgres.new_database()
    mover = await online_move(live)
    mover.kill()
    await mover.wait()
    live.check("migrate --online, killed")
    await run(live, "ntf-server migrate", Beside(config("--cancel"), says="removed"))
    live.check("migrate --cancel")
    live.modes()
    await run(
        live, "ntf-server migrate", Beside(config("--to", "postgres", "--dry-run"), says="rows to move")
    )
    live.check("migrate --dry-run")
    assert {mode for _, mode in live.modes()} == {"ro"}
    mover = await online_move(live)
    assert mover.stdout is not None
    before = len(live.promised.devices)
    await until(lambda: len(live.promised.devices) > before + 10)
    live.check("migrate --online")
    await live.live.pop("server").kill()
    await mover.stdout.read()
    assert await mover.wait() == 0
    await live.start_server()
    try:
        await live.check_devices()
    finally:
        await live.stop_server()
    assert tokens_in(next(live.data_dir.glob("replaced-*")) / "ntf-server.db")


async def test_a_move_whose_log_was_taken_away_is_not_finished(
    tmp_path: Path, postgres: PostgresCluster
) -> None:
    await filled_server(tmp_path)
    before = (tmp_path / "c" / CONFIG_FILE).read_text()
    store = SqliteStore(tmp_path / "d" / "ntf-server.db")
    command = [sys.executable, "-m", "ntf_server", "migrate", "--to", "postgres", "--online"]
    with held(tmp_path / "d"):
        await store.open()
        mover = await asyncio.create_subprocess_exec(
            *(*command, "--config-dir", str(tmp_path / "c")),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"NTF_STORE_URL": postgres.new_database()},
        )
        assert mover.stdout is not None
        while b"Stop the server now" not in (line := await mover.stdout.readline()):
            assert line
        (tmp_path / "d" / "ntf-server.db-wal").unlink()
    _, told = await mover.communicate()
    await store.close()
    assert mover.returncode == 2
    assert b"ntf-server.db-wal was removed" in told
    assert (tmp_path / "c" / CONFIG_FILE).read_text() == before


async def test_no_backup_without_the_log_of_a_running_server(tmp_path: Path) -> None:
    """Whoever took it away: what the server wrote last cannot be read by anybody else."""
    assert init(tmp_path).returncode == 0
    store = SqliteStore(tmp_path / "d" / "ntf-server.db")
    with held(tmp_path / "d"):
        await store.open()
        assert backup(tmp_path, tmp_path / "whole").returncode == 0
        for file in ("ntf-server.db-wal", "ntf-server.db-shm"):
            (tmp_path / "d" / file).unlink()
        refused = backup(tmp_path, tmp_path / "b")
        assert refused.returncode == 2
        assert "ntf-server.db-wal is missing although process" in refused.stderr
        assert not (tmp_path / "b" / "backup.json").exists()
        move = ("migrate", "--to", "postgres", "--online", "--config-dir", tmp_path / "c")
        refused = ntf_server(*move, env={"NTF_STORE_URL": UNREACHABLE})
        assert refused.returncode == 2
        assert "is missing although process" in refused.stderr
        await store.close()
