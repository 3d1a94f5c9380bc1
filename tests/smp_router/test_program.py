"""The command line, its files and what survives the process."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest

from protocol.addresses import SmpServer, parse_smp_server
from protocol.smp_messages import (
    Get,
    Nsub,
    Ok,
    Ping,
    Pong,
    Send,
    Sok,
)
from protocol.versions import VersionRange
from smp_router.__main__ import main, make_parser
from smp_router.config import ConfigError, RouterConfig, load_config, within_open_files, write_config
from smp_router.control import ask, control_socket
from smp_router.router import Router
from tests.smp_router.wire import DEADLINE, add_notifier, connected, create_queue

PROGRAM = [sys.executable, "-m", "smp_router"]
ROOT = Path(__file__).parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """The command line in this process; returns what it exits with."""
    monkeypatch.setattr(sys, "argv", ["smp-router", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@asynccontextmanager
async def running(*arguments: str) -> AsyncIterator[tuple[SmpServer, asyncio.subprocess.Process]]:
    process = await asyncio.create_subprocess_exec(
        *PROGRAM, "start", *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            line = await process.stdout.readline()
        yield parse_smp_server(line.decode().strip()), process
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(DEADLINE):
            await process.wait()
    assert process.returncode == 0


async def test_from_init_to_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config_dir, socket, database = tmp_path / "config", tmp_path / "control", tmp_path / "router.db"
    assert run(monkeypatch, "init", "--ip", "127.0.0.1", "--config-dir", str(config_dir)) == 0
    fingerprint = (config_dir / "fingerprint").read_text().strip()
    assert capsys.readouterr().out.startswith(f"smp://{fingerprint}@127.0.0.1:5223\n")
    assert {path.name for path in config_dir.iterdir()} == {
        "ca.crt", "ca.key", "server.crt", "server.key", "fingerprint", "smp-router.ini"
    }  # fmt: skip
    (config_dir / "smp-router.ini").write_text("[router]\nhost = 127.0.0.1\nport = 0\n")
    options = ["--config-dir", str(config_dir), "--store", str(database), "--interval", "0.01"]
    async with running(*options, "--control", str(socket)) as (server, process):
        assert resource.prlimit(process.pid, resource.RLIMIT_CORE) == (0, 0)  # it would hold keys
        assert str(server).startswith(f"smp://{fingerprint}@")
        async with connected(server) as client:
            queue = await create_queue(client)
            await add_notifier(client, queue)
            assert await client.ask(Send(True, b"kept"), queue.sender_id) == Ok()
        assert (await ask(socket, '{"do": "status"}'))["result"]["queues"] == 1
    assert os.stat(database).st_mode & 0o777 == 0o600
    async with running(*options) as (server, process):
        async with connected(server) as client:
            assert await client.ask(Nsub(), queue.notifier_id, queue.notifier_key) == Sok()
            assert (await client.event())[0] == queue.notifier_id
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(DEADLINE):
            await process.wait()
    (config_dir / "smp-router.ini").write_text(
        "[router]\nhost = 127.0.0.1\nport = 0\nrestore_messages = no\n"
    )
    async with running(*options) as (server, _), connected(server) as client:
        assert await client.ask(Get(), queue.recipient_id, queue.key) == Ok()  # no message


def test_init_does_not_overwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["init", "--ip", "127.0.0.1", "--config-dir", str(tmp_path / "c"), "-a", "ED25519"]
    assert run(monkeypatch, *arguments) == 0
    before = (tmp_path / "c" / "ca.crt").read_bytes()
    assert "not overwritten" in str(run(monkeypatch, *arguments))
    assert (tmp_path / "c" / "ca.crt").read_bytes() == before


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--port", "0", "'0' is not a port that clients can connect to"),
        ("--port", "65536", "'65536' is not a port that clients can connect to"),
        ("--ip", "", "'' is not a host name"),
        ("--ip", "two words", "'two words' is not a host name"),
    ],
)
def test_init_refuses_what_clients_cannot_connect_to(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    value: str,
    told: str,
) -> None:
    arguments = ["--ip", "127.0.0.1", "--config-dir", str(tmp_path / "c"), option, value]
    assert run(monkeypatch, "init", *arguments) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_init_prints_an_address_that_clients_understand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    assert run(monkeypatch, "init", "--ip", host, "--config-dir", str(tmp_path)) == 0
    address = parse_smp_server(capsys.readouterr().out.splitlines()[0])
    assert (address.hosts, address.port_number) == (("[::1]",), 5223)
    assert load_config(tmp_path).hosts == ("::1",)


def test_start_without_files_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "smp-router: cannot read" in str(run(monkeypatch, "start", "--config-dir", str(tmp_path)))


async def test_control_command(
    router: Router, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["control", "--control", str(tmp_path / "control")]
    async with control_socket(router, tmp_path / "control"):
        assert await asyncio.to_thread(run, monkeypatch, *arguments, '{"do": "status"}') == 0
        assert json.loads(capsys.readouterr().out)["ok"]
        assert await asyncio.to_thread(run, monkeypatch, *arguments, "{}") == 1
    told = str(await asyncio.to_thread(run, monkeypatch, *arguments, "{}"))
    assert f"{tmp_path / 'control'}: No such file or directory; a router" in told


@pytest.mark.parametrize("interval", ["-1", "inf", "nan", "x"])
def test_bad_interval(interval: str) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["start", "--config-dir", "d", "--interval", interval])


def test_config_file(tmp_path: Path) -> None:
    write_config(tmp_path, "router.example", 5223)
    plain = load_config(tmp_path)
    assert (plain.hosts, plain.port, plain.listen) == (("router.example",), 5223, "router.example")
    assert plain.router.password is None
    assert plain.router.interval == 0
    with (tmp_path / "smp-router.ini").open("a") as file:
        file.write("listen = 0.0.0.0\npassword = 50%\nmax_version = 15\nquota = 5\ninterval = 1.5\n")
    full = load_config(tmp_path)
    assert full.listen == "0.0.0.0"
    assert (full.router.password, full.router.quota, full.router.interval) == (b"50%", 5, 1.5)
    assert full.router.versions == VersionRange(6, 15)
    assert "50%" not in repr(full)


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "router.md").read_text(encoding="utf-8")
    assert [field.name for field in fields(RouterConfig) if f"`{field.name}`" not in text] == ["versions"]


def test_connections_and_open_files() -> None:
    config = RouterConfig()
    assert within_open_files(config, 100_000) == config
    few = within_open_files(config, 1024)
    assert (few.max_connections, few.max_connections_per_address) == (224, 112)
    with pytest.raises(ConfigError, match="only 800 files"):
        within_open_files(config, 800)
    assert within_open_files(RouterConfig(max_relays=10, max_connections=2), 800).max_connections == 2


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "a section"),
        ("host = x", "not an INI file"),
        ("[other]\nhost = x", "a section"),
        ("[router]\nport = 1", "host"),
        ("[router]\nhost = x", "port"),
        ("[router]\nhost = x,,y\nport = 1", "host"),
        ("[router]\nhost = x/y\nport = 1", "host"),
        ("[router]\nhost = x\nport = 65536", "port"),
        ("[router]\nhost = x\nport = 1\nqouta = 1", "qouta"),
        ("[router]\nhost = x\nport = 1\nquota = 0", "quota"),
        ("[router]\nhost = x\nport = 1\ninterval = nan", "interval"),
        ("[router]\nhost = x\nport = 1\ninterval = soon", "interval"),
        ("[router]\nhost = x\nport = 1\nexpiry_interval = 0", "expiry_interval"),
        ("[router]\nhost = x\nport = 1\nmax_version = 21", "max_version"),
        ("[router]\nhost = x\nport = 1\nmin_version = 9\nmax_version = 8", "max_version"),
    ],
)
def test_bad_config_file(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "smp-router.ini").write_text(content)
    with pytest.raises(ConfigError, match=named):
        load_config(tmp_path)


async def test_renewed_certificate_and_several_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config_dir, onion = tmp_path / "config", "a" * 56 + ".onion"
    files = ["--config-dir", str(config_dir)]
    assert run(monkeypatch, "init", "--ip", f"127.0.0.1,{onion}", "--port", "5224", *files) == 0
    address = parse_smp_server(capsys.readouterr().out.splitlines()[0])
    assert address.hosts == ("127.0.0.1", onion)
    config = config_dir / "smp-router.ini"
    config.write_text(config.read_text().replace("port = 5224", "port = 0"))
    seen = []
    for _ in range(2):
        async with running(*files) as (server, _):
            assert (server.hosts, server.key_hash) == (address.hosts, address.key_hash)
            async with connected(server) as client:
                assert await client.ask(Ping()) == Pong()
                seen.append(client.stream.peer_chain)
        assert run(monkeypatch, "cert", *files) == 0
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] == seen[1][1]
    (config_dir / "ca.key").unlink()
    assert "ca.key is missing" in str(run(monkeypatch, "cert", *files))


def test_what_start_does_not_import() -> None:
    """Each takes a noticeable part of the time to start, and is needed with some options only."""
    slow = (
        "Crypto", "aiosqlite", "prometheus_client", "sqlite3", "store.records", "importlib.metadata",
        "smp_client", "python_socks", "protocol.ntf_commands",
    )  # fmt: skip
    code = f"import sys, smp_router.__main__; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"smp-router {metadata.version('ntf-server')}\n"
