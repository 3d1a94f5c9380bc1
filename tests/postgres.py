"""A real PostgreSQL for tests and benchmarks: a cluster of its own in a folder of its own, gone at the end.

PostgreSQL refuses to run as root; then everything runs as the user that Debian's package makes for it.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.ports import free_port

SERVICE_USER = "postgres"
SUPERUSER = "ntf"
POOLER = "/usr/sbin/pgbouncer"
COMMAND_TIMEOUT = 120.0
"Seconds for a tool of PostgreSQL on a busy machine."

_FAST = (
    "fsync=off",  # a test's data need not survive the machine, and nothing here tests the disk
    "max_connections=200",
    "shared_buffers=64MB",
    "log_min_messages=warning",
)


class PostgresCluster:
    """One PostgreSQL server on a port of its own. `start` and `stop` as often as a drill wants."""

    def __init__(self, folder: Path, *, settings: Sequence[str] = _FAST) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.port = free_port()
        self._settings = settings
        self._names = itertools.count(1)

    def create(self) -> None:
        """An empty cluster."""
        _give_away(self.folder)
        self._run("initdb", "-D", self.data, "-A", "trust", "-U", SUPERUSER, "-E", "UTF8", "--no-sync")

    def create_standby(self, primary: PostgresCluster) -> None:
        """A copy of another cluster that follows it until it is promoted."""
        _give_away(self.folder)
        source = f"host=127.0.0.1 port={primary.port} user={SUPERUSER}"
        self._run("pg_basebackup", "-d", source, "-D", self.data, "-R", "-c", "fast", "--no-sync")

    def promote(self) -> None:
        self._run("pg_ctl", "-D", self.data, "-w", "promote")

    def start(self) -> None:
        options = [f"-k {self.folder}", f"-p {self.port}", "-c listen_addresses=127.0.0.1"]
        options += [f"-c {setting}" for setting in self._settings]
        self._run(
            "pg_ctl", "-D", self.data, "-o", " ".join(options), "-l", self.folder / "log", "-w", "start"
        )

    def stop(self, mode: str = "fast") -> None:
        self._run("pg_ctl", "-D", self.data, "-m", mode, "-w", "stop")

    def kill(self) -> None:
        """As a crash of the machine's memory would: no process of the cluster has time for anything."""
        os.kill(self.pid, signal.SIGQUIT)

    def is_running(self) -> bool:
        return (self.data / "postmaster.pid").exists() and psutil.pid_exists(self.pid)

    @property
    def pid(self) -> int:
        return int((self.data / "postmaster.pid").read_text().splitlines()[0])

    def url(self, database: str) -> str:
        return f"postgresql://{SUPERUSER}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """The address of an empty database."""
        name = f"ntf_{os.getpid()}_{next(self._names)}"
        self._run("createdb", "-h", self.folder, "-p", str(self.port), "-U", SUPERUSER, name)
        return self.url(name)

    def _run(self, tool: str, *arguments: str | Path) -> None:
        command = [*_as_service_user(), str(binary(tool)), *map(str, arguments)]
        # Into a file, not a pipe: the server that pg_ctl leaves behind would keep the pipe open.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                command, stdout=output, stderr=output, cwd=self.folder, timeout=COMMAND_TIMEOUT, check=False
            )
            output.seek(0)
            assert done.returncode == 0, f"{tool}: {output.read().decode()}"


@contextmanager
def running_cluster(
    *, settings: Sequence[str] = _FAST, standby_of: PostgresCluster | None = None
) -> Iterator[PostgresCluster]:
    # Short: the path of a socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="ntf-pg-"))
    cluster = PostgresCluster(folder, settings=settings)
    try:
        if standby_of is None:
            cluster.create()
        else:
            cluster.create_standby(standby_of)
        cluster.start()
        yield cluster
    finally:
        if cluster.is_running():
            cluster.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def replicated_pair() -> Iterator[tuple[PostgresCluster, PostgresCluster]]:
    """A primary whose commits wait for its standby."""
    with (
        running_cluster(settings=(*_FAST, "synchronous_standby_names=*")) as primary,
        running_cluster(standby_of=primary) as standby,
    ):
        yield primary, standby


@contextmanager
def running_pooler(cluster: PostgresCluster, pool_mode: str) -> Iterator[Callable[[str], str]]:
    """PgBouncer before a cluster: yields what makes of an address the one that leads through it."""
    folder = Path(tempfile.mkdtemp(prefix="ntf-pooler-"))
    _give_away(folder)
    port = free_port()
    settings = folder / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\n* = host=127.0.0.1 port={cluster.port} user={SUPERUSER}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        f"auth_type = any\npool_mode = {pool_mode}\nlogfile = {folder / 'log'}\n"
    )
    _give_away(settings)
    user = None if os.getuid() else SERVICE_USER
    process = subprocess.Popen([POOLER, "-q", settings], user=user, cwd=folder)
    try:
        while not _answers(port):
            assert process.poll() is None, "PgBouncer does not run: run scripts/setup dev"
        yield lambda url: url.replace(f":{cluster.port}/", f":{port}/")
    finally:
        process.terminate()
        process.wait(COMMAND_TIMEOUT)
        shutil.rmtree(folder, ignore_errors=True)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def binary(tool: str) -> Path:
    """Debian keeps the server's tools off the PATH, one folder a version."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{tool}"), key=lambda path: int(path.parts[4]))
    assert found, "PostgreSQL is not installed: run scripts/setup dev"
    return found[-1]


def _as_service_user() -> Sequence[str]:
    return () if os.getuid() else ("runuser", "-u", SERVICE_USER, "--")


def _give_away(path: Path) -> None:
    if os.getuid() == 0:
        user = pwd.getpwnam(SERVICE_USER)
        os.chown(path, user.pw_uid, user.pw_gid)
