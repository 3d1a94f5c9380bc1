"""What becomes of rows, decided without a database: every kind of store asks here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from protocol.statuses import (
    RETRIED_SLOWLY,
    SUB_MOVES,
    SUBSCRIBABLE,
    SubEvent,
    SubInput,
    SubState,
    bulk_move,
)
from store.records import (
    Moved,
    QueueEvent,
    ServerKey,
    SubKey,
)
from store.sums import STATE_COLUMNS, QueueChange, StoredState, read_state

BUSY_TIMEOUT = 5.0
"Seconds of patience when another program holds the database."

POOL_SIZE = 8
"Connections to a database server."

STATEMENT_TIMEOUT = 30.0
"Seconds that a statement may take there."


class Durability(StrEnum):
    """What received notifications survive from the moment in which they count as stored."""

    PROCESS = "process"
    MACHINE = "machine"


FIRST_RETRY = 10 * 60
LONGEST_RETRY = 24 * 60 * 60


class Standing(NamedTuple):
    """How a subscription stands with its router."""

    state: SubState
    detail: str
    associated: bool
    retry_count: int
    retry_at: int | None
    "Set exactly while the state is one that is tried again slowly."


def standing_after(before: Standing, event: SubEvent, now: int) -> Standing:
    """END, DELETED, AUTH, SERVICE and ERR end an association; those tried again slowly get their time.

    An event that the table does not list changes nothing.
    """
    state = SUB_MOVES.get((before.state, event.input), before.state)
    if state is before.state and event.input is not SubInput.FAILED:
        return before
    if state in SUBSCRIBABLE:
        return before._replace(state=state, detail="", retry_at=None)
    if state not in RETRIED_SLOWLY:
        return Standing(state, event.detail, False, 0, None)
    if before.retry_at is not None:
        # A second failure while one is waited for is the same outage: it does not double the delay.
        return before._replace(state=state, detail=event.detail, associated=False)
    return Standing(state, event.detail, False, before.retry_count + 1, now + retry_delay(before.retry_count))


def retry_delay(failures: int) -> int:
    """Seconds until a queue is tried again that failed so often before."""
    return min(FIRST_RETRY << min(failures, 10), LONGEST_RETRY)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCaps:
    """How many rows one token may have; 0 is no limit. Far beyond what people need, far below what hurts."""

    subscriptions_per_token: int = 50_000
    routers_per_token: int = 200
    "Counts every router that the token ever had a subscription at."


DEFAULT_CAPS = RowCaps()


@dataclass(slots=True)
class Owner:
    """What decides whether a token may have another subscription."""

    may_subscribe: bool
    routers: set[ServerKey | SmpServer]
    "Every router that it ever had a subscription at; new ones by their address."
    subscriptions: int


# What a router answers about its queues

SOK = bulk_move(SubInput.SUBSCRIBED)
RETRY = bulk_move(SubInput.RETRIED)
CLEAR = bulk_move(SubInput.SERVICE_CLEARED)

_ROW_COLUMNS = f"s.sub_key, s.notifier_id, s.subscription_id, t.token_id, {STATE_COLUMNS}"
SUBSCRIBED_COLUMNS = _ROW_COLUMNS
"Of `plan_subscribed`."
MOVED_COLUMNS = f"{_ROW_COLUMNS}, s.detail, s.retry_count, s.retry_at"
"Of `plan_moves`."


class _Row:
    """A queue's row, and what it comes to by what happened to its router since. Do not print."""

    __slots__ = ("notifier_id", "state", "stored", "sub_key", "subscription_id", "token_id", "turns")

    def __init__(self, columns: Sequence[Any]) -> None:
        self.sub_key: SubKey
        self.notifier_id: EntityId
        self.sub_key, self.notifier_id, self.subscription_id, self.token_id = columns[:4]
        self.stored, self.turns = read_state(columns[4:9])
        self.state = self.stored.now(self.turns)

    def moved(self, after: SubState) -> Moved:
        return Moved(self.subscription_id, self.token_id, self.state, after)

    def changed(self, state: SubState, associated: bool) -> QueueChange:
        return QueueChange(self.notifier_id, self.stored, StoredState(state, associated, self.turns.last))


class Subscribed(NamedTuple):
    """What is written, for the sums and for the journal."""

    keys: list[SubKey]
    "Active now, and associated or not as the answer says."
    as_of: int
    changes: list[QueueChange]
    moved: list[Moved]


def plan_subscribed(found: Iterable[Sequence[Any]], associated: bool) -> Subscribed:
    """The router accepted these queues, in the name of our service or one by one."""
    rows = [
        row for row in map(_Row, found) if row.state in SOK.sources or row.stored.associated != associated
    ]
    as_of = rows[0].turns.last if rows else 0
    changes = [row.changed(SOK.target, associated) for row in rows]
    moved = [row.moved(SOK.target) for row in rows if row.state in SOK.sources]
    return Subscribed([row.sub_key for row in rows], as_of, changes, moved)


class Moves(NamedTuple):
    """Likewise."""

    standings: list[tuple[SubKey, Standing, int]]
    "With what their states are as of."
    changes: list[QueueChange]
    moved: list[Moved]
    "Those whose state is another one now."


def plan_moves(found: Iterable[Sequence[Any]], events: Sequence[QueueEvent], now: int) -> Moves:
    """Events one after the other, several may be about one queue; only what they leave is written."""
    rows = [
        (row, Standing(row.state, columns[9], row.stored.associated, *columns[10:]))
        for columns in found
        for row in (_Row(columns),)
    ]
    standings = {row.notifier_id: before for row, before in rows}
    for notifier_id, event in events:
        if notifier_id in standings:
            standings[notifier_id] = standing_after(standings[notifier_id], event, now)
    changed = [(row, after) for row, before in rows if (after := standings[row.notifier_id]) != before]
    return Moves(
        [(row.sub_key, after, row.turns.last) for row, after in changed],
        [row.changed(after.state, after.associated) for row, after in changed],
        [row.moved(after.state) for row, after in changed if after.state is not row.state],
    )
