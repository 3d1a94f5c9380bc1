"""`ntf-server start --workers`: several processes on one port, watched by one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from ntf_server import workers
from ntf_server.config import Config
from protocol.addresses import NtfServer, parse_ntf_server
from protocol.ntf_commands import Ping, Pong
from tests.ntf_server.conftest import make_config
from tests.ntf_server.ntf_client import NtfClient
from tests.ntf_server.test_cli import init, ntf_server
from tests.ports import free_port
from tests.postgres import PostgresCluster
from tests.waiting import DEADLINE, until


def test_a_file_is_for_one_process(tmp_path: Path) -> None:
    assert init(tmp_path).returncode == 0
    refused = ntf_server("start", "--workers", 2, "--config-dir", tmp_path / "c")
    assert refused.returncode == 2
    assert "--workers needs [STORE] database = postgres" in refused.stderr
    assert "must" not in refused.stderr
    assert "is not a number" in ntf_server("start", "--workers", "many").stderr


@dataclass
class Watched:
    """The first process, and all workers that it ever had."""

    process: asyncio.subprocess.Process
    env: dict[str, str]
    address: NtfServer
    workers: set[psutil.Process] = field(default_factory=set)

    def running(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children()
        self.workers.update(found)
        return found

    def all_ended(self) -> bool:
        return not [
            worker
            for worker in self.workers
            if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
        ]


@asynccontextmanager
async def two_workers(folder: Path, postgres: PostgresCluster) -> AsyncIterator[Watched]:
    assert init(folder).returncode == 0
    env = {
        "NTF_TRANSPORT_LISTEN": "127.0.0.1",
        "NTF_TRANSPORT_PORT": str(free_port()),
        "NTF_STORE_DATABASE": "postgres",
        "NTF_STORE_URL": postgres.new_database(),
        "NTF_STORE_LEASE_SECONDS": "4",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ntf_server", "start", "--workers", "2", "--config-dir", folder / "c"),
        stdout=subprocess.PIPE,
        env=os.environ | env,
    )
    watched = None
    try:
        assert process.stdout is not None
        lines: list[str] = []
        async with asyncio.timeout(DEADLINE):
            while len(lines) < 4:
                lines.append((await process.stdout.readline()).decode())
        (address,) = {line.removeprefix("Server address: ") for line in lines if "address" in line}
        watched = Watched(process, env, parse_ntf_server(address.strip()))
        assert len(watched.running()) == 2
        yield watched
    finally:
        if process.returncode is None:
            process.kill()
        for worker in watched.workers if watched else ():
            if worker.is_running():
                worker.kill()
        await process.wait()


class Scripted(workers.WorkerProcesses):
    """Workers that end with these codes, one after the other; then they run."""

    def __init__(self, config: Config, codes: list[int]) -> None:
        super().__init__(config, ())
        self.codes = codes

    async def _run(self, worker: int) -> int:
        if self.codes:
            return self.codes.pop(0)
        await self._stopping.wait()
        return 0


async def test_one_that_cannot_begin_ends_all_and_one_that_cannot_begin_again_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(workers, "LONGEST_DELAY", 0.01)
    config = make_config(tmp_path)
    assert await Scripted(config, [workers.USAGE]).run(2) == workers.USAGE
    later = Scripted(config, [-signal.SIGKILL, workers.USAGE, workers.USAGE])
    running = asyncio.ensure_future(later.run(1))
    await until(lambda: not later.codes)
    assert not later._stopping.is_set()
    later._stop(signal.SIGTERM)
    assert await running == 0


async def test_workers_share_a_port_and_are_started_again(tmp_path: Path, postgres: PostgresCluster) -> None:
    async with two_workers(tmp_path, postgres) as watched:
        for _ in range(8):  # the system deals them out
            client = await NtfClient.open(watched.address)
            assert await client.ask(Ping()) == Pong()
            client.close()
        status = ntf_server("status", "--config-dir", tmp_path / "c", env=watched.env).stdout
        assert "#1: " in status
        assert "#2: " in status
        dead = watched.running()[0]
        dead.kill()
        await until(lambda: len(watched.running()) == 2 and dead not in watched.running())
        watched.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE):
            assert await watched.process.wait() == 0
        assert watched.all_ended()


async def test_workers_end_with_a_parent_that_had_no_time_to_tell_them(
    tmp_path: Path, postgres: PostgresCluster
) -> None:
    async with two_workers(tmp_path, postgres) as watched:
        watched.process.kill()
        await until(watched.all_ended)
        status = ntf_server("status", "--config-dir", tmp_path / "c", env=watched.env).stdout
        assert "#1: " not in status, "it left what it owned behind"
