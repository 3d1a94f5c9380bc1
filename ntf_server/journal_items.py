"""What the daemon notes for its journal, before it is written."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TypedDict

from store.journal_schema import CONTRACT, JournalEvent


class Columns(TypedDict, total=False):
    """`store.journal_schema.GIVEN_COLUMNS`: what an event is recorded with. None is as good as absent."""

    server: str | None
    provider: str | None
    token: bytes | None
    "Raw here, as the subscription's id is; pseudonyms on disk."
    subscription: bytes | None
    kind: str | None
    status_from: str | None
    status_to: str | None
    latency_us: int | None
    error: str | None
    "A class, not a text."
    count: int | None
    expected: int | None
    changed: int | None
    total: int | None
    daemon: str | None
    uptime_us: int | None


Row = tuple[int, JournalEvent, Columns]
"""One event before it has a writer, a number and pseudonyms; its time is in microseconds."""


class ReceivedBlock:
    """The notifications of one received block: (token id, subscription id), raw."""

    __slots__ = ("ids", "server", "time")

    def __init__(self, time: int, server: str, ids: Sequence[tuple[bytes, bytes]]) -> None:
        self.time = time
        self.server = server
        self.ids = ids


JournalItem = Row | ReceivedBlock


def events_in(item: JournalItem) -> int:
    """How many events the item stands for."""
    return len(item.ids) if isinstance(item, ReceivedBlock) else 1


class ContractError(Exception):
    """An event has a column that it may not have, or lacks one."""


def names_given(columns: Columns) -> Set[str]:
    return {name for name, value in columns.items() if value is not None}


def keeps_contract(item: JournalItem) -> bool:
    """Whether an event has all columns that it must and none that it may not; blocks always do."""
    if isinstance(item, ReceivedBlock):
        return True
    _, event, columns = item
    return event in CONTRACT and CONTRACT[event].allows(names_given(columns))


def must_keep_contract(event: JournalEvent, columns: Columns) -> None:
    """Raise a `ContractError` that says what is wrong with the event."""
    contract, given = CONTRACT[event], names_given(columns)
    if not contract.allows(given):
        lacks, has = sorted(contract.must - given), sorted(given - contract.must - contract.may)
        raise ContractError(f"{event} lacks {lacks} and may not have {has}")
