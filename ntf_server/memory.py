"""Memory that nobody uses any more goes back to the system, soon and whatever the traffic."""

from __future__ import annotations

import asyncio
import ctypes
import gc

INTERVAL = 60.0
YOUNG, OLD = 1, 2
"Generations of Python's collector: looking for garbage among the young costs what is new, among the old all."
MORE, AT_LEAST = 1.25, 10_000
"The old ones are looked through when there are so many times as many, and so many more, as were left."


def relax_garbage_collection() -> None:
    """What the modules made stays for ever, and sessions and commands are freed by reference counts: looking
    through all of it every 700 allocations is a waste."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


class Tidying:
    """Frees what only cycles hold: closed transports of asyncio, parsed handshakes, ended sessions.

    Python by itself waits for 20,000 more objects than there were, on which 20 MB can hang, and for much more
    before it looks through those that are older.
    """

    def __init__(self) -> None:
        self._old = 0
        self._libc = ctypes.CDLL(None)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            self.tidy()

    def tidy(self) -> None:
        gc.collect(YOUNG)
        if len(gc.get_objects(OLD)) > max(self._old * MORE, self._old + AT_LEAST):
            gc.collect()
            self._old = len(gc.get_objects(OLD))
        if hasattr(self._libc, "malloc_trim"):  # glibc, which keeps what was freed
            self._libc.malloc_trim(0)
