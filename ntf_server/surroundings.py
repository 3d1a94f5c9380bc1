"""What every router is watched with, and how writes wait for a store that fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ntf_server.clock import Clock
from ntf_server.interfaces import PushSink
from ntf_server.journal import EventSink
from ntf_server.metrics import counter
from smp_client.backoff import Backoff
from store.interface import LeaseLost, StoreError, StoreVanished, SubscriberStore
from store.leases import SOLE_OWNER, Ownership

logger = logging.getLogger(__name__)

FIRST_RETRY, LONGEST_RETRY = 0.1, 10.0
"Seconds between attempts to reach a store that fails."

STORE_RETRIES = counter(
    "notifications_store_retries", "Attempts to store received notifications that had to be repeated"
)

R = TypeVar("R")


def store_backoff() -> Backoff:
    """Delays between attempts, without jitter: nobody else waits for this store."""
    return Backoff(FIRST_RETRY, LONGEST_RETRY, lambda: 0.0)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of the daemon that routers are watched with."""

    store: SubscriberStore
    push_sink: PushSink
    clock: Clock
    journal: EventSink
    ownership: Ownership = SOLE_OWNER
    "Where several daemons share the routers, they take them over from each other."
    gives_up: asyncio.Event = field(default_factory=asyncio.Event)
    "Set when the daemon stops and has waited for the store long enough."

    async def patiently(self, write: Callable[[], Awaitable[R]], name: str) -> R:
        """Repeat a write until the store takes it: what a router sent is not sent again.

        Meanwhile nothing more is read from that router, so that it keeps the rest.
        """
        backoff: Backoff | None = None
        while True:
            try:
                return await write()
            except (LeaseLost, StoreVanished):
                raise  # another daemon has the router, or this one is about to stop: the router keeps it
            except StoreError as error:
                if self.gives_up.is_set():
                    raise
                STORE_RETRIES.inc()
                logger.error("%s: cannot store what the router sent, retrying: %s", name, error)
            backoff = backoff or store_backoff()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff.next()):
                    await self.gives_up.wait()
