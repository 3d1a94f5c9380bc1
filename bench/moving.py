"""How long a server is stopped when its data moves from SQLite to PostgreSQL.

A process writes to the SQLite store as a server would (SNEW, NMSG, deletions) while `ntf-server migrate --to
postgres --online` copies it. When the command asks for it, the process is ended; the stop lasts until the
command has switched the configuration and a store opened in PostgreSQL answers.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from bench.measure import Row, figure
from bench.part import Part
from bench.store import make_database
from ntf_server import setup
from ntf_server.data_folder import held
from store.postgres import PostgresStore
from tests.postgres import running_cluster
from transport.certificates import KeyAlgorithm

LONGEST_STOP = 10.0


def measure(folder: Path, *, subscriptions: int = 1_000_000) -> list[Row]:
    with running_cluster() as cluster:
        return moved(folder, cluster.new_database(), subscriptions)


def moved(folder: Path, url: str, subscriptions: int) -> list[Row]:
    options = setup.InitOptions(
        config_dir=folder / "c",
        data_dir=folder / "d",
        host="localhost",
        port=443,
        algorithm=KeyAlgorithm.ED25519,
    )
    path = setup.database_path(setup.init(options, datetime.now(UTC)))
    make_database(path, subscriptions)
    command = [sys.executable, "-m", "ntf_server", "migrate", "--to", "postgres", "--online"]
    command += ["--config-dir", str(folder / "c")]
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.store.storm", str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    written: list[str] = []
    reader = threading.Thread(target=_read, args=(writer.stdout, written))
    reader.start()
    began = time.perf_counter()
    with held(path.parent):
        env = os.environ | {"NTF_STORE_URL": url}
        mover = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert mover.stdout is not None
        for line in mover.stdout:
            if "Stop the server now" in line:
                break
        stopped = time.perf_counter()
        writer.terminate()
        writer.wait()
    mover.stdout.read()
    assert mover.wait() == 0
    counts = asyncio.run(_counts(url))
    stop = time.perf_counter() - stopped
    reader.join()
    copying = stopped - began
    return [
        figure("copying while the server runs", "s", copying),
        figure("subscriptions copied", "1/s", counts / copying),
        figure("writes acknowledged meanwhile", "1/s", len(written) / copying),
        figure("stop", "s", stop, aim=LONGEST_STOP),
    ]


def _read(lines: IO[str], into: list[str]) -> None:
    into.extend(lines)


async def _counts(url: str) -> int:
    store = PostgresStore(url)
    await store.open()
    counts = await store.counts()
    await store.close()
    return counts.subscriptions


MOVING = Part(
    name="moving",
    title="Moving to PostgreSQL",
    measure=measure,
    quick={"subscriptions": 20_000},
    repeats=1,
    seconds=90,
    quick_seconds=8,
    why="A server that outgrows SQLite should hardly stop for it.",
    how="A process writes to the SQLite store as fast as it can (SNEW, NMSG, deletions) while"
    " `ntf-server migrate --to postgres --online` copies it. The stop lasts from the command's"
    " request until a store opened in PostgreSQL answers.",
    bound="what the writer changed since it was copied last, and comparing counts and hashes of both sides.",
)
