"""What the parts of the server ask of the store, part by part. One class implements all of it.

Every call is atomic; writes of one moment share a transaction. `durable` calls (those a client is told OK
for) return after the data is on the disk. The others return after a commit that survives a crash of the
process, but perhaps not of the machine.

Callers tell what happened; the tables in `protocol.statuses` and `store.policy` tell what becomes of it. What
a caller decided on an earlier read is checked again in the transaction that acts on it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from protocol.device_token import DeviceToken
from protocol.encoding import EntityId
from protocol.statuses import TokenInput
from store.errors import StoreError as StoreError
from store.leases import Leases, Ownership
from store.records import (
    Counts,
    CreatedSubscription,
    DeletedSubscription,
    Deletion,
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
    SnewRefusal,
    Stored,
    StoredRouter,
    SubKey,
    SubscriptionRecord,
    TokenKey,
    TokenMove,
    TokenPush,
    TokenRecord,
)
from store.statement_records import (
    Accepted,
    BatchPage,
    Claim,
    DeviceRegistration,
    GatewayCaps,
    GatewayCounts,
    GatewayKey,
    GatewaySubscription,
    MadeRule,
    NewGatewaySubscription,
    OutcomeCount,
    Purged,
    PushKey,
    PushLimits,
    PushRecord,
    ReceivedStatement,
    Refusal,
    RegistrationKey,
    Rule,
    RuleEdit,
    RulesEdited,
    SignedRequest,
    StatementPush,
    TokenTaken,
)

KEPT_NOTIFICATIONS = 6
"Last notifications kept per token; unsent ones are kept beyond it."
UNSENT_LOADED = 64
"Unsent entries given for one push: ten pushes' worth; the next call gives the next ones."


class StoreUnavailable(StoreError):
    """Locked, full, read-only or corrupt: nothing was written."""


class StoreDamaged(StoreUnavailable):
    """The database is no longer what was written: it has to be restored."""


class StoreVanished(StoreUnavailable):
    """The database is missing or empty although there was one, or was taken away while in use."""


class RouterGone(StoreError):
    """Nobody has a subscription there any more, so its row is gone."""


class LeaseLost(StoreError):
    """Another daemon owns it by now: nothing was written, and whoever acted as owner stops."""


class SchemaError(StoreError):
    """The database is of another program or of a later version."""


class SchemaOld(SchemaError):
    """It is of an earlier version, and was not to be changed."""


class TokenMoves(Protocol):
    async def move_token(self, seen: TokenRecord, event: TokenInput, updated_on: int) -> TokenMove | None:
        """Durable. What happened to the token as it was `seen`; None if it is gone, has another device or
        code by now, or is in a state for which the table does not list the event. `updated_on` counts if the
        state changes. A token that becomes ACTIVE is verified, and all other tokens of its device go."""


class CommandStore(TokenMoves, Protocol):
    """For the commands of clients."""

    async def tokens(self, token_ids: Sequence[EntityId]) -> list[TokenRecord | None]:
        """One result per id. Concurrent calls share one query."""

    async def token_by_device(self, device_token: DeviceToken, verify_key: bytes) -> TokenRecord | None: ...

    async def create_token(self, token: NewToken) -> TokenRecord:
        """Durable. REGISTERED; if (device token, verify key) exists already, the existing record."""

    async def replace_device_token(
        self, key: TokenKey, device_token: DeviceToken, code: bytes, updated_on: int
    ) -> bool:
        """Durable. REGISTERED with the new code; False if the token is gone, or another record has that
        (device token, key)."""

    async def delete_token(self, key: TokenKey) -> Deletion | None:
        """Durable. With its subscriptions and notifications; None if it is gone."""

    async def set_cron(self, key: TokenKey, minutes: int, due: int | None) -> bool:
        """Durable. 0 minutes (due None) disables; False if the token is gone."""

    async def subscriptions(self, subscription_ids: Sequence[EntityId]) -> list[SubscriptionRecord | None]:
        """One result per id. Concurrent calls share one query."""

    async def create_subscriptions(
        self, news: Sequence[NewSubscription]
    ) -> list[CreatedSubscription | SnewRefusal]:
        """Durable. One result each."""

    async def delete_subscription(self, key: SubKey) -> DeletedSubscription | None:
        """Durable. None if it is gone."""


class SubscriberStore(Protocol):
    """For the side of the routers."""

    async def servers(self) -> list[StoredRouter]:
        """Routers that have subscribable or slowly retried rows, those that were there before first."""

    async def server(self, key: ServerKey) -> ServerRecord:
        """RouterGone if there is no such router."""

    async def subscription_count(self, key: ServerKey) -> int:
        """Subscriptions of a router, whatever their status."""

    async def queues(
        self, key: ServerKey, *, after: SubKey, limit: int, associated: bool | None = None
    ) -> list[QueueRow]:
        """Next page of the subscribable queues of a router (NEW, PENDING, ACTIVE, INACTIVE), by key."""

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
        """ACTIVE queues of the router become INACTIVE, in one step however many; returns their number."""

    async def set_service_subscribed(self, key: ServerKey) -> int:
        """SOKS: associated queues become ACTIVE, in one step; returns how many were not."""

    async def set_credentials(self, key: ServerKey, credentials: ServiceCredentials) -> None:
        """Durable: before the handshake that uses them."""

    async def set_service_id(self, key: ServerKey, service_id: EntityId) -> bool:
        """Durable. A changed id clears all associations (INACTIVE); True if it changed from another one."""

    async def clear_service(self, key: ServerKey) -> int:
        """Durable. Credentials, service id, associations, count and hash, in one transaction.
        Returns how many became INACTIVE."""

    async def add_notifications(
        self, key: ServerKey, notifications: Sequence[Notification], *, received_at: int
    ) -> list[Stored | None]:
        """One block of NMSGs in one transaction, in order; one result each, None without an ACTIVE token."""

    async def add_late_notifications(
        self, key: ServerKey, notifications: Sequence[Notification], *, received_at: int
    ) -> list[Stored | None]:
        """Likewise, after LeaseLost: what came before another daemon took the router over. Nothing that the
        new owner stored is replaced."""


class PushStore(TokenMoves, Protocol):
    """For the side of the devices."""

    async def tokens_by_key(self, keys: Sequence[TokenKey]) -> list[TokenRecord]:
        """Those that exist, in any state."""

    async def pushes(self, keys: Sequence[TokenKey]) -> list[TokenPush]:
        """For ACTIVE tokens that have entries; at most `UNSENT_LOADED` unsent ones of each, the oldest."""

    async def set_sent(self, entries: Sequence[SentEntry]) -> None:
        """Entries replaced by a newer one meanwhile stay unsent."""

    async def unsent_tokens(self, *, after: TokenKey, limit: int) -> list[TokenKey]:
        """Next page of ACTIVE tokens with unsent entries."""


class StatementPushStore(Protocol):
    """For pushes of statements. One that was claimed and has no end when the process dies may have been sent:
    it is for the next process to say whether it is made again."""

    async def statement_pushes(self, keys: Sequence[PushKey]) -> list[StatementPush]:
        """Those still to be made."""

    async def claim_statement_pushes(
        self, keys: Sequence[PushKey], now: float, limits: PushLimits = ...
    ) -> Claim:
        """Just before they are handed to a provider: those that are still wanted and not too late. LeaseLost
        if another daemon pushes statements."""

    async def abandon_claimed_pushes(self) -> int:
        """Durable. Give up all that are claimed; returns how many. LeaseLost as before."""

    async def end_statement_pushes(
        self, *, sent: Sequence[PushKey], given_up: Sequence[PushKey], again: Sequence[PushKey], now: int
    ) -> None:
        """What became of them; those `again` are no longer claimed."""

    async def unsent_statement_pushes(self, *, after: PushKey, limit: int) -> list[PushKey]:
        """Next page of those still to be made."""

    async def delete_gone_device(self, push: StatementPush) -> bool:
        """Durable. The subscription of a device that is gone, unless it has another device by now."""

    async def registrations(self, keys: Sequence[RegistrationKey]) -> list[DeviceRegistration]:
        """Those whose devices still have to show their code."""

    async def delete_registration(self, key: RegistrationKey) -> None:
        """Durable. Its device is gone."""


class DeliveryStore(PushStore, StatementPushStore, Protocol):
    """Whatever is to be pushed."""


class GatewayStore(Protocol):
    """For clients of the statement gateway. A request counts once: a second one is REPLAYED, and nothing
    happens. Whatever is refused changes nothing."""

    async def add_gateway_subscription(
        self, new: NewGatewaySubscription, request: SignedRequest | None, caps: GatewayCaps
    ) -> TokenTaken | Refusal | None:
        """Durable."""

    async def register_device(
        self, new: NewGatewaySubscription, code: bytes, request: SignedRequest | None, caps: GatewayCaps
    ) -> TokenTaken | Refusal | RegistrationKey:
        """Durable. A device that becomes a subscription when it shows the code, also if another client has
        one for it; an earlier registration of the client's for it is void."""

    async def verify_device(
        self,
        client_id: bytes,
        subscription_id: bytes,
        code: bytes,
        now: int,
        request: SignedRequest | None,
    ) -> Refusal | None:
        """Durable. Whoever had a subscription for the device has it no more. The client's own active
        subscription stays as it is."""

    async def registrations_of(self, client_id: bytes) -> list[DeviceRegistration]: ...

    async def has_new_rules(self, subscription_id: bytes) -> bool:
        """Whether a statement may still be taken for one that was there before one of the rules."""

    async def delete_gateway_subscriptions(
        self, client_id: bytes, ids: Sequence[bytes], request: SignedRequest | None
    ) -> Refusal | None:
        """Durable. With their rules; UNKNOWN if one of them is not the client's."""

    async def gateway_subscriptions(
        self, client_id: bytes, request: SignedRequest | None, *, now: int = ...
    ) -> list[GatewaySubscription] | Refusal:
        """They count as renewed."""

    async def gateway_rules(self, key: GatewayKey, after: Rule | None, limit: int) -> list[MadeRule]:
        """The rules of a subscription by topic and sender, those behind `after`."""

    async def edit_rules(
        self,
        client_id: bytes,
        subscription_id: bytes,
        edit: RuleEdit,
        rules: Sequence[Rule],
        request: SignedRequest | None,
        *,
        now: float,
        caps: GatewayCaps,
        most_new_topics: int | None = None,
    ) -> RulesEdited | Refusal:
        """Durable. `most_new_topics`: that no rule of any client names; None is no limit."""


