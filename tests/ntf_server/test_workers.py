"""`ntf-server start --workers`: several processes on one port, watched by one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from protocol.addresses import parse_ntf_server
from protocol.ntf_commands import Ping, Pong
from tests.drills.world import free_port
from tests.ntf_server.ntf_client import NtfClient
from tests.ntf_server.test_cli import init, ntf_server
from tests.postgres import PostgresCluster

DEADLINE = 60.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.05)


def test_a_file_is_for_one_process(tmp_path: Path) -> None:
    assert init(tmp_path).returncode == 0
    refused = ntf_server("start", "--workers", 2, "--config-dir", tmp_path / "c")
    assert refused.returncode == 2
    assert "--workers needs [STORE] database = postgres" in refused.stderr
    assert "must" not in refused.stderr
    assert "is not a number" in ntf_server("start", "--workers", "many").stderr


async def test_workers_share_a_port_and_are_started_again(tmp_path: Path, postgres: PostgresCluster) -> None:
    assert init(tmp_path).returncode == 0
    env = {
        "NTF_TRANSPORT_LISTEN": "127.0.0.1",
        "NTF_TRANSPORT_PORT": str(free_port()),
        "NTF_STORE_DATABASE": "postgres",
        "NTF_STORE_URL": postgres.new_database(),
        "NTF_STORE_LEASE_SECONDS": "4",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ntf_server", "start", "--workers", "2", "--config-dir", tmp_path / "c"),
        stdout=subprocess.PIPE,
        env=os.environ | env,
    )
    parent = psutil.Process(process.pid)
    workers: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        lines: list[str] = []
        async with asyncio.timeout(DEADLINE):
            while len(lines) < 4:
                lines.append((await process.stdout.readline()).decode())
        (address,) = {line.removeprefix("Server address: ") for line in lines if "address" in line}
        for _ in range(8):  # the system deals them out
            client = await NtfClient.open(parse_ntf_server(address.strip()))
            assert await client.ask(Ping()) == Pong()
            client.close()
        status = ntf_server("status", "--config-dir", tmp_path / "c", env=env).stdout
        assert "#1: " in status
        assert "#2: " in status
        workers = parent.children()
        assert len(workers) == 2
        workers[0].kill()
        await until(lambda: len(parent.children()) == 2 and workers[0] not in parent.children())
        workers += parent.children()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE):
            assert await process.wait() == 0
            await process.stdout.read()
        assert not [worker for worker in workers if worker.is_running()]
    finally:
        for one in {parent, *workers}:
            if one.is_running():
                one.kill()
        await process.wait()
