"""Decisions about subscriptions, without input or output: what waits, what an answer means, what drifted."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Generic, Protocol, TypeVar

from protocol.encoding import EntityId
from protocol.errors import AUTH, SERVICE_ERRORS
from protocol.hiding import hides_bytes
from protocol.ids_hash import NO_IDS, ids_hash, xor
from protocol.smp_messages import Deld, End, Err, Ok, QueueSet, SmpMessage, Sok
from protocol.statuses import SubEvent, SubInput
from smp_client.errors import BadAnswer, CannotSend, ClientError
from smp_client.requests import Batch

ENDED = SubEvent(SubInput.ENDED)
DELETED = SubEvent(SubInput.QUEUE_DELETED)
REFUSED = SubEvent(SubInput.REFUSED)
SERVICE_REFUSED = SubEvent(SubInput.SERVICE_REFUSED)

_TEMPORARY_ERRORS = frozenset({"INTERNAL", "STORE", "QUOTA"})
"Errors that describe the router's condition, not the queue or the service."
SURPLUS_IDS = 1000
"Of queues that were deleted here and not at the router: remembered one by one. Others count."

QUEUE_EVENTS: Mapping[type[SmpMessage], SubEvent] = {End: ENDED, Deld: DELETED}
"What messages of a router mean for the state of their queue."


class Queue(Protocol):
    """A queue with what is needed to subscribe it."""

    @property
    def notifier_id(self) -> EntityId: ...


Q = TypeVar("Q", bound=Queue)


@dataclass(slots=True)
class WaitingRoom:
    """What the queues of all routers may take up together; each router has `share` places in any case."""

    places: int
    share: int
    taken: int = 0


class WaitingQueues(Generic[Q]):
    """Queues to be subscribed soon, in order of arrival.

    Bounded: beyond `limit`, or where the room is full, only the fact remains that there are more
    (`overflowed`) and from when on they can be tried; the owner then reads them from the store.
    """

    def __init__(self, limit: int, room: WaitingRoom | None = None) -> None:
        self._limit = limit
        self._room = room or WaitingRoom(limit, limit)
        self._taken = 0
        self._ready: dict[EntityId, Q] = {}
        self._later: dict[EntityId, tuple[float, Q]] = {}
        self._overflow_at: float | None = None

    def __len__(self) -> int:
        return len(self._ready) + len(self._later)

    @property
    def put_off(self) -> int:
        """How many are to be tried again."""
        return len(self._later)

    @property
    def overflowed(self) -> bool:
        """Whether some queues are only in the store."""
        return self._overflow_at is not None

    def is_overflow_due(self, now: float) -> bool:
        """Whether it is time to read them from there."""
        return self._overflow_at is not None and self._overflow_at <= now

    @property
    def _is_full(self) -> bool:
        room, size = self._room, len(self)
        return size >= self._limit or (size >= room.share and room.taken >= room.places)

    def _count(self) -> None:
        """Tell the room what changed."""
        self._room.taken += len(self) - self._taken
        self._taken = len(self)

    def add(self, queue: Q) -> None:
        if self._is_full:
            self._overflow_at = -math.inf
            return
        self._later.pop(queue.notifier_id, None)
        self._ready[queue.notifier_id] = queue
        self._count()

    def add_later(self, queues: Iterable[Q], at: float) -> None:
        """Try these again, but not before `at`."""
        for queue in queues:
            if self._is_full:
                self._overflow_at = at if self._overflow_at is None else min(at, self._overflow_at)
                return
            self._later[queue.notifier_id] = (at, queue)
            self._count()

    def discard(self, notifier_id: EntityId) -> None:
        self._ready.pop(notifier_id, None)
        self._later.pop(notifier_id, None)
        self._count()

    def clear(self) -> None:
        """All of them are about to be found in the store."""
        self._ready.clear()
        self._later.clear()
        self._count()
        self._overflow_at = None

    def take(self, limit: int, now: float) -> list[Q]:
        """The next batch."""
        for notifier_id, (_, queue) in [item for item in self._later.items() if item[1][0] <= now]:
            del self._later[notifier_id]
            self._ready[notifier_id] = queue
        batch = list(islice(self._ready.values(), limit))
        for queue in batch:
            del self._ready[queue.notifier_id]
        self._count()
        return batch

    def next_at(self) -> float | None:
        """When the earliest of those put off is due."""
        overflow = () if self._overflow_at is None else (self._overflow_at,)
        return min((*overflow, *(at for at, _ in self._later.values())), default=None)


class Flight:
    """One batch of NSUBs on its way, and the END and DELD events that overtake its outcome.

    An event about a queue whose answer is still to come is about an older subscription: the answer decides.
    One that comes after the answer must not be overwritten when the answers are stored: it is applied then.
    """

    def __init__(self, notifier_ids: Sequence[EntityId], batch: Batch[SmpMessage]) -> None:
        self._index = {notifier_id: index for index, notifier_id in enumerate(notifier_ids)}
        self._batch = batch
        self.overtaken: list[tuple[EntityId, SubEvent]] = []

    def absorbs(self, notifier_id: EntityId, event: SubEvent) -> bool:
        """Whether the event needs no further care now."""
        index = self._index.get(notifier_id)
        if index is None:
            return False
        if self._batch.answers[index] is not None:
            self.overtaken.append((notifier_id, event))
        return True


@hides_bytes
@dataclass(slots=True)
class SubscribeOutcomes:
    """The answers to a batch of NSUBs, sorted by what is to be done."""

    associated: list[EntityId] = field(default_factory=list)
    individual: list[EntityId] = field(default_factory=list)
    changed: list[tuple[EntityId, SubEvent]] = field(default_factory=list)
    retried: list[EntityId] = field(default_factory=list)
    "Timeouts, lost connections and temporary errors of the router leave a queue as it is."
    service_failed: bool = False
    "A queue was refused because of the service, or bound to another one than ours."


def sort_outcomes(
    notifier_ids: Sequence[EntityId],
    answers: Sequence[SmpMessage | ClientError],
    service_id: EntityId | None,
) -> SubscribeOutcomes:
    outcomes = SubscribeOutcomes()
    for notifier_id, answer in zip(notifier_ids, answers, strict=True):
        if isinstance(answer, Sok) and answer.service_id is not None:
            if answer.service_id == service_id:
                outcomes.associated.append(notifier_id)
            else:
                outcomes.service_failed = True
                outcomes.changed.append((notifier_id, SERVICE_REFUSED))
        elif isinstance(answer, Sok | Ok):
            outcomes.individual.append(notifier_id)
        elif _says_nothing_of_the_queue(answer):
            outcomes.retried.append(notifier_id)
        else:
            event = refusal(answer)
            outcomes.service_failed |= event is SERVICE_REFUSED
            outcomes.changed.append((notifier_id, event))
    return outcomes


def _says_nothing_of_the_queue(answer: SmpMessage | ClientError) -> bool:
    if isinstance(answer, ClientError):
        return not isinstance(answer, BadAnswer | CannotSend)
    return is_temporary(answer)


def is_temporary(answer: SmpMessage | ClientError) -> bool:
    """Whether the router answered that it cannot serve the request now."""
    return isinstance(answer, Err) and answer.error.word in _TEMPORARY_ERRORS


def error_text(answer: SmpMessage | ClientError) -> str:
    """The error for the log, without what the peer wrote behind it."""
    return answer.error.without_text if isinstance(answer, Err) else "an unexpected message"


def refusal(answer: SmpMessage | ClientError) -> SubEvent:
    """Why a queue could not be subscribed."""
    if isinstance(answer, Err):
        if answer.error == AUTH:
            return REFUSED
        if answer.error in SERVICE_ERRORS:
            return SERVICE_REFUSED
        return SubEvent.failed(answer.error.without_text)
    return SubEvent.failed(str(answer) if isinstance(answer, ClientError) else "unexpected answer")


class Balance(Enum):
    EQUAL = "the router has our queues, and perhaps ones that we gave up"
    UNCERTAIN = "the numbers agree, but an old router tells no hash"
    DRIFTED = "the router has another set of queues"


class ServiceBalance:
    """Compares our associated queues with the router's.

    There is no command to give a queue up, so the router keeps queues whose subscriptions were deleted here.
    This surplus is remembered by count and hash, as otherwise it would look like drift for ever; some of it
    also by id, as the router says which queues it deletes.
    """

    def __init__(self) -> None:
        self._surplus = QueueSet(0, NO_IDS)
        self._surplus_ids: OrderedDict[EntityId, None] = OrderedDict()
        self.is_complete = False
        "The surplus includes what was deleted before this object was made."

    def given_up(self, notifier_ids: Collection[EntityId]) -> None:
        """Associated queues were deleted here."""
        self._surplus = QueueSet(
            self._surplus.count + len(notifier_ids), xor(_hash(self._surplus), ids_hash(notifier_ids))
        )
        self._surplus_ids.update(dict.fromkeys(notifier_ids))
        while len(self._surplus_ids) > SURPLUS_IDS:
            self._surplus_ids.popitem(last=False)

    def no_surplus(self, notifier_ids: Iterable[EntityId]) -> int:
        """The router deleted these queues, or they are ours again; returns how many had been given up."""
        found = [queue_id for queue_id in notifier_ids if queue_id in self._surplus_ids]
        for queue_id in found:
            del self._surplus_ids[queue_id]
        count = self._surplus.count - len(found)
        self._surplus = QueueSet(count, xor(_hash(self._surplus), ids_hash(found)))
        return len(found)

    def explains(self, surplus: int) -> bool:
        """Whether a surplus of queues at the router may consist of queues that were deleted here."""
        return surplus > 0 and (not self.is_complete or surplus <= self._surplus.count)

    def compare(self, ours: QueueSet, routers: QueueSet) -> Balance:
        if routers.ids_hash is None:
            same = routers.count - ours.count == self._surplus.count
            return Balance.UNCERTAIN if same else Balance.DRIFTED
        known = QueueSet(ours.count + self._surplus.count, xor(_hash(ours), _hash(self._surplus)))
        if routers not in (known, ours):
            return Balance.DRIFTED
        if routers != known:
            self._surplus = QueueSet(0, NO_IDS)
            self._surplus_ids.clear()
        self.is_complete = True
        return Balance.EQUAL

    def settle(self, ours: QueueSet, routers: QueueSet) -> None:
        """Every queue of ours was just confirmed one by one: what remains is the router's surplus."""
        self._surplus = QueueSet(routers.count - ours.count, xor(_hash(ours), _hash(routers)))
        if not self._surplus.count:
            self._surplus_ids.clear()
        self.is_complete = True


def _hash(queues: QueueSet) -> bytes:
    return queues.ids_hash or NO_IDS
