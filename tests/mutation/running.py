"""Running tests in a forked process, so that no mutant outlives its trial."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

POLL, LOOK = 0.01, 1.0
MORE_CPU, LEAST_CPU = 3.0, 2.0
"Beyond that a test does not end: times what it took before, and seconds."
MORE_WALL, LEAST_WALL = 3.0, 5.0
"As long as that it may wait for something, with nothing of it ready to run."
POLLING = 0.3
"Share of a CPU that a process may use and be waiting all the same."
TICKS = os.sysconf("SC_CLK_TCK")
_SECONDS = count(os.getpid() * 10_000 % 1_000_000_000)


@contextmanager
def in_place(path: Path, source: str) -> Iterator[None]:
    """The file is the mutant while the block runs, with a time that no version had, to be compiled anew."""
    original, stat = path.read_bytes(), path.stat()
    path.write_text(source)
    second = next(_SECONDS)
    os.utime(path, (second, second))
    try:
        yield
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@dataclass(frozen=True, slots=True)
class Stage:
    """What a child is at, and the seconds that it usually takes."""

    name: str
    cpu: float
    wall: float


def forked(work: Callable[[], int], log: Path, stage: Callable[[], Stage]) -> int | None:
    """The exit code of a child; None if one of its stages does not end."""
    pid = os.fork()
    if not pid:
        _run(work, log)
    watch = _Watch(pid, stage, stage())
    code = None
    while not watch.is_over():
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(POLL)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    return code


def _run(work: Callable[[], int], log: Path) -> None:
    """The child: with a group of its own, so that what its tests start ends with it."""
    code = 99
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass(slots=True)
class _Watch:
    """Tells a child that stands still or turns round and round from one on a machine that is busy."""

    pid: int
    stage: Callable[[], Stage]
    at: Stage
    _looked: float = 0.0
    _cpu: float = 0.0
    _waited: float = 0.0
    "Seconds of this stage in which it could not go on, or hardly did."
    _before: float = 0.0
    "CPU seconds of earlier stages."

    def is_over(self) -> bool:
        now = time.monotonic()
        if now < self._looked + LOOK:
            return False
        elapsed, self._looked = now - self._looked if self._looked else 0.0, now
        cpu, is_ready = _usage(self.pid)
        if (stage := self.stage()) != self.at:
            self.at, self._before, self._waited = stage, cpu, 0.0
        elif not is_ready and cpu - self._cpu < POLLING * elapsed:
            self._waited += elapsed
        self._cpu = cpu
        if self._waited > stage.wall * MORE_WALL + LEAST_WALL:
            return True
        return cpu - self._before > stage.cpu * MORE_CPU + LEAST_CPU


def _usage(session: int) -> tuple[float, bool]:
    """CPU seconds of the processes of a session; whether one of them could run now."""
    ticks, is_ready = 0, False
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
                is_ready |= fields[0] in "RD"
    return ticks / TICKS, is_ready
