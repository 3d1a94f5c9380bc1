"""A hostile peer in a process of its own, so that its work does not slow down those who measure.

python -m tests.drills.attacker module:function ntf://… (or smp://…) seconds
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from protocol.addresses import NtfServer, SmpServer, parse_ntf_server, parse_smp_server
from protocol.errors import HandshakeError
from transport.errors import TransportError

Attack = Callable[[Any, float], Awaitable[None]]
"A coroutine function at the top of a module: hurts the server at this address for so many seconds."

READY = b"attacking\n"
PAUSE = 0.05


async def persist(act: Callable[[], Awaitable[None]]) -> None:
    """Whoever is cut off, or refused, comes back."""
    while True:
        try:
            await act()
        except* (TransportError, OSError, HandshakeError, AssertionError):
            pass
        await asyncio.sleep(PAUSE)


@asynccontextmanager
async def attacking(attack: Attack, address: NtfServer | SmpServer, seconds: float) -> AsyncIterator[None]:
    """The attack has begun when the block is entered, and is over when it was left."""
    name = f"{attack.__module__}:{getattr(attack, '__name__', '')}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.drills.attacker", name, str(address), str(seconds)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == READY, f"{name} did not start"
        yield
        assert not process.returncode, f"{name} failed: whatever was measured, it was no attack"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def run(name: str, address: str, seconds: str) -> None:
    module, _, function = name.partition(":")
    attack: Attack = getattr(importlib.import_module(module), function)
    server = (parse_smp_server if address.startswith("smp:") else parse_ntf_server)(address)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(float(seconds)):
            await attack(server, float(seconds))
    await asyncio.sleep(float(seconds))  # what it left open stays open until it is killed


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:4]))
