"""Signals to a real server: it reloads, tells about itself, stops; and the service manager hears of it."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from cryptography import x509

from ntf_demo.fake_push.faults import Fault
from ntf_server.__main__ import main
from ntf_server.daemon import TOGETHER
from ntf_server.logs import LINES_PER_WINDOW
from ntf_server.service_manager import ServiceManager
from protocol.device_token import ApnsToken, Provider
from protocol.ntf_commands import Ping, Pong
from tests.drills.world import DEADLINE, Daemon, provider, push_settings, running_daemon
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.ntf_server.test_cli import init
from tests.waiting import until
from transport.errors import TransportError


async def until_logged(daemon: Daemon, text: str) -> str:
    async with asyncio.timeout(DEADLINE):
        while text not in daemon.log.read_text():
            assert daemon.is_alive()
            await asyncio.sleep(0.02)
    return daemon.log.read_text()


async def check_serves(daemon: Daemon) -> None:
    client = await NtfClient.open(daemon.address)
    assert await client.ask(Ping()) == Pong()
    client.close()


async def serial(daemon: Daemon) -> int:
    """Of the certificate that a client is shown."""
    client = await NtfClient.open(daemon.address)
    client.close()
    return _serial(client)


def _serial(client: NtfClient) -> int:
    return x509.load_der_x509_certificate(client.stream.peer_chain[0]).serial_number


def set_key(folder: Path, section: str, line: str) -> None:
    """Sections may be continued; the last value of a key would be refused as a second one."""
    path = folder / "c" / "ntf-server.ini"
    name = line.partition(" ")[0]
    inside, lines = "", []
    for each in path.read_text().splitlines():
        inside = each.strip("[]") if each.startswith("[") else inside
        same = inside == section and each.lstrip("# ").startswith(f"{name} =")
        lines.append(line if same else each)
    path.write_text("\n".join(lines) + "\n")


async def test_sighup_reloads(tmp_path: Path) -> None:
    assert init(tmp_path).returncode == 0
    async with running_daemon(tmp_path) as daemon:
        before = await serial(daemon)
        assert main(["cert", "--config-dir", str(tmp_path / "c")]) == 0
        set_key(tmp_path, "LOG", "level = debug")
        set_key(tmp_path, "LIMITS", "connections_per_address = 1")
        set_key(tmp_path, "PUSH", "concurrency = 7")
        daemon.process.send_signal(signal.SIGHUP)
        log = await until_logged(daemon, "reloaded: certificate")
        log = await until_logged(daemon, "changed, but needs a restart: [PUSH] concurrency\n")
        assert "nothing was reloaded" not in log
        first = await open_soon(daemon)
        assert _serial(first) != before
        with pytest.raises(TransportError):
            await NtfClient.open(daemon.address)
        first.close()


async def open_soon(daemon: Daemon) -> NtfClient:
    """When the client before has gone."""
    async with asyncio.timeout(DEADLINE):
        while True:
            with suppress(TransportError):
                return await NtfClient.open(daemon.address)
            await asyncio.sleep(0.02)


async def test_a_mistake_changes_nothing(tmp_path: Path) -> None:
    assert init(tmp_path).returncode == 0
    async with running_daemon(tmp_path) as daemon:
        set_key(tmp_path, "LOG", "level = loud")
        daemon.process.send_signal(signal.SIGHUP)
        log = await until_logged(daemon, "nothing was reloaded: ")
        assert "Traceback" not in log
        set_key(tmp_path, "LOG", "level = info")
        (tmp_path / "c" / "server.crt").write_text("nonsense")
        daemon.process.send_signal(signal.SIGHUP)
        await until_logged(daemon, "server.crt")
        await check_serves(daemon)


async def test_sigusr1_tells_of_tasks_and_queues(tmp_path: Path) -> None:
    async with running_daemon(tmp_path) as daemon:
        client = await NtfClient.open(daemon.address)
        daemon.process.send_signal(signal.SIGUSR1)
        log = await until_logged(daemon, "tasks: ")
        client.close()
        await check_serves(daemon)
    line = next(line for line in log.splitlines() if "tasks: " in line)
    assert "127.0.0.1" not in line.partition("tasks: ")[2]  # addresses of clients
    for words in ("1 push dispatcher", "1 router subscriber", "1 clients", "0 pushes in memory"):
        assert words in log


async def test_stopped_is_the_last_line(tmp_path: Path) -> None:
    """Also if lines were left out, which are told of at the end."""
    async with running_daemon(tmp_path) as daemon:
        for _ in range(LINES_PER_WINDOW + 3):
            daemon.process.send_signal(signal.SIGUSR1)
            await check_serves(daemon)  # else signals that wait become one
        daemon.process.send_signal(signal.SIGTERM)
        assert (await ended(daemon)).endswith("ntf_server.daemon: stopped")
        *_, left_out, _ = daemon.log.read_text().splitlines()
    assert "tasks: " in left_out
    assert "(repeated " in left_out


async def ended(daemon: Daemon) -> str:
    """The last line of its log."""
    await until(lambda: not daemon.is_alive())
    return daemon.log.read_text().splitlines()[-1]


async def test_signals_that_come_together_are_one(tmp_path: Path) -> None:
    """`timeout` and others signal the process and its group."""
    async with running_daemon(tmp_path) as daemon:
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.send_signal(signal.SIGINT)
        assert (await ended(daemon)).endswith("ntf_server.daemon: stopped")


async def test_one_that_follows_does_not_wait_for_a_silent_provider(tmp_path: Path) -> None:
    async with provider(tmp_path) as push, running_daemon(tmp_path, push_settings(push)) as daemon:
        push.add_fault(Fault(action="silence"))
        client = await NtfClient.open(daemon.address)
        await Device.make(ApnsToken(Provider.APNS_TEST, bytes(32).hex().encode())).register(client)
        await until(lambda: push.requests == 1)
        while daemon.is_alive():
            daemon.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(TOGETHER / 4)
        client.close()
        assert (await ended(daemon)).endswith("ntf_server.daemon: stopping")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        yield manager


async def test_the_service_manager_is_told(tmp_path: Path, manager: socket.socket) -> None:
    env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
    async with running_daemon(tmp_path, env) as daemon:
        heard = await until_told(manager, "READY=1")
        heard += await until_told(manager, "WATCHDOG=1")
        daemon.process.send_signal(signal.SIGHUP)
        assert "MONOTONIC_USEC=" in (await until_told(manager, "RELOADING=1"))[-1]
        await until_told(manager, "READY=1")
        daemon.process.send_signal(signal.SIGTERM)
        await until_told(manager, "STOPPING=1")
        async with asyncio.timeout(DEADLINE):
            while daemon.is_alive():
                await asyncio.sleep(0.02)
        assert daemon.log.read_text().endswith(": stopped\n")


async def until_told(manager: socket.socket, word: str) -> list[str]:
    heard: list[str] = []
    async with asyncio.timeout(DEADLINE):
        while not (heard and word in heard[-1]):
            heard.append((await asyncio.get_running_loop().sock_recv(manager, 4096)).decode())
    return heard


def test_nobody_listens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ServiceManager({}).ready()
    assert not caplog.text
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).ready()
    assert "cannot tell the service manager" in caplog.text


async def test_no_core_dumps(tmp_path: Path) -> None:
    """They would hold keys and device tokens."""
    async with running_daemon(tmp_path) as daemon:
        assert resource.prlimit(daemon.process.pid, resource.RLIMIT_CORE) == (0, 0)
