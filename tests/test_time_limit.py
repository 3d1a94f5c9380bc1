"""What a developer sees of a test that hangs: run in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HANGS = """
import asyncio
import contextlib
from tests.conftest import pytest_timeout_set_timer

async def wait_for_nothing():
    await asyncio.Event().wait()

async def stubborn():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await wait_for_nothing()

async def hang(work):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work(), name="the one that hangs")

def test_that_hangs():
    asyncio.run(hang(wait_for_nothing))

def test_that_cannot_be_cancelled():
    asyncio.run(hang(stubborn))

def test_after():
    pass
"""


def run(folder: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text("from tests.conftest import pytest_timeout_set_timer\n")
    file = folder / "test_hangs.py"
    file.write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-o", "timeout=1", *options, "-k", name, str(file)]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-p", "no:cacheprovider"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "workers"])
def test_tasks_are_shown_and_the_next_test_runs(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run(tmp_path, "test_that_hangs or test_after", *options)
    assert "1 failed, 1 passed" in done.stdout
    assert "Timeout (>1.0s)" in done.stdout
    assert "Task 'the one that hangs':" in done.stderr
    assert "in wait_for_nothing: await asyncio.Event().wait()" in done.stderr
    assert "in hang: async with asyncio.TaskGroup() as tasks:" in done.stderr


def test_what_cannot_be_cancelled_is_ended(tmp_path: Path) -> None:
    done = run(tmp_path, "test_that_cannot_be_cancelled", "-o", "faulthandler_timeout=4")
    assert done.returncode == 1
    assert "in stubborn: await wait_for_nothing()" in done.stderr
    assert "Timeout (0:00:04)!" in done.stderr
