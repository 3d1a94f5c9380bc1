"""Where a daemon's memory is: the daemon in this process, and a socket that answers who holds how much.

    python -m tests.drills.memory_probe start --config-dir ...      # with MEMORY_PROBE=path of the socket

Who connects and says a line is sent one of JSON: bytes for each owner. If it says `trim`, malloc gives back
to the system what it can before. With MEMORY_PROBE_TRACE=1 also the lines of Python that hold most, at a
price in memory and time that makes the other figures of that run worthless.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import re
import socketserver
import sys
import tempfile
import threading
import tracemalloc
from collections import Counter
from pathlib import Path

from ntf_server.__main__ import main

PROBED = ("-m", "tests.drills.memory_probe")
SOCKET = "MEMORY_PROBE"
TRACE = "MEMORY_PROBE_TRACE"
COMMONEST = 12
_PYTHON_USES = re.compile(r"# bytes in allocated blocks\s*=\s*([\d,]+)")
_PYTHON_HOLDS = re.compile(r"\d+ arenas \* \d+ bytes/arena\s*=\s*([\d,]+)")
_MALLINFO_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
)  # fmt: skip


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO_FIELDS]


def _malloc() -> _Mallinfo:
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Mallinfo
    found = ask()
    assert isinstance(found, _Mallinfo)
    return found


def _sqlite() -> int:
    """All connections: pages kept, prepared statements, what a query needs."""
    ask = ctypes.CDLL("libsqlite3.so.0").sqlite3_memory_used
    ask.restype = ctypes.c_int64
    return int(ask())


def _python() -> tuple[int, int]:
    """What small objects use, and what Python holds for them."""
    with tempfile.TemporaryFile() as said:
        stderr = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            sys._debugmallocstats()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        said.seek(0)
        text = said.read().decode()
    uses, holds = _PYTHON_USES.search(text), _PYTHON_HOLDS.search(text)
    assert uses is not None
    assert holds is not None
    return int(uses[1].replace(",", "")), int(holds[1].replace(",", ""))


def _resident() -> dict[str, int]:
    """Its own memory, and pages of files that other processes may use as well."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0][:-1]: int(line[1]) * 1024 for line in lines if line[0] in ("RssAnon:", "RssFile:")}


def owners() -> dict[str, int]:
    """Bytes: of the process, and by owner. SQLite's are part of malloc's."""
    malloc, (python_uses, python_holds) = _malloc(), _python()
    return {
        **_resident(),
        "python uses": python_uses,
        "python holds": python_holds,
        "malloc uses": malloc.uordblks + malloc.hblkhd,
        "of these in maps": malloc.hblkhd,
        "malloc keeps free": malloc.fordblks,
        "sqlite": _sqlite(),
        "gc objects": len(gc.get_objects()),
    }


def _details() -> dict[str, object]:
    kinds = Counter(type(each).__name__ for each in gc.get_objects())
    found: dict[str, object] = {"commonest objects": kinds.most_common(COMMONEST)}
    if tracemalloc.is_tracing():
        lines = tracemalloc.take_snapshot().statistics("lineno")[:COMMONEST]
        found["lines"] = [str(line) for line in lines]
    return found


class _Answer(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        if self.rfile.readline() == b"trim\n":
            ctypes.CDLL(None).malloc_trim(0)
        self.wfile.write(json.dumps(owners() | _details()).encode() + b"\n")


def _listen() -> None:
    server = socketserver.UnixStreamServer(os.environ[SOCKET], _Answer)
    threading.Thread(target=server.serve_forever, name="memory probe", daemon=True).start()


async def ask(path: Path, word: str = "") -> dict[str, object]:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(f"{word}\n".encode())
        answer: dict[str, object] = json.loads(await reader.read())
        return answer
    finally:
        writer.close()


if __name__ == "__main__":
    if TRACE in os.environ:
        tracemalloc.start()
    _listen()
    sys.exit(main())
