"""Memory that nobody uses any more goes back to the system, soon and whatever the traffic."""

from __future__ import annotations

import asyncio
import ctypes
import gc

INTERVAL = 60.0
YOUNG_OBJECTS = 20_000
"""So many more objects than at the last look make Python look for cycles by itself. With what hangs on them
that can be 20 MB; a busy server gets there within the interval, and a calm one need not wait for it."""


def relax_garbage_collection() -> None:
    """What the modules made stays for ever, and sessions and commands are freed by reference counts: looking
    through all of it every 700 allocations is a waste."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


async def keep_tidy() -> None:
    while True:
        await asyncio.sleep(INTERVAL)
        tidy()


def tidy() -> None:
    """Free what only cycles hold (closed transports of asyncio, parsed handshakes), and let malloc, which
    keeps what was freed, give up the pages that are empty."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)
