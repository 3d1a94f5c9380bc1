"""A wall clock that is wrong, for one process: libfaketime, and what it breaks put right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SLEEP = """
import select
import time

time.sleep = lambda seconds: select.select((), (), (), seconds)
"""
"""Python has `time.sleep` end at a point of monotonic time. The library takes that for one of the faked
clock, and refuses, or waits for ever."""


def fake_clock(folder: Path, **settings: str) -> dict[str, str]:
    """The environment of such a process, whichever library asks for the time. `folder`: for what it reads.

    `settings`: of libfaketime, which say how wrong the clock is.
    """
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        pytest.skip("Debian's package faketime is not installed")
    (folder / "sitecustomize.py").write_text(SLEEP)
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **settings,
    }
