"""What becomes of a router's queues when it answers, decided without a database; and the SQL for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from protocol.encoding import EntityId
from protocol.statuses import SUBSCRIBABLE, SubInput, SubState, bulk_move
from store.policy import Standing, standing_after
from store.records import Moved, QueueEvent, ServerKey, SubKey
from store.router_sums import DROP, STATE_COLUMNS, StoredState, read_state
from store.sums import Sums

SOK = bulk_move(SubInput.SUBSCRIBED)
RETRY = bulk_move(SubInput.RETRIED)
CLEAR = bulk_move(SubInput.SERVICE_CLEARED)

UNUSED_PAGE = 500
"Routers deleted in one transaction."


def listed(states: Iterable[SubState]) -> str:
    """For an IN list."""
    return ", ".join(f"'{state}'" for state in sorted(states))


EVER_SUBSCRIBED = listed({SOK.target, DROP.target})
"States that no queue reaches without an answer of its router."
SUBSCRIBABLE_STATES = listed(SUBSCRIBABLE)
ENDED_STATES = listed(frozenset(SubState) - SUBSCRIBABLE)

UNUSED_SERVER = """
NOT EXISTS (SELECT 1 FROM subscriptions s WHERE s.server_key = v.server_key)
    AND NOT EXISTS (SELECT 1 FROM token_routers r WHERE r.server_key = v.server_key)
"""

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

    def restored(self, state: SubState, associated: bool) -> StoredState:
        return StoredState(state, associated, self.turns.last)


class Subscribed(NamedTuple):
    changed: list[SubKey]
    "Rows that are written: active now, and associated or not as the answer says."
    as_of: int
    moved: list[Moved]


def plan_subscribed(
    sums: Sums, key: ServerKey, found: Iterable[Sequence[Any]], associated: bool
) -> Subscribed:
    """The router accepted these queues, in the name of our service or one by one."""
    rows = [
        row for row in map(_Row, found) if row.state in SOK.sources or row.stored.associated != associated
    ]
    flipped = [row.notifier_id for row in rows if row.stored.associated != associated]
    sums.queues_changed(
        key, (row.stored for row in rows), (row.restored(SOK.target, associated) for row in rows)
    )
    sums.associations_changed(key, flipped)
    as_of = rows[0].turns.last if rows else 0
    moved = [row.moved(SOK.target) for row in rows if row.state in SOK.sources]
    return Subscribed([row.sub_key for row in rows], as_of, moved)


class Moves(NamedTuple):
    changed: list[tuple[SubKey, Standing, int]]
    "With what their states are as of."
    moved: list[Moved]
    "Those whose state is another one now."


def plan_moves(
    sums: Sums, key: ServerKey, found: Iterable[Sequence[Any]], events: Sequence[QueueEvent], now: int
) -> Moves:
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
    sums.queues_changed(
        key,
        (row.stored for row, _ in changed),
        (row.restored(after.state, after.associated) for row, after in changed),
    )
    sums.associations_changed(
        key, [row.notifier_id for row, after in changed if row.stored.associated != after.associated]
    )
    return Moves(
        [(row.sub_key, after, row.turns.last) for row, after in changed],
        [row.moved(after.state) for row, after in changed if after.state is not row.state],
    )
