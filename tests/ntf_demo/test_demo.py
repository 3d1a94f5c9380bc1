"""`ntf-server demo` as its first user meets it: prints what the documentation shows, leaves nothing."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CAPTURE = ROOT / "docs" / "demo.txt"
DEADLINE = 60.0
LINK = re.compile(r"simplex:/\S+")


async def start(tmp_path: Path, *arguments: str) -> asyncio.subprocess.Process:
    return await start_command(tmp_path, sys.executable, *arguments)


async def start_command(tmp_path: Path, *command: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def finish(process: asyncio.subprocess.Process) -> tuple[str, str]:
    async with asyncio.timeout(DEADLINE):
        out, err = await process.communicate()
    return out.decode(), err.decode()


def structure(text: str) -> list[str]:
    """The text without what differs from run to run: ports, keys, times."""
    text = re.sub(r"[\w-]{8,}…", "ID…", text)
    text = re.sub(r" *[\d.]+ ms *█*", " 0 ms", text)
    return re.sub(r"[\d,]*\d", "0", text).splitlines()


async def read_until(process: asyncio.subprocess.Process, text: str) -> str:
    assert process.stdout is not None
    seen = ""
    async with asyncio.timeout(DEADLINE):
        while text not in seen:
            line = await process.stdout.readline()
            assert line, seen
            seen += line.decode()
    return seen


def test_the_readme_shows_the_same() -> None:
    assert CAPTURE.read_text() in (ROOT / "README.md").read_text()


async def test_prints_what_the_documentation_shows(tmp_path: Path) -> None:
    process = await start(tmp_path, "-m", "ntf_server", "demo")
    out, err = await finish(process)
    assert (process.returncode, err) == (0, "")
    assert structure(out) == structure(CAPTURE.read_text())
    assert "\x1b" not in out  # no terminal, no colours
    assert os.listdir(tmp_path) == []


async def test_statements(tmp_path: Path) -> None:
    process = await start(tmp_path, "-m", "ntf_server", "demo", "--statements")
    out, err = await finish(process)
    assert (process.returncode, err) == (0, "")
    assert structure(out) == structure(CAPTURE.with_name("demo-statements.txt").read_text())
    assert os.listdir(tmp_path) == []


async def as_printed(tmp_path: Path, command: str) -> str:
    process = await start_command(tmp_path, *shlex.split(command))
    out, err = await finish(process)
    assert process.returncode == 0, err
    return out


async def test_kept_servers_can_be_played_with(tmp_path: Path) -> None:
    process = await start(tmp_path, "-m", "ntf_server", "demo", "--keep")
    seen = await read_until(process, "Hello from another terminal")
    register, create, join, listen, send = [
        line.strip() for line in seen.splitlines() if line.startswith("    ") and "ntf-agent " in line
    ]
    assert await as_printed(tmp_path, register) == "Token: ACTIVE\n"
    link = LINK.search(await as_printed(tmp_path, create))
    assert link is not None
    await as_printed(tmp_path, join.replace("LINK", link[0]))
    listening = await start_command(tmp_path, *shlex.split(listen))
    await read_until(listening, "Listening")
    await as_printed(tmp_path, send)
    await read_until(listening, "Hello from another terminal")
    listening.terminate()
    await finish(listening)
    process.send_signal(signal.SIGINT)
    _, err = await finish(process)
    assert (process.returncode, err) == (0, "")
    assert os.listdir(tmp_path) == []


async def test_ended_early_leaves_nothing_behind(tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        process = await start(tmp_path, "-m", "ntf_server", "demo")
        await read_until(process, "registers for notifications")
        process.send_signal(number)
        _, err = await finish(process)
        assert (process.returncode, err) == (130, "")
        assert os.listdir(tmp_path) == []
