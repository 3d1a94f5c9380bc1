"""The one interface of the store. Every call is atomic; writes of one moment share a transaction.

`durable` calls (those a client is told OK for) return after the data is on the disk. The others return after
a commit that survives a crash of the process, but perhaps not of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from protocol.device_token import DeviceToken
from protocol.encoding import EntityId
from protocol.statuses import TokenStatus
from store.records import (
    Counts,
    CreatedSubscription,
    LiveQueue,
    Moved,
    NewSubscription,
    NewToken,
    Notification,
    QueueEvent,
    QueueRow,
    SentEntry,
    ServerKey,
    ServerRecord,
    ServiceCredentials,
    Stored,
    SubKey,
    SubscriptionRecord,
    TokenKey,
    TokenPush,
    TokenRecord,
)

KEPT_NOTIFICATIONS = 6
"Last notifications kept per token; unsent ones are kept beyond it."


class StoreError(Exception):
    """The store cannot do it; the message is fit for an operator and holds no data."""


class StoreUnavailable(StoreError):
    """Locked, full, read-only or corrupt: nothing was written."""


class SchemaError(StoreError):
    """The database is of another program or of a later version."""


class NtfStore(Protocol):
    async def open(self) -> None: ...

    async def close(self) -> None:
        """Finish queued writes, then close."""

    # Tokens

    async def tokens(self, token_ids: Sequence[EntityId]) -> list[TokenRecord | None]:
        """One result per id. Concurrent calls share one query."""

    async def tokens_by_key(self, keys: Sequence[TokenKey]) -> list[TokenRecord]:
        """Those that exist, in any state."""

    async def token_by_device(self, device_token: DeviceToken, verify_key: bytes) -> TokenRecord | None: ...

    async def create_token(self, token: NewToken) -> TokenRecord:
        """Durable. REGISTERED; if (device token, verify key) exists already, the existing record."""

    async def activate_token(self, key: TokenKey, updated_on: int) -> list[LiveQueue]:
        """Durable. ACTIVE, if the token is in a state that allows verification; every other token of the
        device is deleted; returns the queues that went with them."""

    async def set_token_status(
        self,
        key: TokenKey,
        status: TokenStatus,
        *,
        only_from: Sequence[TokenStatus] | None = None,
        updated_on: int | None = None,
    ) -> bool:
        """Durable. False if the token is gone or not in one of `only_from`. Give `updated_on` for a token
        that dies, or `purge_tokens` counts from the day it was registered."""

    async def replace_device_token(
        self, key: TokenKey, device_token: DeviceToken, code: bytes, updated_on: int
    ) -> bool:
        """Durable. REGISTERED with the new code; False if another record has that (device token, key)."""

    async def delete_token(self, key: TokenKey) -> list[LiveQueue]:
        """Durable. With its subscriptions and notifications."""

    async def set_cron(self, key: TokenKey, minutes: int, due: int | None) -> None:
        """Durable. 0 minutes (due None) disables."""

    async def due_crons(self, now: int, limit: int) -> list[TokenRecord]:
        """ACTIVE tokens whose cron is due, the longest due first. Costs what is due."""

    async def set_cron_due(self, due: Sequence[tuple[TokenKey, int]]) -> None: ...

    async def next_cron_due(self) -> int | None: ...

    async def purge_tokens(
        self, *, unverified_before: int, invalid_before: int, limit: int
    ) -> list[LiveQueue]:
        """Delete tokens never verified, and INVALID or EXPIRED ones, whose `updated_on` is older."""

    # Subscriptions

    async def subscriptions(self, subscription_ids: Sequence[EntityId]) -> list[SubscriptionRecord | None]:
        """One result per id. Concurrent calls share one query."""

    async def create_subscriptions(self, news: Sequence[NewSubscription]) -> list[CreatedSubscription | None]:
        """Durable. One result each; None: the queue is another token's, or the notifier key differs."""

    async def delete_subscription(self, key: SubKey) -> LiveQueue | None:
        """Durable."""

    # Routers

    async def servers(self) -> list[ServerRecord]:
        """Routers that have subscribable or slowly retried rows."""

    async def server(self, key: ServerKey) -> ServerRecord:
        """StoreError if there is no such router."""

    async def subscription_count(self, key: ServerKey) -> int:
        """Subscriptions of a router, whatever their status."""

    async def subscribable_count(self) -> int:
        """Subscribable queues of all routers."""

    async def queues(
        self, key: ServerKey, *, after: SubKey, limit: int, associated: bool | None = None
    ) -> list[QueueRow]:
        """Next page of the subscribable queues of a router (NEW, PENDING, ACTIVE, INACTIVE), by key."""

    async def queues_by_id(self, key: ServerKey, notifier_ids: Sequence[EntityId]) -> list[QueueRow]: ...

    async def due_retries(self, key: ServerKey, now: int, limit: int) -> list[QueueRow]:
        """Queues in END, SERVICE or ERR whose slow back-off has elapsed; they become PENDING."""

    async def next_retry(self, key: ServerKey) -> int | None: ...

    async def set_subscribed(
        self, key: ServerKey, notifier_ids: Sequence[EntityId], *, service_id: EntityId | None
    ) -> list[Moved]:
        """SOK: ACTIVE, associated exactly if `service_id` is given (and still the router's)."""

    async def move_queues(self, key: ServerKey, events: Sequence[QueueEvent], *, now: int) -> list[Moved]:
        """What else happened to queues of a router, in order; SOK goes through `set_subscribed`.
        `store.policy` tells what it leads to. Unknown ids are ignored."""

    async def set_disconnected(self, key: ServerKey) -> int:
        """ACTIVE queues of the router become INACTIVE; returns how many."""

    async def set_service_subscribed(self, key: ServerKey) -> int:
        """SOKS: associated subscribable queues become ACTIVE; returns how many were not."""

    async def set_credentials(self, key: ServerKey, credentials: ServiceCredentials) -> None:
        """Durable: before the handshake that uses them."""

    async def set_service_id(self, key: ServerKey, service_id: EntityId) -> bool:
        """Durable. A changed id clears all associations (INACTIVE); True if it changed from another one."""

    async def clear_service(self, key: ServerKey) -> None:
        """Durable. Credentials, service id, associations, count and hash, in one transaction."""

    # Notifications

    async def add_notifications(
        self, key: ServerKey, notifications: Sequence[Notification], *, received_at: int
    ) -> list[Stored | None]:
        """One block of NMSGs in one transaction, in order; one result each, None without an ACTIVE token."""

    async def pushes(self, keys: Sequence[TokenKey]) -> list[TokenPush]:
        """For ACTIVE tokens that have entries; at most 64 unsent ones of each, the oldest."""

    async def set_sent(self, entries: Sequence[SentEntry]) -> None:
        """Entries replaced by a newer one meanwhile stay unsent."""

    async def unsent_tokens(self, *, after: TokenKey, limit: int) -> list[TokenKey]:
        """Next page of ACTIVE tokens with unsent entries."""

    async def counts(self) -> Counts: ...
