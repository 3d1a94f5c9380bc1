"""Waiting for a store that is unavailable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from store.interface import StoreError

T = TypeVar("T")

log = logging.getLogger(__name__)

PAUSE = 1.0
"Seconds until the store is asked again."


class Patience:
    """However long the store is unavailable, until `end`."""

    def __init__(self) -> None:
        self.ended = False

    def end(self) -> None:
        """From now on a failure is final."""
        self.ended = True

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """The result of a call to the store; None if it failed and we are to stop."""
        while True:
            try:
                return await call()
            except StoreError as error:
                log.error("push waits for the store: %s", error)
            if self.ended:
                return None
            await asyncio.sleep(PAUSE)
