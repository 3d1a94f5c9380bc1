"""What the daemon notes for its journal, before it is written."""

from __future__ import annotations

from collections.abc import Sequence

Row = tuple[
    int,  # time
    str,  # event
    str | None,  # server
    str | None,  # provider
    bytes | None,  # token, raw
    bytes | None,  # subscription, raw
    str | None,  # status_from
    str | None,  # status_to
    int | None,  # latency_us
    str | None,  # error
    int | None,  # count
    int | None,  # total
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
