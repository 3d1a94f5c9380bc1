"""The sums of a router, and the state of its queues.

What happens to all queues of a router at once is a number in the router's row; theirs are not written. Losses
of the connection and answers to NSUBS are numbered as they come. A queue's row has the last number that its
state knows of; those that came later are applied whenever the state is read. Two numbers are enough: of each
kind only the last one matters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from protocol.encoding import EntityId, new_tuple
from protocol.hiding import hides_bytes
from protocol.ids_hash import NO_IDS, xor
from protocol.statuses import SUBSCRIBABLE, SubInput, SubState, bulk_move

DROP = bulk_move(SubInput.DISCONNECTED)
SOKS = bulk_move(SubInput.SUBSCRIBED, SUBSCRIBABLE)

SUM_COLUMNS = "lost, served, associated_count, associated_hash, active_count, active_associated"
"Of `RouterSums`."
STATE_COLUMNS = "s.state, s.associated, s.as_of, v.lost, v.served"
"Of `read_state`."
STATES = {state.value: state for state in SubState}
"Read by the row: a lookup costs a third of the enum's own."


class RouterTurns(NamedTuple):
    """Of a router: the numbers of the last loss of its connection and of the last SOKS; 0 is none."""

    lost: int
    served: int

    @property
    def last(self) -> int:
        return max(self)


class StoredState(NamedTuple):
    """The state of a queue as its row has it."""

    state: SubState
    associated: bool
    as_of: int

    def now(self, turns: RouterTurns) -> SubState:
        return state_now(*self, *turns)


def state_now(state: SubState, associated: bool, as_of: int, lost: int, served: int) -> SubState:
    """What the state in a row comes to by what happened to its router since."""
    if associated and served > as_of:
        # Whether the connection was lost before that makes no difference.
        state, as_of = SOKS.moved(state), served
    return DROP.moved(state) if lost > as_of else state


def read_state(row: Sequence[Any]) -> tuple[StoredState, RouterTurns]:
    """From `STATE_COLUMNS`."""
    state, associated, as_of, lost, served = row
    stored = new_tuple(StoredState, (STATES[state], bool(associated), as_of))
    return stored, new_tuple(RouterTurns, (lost, served))


class RouterChanges:
    """What a transaction does to the sums of a router, before they are read for that."""

    __slots__ = ("digest", "states")

    def __init__(self) -> None:
        self.digest = NO_IDS
        "What the hash of associated ids is XORed with."
        self.states: Counter[StoredState] = Counter()
        "How many rows more, or fewer, are in each state."


@hides_bytes
class RouterSums(NamedTuple):
    """The sums in a router's row."""

    lost: int
    served: int
    associated_count: int
    associated_hash: bytes
    active_count: int
    active_associated: int

    def changed(self, changes: RouterChanges) -> RouterSums:
        """States are counted as they are by now, whatever they were when the changes were noted: another
        daemon may have marked the router in between."""
        turns = RouterTurns(self.lost, self.served)
        associated, active, both = self.associated_count, self.active_count, self.active_associated
        for stored, rows in changes.states.items():
            is_active = stored.now(turns) is SubState.ACTIVE
            associated += stored.associated * rows
            active += is_active * rows
            both += (stored.associated and is_active) * rows
        digest = xor(self.associated_hash, changes.digest)
        return RouterSums(self.lost, self.served, associated, digest, active, both)

    def disconnected(self) -> RouterSums:
        """Every ACTIVE queue is INACTIVE."""
        if not self.active_count:
            return self
        return self._replace(lost=self._next, active_count=0, active_associated=0)

    def service_subscribed(self) -> RouterSums:
        """Every associated queue is ACTIVE; those that are not associated stay as they are."""
        more = self.associated_count - self.active_associated
        if not more:
            return self
        return self._replace(
            served=self._next,
            active_count=self.active_count + more,
            active_associated=self.associated_count,
        )

    def without_associations(self) -> RouterSums:
        """Every associated queue is INACTIVE and no longer associated."""
        return self._replace(
            associated_count=0,
            associated_hash=NO_IDS,
            active_count=self.active_count - self.active_associated,
            active_associated=0,
        )

    @property
    def _next(self) -> int:
        return max(self.lost, self.served) + 1


@hides_bytes
class QueueChange(NamedTuple):
    """A queue's row that was written, or is gone. Do not print."""

    notifier_id: EntityId
    before: StoredState
    after: StoredState | None
