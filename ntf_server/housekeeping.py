"""Removes what nobody uses: tokens never verified or dead for long, rows of deleted tokens, empty routers."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from ntf_server.clock import SECONDS_PER_DAY, Clock, day
from ntf_server.config import StoreConfig
from ntf_server.interfaces import Subscriber
from ntf_server.journal import EventSink
from store.interface import HousekeepingStore, LeaseLost, StoreError
from store.journal_schema import DeletionReason, JournalEvent
from store.leases import CHORES, SOLE_OWNER, Ownership
from store.records import Deletion

log = logging.getLogger(__name__)

INTERVAL = 600.0
"Seconds between two looks."
BATCH = 500
"Tokens removed at once: bounds how long other writes wait."
STORE_PAUSE = 10.0
"Seconds until a store that is unavailable is asked again."


class Deletions:
    """What the end of a token leads to, whoever caused it: the subscriber forgets, the journal notes."""

    def __init__(self, subscriber: Subscriber, journal: EventSink) -> None:
        self._subscriber = subscriber
        self._journal = journal
        self.more = asyncio.Event()
        "Deleted tokens have rows left: housekeeping goes on with them."

    def note(self, deletion: Deletion, reason: DeletionReason) -> None:
        if deletion.subscriptions:
            self._subscriber.forget(deletion.subscriptions)
        for token in deletion.tokens:
            self._journal.record(
                JournalEvent.TOKEN_DELETED,
                token=token.token_id,
                provider=token.provider.tag,
                error=reason,
                count=token.subscriptions,
            )
        if deletion.more:
            self.more.set()


class Housekeeping:
    """Looks at every interval, and when a deletion has left rows behind, until cancelled."""

    def __init__(
        self,
        store: HousekeepingStore,
        deletions: Deletions,
        clock: Clock,
        config: StoreConfig,
        ownership: Ownership = SOLE_OWNER,
    ) -> None:
        self._store = store
        self._ownership = ownership
        self._deletions = deletions
        self._clock = clock
        self._config = config

    async def run(self) -> None:
        while True:
            pause = INTERVAL
            self._deletions.more.clear()
            try:
                await self.finish_deletions()
                if self._ownership.owns(CHORES):
                    await self.purge()
                    while await self._store.delete_unused_servers():
                        pass
            except LeaseLost:
                pass  # another daemon goes on with it
            except StoreError as error:
                log.error("housekeeping waits for the store: %s", error)
                pause = STORE_PAUSE
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._deletions.more.wait()

    async def finish_deletions(self) -> None:
        """Delete what deleted tokens have left, page by page: other writes go in between."""
        more = True
        while more:
            deletion = await self._store.delete_more()
            self._deletions.note(deletion, DeletionReason.PURGED)
            more = deletion.more

    async def purge(self) -> None:
        """Remove all tokens whose time has come."""
        found = True
        while found:
            deletion = await self._store.purge_tokens(
                unverified_before=self._before(self._config.unverified_token_days),
                invalid_before=self._before(self._config.invalid_token_days),
                limit=BATCH,
            )
            self._deletions.note(deletion, DeletionReason.PURGED)
            found = bool(deletion.tokens)

    def _before(self, days: int) -> int:
        return day(self._clock.now()) - days * SECONDS_PER_DAY if days else 0
