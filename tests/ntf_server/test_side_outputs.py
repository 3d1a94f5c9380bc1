"""Metrics, logs, the control port: whatever happens to them, the daemon lives and serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ntf_server import control
from ntf_server.app import running
from ntf_server.secret_files import readable_by_others, secret_files
from protocol.addresses import NtfServer, parse_ntf_server
from protocol.ntf_commands import Ping, Pong
from tests.http import get
from tests.ntf_server.conftest import make_app, make_config
from tests.ntf_server.ntf_client import DEADLINE, NtfClient
from tests.ntf_server.test_cli import init
from tests.ports import free_port
from tests.waiting import until
from transport import plain_http


async def test_metrics_file_in_a_missing_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "not" / "there"
    config = make_config(tmp_path, METRICS={"file": folder / "metrics.prom", "file_interval": 0.05})
    async with running(make_app(tmp_path, config)) as app:
        async with asyncio.timeout(DEADLINE):
            while "cannot write the metrics" not in caplog.text:
                await asyncio.sleep(0.01)
        client = await NtfClient.open(app.address)
        assert await client.ask(Ping()) == Pong()
        client.close()
        folder.mkdir(parents=True)
        async with asyncio.timeout(DEADLINE):
            while not (folder / "metrics.prom").exists():
                await asyncio.sleep(0.01)
    assert caplog.text.count("cannot write the metrics") == 1
    assert "simplex_ntf_clients" in (folder / "metrics.prom").read_text()


async def test_journal_that_cannot_be_written(tmp_path: Path) -> None:
    config = make_config(tmp_path, JOURNAL={"enabled": True, "segment_seconds": 1.0})
    (tmp_path / "data" / "journal").write_text("a file where a folder should be")
    async with running(make_app(tmp_path, config)) as app:
        client = await NtfClient.open(app.address)
        assert await client.ask(Ping()) == Pong()
        client.close()


async def test_nobody_reads_what_it_prints(tmp_path: Path) -> None:
    """Both outputs are pipes whose readers are gone."""
    assert init(tmp_path).returncode == 0
    port = free_port()
    env = {"NTF_TRANSPORT_LISTEN": "127.0.0.1", "NTF_TRANSPORT_PORT": str(port), "NTF_LOG_LEVEL": "debug"}
    reading, writing = os.pipe()
    os.close(reading)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ntf_server", "start", "--config-dir", str(tmp_path / "c")),
        stdout=writing,
        stderr=writing,
        env=os.environ | env,
    )
    os.close(writing)
    try:
        fingerprint = (tmp_path / "c" / "fingerprint").read_text()
        address = parse_ntf_server(f"ntf://{fingerprint}@127.0.0.1:{port}")
        client = await _open_soon(address, process)
        for _ in range(3):
            assert await client.ask(Ping()) == Pong()
        client.close()
        assert process.returncode is None
    finally:
        process.kill()
        await process.wait()


async def _open_soon(address: NtfServer, process: asyncio.subprocess.Process) -> NtfClient:
    async with asyncio.timeout(DEADLINE):
        while True:
            assert process.returncode is None
            with contextlib.suppress(OSError):
                return await NtfClient.open(address)
            await asyncio.sleep(0.05)


async def test_guesses_at_the_control_port_share_their_pauses(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "FAILED_LOGIN_PAUSE", 0.2)
    config = make_config(
        tmp_path,
        TRANSPORT={"control_port": unused_tcp_port},
        AUTH={"control_port_admin_password": "right"},
    )
    async with running(make_app(tmp_path, config)):
        started = time.monotonic()
        assert await asyncio.gather(*(_guess(unused_tcp_port, "wrong") for _ in range(5))) == [b"AUTH\n"] * 5
        assert time.monotonic() - started >= 0.9
        assert await _guess(unused_tcp_port, "right") == b"role: admin\n"


async def _guess(port: int, password: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(DEADLINE):
        await reader.readline()
        writer.write(f"auth {password}\n".encode())
        answer = await reader.readline()
    writer.close()
    return answer


async def test_too_many_talks_are_ended(tmp_path: Path, unused_tcp_port: int) -> None:
    config = make_config(tmp_path, TRANSPORT={"control_port": unused_tcp_port})
    async with running(make_app(tmp_path, config)):
        talks = []
        for _ in range(control.MAX_TALKS):
            talks.append(await asyncio.open_connection("127.0.0.1", unused_tcp_port))
            assert await talks[-1][0].readline()
        reader, writer = await asyncio.open_connection("127.0.0.1", unused_tcp_port)
        assert await reader.readline() == b""
        for _, each in (*talks, (reader, writer)):
            each.close()


async def test_silent_talks_make_room_for_the_operator(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in which nobody has logged in: one does not read what it asked for, the others say nothing."""
    monkeypatch.setattr(control, "STRANGER_TIMEOUT", 0.2)
    config = make_config(
        tmp_path,
        TRANSPORT={"control_port": unused_tcp_port},
        AUTH={"control_port_admin_password": "right"},
    )
    async with running(make_app(tmp_path, config)):
        held = [await asyncio.open_connection("127.0.0.1", unused_tcp_port) for _ in range(control.MAX_TALKS)]
        held[0][1].write(b"help\n" * 100_000)

        async def operator() -> bool:
            return await _guess(unused_tcp_port, "right") == b"role: admin\n"

        await until(operator)
        for _, each in held:
            each.close()


