"""The seams of the daemon: what commands ask of the subscriber, and everyone of the push side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from protocol.addresses import SmpServer
from store.records import DeletedSubscription, QueueRow, ServerKey, TokenKey


class Subscriber(Protocol):
    """Keeps the store's subscribable queues subscribed at their routers. Calls return at once."""

    def subscribe(self, server_key: ServerKey, server: SmpServer, queue: QueueRow) -> None:
        """The queue was stored (or revived) as PENDING: it goes to its router's task, which needs no more
        than this to subscribe it."""

    def forget(self, queues: Sequence[DeletedSubscription]) -> None:
        """The rows are gone: ignore what still arrives for them."""


class PushSink(Protocol):
    """Takes work for devices. Everything was stored before it comes here."""

    async def verify(self, token_key: TokenKey) -> None:
        """Push the registration code of a token."""

    async def notify(self, token_keys: Sequence[TokenKey], received_at: float) -> None:
        """Tokens have unsent notifications, received at this monotonic time.

        Waits while the push side is full: whoever reads from routers then reads no further.
        """
