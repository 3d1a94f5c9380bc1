"""TCRN: devices that asked for it are woken every so many minutes to look for messages by themselves.

When a token is due is kept in the store, in an index: looking costs what is due, not what exists.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ntf_server.clock import Clock
from ntf_server.interfaces import CheckMessagesSink
from ntf_server.randomness import random_part
from store.interface import PeriodicStore, StoreError

log = logging.getLogger(__name__)

SECONDS_PER_MINUTE = 60
EARLIEST_FIRST = 0.5
"Part of the interval after which the first push comes at the earliest."
LATENESS = 0.05
"Part of the interval by which a push may come later, so that tokens do not keep in step."
SHORTEST_PAUSE = 1.0
LONGEST_PAUSE = 300.0
"Seconds after which the store is asked again at the latest."
SHARED_PAUSE = 10.0
"Where other daemons may leave their tokens to this one."
BATCH = 100
PER_SECOND = 500.0
"Pushes per second at most: those that became due while the server was down do not come in one burst."


def first_due(now: float, minutes: int, random: Callable[[int], bytes]) -> int:
    """When a token gets its first periodic push: within the interval, at a time of its own."""
    part = EARLIEST_FIRST + (1 - EARLIEST_FIRST) * random_part(random)
    return int(now + minutes * SECONDS_PER_MINUTE * part)


def next_due(now: float, minutes: int, random: Callable[[int], bytes]) -> int:
    """When the next one follows: after the interval, a little later for some than for others."""
    return int(now + minutes * SECONDS_PER_MINUTE * (1 + LATENESS * random_part(random)))


class Periodic:
    """Queues a check-messages push for every token that is due, until cancelled."""

    def __init__(
        self,
        store: PeriodicStore,
        sink: CheckMessagesSink,
        clock: Clock,
        random: Callable[[int], bytes],
        *,
        is_shared: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._sink = sink
        self._clock = clock
        self._random = random
        self._is_shared = is_shared
        self._sleep = sleep

    @property
    def _longest_pause(self) -> float:
        return SHARED_PAUSE if self._is_shared else LONGEST_PAUSE

    async def run(self) -> None:
        while True:
            try:
                pause = await self._push_due()
            except StoreError as error:
                log.error("periodic pushes wait for the store: %s", error)
                pause = self._longest_pause
            await self._sleep(pause)

    async def _push_due(self) -> float:
        """Queue the pushes of one batch; seconds until the next one."""
        due = await self._store.due_crons(int(self._clock.now()), BATCH)
        for token in due:
            self._sink.check_messages(token.key)
        if due:
            now = self._clock.now()
            await self._store.set_cron_due(
                [(token.key, next_due(now, token.cron_minutes, self._random)) for token in due]
            )
        if len(due) == BATCH:
            return BATCH / PER_SECOND
        next_at = await self._store.next_cron_due()
        if next_at is None:
            return self._longest_pause
        return min(max(next_at - self._clock.now(), SHORTEST_PAUSE), self._longest_pause)
