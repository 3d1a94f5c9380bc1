"""What the daemon notes for its journal, before it is written."""

from __future__ import annotations

from collections.abc import Sequence, Set

from store.journal_schema import CONTRACT, GIVEN_COLUMNS, JournalEvent

Row = tuple[  # time, event and GIVEN_COLUMNS
    int,
    JournalEvent,
    str | None,  # server
    str | None,  # provider
    bytes | None,  # token, raw
    bytes | None,  # subscription, raw
    str | None,  # kind
    str | None,  # status_from
    str | None,  # status_to
    int | None,  # latency_us
    str | None,  # error
    int | None,  # count
    int | None,  # expected
    int | None,  # changed
    int | None,  # total
    str | None,  # daemon
    int | None,  # uptime_us
]
"""One event before it has a writer, a number and pseudonyms."""


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


class ContractCheck:
    """Tells rows that keep the contract from others; remembers which shapes of rows it has seen."""

    def __init__(self) -> None:
        self._seen: dict[tuple[JournalEvent, tuple[bool, ...]], bool] = {}

    def allows(self, row: Row) -> bool:
        """Whether the row has all columns that it must and none that it may not."""
        shape = (row[1], tuple([value is None for value in row]))
        try:
            return self._seen[shape]
        except KeyError:
            self._seen[shape] = allowed = row[1] in CONTRACT and CONTRACT[row[1]].allows(columns_of(row))
            return allowed


def columns_of(row: Row) -> set[str]:
    """Names of the columns that a row has beside time and event."""
    return {name for name, value in zip(GIVEN_COLUMNS, row[2:], strict=True) if value is not None}


def must_keep_contract(event: JournalEvent, columns: Set[str]) -> None:
    """Raise a `ContractError` that says what is wrong with the event."""
    contract = CONTRACT[event]
    if not contract.allows(columns):
        lacks, has = sorted(contract.must - columns), sorted(columns - contract.must - contract.may)
        raise ContractError(f"{event} lacks {lacks} and may not have {has}")
