"""A write transaction with the sums that must change together with the rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from store.records import ServerKey
from store.router_sums import SUM_COLUMNS, RouterSums
from store.rule_filter import RuleFilter
from store.sums import Sums

_SIZES = (256, 64, 16, 4, 1)
"A list in a statement has one of these lengths, so that few different statements stay prepared."

_READ_ROUTER = f"SELECT {SUM_COLUMNS} FROM smp_servers WHERE server_key = ?"
_WRITE_ROUTER = f"UPDATE smp_servers SET ({SUM_COLUMNS}) = (?, ?, ?, ?, ?, ?) WHERE server_key = ?"
_WRITE_TOTALS = """
UPDATE totals SET tokens = tokens + ?, active_tokens = active_tokens + ?, subscriptions = subscriptions + ?,
    active_subscriptions = active_subscriptions + ?, last_seq = last_seq + ?
"""


class Transaction(Sums):
    """Sums are written by `flush`, once for each group of operations."""

    __slots__ = ("_last_seq", "_new_seqs", "db", "rule_filter")

    def __init__(self, db: sqlite3.Connection, rule_filter: RuleFilter | None = None) -> None:
        super().__init__()
        self.db = db
        self.rule_filter = rule_filter or RuleFilter()
        self._last_seq: int | None = None
        self._new_seqs = 0

    def router(self, key: ServerKey) -> RouterSums | None:
        """The sums of a router, with what this transaction did so far; None if it is gone."""
        row = self.db.execute(_READ_ROUTER, (key,)).fetchone()
        changes = self.routers.pop(key, None)
        if row is None:
            return None
        before = RouterSums(*row)
        return before if changes is None else self.change_router(key, before, before.changed(changes))

    def change_router(self, key: ServerKey, before: RouterSums, after: RouterSums) -> RouterSums:
        if after != before:
            self.db.execute(_WRITE_ROUTER, (*after, key))
            self.active_subscriptions += after.active_count - before.active_count
        return after

    def take_seqs(self, count: int) -> range:
        """The next numbers of last notifications."""
        if self._last_seq is None:
            (self._last_seq,) = self.db.execute("SELECT last_seq FROM totals").fetchone()
        first = self._last_seq + self._new_seqs + 1
        self._new_seqs += count
        return range(first, first + count)

    def settle_routers(self) -> None:
        for key in list(self.routers):
            self.router(key)

    def flush(self) -> None:
        self.settle_routers()
        changes = (
            self.tokens,
            self.active_tokens,
            self.subscriptions,
            self.active_subscriptions,
            self._new_seqs,
        )
        if any(changes):
            self.db.execute(_WRITE_TOTALS, changes)


def chunks(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Cut a list into pieces of the sizes that statements exist for."""
    start, left = 0, len(values)
    for size in _SIZES:
        while left >= size:
            yield values[start : start + size]
            start += size
            left -= size


def padded(values: Sequence[Any]) -> Iterator[list[Any]]:
    """Like `chunks`, in fewer pieces: short ones are filled up by repeating a value. For IN lists."""
    for start in range(0, len(values), _SIZES[0]):
        piece = list(values[start : start + _SIZES[0]])
        size = next(size for size in reversed(_SIZES) if size >= len(piece))
        yield piece + piece[-1:] * (size - len(piece))


def select_in(
    db: sqlite3.Connection, sql: str, values: Sequence[Any], *before: Any
) -> Iterator[tuple[Any, ...]]:
    """Rows of a query that has `{}` where its IN list goes; `before` are its other parameters."""
    for piece in padded(values):
        yield from db.execute(_with_list(sql, len(piece)), (*before, *piece))


def select_each(db: sqlite3.Connection, sql: str, ids: Sequence[bytes]) -> dict[bytes, tuple[Any, ...]]:
    """Rows by their first column, one for every id: of an outer join with the table that `{}` stands for.

    A client must not learn from the time taken whether an id exists. Each row costs a step, and each step
    a wait for the interpreter's lock; so unknown ids have rows too.
    """
    found: dict[bytes, tuple[Any, ...]] = {}
    for piece in padded(ids):
        for row in db.execute(_with_rows(sql, len(piece), 1), piece):
            found[row[0]] = row
    return found


def select_rows(
    db: sqlite3.Connection, sql: str, rows: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[Any, ...]]:
    """What is returned by a statement that has `{}` where its VALUES go."""
    for piece in chunks(rows):
        flat = [value for row in piece for value in row]
        yield from db.execute(_with_rows(sql, len(piece), len(piece[0])), flat)


def update_in(db: sqlite3.Connection, sql: str, values: Sequence[Any], *before: Any) -> int:
    """Rows changed by a statement that has `{}` where its IN list goes."""
    return sum(
        db.execute(_with_list(sql, len(piece)), (*before, *piece)).rowcount for piece in padded(values)
    )


def insert_rows(db: sqlite3.Connection, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows with a statement that has `{}` where its VALUES go.

    Several rows in one step: each step gives up the interpreter lock and has to get it back.
    """
    for _ in select_rows(db, sql, rows):
        pass


@cache
def _with_list(sql: str, size: int) -> str:
    return sql.format(_marks(size))


@cache
def _with_rows(sql: str, rows: int, columns: int) -> str:
    return sql.format(",".join([f"({_marks(columns)})"] * rows))


def _marks(count: int) -> str:
    return ",".join("?" * count)
