"""What becomes of a group of SNEWs, decided without a database: every kind of store asks here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from protocol.statuses import SubInput, SubState, move_sub
from store.policy import RowCaps
from store.records import (
    CreatedSubscription,
    NewSubscription,
    QueueRow,
    ServerKey,
    SnewRefusal,
    SubKey,
    TokenKey,
)

BORN = move_sub(SubState.NEW, SubInput.HANDED_OVER)
"Whoever creates a row hands it over to its router's subscriber at once."


@dataclass(slots=True)
class Existing:
    """A row of the queue that is to be subscribed."""

    subscription_id: EntityId
    token_key: TokenKey
    queue: QueueRow
    state: SubState
    abandoned: bool = False
    "Its token is deleted, but the row is not yet."


@dataclass(slots=True)
class Owner:
    """What decides whether a token may have another subscription."""

    may_subscribe: bool
    routers: set[ServerKey | SmpServer]
    "Every router that it ever had a subscription at; new ones by their address."
    subscriptions: int


class Insert(NamedTuple):
    """A new row, in the place of one that was abandoned. Do not print."""

    new: NewSubscription
    queue: QueueRow
    replaces: SubKey | None

    @property
    def columns(self) -> tuple[SubKey, EntityId, TokenKey, EntityId, bytes, str]:
        """All but the router's key, which is known last, and the state."""
        new = self.new
        ids = self.queue.key, new.subscription_id, new.token_key, new.notifier_id
        return *ids, new.notifier_key, new.spelling


class Repeat(NamedTuple):
    """A row that is there already; `handed_over` if it was dead and is to be revived. Do not print."""

    row: Existing
    handed_over: bool


Step = Insert | Repeat | SnewRefusal


class SnewPlan:
    """`existing` has the rows of the queues that the group names, by router and notifier id."""

    def __init__(
        self,
        owners: Mapping[TokenKey, Owner],
        servers: Mapping[SmpServer, ServerKey | None],
        existing: dict[tuple[SmpServer, EntityId], Existing],
        new_keys: Iterator[SubKey],
        caps: RowCaps,
    ) -> None:
        self._owners = owners
        self._servers = servers
        self._existing = existing
        self._new_keys = new_keys
        self._caps = caps

    def steps(self, news: Sequence[NewSubscription]) -> list[Step]:
        """In order: a later SNEW finds what an earlier one of the group made."""
        return [self._step(new) for new in news]

    def _step(self, new: NewSubscription) -> Step:
        owner = self._owners.get(new.token_key)
        if owner is None or not owner.may_subscribe:
            return SnewRefusal.AUTH
        row = self._existing.get((new.server, new.notifier_id))
        if row is not None and not row.abandoned:
            return _repeat(row, new)
        router = self._servers[new.server] or new.server
        routers = len(owner.routers) + (router not in owner.routers)
        if not self._caps.admits(owner.subscriptions + 1, routers):
            return SnewRefusal.QUOTA
        owner.routers.add(router)
        owner.subscriptions += 1
        queue = QueueRow(next(self._new_keys), new.notifier_id, new.notifier_key, False)
        self._existing[new.server, new.notifier_id] = Existing(
            new.subscription_id, new.token_key, queue, BORN
        )
        return Insert(new, queue, None if row is None else row.queue.key)


def _repeat(row: Existing, new: NewSubscription) -> Repeat | SnewRefusal:
    if row.token_key != new.token_key or row.queue.notifier_key != new.notifier_key:
        return SnewRefusal.AUTH
    handed_over = move_sub(row.state, SubInput.CREATED_AGAIN) is SubState.NEW
    if handed_over:
        row.state = BORN
    return Repeat(row, handed_over)


def revived(steps: Sequence[Step]) -> list[SubKey]:
    """Rows that were dead and are PENDING again."""
    return [step.row.queue.key for step in steps if isinstance(step, Repeat) and step.handed_over]


def results(
    steps: Sequence[Step], news: Sequence[NewSubscription], servers: Mapping[SmpServer, ServerKey | None]
) -> list[CreatedSubscription | SnewRefusal]:
    """What the callers are told, once everything is written and every router has a key."""
    return [_result(step, servers[new.server]) for step, new in zip(steps, news, strict=True)]


def _result(step: Step, server_key: ServerKey | None) -> CreatedSubscription | SnewRefusal:
    if isinstance(step, SnewRefusal):
        return step
    assert server_key is not None, "a queue has a row, so its router has one"
    if isinstance(step, Insert):
        return CreatedSubscription(step.new.subscription_id, server_key, step.queue, True, True)
    return CreatedSubscription(step.row.subscription_id, server_key, step.row.queue, False, step.handed_over)
