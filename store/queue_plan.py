"""What becomes of a router's queues when it answers, decided without a database; and the SQL for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from protocol.encoding import EntityId
from protocol.statuses import SUBSCRIBABLE, SubInput, SubState, bulk_move
from store.policy import Standing, standing_after
from store.records import Moved, QueueEvent, ServerKey, SubKey
from store.rows import standing
from store.sums import Sums

SOK = bulk_move(SubInput.SUBSCRIBED)
SOKS = bulk_move(SubInput.SUBSCRIBED, SUBSCRIBABLE)
DROP = bulk_move(SubInput.DISCONNECTED)
RETRY = bulk_move(SubInput.RETRIED)
CLEAR = bulk_move(SubInput.SERVICE_CLEARED)

UNUSED_PAGE = 500
"Routers deleted in one transaction."
STATE_PAGE = 10_000
"Rows that change state in one transaction: bounds how long other writes wait for those of a large router."


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

SUBSCRIBED_COLUMNS = "s.sub_key, s.notifier_id, s.subscription_id, t.token_id, s.state, s.associated"
"Of `plan_subscribed`."
MOVED_COLUMNS = """
s.sub_key, s.notifier_id, s.subscription_id, t.token_id,
s.state, s.detail, s.associated, s.retry_count, s.retry_at
"""
"Of `plan_moves`."


class Page(NamedTuple):
    """Rows changed, and the last one looked at; None at the end."""

    changed: int
    last: SubKey | None


class Subscribed(NamedTuple):
    changed: list[SubKey]
    "Rows that are written: active now, and associated or not as the answer says."
    moved: list[Moved]


def plan_subscribed(
    sums: Sums, key: ServerKey, rows: Iterable[Sequence[Any]], associated: bool
) -> Subscribed:
    """The router accepted these queues, in the name of our service or one by one."""
    changed: list[SubKey] = []
    flipped: list[EntityId] = []
    moved: list[Moved] = []
    for sub_key, notifier_id, subscription_id, token_id, state, was_associated in rows:
        if state in SOK.sources or was_associated != associated:
            changed.append(sub_key)
        if state in SOK.sources:
            moved.append(Moved(subscription_id, token_id, SubState(state), SOK.target))
        if was_associated != associated:
            flipped.append(notifier_id)
    sums.queues_moved(moved)
    (sums.add_associated if associated else sums.remove_associated)(key, flipped)
    return Subscribed(changed, moved)


class _Row(NamedTuple):
    sub_key: SubKey
    notifier_id: EntityId
    subscription_id: EntityId
    token_id: EntityId
    standing: Standing


class Moves(NamedTuple):
    changed: list[tuple[SubKey, Standing]]
    moved: list[Moved]
    "Those whose state is another one now."


def plan_moves(
    sums: Sums, key: ServerKey, found: Iterable[Sequence[Any]], events: Sequence[QueueEvent], now: int
) -> Moves:
    """Events one after the other, several may be about one queue; only what they leave is written."""
    rows = [_Row(columns[0], columns[1], columns[2], columns[3], standing(columns[4:])) for columns in found]
    standings = {row.notifier_id: row.standing for row in rows}
    for notifier_id, event in events:
        if notifier_id in standings:
            standings[notifier_id] = standing_after(standings[notifier_id], event, now)
    pairs = [(row, standings[row.notifier_id]) for row in rows]
    pairs = [(row, after) for row, after in pairs if after != row.standing]
    moved = [
        Moved(row.subscription_id, row.token_id, row.standing.state, after.state) for row, after in pairs
    ]
    sums.queues_moved(moved)
    sums.remove_associated(
        key, [row.notifier_id for row, after in pairs if row.standing.associated and not after.associated]
    )
    changed = [(row.sub_key, after) for row, after in pairs]
    return Moves(changed, [move for move in moved if move.before is not move.after])
