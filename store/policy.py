"""What becomes of a row, decided without a database: every implementation of the store asks here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from protocol.statuses import RETRIED_SLOWLY, SUB_MOVES, SUBSCRIBABLE, SubEvent, SubInput, SubState

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

    def admits(self, subscriptions: int, routers: int) -> bool:
        """Whether a token may come to have so many."""
        within = not self.subscriptions_per_token or subscriptions <= self.subscriptions_per_token
        return within and (not self.routers_per_token or routers <= self.routers_per_token)


DEFAULT_CAPS = RowCaps()
