"""A test that does not end shows where it stands: every thread and every waiting task, then it fails.

pytest-timeout raises in the test at `timeout`. A test that swallows that as well is ended with its whole
process at `faulthandler_timeout`; what it was waiting for has been printed by then.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import linecache
import signal
import sys
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Any, TextIO

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    fail = signal.getsignal(signal.SIGALRM)

    def show_and_fail(number: int, frame: FrameType | None) -> None:
        capture = item.config.pluginmanager.getplugin("capturemanager")
        assert capture is not None
        with capture.global_and_fixture_disabled():
            print(f"\n{item.nodeid} takes too long", file=sys.stderr)
            faulthandler.dump_traceback(file=sys.stderr)
            print_tasks(sys.stderr)
        assert callable(fail)
        fail(number, frame)

    signal.signal(signal.SIGALRM, show_and_fail)
    return result


def print_tasks(file: TextIO) -> None:
    """All tasks that are not done, of every loop, each with its whole chain of awaits."""
    for task in [thing for thing in gc.get_objects() if isinstance(thing, asyncio.Task)]:
        if not task.done():
            print(f"Task {task.get_name()!r}:", file=file)
            for frame in _awaited(task.get_coro()):
                print(f"  {_line(frame)}", file=file)
    file.flush()


def _awaited(waiting: Any) -> Iterator[FrameType]:
    """From the outermost coroutine to the one that waits: coroutines, generators, asynchronous generators."""
    while waiting is not None:
        for prefix in ("cr", "gi", "ag"):
            if hasattr(waiting, f"{prefix}_frame"):
                break
        else:
            return
        frame = getattr(waiting, f"{prefix}_frame")
        if frame is not None:
            yield frame
        waiting = getattr(waiting, "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await")


def _line(frame: FrameType) -> str:
    file, number = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(file, number).strip()
    return f"{file}:{number} in {frame.f_code.co_name}: {source}"