async def test_health_is_told_however_many_say_nothing(tmp_path: Path, unused_tcp_port: int) -> None:
    """A supervisor that cannot ask ends the server."""
    config = make_config(tmp_path, METRICS={"port": unused_tcp_port})
    async with running(make_app(tmp_path, config)):
        held = [
            await asyncio.open_connection("127.0.0.1", unused_tcp_port)
            for _ in range(2 * plain_http.MAX_REQUESTS)
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", unused_tcp_port)
        writer.write(b"GET /health/live HTTP/1.1\r\n\r\n")
        assert b" 200 " in await reader.readline()
        for _, each in (*held, (reader, writer)):
            each.close()


async def test_clients_of_the_pages_do_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_http, "REQUEST_TIMEOUT", 3600)
    pages = plain_http.HttpPages()
    port = await pages.open("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await until(lambda: bool(pages._requests))
    async with asyncio.timeout(DEADLINE):
        await pages.close()
        assert await reader.read() == b""
    writer.close()


async def test_pages_can_only_be_read() -> None:
    """Under any name, if none was given."""

    class Pages(plain_http.HttpPages):
        def page(self, path: bytes) -> plain_http.Page:
            return plain_http.Page(plain_http.PLAIN, path)

    pages = Pages()
    port = await pages.open("127.0.0.1", 0)
    assert "405" in (await get(port, "/", "POST")).splitlines()[0]
    assert (await get(port, "/here HTTP/1.1\r\nHost: any.example\r\nX:")).endswith("/here")
    await pages.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"", b"200"),
        (b"Host: localhost:9090\r\n", b"200"),
        (b"host:127.0.0.1\r\n", b"200"),
        (b"Host: [::1]:9090\r\n", b"200"),
        (b"Host: METRICS.example\r\n", b"200"),
        (b"Host: evil.example\r\n", b"421"),
        (b"Host: 127.0.0.1.evil.example\r\n", b"421"),
        (b"Host: localhost\r\nHost: evil.example\r\n", b"421"),
        (b"X: y\r\nhOsT :\tevil.example\r\n", b"421"),
    ],
)
async def test_pages_for_another_host(
    tmp_path: Path, unused_tcp_port: int, host: bytes, status: bytes
) -> None:
    """A site whose name its owner resolves to this machine cannot read them (DNS rebinding)."""
    metrics = {"port": unused_tcp_port, "hosts": ("metrics.example",)}
    async with running(make_app(tmp_path, make_config(tmp_path, METRICS=metrics))):
        reader, writer = await asyncio.open_connection("127.0.0.1", unused_tcp_port)
        writer.write(b"GET /status.json HTTP/1.1\r\n" + host + b"\r\n")
        assert (await reader.read()).split(b" ")[1] == status
        writer.close()


def test_files_that_others_can_read(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        STORE={"url_file": (url := tmp_path / "config" / "database-url")},
        STATEMENTS={"key_file": (gateway := tmp_path / "config" / "gateway.key")},
        APNS={"key_file": (apns := tmp_path / "config" / "apns.p8")},
        FCM={"service_account_file": (fcm := tmp_path / "config" / "fcm.json")},
        WEBPUSH={"vapid_key_file": (vapid := tmp_path / "config" / "vapid.pem")},
    )
    named = {url, gateway, apns, fcm, vapid}
    for file in named:
        file.touch(0o600)
    files = secret_files(tmp_path / "config", config)
    assert named <= set(files)
    key = tmp_path / "config" / "server.key"
    assert key in files
    assert tmp_path / "config" / "ntf-server.ini" in files
    assert readable_by_others(files) == []
    key.chmod(0o644)
    assert readable_by_others(files) == []  # nobody else can enter the folder
    (tmp_path / "config").chmod(0o755)
    assert readable_by_others(files) == [key]
    key.chmod(0o640)
    assert readable_by_others(files) == [key]


def test_start_warns_of_them(tmp_path: Path) -> None:
    assert init(tmp_path).returncode == 0
    (tmp_path / "c").chmod(0o755)
    (tmp_path / "c" / "server.key").chmod(0o644)
    checked = subprocess.run(
        [sys.executable, "-m", "ntf_server", "start", "--maintenance", "--config-dir", str(tmp_path / "c")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert f"others on this machine can read {tmp_path / 'c' / 'server.key'}: chmod 600" in checked.stderr
