"""The journal as tests have it: an event that breaks the contract raises where it is recorded."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from store.journal_schema import CONTRACT, JournalEvent

Record = Callable[..., None]


class ContractError(Exception):
    """An event has a column that it may not have, or lacks one."""


def strict(record: Record) -> Record:
    """A sink's `record` that refuses what the writer would leave out and count."""

    @wraps(record)
    def checked(sink: Any, event: JournalEvent, **columns: Any) -> None:
        contract = CONTRACT[event]
        given = {name for name, value in columns.items() if value is not None}
        if not contract.allows(given):
            lacks, has = sorted(contract.must - given), sorted(given - contract.must - contract.may)
            raise ContractError(f"{event} lacks {lacks} and may not have {has}")
        record(sink, event, **columns)

    return checked
