"""A session that this side gave up, read on until another one has its queues.

A router sends a notification once, to whoever subscribed last. If it does not answer a request, another
session is tried; but until that one is subscribed, what the router sends still comes to the old one. And what
it sent before it heard of the new one is on the way for as long as the network takes.
"""

from __future__ import annotations

import asyncio
import contextlib

from smp_client.session import SmpSession

OVERLAP = 20.0
"Seconds for a router to send the last of what it has for a session that lost its queues; END takes up to 15."


class FormerSession:
    """Owns the session, and a task that ends it: some time after `succeeded`, or at `close`."""

    def __init__(self, session: SmpSession, name: str) -> None:
        self._session = session
        self._succeeded = asyncio.Event()
        session.when_closed(self._succeeded.set)
        self._task = asyncio.get_running_loop().create_task(self._read_on(), name=f"former session {name}")

    @property
    def is_storing(self) -> bool:
        return self._session.is_consuming

    def succeeded(self) -> None:
        """Another session has the queues."""
        self._succeeded.set()

    async def close(self) -> None:
        """Deal with what has come, and end the session now."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _read_on(self) -> None:
        async with self._session as session:
            try:
                await self._succeeded.wait()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(OVERLAP):
                        await session.wait_closed()
            finally:
                await session.finish()