class StatementStore(Protocol):
    """For the side of the statement store's node."""

    async def watched_topics(self, limit: int) -> list[bytes]:
        """Topics that rules name, each once."""

    async def new_rule_topics(self, limit: int, after: bytes = ...) -> list[bytes]:
        """Topics with rules of which it is not known what the node stored before them, in order."""

    async def begin_baseline(self, topics: Sequence[bytes]) -> None:
        """Durable. From now on it is read what the node has stored of these topics. LeaseLost if another
        daemon watches one of them."""

    async def settle_rules(self, topics: Sequence[bytes]) -> None:
        """Durable. It was: whatever comes from now on is new for the rules that were there at the beginning.
        LeaseLost as above."""

    async def note_listening(self, parts: Collection[int], until: float) -> None:
        """Of topics of these parts, what the node has stored when they are subscribed next came later than
        this. LeaseLost if another daemon watches one of them."""

    async def listened_until(self, parts: Collection[int]) -> float:
        """The earliest of them. 0: nobody ever listened to one of them."""

    async def accept_statements(
        self,
        statements: Sequence[ReceivedStatement],
        now: float,
        page: BatchPage = ...,
        limits: PushLimits = ...,
    ) -> Accepted:
        """One push for each subscription with a rule for the sender and one of the topics (the first that has
        one), once for each device and statement, within the limits of the sender and the device, and only of
        statements that came after the rule. What is not pushed is remembered, too. Those of a page only: the
        answer tells whether there is another. LeaseLost if other daemons watch all of the topics."""

    async def purge_statements(self, now: int, limit: int, *, unrenewed_before: int = ...) -> Purged:
        """Delete what nobody needs any more: at most so many rows of each kind."""


