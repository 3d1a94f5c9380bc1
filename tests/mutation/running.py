"""Running tests against one changed file, in a process that has the libraries loaded already."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from tests.mutation.mutants import Mutant

POLL = 0.02
GRACE = 40.0
"Seconds beyond what the tests took before; then they are taken as hanging."
SLOWDOWN = 4.0
LIBRARIES = """
import sys
from pathlib import Path
before = set(sys.modules)
import pytest
pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]])
here = str(Path.cwd())
ours = {path.parent.name for path in Path.cwd().glob("*/__init__.py")}
print("LIBRARIES", *sorted(name for name in sys.modules if name.partition(".")[0] not in {*ours, "conftest"}))
"""
OPTIONS: tuple[str, ...] = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line")
OPTIONS += ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # its plugins are loaded ahead, too
_SECONDS = count(os.getpid() * 10_000 % 1_000_000_000)
HARMLESS = ("_pytest", "asyncio", "cryptography", "OpenSSL", "hypothesis", "pytest_asyncio", "construct")
"What is loaded ahead: it starts no threads and keeps nothing of ours."


def load_libraries(tests: Sequence[str]) -> None:
    """Import what the tests import, apart from our own packages."""
    shown = subprocess.run(
        [sys.executable, "-c", LIBRARIES, *tests], capture_output=True, text=True, check=True
    )
    found = next(line for line in shown.stdout.splitlines() if line.startswith("LIBRARIES"))
    for name in found.split()[1:]:
        if name.partition(".")[0] in HARMLESS:
            with suppress(ImportError, AttributeError):
                importlib.import_module(name)


@contextmanager
def in_place(path: Path, mutant: Mutant) -> Iterator[None]:
    """The file is the mutant while the block runs, with a time that no version had, to be compiled anew."""
    original, stat = path.read_bytes(), path.stat()
    path.write_text(mutant.source)
    second = next(_SECONDS)
    os.utime(path, (second, second))
    try:
        yield
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def outcome(tests: Sequence[str], usual_seconds: float, log: Path) -> str:
    """`killed`, `survived` or `timeout`."""
    pid = os.fork()
    if not pid:
        _run(tests, log)
    deadline = time.monotonic() + usual_seconds * SLOWDOWN + GRACE
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            _end_group(pid)
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(POLL)
    _end_group(pid)
    os.waitpid(pid, 0)
    return "timeout"


def _run(tests: Sequence[str], log: Path) -> None:
    """The child: with a group of its own, so that what its tests start ends with it."""
    code = 99
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = pytest.main([*OPTIONS, *tests])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
