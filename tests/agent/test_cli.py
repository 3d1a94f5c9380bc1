"""`ntf-agent` as people use it: a process per command."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.__main__ import main
from ntf_demo.demo import Playground, playground
from tests.agent.world import DEADLINE, DEVICE, verification

LINK = re.compile(r"smp://\S+#/\?\S+")


class Terminal:
    """Runs commands for one device."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "agent",
            "--folder",
            str(self._folder),
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *arguments: str, stdin: str = "") -> str:
        process = await self.start(*arguments)
        async with asyncio.timeout(DEADLINE):
            out, err = await process.communicate(stdin.encode())
        assert process.returncode == 0, err.decode()
        return out.decode()


@pytest.fixture
def pushes(tmp_path: Path) -> Path:
    return tmp_path / "pushes.jsonl"


@pytest.fixture
async def world(tmp_path: Path, pushes: Path) -> AsyncIterator[Playground]:
    async with playground(tmp_path / "servers", record_file=pushes) as running:
        yield running


@asynccontextmanager
async def listening(terminal: Terminal, pushes: Path) -> AsyncIterator[asyncio.StreamReader]:
    process = await terminal.start("listen", "--pushes", str(pushes))
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE):
            assert b"Listening" in await process.stdout.readline()
        yield process.stdout
    finally:
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(DEADLINE):
            _, err = await process.communicate()
        assert process.returncode == 130
        assert err == b""


async def test_a_conversation(world: Playground, tmp_path: Path, pushes: Path) -> None:
    alice, bob = Terminal(tmp_path / "alice"), Terminal(tmp_path / "bob")
    device, router = DEVICE.token.decode(), str(world.router.address)
    register = ("register", str(world.server.address), device, "--provider", "test")
    assert "Token: ACTIVE" in await alice.run(*register, "--pushes", str(pushes))
    created = await alice.run("create", router)
    link = LINK.search(created)
    assert link is not None
    assert "Connection 1" in await bob.run("join", link[0])
    status = await alice.run("status")
    assert "Token: ACTIVE, instant" in status
    assert "Connection 1: receives; notifications: NEW (next: NTF_CHECK)" in status
    async with listening(alice, pushes) as heard:
        assert await bob.run("send", "1", "hello \x1b[31mAlice") == "Sent.\n"
        async with asyncio.timeout(DEADLINE):
            line = (await heard.readline()).decode()
    assert line == "Connection 1: hello �[31mAlice\n"
    assert "notifications: none" in await alice.run("unsubscribe", "1")


async def test_by_hand(world: Playground, tmp_path: Path) -> None:
    alice = Terminal(tmp_path / "alice")
    told = await alice.run("register", str(world.server.address), DEVICE.token.decode(), "--provider", "test")
    assert "ntf-agent verify" in told
    data = json.loads((await verification(world)).body)["notificationData"]
    assert await alice.run("verify", data["nonce"], data["verification"]) == "Token: ACTIVE\n"
    assert await alice.run("push", stdin='{"checkMessages":true}') == ""
    assert await alice.run("unregister") == "Token given up.\n"
    assert (await world.server.store.counts()).tokens == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["verify", "AAAA", "AAAA"], "not registered"),
        (["verify", "!", "AAAA"], "base64url"),
        (["send", "1", "text"], "cannot send"),
        (["listen"], "not registered"),
        (["unregister"], "no token"),
        (["register", "ntf://" + "A" * 43 + "=@127.0.0.1:1", "x" * 300], "1 to 255"),
        (
            ["--timeout", "1", "register", "ntf://" + "A" * 43 + "=@127.0.0.1:1", "aa"],
            "ConnectFailed|refused|Connect",
        ),
        (["register", "ntf://" + "A" * 43 + "=@h", "aa", "--period", "3"], "20 to 65535"),
        (["join", "nonsense"], "not a queue link"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    folder = ["--folder", str(tmp_path / "agent")]
    main([*folder, "join", "nonsense"])  # makes the device
    capsys.readouterr()
    assert main([*folder, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("ntf-agent: ")
    assert captured.err.count("\n") == 1
    assert re.search(told, captured.err), captured.err


@pytest.mark.parametrize(
    "arguments", [["create", "http://x"], ["register", "smp://x", "aa"], [], ["send", "x"]]
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: ntf-agent" in capsys.readouterr().err


def test_folder_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["--folder", str(tmp_path / "file" / "agent"), "status"]) == 1
    assert capsys.readouterr().err.startswith("ntf-agent: ")


@pytest.mark.parametrize("command", [["status"], ["check"], ["fetch"], ["subscribe"], ["send", "1", "text"]])
def test_asking_a_device_that_is_not_there_makes_none(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--folder", str(tmp_path / "nobody"), *command]) == 1
    assert "there is no device in" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
