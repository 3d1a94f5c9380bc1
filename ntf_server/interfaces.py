"""The seams of the daemon: what commands ask of the subscriber, and everyone of the push side."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from protocol.addresses import SmpServer
from protocol.errors import ErrorType
from store.records import DeletedSubscription, QueueRow, ServerKey, Stored, TokenKey


class Subscriber(Protocol):
    """Keeps the store's subscribable queues subscribed at their routers. Calls return at once."""

    def admission(
        self, servers: Collection[SmpServer], client: str
    ) -> AbstractContextManager[Mapping[SmpServer, ErrorType]]:
        """Before anything is stored: which routers, by their canonical addresses, must not be watched, and
        what to answer. The others have a place until the end of the block at least."""

    def subscribe(self, server_key: ServerKey, server: SmpServer, queue: QueueRow) -> None:
        """The queue was stored (or revived) as PENDING: it goes to its router's task, which needs no more
        than this to subscribe it."""

    def forget(self, queues: Sequence[DeletedSubscription]) -> None:
        """The rows are gone: ignore what still arrives for them."""


class PushSink(Protocol):
    """Takes notifications for devices. They were stored before they come here."""

    async def notify(self, stored: Sequence[Stored], received_at: float) -> None:
        """Tokens have unsent notifications, received at this monotonic time.

        Waits while the server itself cannot keep up: whoever reads from routers then reads no further. It
        never waits for a provider: what one cannot take now stays in the store.
        """


class VerificationSink(Protocol):
    def verify(self, token_key: TokenKey) -> None:
        """Push the registration code of a token. Never waits: too many are dropped and counted, and clients
        ask again."""


class CheckMessagesSink(Protocol):
    def check_messages(self, token_key: TokenKey) -> None:
        """Wake the device of a token, so that it looks for messages by itself. Never waits: as above."""
