"""Removes tokens that nobody will use: those never verified, and those that died long ago."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ntf_server.clock import SECONDS_PER_DAY, Clock, day
from ntf_server.interfaces import Subscriber
from store.interface import NtfStore, StoreError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HousekeepingConfig:
    unverified_days: int = 7
    "Tokens never verified are kept so long; 0 keeps them for ever."
    invalid_days: int = 30
    "Tokens that a provider called invalid are kept so long; 0 keeps them for ever."
    interval: float = 600.0
    "Seconds between two looks."
    batch: int = 500
    "Tokens removed at once: bounds how long other writes wait."


class Housekeeping:
    """Purges at every interval, until cancelled."""

    def __init__(
        self,
        store: NtfStore,
        subscriber: Subscriber,
        clock: Clock,
        settings: HousekeepingConfig | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._subscriber = subscriber
        self._clock = clock
        self._settings = settings or HousekeepingConfig()
        self._sleep = sleep

    async def run(self) -> None:
        while True:
            try:
                await self.purge()
            except StoreError as error:
                log.error("housekeeping waits for the store: %s", error)
            await self._sleep(self._settings.interval)

    async def purge(self) -> None:
        """Remove one batch, and let the subscriber forget its queues."""
        queues = await self._store.purge_tokens(
            unverified_before=self._before(self._settings.unverified_days),
            invalid_before=self._before(self._settings.invalid_days),
            limit=self._settings.batch,
        )
        if queues:
            self._subscriber.forget(queues)

    def _before(self, days: int) -> int:
        return day(self._clock.now()) - days * SECONDS_PER_DAY if days else 0
