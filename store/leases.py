"""Who does what when several daemons share a store: each router, each part of the pushes, the statements, the
chores.

A lease has one owner at a time. Its fence is a number that rises with every change of owner; whoever writes
as owner shows it in the same transaction, so one that was taken for dead and wakes up again writes nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from store.records import QueueRow, ServerKey, StoredRouter, TokenKey
from store.statement_records import PushKey

TOPIC_PARTS = 16
"Topics of statements are dealt out to so many parts; the topics of a part are watched by its owner."

PUSH_PARTS = 64
"Tokens are dealt out to so many parts; the pushes of a part are sent by its owner."

LEASE_SECONDS = 20.0
"A daemon that was not heard of for so long loses what it owns."
VALID_PART = 0.75
"Of that time it trusts its own leases, counted from when it last asked: it stops before others begin."
RENEWALS = 4
"Times that it asks in that time."
PATIENCE, LEAST_PATIENCE = 0.25, 1.0
"Part of that time for one answer of the database; and seconds."

GIVEN_BACK_PART = 0.1
"Of what a daemon owns, given back at a time to one that came."
CLAIMED_AT_ONCE = 1000
HANDED_AT_ONCE = 1000


class Duty(StrEnum):
    ROUTER = "router"
    PUSHES = "pushes"
    CHORES = "chores"
    STATEMENTS = "statements"
    TOPICS = "topics"


class Lease(NamedTuple):
    duty: Duty
    id: int


CHORES = Lease(Duty.CHORES, 0)
"Housekeeping: once for all daemons."
STATEMENTS = Lease(Duty.STATEMENTS, 0)
"Pushing statements: one daemon of those whose gateway is on."
GATEWAY = frozenset({Duty.STATEMENTS, Duty.TOPICS})
"What only these daemons do."


def of_router(key: ServerKey) -> Lease:
    return Lease(Duty.ROUTER, key)


def of_pushes(key: TokenKey) -> Lease:
    return Lease(Duty.PUSHES, key % PUSH_PARTS)


def topic_part(topic: bytes) -> int:
    return zlib.crc32(topic) % TOPIC_PARTS


def of_topic_part(part: int) -> Lease:
    return Lease(Duty.TOPICS, part)


def of_topic(topic: bytes) -> Lease:
    return Lease(Duty.TOPICS, topic_part(topic))


class Notice(NamedTuple):
    """What another daemon says to all."""

    verb: str
    words: tuple[str, ...]


HANDED_OVER, FREED, PUSH, RESUBSCRIBE = "handover", "freed", "push", "resubscribe"
PUSH_STATEMENTS = "push-statements"
FORGET, FORGET_UNASSOCIATED = "forget", "forget-unassociated"
"Deleted queues, by whether they were associated with the service."


class HandedOver(NamedTuple):
    """A queue of a router of ours that another daemon stored. Do not print."""

    router: StoredRouter
    queue: QueueRow
    version: str
    "Another one if it was handed over again meanwhile."


class TimeTold(NamedTuple):
    """What the database's clock showed, at some moment of the seconds that the question took."""

    now: float
    "Seconds since the epoch."
    took: float


class DaemonRecord(NamedTuple):
    """A daemon that shares the store, and what it owns."""

    name: str
    is_this: bool
    routers: int
    pushes: int
    "Parts of them."
    chores: bool
    statements: bool
    topics: int
    "Parts of them."


class Changes(NamedTuple):
    """`gained` is ours now; `surplus` is more than our share, to be given back when it is no longer used."""

    gained: Sequence[Lease] = ()
    surplus: Sequence[Lease] = ()
    resumed: Collection[Lease] = ()
    "Of what was gained, that which nobody else owned since it was last ours."


class Rebalance(NamedTuple):
    """What a daemon does about leases of one duty: claim so many, or give so many back."""

    claim: int = 0
    give_back: int = 0


def next_step(*, total: int, mine: int, daemons: int) -> Rebalance:
    """Towards equal shares. What nobody owns is claimed at once; what others should have goes in small parts,
    so that daemons which come and go do not make all routers reconnect."""
    share = math.ceil(total / max(1, daemons))
    if mine <= share:
        return Rebalance(claim=min(share - mine, CLAIMED_AT_ONCE))
    return Rebalance(give_back=min(mine - share, math.ceil(mine * GIVEN_BACK_PART)))


class Ownership(Protocol):
    """What the parts of a daemon ask before they act."""

    @property
    def is_shared(self) -> bool:
        """False: there is one daemon alone, and it owns everything."""

    def owns(self, lease: Lease) -> bool:
        """As far as this daemon knows, now; what it writes is checked again."""

    def term(self, lease: Lease) -> int:
        """Another number whenever others may have owned it in between."""

    def push_elsewhere(self, keys: Collection[TokenKey]) -> None:
        """Tokens with unsent notifications whose pushes other daemons send; `tell` tells them. Lost words
        cost time, nothing else: every daemon looks into the store now and then."""

    def push_statements_elsewhere(self, keys: Collection[PushKey]) -> None:
        """As above, for pushes of statements."""

    async def say(self, notice: Notice) -> None:
        """To all other daemons."""

    async def daemons(self) -> list[DaemonRecord]: ...


class Leases(Ownership, Protocol):
    """For the part of a daemon that takes leases and gives them back."""

    def owned(self) -> Collection[Lease]: ...

    async def join(self) -> TimeTold: ...

    async def leave(self) -> None:
        """Give everything back: others go on at once."""

    async def renew(self) -> TimeTold:
        """A sign of life. LeaseLost if this daemon was taken for dead: it owns nothing any more."""

    def seconds_left(self) -> float:
        """Until everything lapses, unless it is renewed."""

    def lapse(self) -> None:
        """Own nothing any more."""

    async def balance(self) -> Changes:
        """Take what dead daemons left and our share of the rest."""

    def suspend(self, leases: Collection[Lease]) -> None:
        """They are about to be given back: `owns` is False for them."""

    async def give_back(self, leases: Collection[Lease]) -> None: ...

    async def routers(self, keys: Sequence[ServerKey]) -> list[StoredRouter]:
        """Those of them that have queues to be watched."""

    async def handed_over(self) -> list[HandedOver]:
        """Queues that others stored for our routers, again and again until they are `taken`; at most
        HANDED_AT_ONCE."""

    async def taken(self, handed: Sequence[HandedOver]) -> None: ...

    async def tell(self) -> None:
        """Tell what `push_elsewhere` gathered, when there is any."""

    async def notices(self, timeout: float) -> list[Notice]:
        """What others say; empty after so many seconds."""


class SoleOwner:
    """Where there is one daemon: it owns everything for ever, and there is nobody to be told anything."""

    is_shared = False

    def owns(self, lease: Lease) -> bool:
        return True

    def term(self, lease: Lease) -> int:
        return 1

    def push_elsewhere(self, keys: Collection[TokenKey]) -> None:
        raise AssertionError("there is no other daemon")

    def push_statements_elsewhere(self, keys: Collection[PushKey]) -> None:
        raise AssertionError("there is no other daemon")

    async def say(self, notice: Notice) -> None:
        pass

    async def daemons(self) -> list[DaemonRecord]:
        return []


SOLE_OWNER = SoleOwner()
