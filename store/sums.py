"""The sums that must change together with the rows: collected in a transaction, written once at its end.

What happens to all queues of a router at once is a number in the router's row; theirs are not written. Losses
of the connection and answers to NSUBS are numbered as they come. A queue's row has the last number that its
state knows of; those that came later are applied whenever the state is read. Two numbers are enough: of each
kind only the last one matters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from protocol.encoding import EntityId, new_tuple
from protocol.ids_hash import NO_IDS, ids_hash, xor
from protocol.statuses import SUBSCRIBABLE, SubInput, SubState, TokenStatus, bulk_move
from store.records import DeletedSubscription, ServerKey

DROP = bulk_move(SubInput.DISCONNECTED)
SOKS = bulk_move(SubInput.SUBSCRIBED, SUBSCRIBABLE)

SUM_COLUMNS = "lost, served, associated_count, associated_hash, active_count, active_associated"
"Of `RouterSums`."
STATE_COLUMNS = "s.state, s.associated, s.as_of, v.lost, v.served"
"Of `read_state`."
_STATES = {state.value: state for state in SubState}
"Read by the row: a lookup costs a third of the enum's own."


class Turns(NamedTuple):
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

    def now(self, turns: Turns) -> SubState:
        state, as_of = self.state, self.as_of
        if self.associated and turns.served > as_of:
            # Whether the connection was lost before that makes no difference.
            state, as_of = SOKS.moved(state), turns.served
        return DROP.moved(state) if turns.lost > as_of else state


def read_state(row: Sequence[Any]) -> tuple[StoredState, Turns]:
    """From `STATE_COLUMNS`."""
    state, associated, as_of, lost, served = row
    stored = new_tuple(StoredState, (_STATES[state], bool(associated), as_of))
    return stored, new_tuple(Turns, (lost, served))


class RouterChanges:
    """What a transaction does to the sums of a router, before they are read for that."""

    __slots__ = ("digest", "states")

    def __init__(self) -> None:
        self.digest = NO_IDS
        "What the hash of associated ids is XORed with."
        self.states: Counter[StoredState] = Counter()
        "How many rows more, or fewer, are in each state."


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
        turns = Turns(self.lost, self.served)
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


class Sums:
    def __init__(self) -> None:
        self.tokens = 0
        self.active_tokens = 0
        self.subscriptions = 0
        self.active_subscriptions = 0
        "Follows from the routers' sums, when these are written."
        self.routers: dict[ServerKey, RouterChanges] = {}

    def queues_changed(
        self, key: ServerKey, before: Iterable[StoredState], after: Iterable[StoredState]
    ) -> None:
        """Rows of a router that were written, or are gone."""
        for sign, states in ((-1, before), (1, after)):
            for stored in states:
                if stored.associated or stored.state is SubState.ACTIVE:  # no other counts, now or later
                    self._of_router(key).states[stored] += sign

    def associations_changed(self, key: ServerKey, notifier_ids: Sequence[EntityId]) -> None:
        """Queues became associated, or no longer are: a hash is its own inverse."""
        if notifier_ids:
            changes = self._of_router(key)
            changes.digest = xor(changes.digest, ids_hash(notifier_ids))

    def _of_router(self, key: ServerKey) -> RouterChanges:
        return self.routers.setdefault(key, RouterChanges())

    def token_moved(self, before: TokenStatus, after: TokenStatus) -> None:
        self.active_tokens += (after is TokenStatus.ACTIVE) - (before is TokenStatus.ACTIVE)

    def token_deleted(self, status: str) -> None:
        self.tokens -= 1
        self.active_tokens -= status == TokenStatus.ACTIVE

    def subscriptions_deleted(
        self, deleted: Sequence[DeletedSubscription], states: Iterable[StoredState]
    ) -> None:
        associated: dict[ServerKey, list[EntityId]] = {}
        for row, stored in zip(deleted, states, strict=True):
            self.queues_changed(row.server_key, (stored,), ())
            if row.associated:
                associated.setdefault(row.server_key, []).append(row.notifier_id)
        for server_key, notifier_ids in associated.items():
            self.associations_changed(server_key, notifier_ids)
        self.subscriptions -= len(deleted)
