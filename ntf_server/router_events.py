"""What routers tell: notifications go to the store and then to the push side, ends to their queues."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from ntf_server.clock import Clock
from ntf_server.interfaces import PushSink
from ntf_server.journal import EventSink
from ntf_server.metrics import counter
from protocol.connection import Received
from protocol.smp_messages import Nmsg, SmpMessage
from smp_client.backoff import Backoff
from store.interface import StoreError, SubscriberStore
from store.journal_schema import JournalEvent
from store.records import Notification, ServerKey, Stored

logger = logging.getLogger(__name__)

RECEIVED = counter("notifications_received", "Received notifications")
RECEIVED_OWN = counter("notifications_received_own", "Received notifications, of own servers", ["server"])
WITHOUT_TOKEN = counter(
    "notifications_received_without_token", "Received notifications that have no subscription or active token"
)
STORE_RETRIES = counter(
    "notifications_store_retries", "Attempts to store received notifications that had to be repeated"
)

R = TypeVar("R")


class Notifications:
    """The NMSGs of one router: stored by blocks, each block in one transaction, then pushed."""

    def __init__(
        self,
        store: SubscriberStore,
        push_sink: PushSink,
        clock: Clock,
        journal: EventSink,
        *,
        key: ServerKey,
        server: str,
        own: str | None,
    ) -> None:
        self._store = store
        self._push_sink = push_sink
        self._clock = clock
        self._journal = journal
        self._key = key
        self._server = server
        self._own = None if own is None else RECEIVED_OWN.labels(own)

    async def receive(self, events: Sequence[Received[SmpMessage]]) -> None:
        """Store those of a block and hand their tokens to the push side, which may take its time."""
        block = [
            Notification(event.entity_id, *event.message)
            for event in events
            if type(event.message) is Nmsg  # a tuple, and this loop is hot
        ]
        if not block:
            return
        received_at = self._clock.monotonic()
        timestamp = int(self._clock.now())
        stored = await patiently(
            lambda: self._store.add_notifications(self._key, block, received_at=timestamp), self._server
        )
        self._count(stored)
        if token_keys := [entry.token_key for entry in stored if entry is not None]:
            await self._push_sink.notify(token_keys, received_at)

    def _count(self, stored: Sequence[Stored | None]) -> None:
        RECEIVED.inc(len(stored))
        if self._own is not None:
            self._own.inc(len(stored))
        ids = [(entry.token_id, entry.subscription_id) for entry in stored if entry is not None]
        if ids:
            self._journal.record_received(self._server, ids)
        if lost := len(stored) - len(ids):
            WITHOUT_TOKEN.inc(lost)
            self._journal.record(JournalEvent.NTF_RECEIVED, server=self._server, count=lost)


async def patiently(write: Callable[[], Awaitable[R]], host: str) -> R:
    """Repeat a write until the store takes it: what a router sent is not sent again.

    Meanwhile nothing more is read from that router, so that it keeps the rest.
    """
    backoff = Backoff(0.1, 10.0, lambda: 0.0)
    while True:
        try:
            return await write()
        except StoreError as error:
            STORE_RETRIES.inc()
            logger.error("what %s sent cannot be stored yet: %s", host, error)
        await asyncio.sleep(backoff.next())
