"""A connected client as the rest of the router sees it: what it was given and what waits to be sent to it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from protocol.commands import Codec
from protocol.connection import Outgoing
from protocol.crypto import AuthPublicKey
from protocol.encoding import NO_CORR, EntityId
from protocol.hiding import hides_bytes
from protocol.session_params import SessionParams
from protocol.smp_codec import SMP_MESSAGES
from protocol.smp_messages import Alls, Lnk, Msg, Pkey, Pres, Rres, SmpMessage, Soks
from protocol.versions import SMP_BLOCK_SIZE
from smp_router.client_limits import Allowance
from smp_router.queues import Prepared
from smp_router.state import Records
from smp_router.storage import Creator

RouterMessage = SmpMessage | Prepared
SMALL_MESSAGE = 205
"About eighty events or answers fill a block."
_ALONE_IN_A_BLOCK = frozenset({Alls, Msg, Soks})
_FILL_A_BLOCK = frozenset({*_ALONE_IN_A_BLOCK, Pkey, Pres, Rres})
ROOM = 16 * SMP_BLOCK_SIZE
"Bytes in the outbox below which more is put into it."


class RouterMessages(Codec[RouterMessage]):
    """The words of a router; prepared ones go out as they are."""

    def encode(self, message: RouterMessage, version: int) -> bytes:
        return message if isinstance(message, Prepared) else SMP_MESSAGES.encode(message, version)


ROUTER_MESSAGES = RouterMessages(SMP_MESSAGES.specs)


@hides_bytes
@dataclass(slots=True)
class Reception:
    """How this client receives from one queue: by SUB (also through its service) or by GET, never both."""

    by_get: bool = False
    delivered: bytes | None = None
    "The message that was sent and is not yet acknowledged."
    again: bool = False
    "It is to be sent once more: the client subscribed again."


class Client:
    """Answers and events go to the outbox. Ids of queues with something stored wait in `offers`: what they
    have is taken only when it can be sent, so that stored messages do not pile up in memory twice."""

    def __init__(
        self, params: SessionParams, max_unsent: int, records: Records, allowance: Allowance | None = None
    ) -> None:
        self.params = params
        self.allowance = allowance
        self._records = records
        self.depends_on = 0
        "The change that must be safe before anything more is sent."
        self.receptions: dict[EntityId, Reception] = {}
        self.receptions_checked = 0
        "How many there must be before they are looked through for queues that are gone."
        self.offers: OrderedDict[EntityId, None] = OrderedDict()
        "An ordered set. In a plain dict, taking the first of 100,000 one after the other takes seconds."
        self.outbox: deque[Outgoing[RouterMessage]] = deque()
        self.unsent = 0
        self.overrun = False
        "More waits than `max_unsent` allows: the client must be disconnected."
        self.forwarding = 0
        "Commands that are under way to other routers."
        self.connecting = 0
        "PRXY commands among them."
        self.proven_key: AuthPublicKey | None = None
        "Of the queue's several recipient keys, the one that authorised the command that is carried out."
        self.wake = asyncio.Event()
        self._max_unsent = max_unsent
        self._gone = self._collecting = False
        self.sent = asyncio.Event()
        "Nothing waits to be sent, or the client is gone."
        self.sent.set()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def creator(self) -> Creator | None:
        """Whose share of the storage it uses."""
        return None if self.allowance is None else self.allowance.creator

    def depend(self) -> None:
        """What is sent from now on follows from what has changed until now."""
        self.depends_on = self._records.made

    def event(self, entity_id: EntityId, message: RouterMessage) -> None:
        self.depend()
        self.push((Outgoing(NO_CORR, entity_id, message),))

    def push(self, batch: Iterable[Outgoing[RouterMessage]]) -> None:
        if self._gone:
            return
        for outgoing in batch:
            self.outbox.append(outgoing)
            self.unsent += _size(outgoing)
        if self.unsent >= ROOM:
            self._room.clear()
        self.overrun = self.overrun or self.unsent > self._max_unsent
        self.sent.clear()
        self._wake()

    def offer(self, entity_id: EntityId) -> None:
        """Something is stored for this client under `entity_id`."""
        if self._gone:
            return
        self.depend()
        self.offers[entity_id] = None
        self.sent.clear()
        self._wake()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """What is pushed meanwhile is sent together: a block is as large for one answer as for eighty."""
        self._collecting = True
        try:
            yield
        finally:
            self._collecting = False
            self.wake.set()

    def _wake(self) -> None:
        if not self._collecting or not self.has_room:
            self.wake.set()

    @property
    def has_room(self) -> bool:
        """The outbox is short, or the client is gone."""
        return self._room.is_set()

    async def room(self) -> None:
        """Wait until it is so again."""
        await self._room.wait()

    def take(self) -> list[Outgoing[RouterMessage]]:
        """What to send next: a handful of blocks at most."""
        batch: list[Outgoing[RouterMessage]] = []
        size = 0
        while self.outbox and size < ROOM:
            outgoing = self.outbox.popleft()
            batch.append(outgoing)
            size += _size(outgoing)
        self.unsent -= size
        if self.unsent < ROOM:
            self._room.set()
        return batch

    def put_back(self, batch: Sequence[Outgoing[RouterMessage]]) -> None:
        """It was taken, and did not leave."""
        self.outbox.extendleft(reversed(batch))

    def gone(self) -> list[Outgoing[RouterMessage]]:
        """Nothing will be sent any more, and nobody has to wait for it; returns what was not."""
        self._gone = True
        unsent = list(self.outbox)
        self.outbox.clear()
        self.offers.clear()
        self._room.set()
        self.sent.set()
        self.wake.set()
        return unsent


def in_blocks(batch: Iterable[Outgoing[RouterMessage]]) -> Iterator[list[Outgoing[RouterMessage]]]:
    """What may share blocks: some clients read only the first transmission of those that answer SUBS."""
    for alone, group in groupby(batch, lambda outgoing: type(outgoing.message) in _ALONE_IN_A_BLOCK):
        if alone:
            yield from ([outgoing] for outgoing in group)
        else:
            yield list(group)


def _size(outgoing: Outgoing[RouterMessage]) -> int:
    message = outgoing.message
    if type(message) in _FILL_A_BLOCK:
        return SMP_BLOCK_SIZE
    if isinstance(message, Lnk):
        return SMALL_MESSAGE + len(message.data.fixed) + len(message.data.user)
    return SMALL_MESSAGE