class ReportStore(Protocol):
    """For operators of the statement gateway."""

    async def gateway_counts(self) -> GatewayCounts: ...

    async def newest_outcomes(self, limit: int) -> list[OutcomeCount]:
        """Of so many statements that met a rule."""

    async def push_records(self, subscription_id: bytes, limit: int = ...) -> list[PushRecord]:
        """The newest, in the order in which they came."""

    async def push_records_of_sender(self, sender: bytes, limit: int = ...) -> list[PushRecord]:
        """As above. Without an index: it reads all records."""


class PeriodicStore(Protocol):
    """For periodic pushes."""

    async def due_crons(self, now: int, limit: int) -> list[TokenRecord]:
        """ACTIVE tokens whose cron is due, the longest due first. Costs what is due."""

    async def set_cron_due(self, due: Sequence[tuple[TokenKey, int]]) -> None:
        """Of tokens whose pushes are this daemon's; others stay as they are."""

    async def next_cron_due(self) -> int | None: ...


class HousekeepingStore(Protocol):
    """For what nobody needs any more. LeaseLost if another daemon does it by now; the rows of deleted tokens
    are for anybody."""

    async def purge_tokens(self, *, unverified_before: int, invalid_before: int, limit: int) -> Deletion:
        """Delete tokens that are not ACTIVE and whose `updated_on` is older: the first time is for those
        never verified, the second for all others."""

    async def delete_more(self) -> Deletion:
        """The next page of subscriptions of deleted tokens, also of those deleted before a restart."""

    async def delete_unused_servers(self) -> int:
        """Delete a page of the routers at which no token has or had a subscription; how many were deleted."""


class ControlStore(Protocol):
    """For operators."""

    async def check(self) -> None:
        """Durable: a write that changes nothing. StoreVanished if the database was taken away: everything
        else fails with it too. StoreUnavailable also if anybody found it damaged since it was opened."""

    async def counts(self) -> Counts: ...

    async def subscribable_count(self) -> int:
        """Subscribable queues of all routers."""


class NtfStore(
    CommandStore,
    SubscriberStore,
    PushStore,
    StatementPushStore,
    GatewayStore,
    StatementStore,
    ReportStore,
    PeriodicStore,
    HousekeepingStore,
    ControlStore,
    Protocol,
):
    """All roles, and the life of the store."""

    @property
    def leases(self) -> Leases | None:
        """None: a store for one daemon alone."""

    @property
    def ownership(self) -> Ownership: ...

    async def open(self) -> None: ...

    async def close(self) -> None:
        """Finish queued writes, then close."""
