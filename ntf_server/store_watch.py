"""Whether the store can be written to, asked all the time: before a client finds out."""

from __future__ import annotations

import asyncio
import logging

from ntf_server.clock import Clock
from ntf_server.metrics import gauge
from ntf_server.outage import Outage
from store.interface import ControlStore, StoreError, StoreVanished

logger = logging.getLogger(__name__)

INTERVAL = 2.0
LIMIT = 5.0
"Seconds within which a write must be on the disk."

WRITABLE = gauge("store_writable", "Whether a write reached the disk in time, when last tried")


class StoreWatch:
    """`run` asks for ever; `problem` is what it found last, empty if all is well."""

    def __init__(self, store: ControlStore, clock: Clock) -> None:
        self._store = store
        self._outage = Outage("the store", clock.monotonic, logger)
        self.problem = ""

    async def run(self) -> StoreVanished:
        """Returns only if the database was taken away."""
        while True:
            try:
                async with asyncio.timeout(LIMIT):
                    await self._store.check()
            except StoreVanished as error:
                self.problem = str(error)
                return error
            except StoreError as error:
                self._note(str(error))
            except TimeoutError:
                self._note(f"no write reached the disk within {LIMIT:g} s")
            else:
                self._note("")
            await asyncio.sleep(INTERVAL)

    def _note(self, problem: str) -> None:
        self.problem = problem
        WRITABLE.set(not problem)
        self._outage.note(problem and f"is unavailable: {problem}")
