"""The command line, as an operator uses it: in processes of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.addresses import parse_ntf_server
from protocol.ntf_commands import Ping, Pong
from tests.ntf_server.ntf_client import NtfClient
from tests.postgres import PostgresCluster

ANY_PORT = {
    "NTF_TRANSPORT_LISTEN": "127.0.0.1",
    "NTF_TRANSPORT_PORT": "0",
    "NTF_SUBSCRIBER_ALLOW_PRIVATE_ROUTERS": "on",
}
FILES = ("ca.crt", "ca.key", "server.crt", "server.key", "fingerprint", "ntf-server.ini", "vapid.pem")
TIMEOUT = 60


Env = dict[str, str]
Finished = subprocess.CompletedProcess[str]


def ntf_server(
    *arguments: object, answer: str = "", env: Env | None = None, user: Sequence[str] = ()
) -> Finished:
    """`user`: a command that becomes another one and runs what follows."""
    return subprocess.run(
        [*user, sys.executable, "-m", "ntf_server", *map(str, arguments)],
        input=answer,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=os.environ | (env or {}),
        check=False,
    )


def init(folder: Path, *extra: object) -> Finished:
    where = ("--config-dir", folder / "c", "--data-dir", folder / "d")
    return ntf_server("init", "--ip", "127.0.0.1", *where, *extra)


IS_ROOT = os.geteuid() == 0
needs_setpriv = pytest.mark.skipif(IS_ROOT and shutil.which("setpriv") is None, reason="needs util-linux")


def without(capabilities: str) -> tuple[str, ...]:
    """A `user`: root that lacks these capabilities is one like others, who lack them anyway."""
    return ("setpriv", f"--bounding-set=-{capabilities}", f"--inh-caps=-{capabilities}") if IS_ROOT else ()


@contextmanager
def started(
    folder: Path, env: Env | None = None, user: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server and its address."""
    process = subprocess.Popen(
        [*user, sys.executable, "-m", "ntf_server", "start", "--config-dir", str(folder / "c")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ANY_PORT | (env or {}),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline()
        assert "Server address: " in line, process.stderr.read()
        yield process, line.removeprefix("Server address: ").strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("algorithm", ["ED25519", "ED448"])
async def test_init_start_stop(tmp_path: Path, algorithm: str) -> None:
    made = init(tmp_path, "-a", algorithm)
    assert made.returncode == 0, made.stderr
    address = re.search(r"ntf://([\w=-]+)@127\.0\.0\.1", made.stdout)
    assert address is not None
    assert (tmp_path / "c" / "fingerprint").read_text() == address[1]
    for name in FILES:
        assert stat.S_IMODE((tmp_path / "c" / name).stat().st_mode) == 0o600, name
    with started(tmp_path) as (process, text):
        client = await NtfClient.open(parse_ntf_server(text))
        assert await client.ask(Ping()) == Pong()
        client.close()
        assert stat.S_IMODE((tmp_path / "d" / "ntf-server.db").stat().st_mode) == 0o600
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0


async def test_init_with_postgres(tmp_path: Path, postgres: PostgresCluster) -> None:
    made = init(tmp_path, "--store", "postgres", postgres.new_database())
    assert made.returncode == 0, made.stderr
    with started(tmp_path) as (_, text):
        client = await NtfClient.open(parse_ntf_server(text))
        assert await client.ask(Ping()) == Pong()
        client.close()
    assert not (tmp_path / "d" / "ntf-server.db").exists()


@pytest.mark.parametrize("words", [["mysql"], ["postgres"], ["sqlite", "/tmp/x"], ["postgres", "host/name"]])
def test_init_refuses_a_store_that_it_does_not_know(tmp_path: Path, words: list[str]) -> None:
    refused = init(tmp_path, "--store", *words)
    assert refused.returncode == 2
    assert "--store" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "c").exists()


def test_init_never_overwrites(tmp_path: Path) -> None:
    assert init(tmp_path).returncode == 0
    fingerprint = (tmp_path / "c" / "fingerprint").read_text()
    again = init(tmp_path)
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert (tmp_path / "c" / "fingerprint").read_text() == fingerprint
    forced = init(tmp_path, "--force")
    assert forced.returncode == 0
    (replaced,) = (tmp_path / "c").glob("replaced-*")
    assert f"The old configuration and identity: {replaced}" in forced.stdout
    assert (replaced / "fingerprint").read_text() == fingerprint
    assert (replaced / "ca.key").exists()
    assert (tmp_path / "c" / "fingerprint").read_text() != fingerprint


def test_start_with_an_identity_brought_along(tmp_path: Path) -> None:
    """Another server's files, without the CA key."""
    init(tmp_path / "old")
    for name in ("ca.crt", "server.crt", "server.key", "fingerprint"):
        target = tmp_path / "c" / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes((tmp_path / "old" / "c" / name).read_bytes())
    (tmp_path / "c" / "server.key").chmod(0o644)
    assert init(tmp_path).returncode == 0
    assert stat.S_IMODE((tmp_path / "c" / "server.key").stat().st_mode) == 0o600
    with started(tmp_path) as (_, text):
        assert (tmp_path / "old" / "c" / "fingerprint").read_text() in text


@pytest.mark.parametrize("name", ["ca.crt", "server.crt", "server.key", "fingerprint"])
def test_broken_identity_is_named(tmp_path: Path, name: str) -> None:
    init(tmp_path)
    (tmp_path / "c" / name).write_text("broken")
    failed = ntf_server("start", "--config-dir", tmp_path / "c")
    assert failed.returncode == 2
    assert name in failed.stderr
    assert "Traceback" not in failed.stderr


def test_bad_configuration_is_named(tmp_path: Path) -> None:
    init(tmp_path)
    ini = tmp_path / "c" / "ntf-server.ini"
    ini.write_text(ini.read_text() + "\n[LOG2]\n")
    failed = ntf_server("start", "--config-dir", tmp_path / "c")
    assert failed.returncode == 2
    assert "unknown section [LOG2]" in failed.stderr


def test_cert_keeps_the_address(tmp_path: Path) -> None:
    init(tmp_path)
    before = (tmp_path / "c" / "server.crt").read_bytes()
    renewed = ntf_server("cert", "--config-dir", tmp_path / "c")
    assert renewed.returncode == 0, renewed.stderr
    assert (tmp_path / "c" / "server.crt").read_bytes() != before
    with started(tmp_path) as (_, text):
        assert (tmp_path / "c" / "fingerprint").read_text() in text
    (tmp_path / "c" / "ca.key").unlink()
    assert "ca.key" in ntf_server("cert", "--config-dir", tmp_path / "c").stderr


def test_migrate_and_a_schema_from_the_future(tmp_path: Path) -> None:
    init(tmp_path)
    where = ("--config-dir", tmp_path / "c")
    assert "version 1" in ntf_server("migrate", "--dry-run", *where).stdout
    assert ntf_server("migrate", *where).returncode == 0
    assert "nothing to do" in ntf_server("migrate", *where).stdout
    declined = ntf_server("migrate", "--to", 0, *where, answer="no\n")
    assert declined.returncode == 1
    assert ntf_server("migrate", "--to", 0, "--yes", *where).returncode == 0
    assert ntf_server("start", "--maintenance", *where).returncode == 0
    database = sqlite3.connect(tmp_path / "d" / "ntf-server.db")
    database.execute("PRAGMA user_version = 999")
    database.close()
    before = (tmp_path / "d" / "ntf-server.db").read_bytes()
    failed = ntf_server("start", *where)
    assert failed.returncode == 2
    assert "999" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert (tmp_path / "d" / "ntf-server.db").read_bytes() == before


def test_corrupt_database_is_not_touched(tmp_path: Path) -> None:
    init(tmp_path)
    database = tmp_path / "d" / "ntf-server.db"
    database.write_bytes(b"garbage" * 1000)
    failed = ntf_server("start", "--config-dir", tmp_path / "c")
    assert failed.returncode == 2
    assert str(database) in failed.stderr
    assert "Traceback" not in failed.stderr
    assert database.read_bytes() == b"garbage" * 1000


def test_status(tmp_path: Path, unused_tcp_port: int) -> None:
    init(tmp_path)
    where = ("--config-dir", tmp_path / "c")
    env = {"NTF_TRANSPORT_PORT": str(unused_tcp_port), "NTF_TRANSPORT_LISTEN": "127.0.0.1"}
    stopped = ntf_server("status", *where, env=env)
    assert stopped.returncode == 1
    assert "does not answer" in stopped.stdout
    with started(tmp_path, env=env):
        running = ntf_server("status", *where, env=env)
        assert running.returncode == 0, running.stdout + running.stderr
        assert "server       answers" in running.stdout
        assert "tokens       0, 0 active" in running.stdout


def test_delete_asks_first(tmp_path: Path) -> None:
    init(tmp_path)
    (tmp_path / "c" / "mine.txt").write_text("keep")
    declined = ntf_server("delete", "--config-dir", tmp_path / "c", answer="no\n")
    assert declined.returncode == 1
    assert (tmp_path / "c" / "ca.key").exists()
    assert ntf_server("delete", "--config-dir", tmp_path / "c", answer="yes\n").returncode == 0
    assert [file.name for file in (tmp_path / "c").iterdir()] == ["mine.txt"]
    assert not (tmp_path / "d").exists()


def test_help_names_every_command() -> None:
    text = ntf_server("--help").stdout
    for command in (
        *("init", "start", "cert", "delete", "migrate", "import", "status", "backup", "restore"),
        *("doctor", "test", "demo", "fake-push"),
    ):
        assert command in text


@pytest.mark.parametrize("module", ["ntf_server", "agent", "analytics", "smp_router"])
def test_version(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True).stdout
    assert re.fullmatch(r"[a-z-]+ [0-9.]+\n", shown)


def test_init_refuses_a_port_that_no_client_could_use(tmp_path: Path) -> None:
    refused = init(tmp_path, "--port", 0)
    assert refused.returncode == 2
    assert "'0' is not a port" in refused.stderr
    assert not (tmp_path / "c").exists()


def test_an_ipv6_address_is_one_that_clients_can_use(tmp_path: Path) -> None:
    where = ("--config-dir", tmp_path / "c", "--data-dir", tmp_path / "d")
    made = ntf_server("init", "--ip", "2001:db8::1", "--port", 5223, *where)
    address = parse_ntf_server(made.stdout.splitlines()[-1].removeprefix("Server address: "))
    assert (address.hosts, address.port_number) == (("[2001:db8::1]",), 5223)


def test_unknown_variables_are_named_at_the_start(tmp_path: Path) -> None:
    init(tmp_path)
    with started(tmp_path, env={"NTF_PUSH_CONCURENCY": "5", "NTF_AGENT_PATH": "/tmp"}) as (process, _):
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=TIMEOUT)
    assert (
        "unknown variable NTF_PUSH_CONCURENCY in the environment; did you mean NTF_PUSH_CONCURRENCY?" in log
    )
    assert "NTF_AGENT_PATH" not in log


@needs_setpriv
def test_a_privileged_port(tmp_path: Path) -> None:
    init(tmp_path)
    user = without("net_bind_service")
    bind = [*user, sys.executable, "-c", "import socket; socket.create_server(('', 81))"]
    if subprocess.run(bind, check=False).returncode == 0:
        pytest.skip("every port is free for all here")
    failed = ntf_server("start", "--config-dir", tmp_path / "c", env={"NTF_TRANSPORT_PORT": "81"}, user=user)
    assert failed.returncode == 2
    assert "port 81 needs root or CAP_NET_BIND_SERVICE" in failed.stderr
    assert "Traceback" not in failed.stderr
