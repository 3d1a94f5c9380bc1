"""The roles of the store by way of SQL, whatever the database: what is durable, what shares a trip."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from protocol.device_token import DeviceToken
from protocol.encoding import EntityId
from protocol.statuses import TokenInput
from store.leases import CHORES, SOLE_OWNER, STATEMENTS, Lease, Leases, Ownership, of_router
from store.records import (
    Counts,
    CreatedSubscription,
    DeletedSubscription,
    Deletion,
    Moved,
    NewSubscription,
    NewToken,
    QueueEvent,
    QueueRow,
    ServerKey,
    ServerRecord,
    ServiceCredentials,
    SnewRefusal,
    StoredRouter,
    SubKey,
    SubscriptionRecord,
    TokenKey,
    TokenMove,
    TokenPush,
    TokenRecord,
)
from store.statement_records import (
    DEFAULT_GATEWAY_CAPS,
    FIRST_PAGE,
    Accepted,
    GatewayCaps,
    GatewaySubscription,
    NewGatewaySubscription,
    Page,
    PushKey,
    PushRecord,
    ReceivedStatement,
    Refusal,
    Request,
    Rule,
    RuleEdit,
    RulesEdited,
    StatementPush,
    TokenTaken,
)


class SqlModules(NamedTuple):
    """The statements for one kind of database: modules with the same functions for each kind."""

    tokens: Any
    subscriptions: Any
    routers: Any
    notifications: Any
    deletion: Any
    statements: Any


class SqlStore(ABC):
    """NtfStore, but for its life and the notifications on their way."""

    _sql: SqlModules
    _syncs_arrivals: bool
    "Whether what peers send waits for the disk, as what clients are promised does."
    leases: Leases | None = None

    @property
    def ownership(self) -> Ownership:
        return SOLE_OWNER if self.leases is None else self.leases

    @abstractmethod
    async def _write(self, call: Callable[[Any], Any], *, durable: bool = True) -> Any:
        """Run a call on a transaction; those that wait share one."""

    async def _write_as_owner(
        self, lease: Lease, call: Callable[[Any], Any], *, durable: bool = False
    ) -> Any:
        """Like `_write`; LeaseLost if another daemon owns it."""
        return await self._write(call, durable=durable)

    @abstractmethod
    async def _read(self, call: Callable[[Any], Any]) -> Any:
        """Run a call on a connection."""

    @abstractmethod
    async def _read_grouped(self, read: Callable[[Any, Any], Any], ids: Sequence[EntityId]) -> Any:
        """Like `_read`; the ids of all callers that wait share one query."""

    @abstractmethod
    async def _create(self, news: Sequence[NewSubscription]) -> list[CreatedSubscription | SnewRefusal]:
        """All SNEWs that wait share a few statements."""

    # Tokens

    async def tokens(self, token_ids: Sequence[EntityId]) -> list[TokenRecord | None]:
        return await self._read_grouped(self._sql.tokens.tokens, token_ids)

    async def tokens_by_key(self, keys: Sequence[TokenKey]) -> list[TokenRecord]:
        return await self._read(lambda db: self._sql.tokens.by_key(db, keys))

    async def token_by_device(self, device_token: DeviceToken, verify_key: bytes) -> TokenRecord | None:
        return await self._read(lambda db: self._sql.tokens.by_device(db, device_token, verify_key))

    async def create_token(self, token: NewToken) -> TokenRecord:
        return await self._write(lambda tx: self._sql.tokens.create(tx, token))

    async def move_token(self, seen: TokenRecord, event: TokenInput, updated_on: int) -> TokenMove | None:
        return await self._write(lambda tx: self._sql.tokens.move(tx, seen, event, updated_on))

    async def replace_device_token(
        self, key: TokenKey, device_token: DeviceToken, code: bytes, updated_on: int
    ) -> bool:
        return await self._write(
            lambda tx: self._sql.tokens.replace_device(tx, key, device_token, code, updated_on)
        )

    async def delete_token(self, key: TokenKey) -> Deletion | None:
        return await self._write(lambda tx: self._sql.tokens.delete(tx, key))

    async def set_cron(self, key: TokenKey, minutes: int, due: int | None) -> bool:
        return await self._write(lambda tx: self._sql.tokens.set_cron(tx, key, minutes, due))

    async def due_crons(self, now: int, limit: int) -> list[TokenRecord]:
        return await self._read(lambda db: self._sql.tokens.due_crons(db, now, limit))

    async def set_cron_due(self, due: Sequence[tuple[TokenKey, int]]) -> None:
        await self._write(lambda tx: self._sql.tokens.set_cron_due(tx, due), durable=False)

    async def next_cron_due(self) -> int | None:
        return await self._read(self._sql.tokens.next_cron_due)

    async def purge_tokens(self, *, unverified_before: int, invalid_before: int, limit: int) -> Deletion:
        return await self._write_as_owner(
            CHORES, lambda tx: self._sql.tokens.purge(tx, unverified_before, invalid_before, limit)
        )

    async def delete_more(self) -> Deletion:
        return await self._write(self._sql.deletion.more, durable=False)

    async def delete_unused_servers(self) -> int:
        """Looked for on a connection that reads: a scan of all routers holds up no write."""
        unused = await self._read(self._sql.routers.unused_servers)
        if not unused:
            return 0
        return await self._write_as_owner(CHORES, lambda tx: self._sql.routers.delete_unused(tx, unused))

    # Subscriptions

    async def subscriptions(self, subscription_ids: Sequence[EntityId]) -> list[SubscriptionRecord | None]:
        return await self._read_grouped(self._sql.subscriptions.subscriptions, subscription_ids)

    async def create_subscriptions(
        self, news: Sequence[NewSubscription]
    ) -> list[CreatedSubscription | SnewRefusal]:
        return await self._create(news)

    async def delete_subscription(self, key: SubKey) -> DeletedSubscription | None:
        return await self._write(lambda tx: self._sql.subscriptions.delete(tx, key))

    # Routers

    async def servers(self) -> list[StoredRouter]:
        return await self._read(self._sql.routers.servers)

    async def server(self, key: ServerKey) -> ServerRecord:
        return await self._read(lambda db: self._sql.routers.server(db, key))

    async def subscription_count(self, key: ServerKey) -> int:
        return await self._read(lambda db: self._sql.routers.subscription_count(db, key))

    async def subscribable_count(self) -> int:
        return await self._read(self._sql.routers.subscribable_count)

    async def queues(
        self, key: ServerKey, *, after: SubKey, limit: int, associated: bool | None = None
    ) -> list[QueueRow]:
        return await self._read(lambda db: self._sql.routers.queues(db, key, after, limit, associated))

    async def queues_by_id(self, key: ServerKey, notifier_ids: Sequence[EntityId]) -> list[QueueRow]:
        return await self._read(lambda db: self._sql.routers.queues_by_id(db, key, notifier_ids))

    async def due_retries(self, key: ServerKey, now: int, limit: int) -> list[QueueRow]:
        return await self._write_as_owner(
            of_router(key), lambda tx: self._sql.routers.due_retries(tx, key, now, limit)
        )

    async def next_retry(self, key: ServerKey) -> int | None:
        return await self._read(lambda db: self._sql.routers.next_retry(db, key))

    async def set_subscribed(
        self, key: ServerKey, notifier_ids: Sequence[EntityId], *, service_id: EntityId | None
    ) -> list[Moved]:
        return await self._write_as_owner(
            of_router(key), lambda tx: self._sql.routers.set_subscribed(tx, key, notifier_ids, service_id)
        )

    async def move_queues(self, key: ServerKey, events: Sequence[QueueEvent], *, now: int) -> list[Moved]:
        return await self._write_as_owner(
            of_router(key), lambda tx: self._sql.routers.move_queues(tx, key, events, now)
        )

    async def set_disconnected(self, key: ServerKey) -> int:
        return await self._write_as_owner(
            of_router(key), lambda tx: self._sql.routers.set_disconnected(tx, key)
        )

    async def set_service_subscribed(self, key: ServerKey) -> int:
        return await self._write_as_owner(
            of_router(key), lambda tx: self._sql.routers.set_service_subscribed(tx, key)
        )

    async def set_credentials(self, key: ServerKey, credentials: ServiceCredentials) -> None:
        await self._write_as_owner(
            of_router(key), lambda tx: self._sql.routers.set_credentials(tx, key, credentials), durable=True
        )

    async def set_service_id(self, key: ServerKey, service_id: EntityId) -> bool:
        return await self._write_as_owner(
            of_router(key), lambda tx: self._sql.routers.set_service_id(tx, key, service_id), durable=True
        )

    async def clear_service(self, key: ServerKey) -> int:
        return await self._write_as_owner(
            of_router(key), lambda tx: self._sql.routers.clear_service(tx, key), durable=True
        )

    # Notifications

    async def pushes(self, keys: Sequence[TokenKey]) -> list[TokenPush]:
        return await self._read(lambda db: self._sql.notifications.pushes(db, keys))

    async def unsent_tokens(self, *, after: TokenKey, limit: int) -> list[TokenKey]:
        return await self._read(lambda db: self._sql.notifications.unsent_tokens(db, after, limit))

    async def counts(self) -> Counts:
        return await self._read(self._sql.notifications.counts)

    # Statements

    async def add_gateway_subscription(
        self,
        new: NewGatewaySubscription,
        request: Request | None,
        caps: GatewayCaps = DEFAULT_GATEWAY_CAPS,
    ) -> TokenTaken | Refusal | None:
        return await self._write(lambda tx: self._sql.statements.subscribe(tx, new, request, caps))

    async def delete_gateway_subscriptions(
        self, client_id: bytes, ids: Sequence[bytes], request: Request | None
    ) -> Refusal | None:
        return await self._write(lambda tx: self._sql.statements.unsubscribe(tx, client_id, ids, request))

    async def gateway_subscriptions(
        self, client_id: bytes, request: Request | None
    ) -> list[GatewaySubscription] | Refusal:
        """Each is read by itself: it may have thousands of rules, and others wait meanwhile."""
        sql = self._sql.statements
        if not await self._write(lambda tx: sql.use(tx, request)):
            return Refusal.REPLAYED
        rows = await self._read(lambda db: sql.listed(db, client_id))
        return [await self._read(partial(sql.with_rules, row)) for row in rows]

    async def edit_rules(
        self,
        client_id: bytes,
        subscription_id: bytes,
        edit: RuleEdit,
        rules: Sequence[Rule],
        request: Request | None,
        *,
        now: int,
        caps: GatewayCaps = DEFAULT_GATEWAY_CAPS,
    ) -> RulesEdited | Refusal:
        return await self._write(
            lambda tx: self._sql.statements.edit_rules(
                tx, client_id, subscription_id, edit, rules, request, caps=caps, now=now
            )
        )

    async def watched_topics(self, limit: int) -> list[bytes]:
        return await self._read(lambda db: self._sql.statements.topics(db, limit))

    async def accept_statements(
        self, statements: Sequence[ReceivedStatement], now: float, page: Page = FIRST_PAGE
    ) -> Accepted:
        return await self._write_as_owner(
            STATEMENTS,
            lambda tx: self._sql.statements.accept(tx, statements, now, page),
            durable=self._syncs_arrivals,
        )

    async def statement_pushes(self, keys: Sequence[PushKey]) -> list[StatementPush]:
        return await self._read(lambda db: self._sql.statements.pushes(db, keys))

    async def claim_statement_pushes(self, keys: Sequence[PushKey]) -> set[PushKey]:
        return await self._write_as_owner(STATEMENTS, lambda tx: self._sql.statements.claim(tx, keys))

    async def abandon_claimed_pushes(self) -> int:
        return await self._write_as_owner(STATEMENTS, self._sql.statements.abandon, durable=True)

    async def end_statement_pushes(
        self, *, sent: Sequence[PushKey], given_up: Sequence[PushKey], again: Sequence[PushKey], now: int
    ) -> None:
        await self._write(
            lambda tx: self._sql.statements.ended(tx, sent, given_up, again, now), durable=False
        )

    async def unsent_statement_pushes(self, *, after: PushKey, limit: int) -> list[PushKey]:
        return await self._read(lambda db: self._sql.statements.unsent(db, after, limit))

    async def delete_gone_device(self, push: StatementPush) -> bool:
        return await self._write(lambda tx: self._sql.statements.device_gone(tx, push))

    async def push_records(self, subscription_id: bytes) -> list[PushRecord]:
        return await self._read(lambda db: self._sql.statements.records(db, subscription_id))

    async def purge_statements(self, now: int, limit: int) -> int:
        return await self._write(lambda tx: self._sql.statements.purge(tx, now, limit), durable=False)
