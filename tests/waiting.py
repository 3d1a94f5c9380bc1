"""Tests wait for what other tasks bring about, not for time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable

DEADLINE = 60.0
PAUSE = 0.005


async def until(condition: Callable[..., object], seconds: float = DEADLINE) -> None:
    """Return when the condition, or what it lets us wait for, is true."""
    async with asyncio.timeout(seconds):
        while True:
            value = condition()
            if await value if inspect.isawaitable(value) else value:
                return
            await asyncio.sleep(PAUSE)
