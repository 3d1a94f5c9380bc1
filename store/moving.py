"""Copies a store whole into one of another kind, in steps that can be continued after a crash, and proves it.

A store in use is copied while it changes. Its change log is started first, so whatever a page of the copy has
missed is in the log. What was there at the start is copied by pages in the order of keys; rounds then bring
over the rows that the log names, until a round brings so few that the server can be stopped for the last one.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from store.interface import StoreError
from store.tables import PAGE, PARENTS, TABLES, Key, Marks, NewTables, ReadTables, Row, Sum, Table, sum_of
from store.tables_postgres import NewPostgresTables
from store.tables_sqlite import ChangeLog, SqliteTables

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
"What is done, how much of it, of how much."

_DONE = "done"
_BOUNDS_NOTE = "bounds"


class CopyDiffers(StoreError):
    """The copy is not what the source is."""


async def copy(source: ReadTables, new: NewTables, progress: Progress) -> None:
    """Copy what there is beside the parents; what was copied before is not copied again."""
    upto = Marks(*json.loads(await new.note(_BOUNDS_NOTE) or ""))
    for table in TABLES[len(PARENTS) :]:
        note = await new.note(table.name)
        if note == _DONE:
            continue
        total = await source.count(table)
        after: Key = ast.literal_eval(note) if note else table.before_all
        done = await new.count(table)
        while rows := await source.page(table, after, upto):
            after = table.key_of(rows[-1])
            await new.append(table, rows, repr(after))
            done += len(rows)
            progress(table.name, done, max(done, total))
        await new.put_note(table.name, _DONE)


async def parents_copied(new: NewTables) -> bool:
    return await new.note(_BOUNDS_NOTE) is not None


async def copy_parents(source: ReadTables, new: NewTables, progress: Progress) -> None:
    """Rows that others refer to, all of one moment: the caller keeps the source still.

    A token may get another's device, so tokens of two moments might not go together. If this is interrupted,
    the new store must be begun anew.
    """
    for table in PARENTS:
        total, done, after = await source.count(table), 0, table.before_all
        while rows := await source.page(table, after, None):
            after = table.key_of(rows[-1])
            done += len(rows)
            await new.append(table, rows, _DONE)
            progress(table.name, done, total)
    # Noted last: this says that they are complete.
    await new.put_note(_BOUNDS_NOTE, json.dumps(await source.marks()))


async def compare(source: ReadTables, new: ReadTables, progress: Progress) -> dict[str, Sum]:
    """The sums of all tables. CopyDiffers if any differ; nobody may write meanwhile."""
    sums = {}
    for number, table in enumerate(TABLES, 1):
        expected, found = await sum_of(source, table), await sum_of(new, table)
        if expected != found:
            raise CopyDiffers(f"{table.name} differ: there are {expected}; copied were {found}")
        sums[table.name] = found
        progress("comparing tables", number, len(TABLES))
    return sums


class Follower:
    """Brings over what changes in an SQLite store in use."""

    def __init__(self, source: SqliteTables, log: ChangeLog, new: NewPostgresTables) -> None:
        self._source = source
        self._log = log
        self.new = new

    async def catch_up(self) -> int:
        """One round: the number of rows that had changed. Afterwards the copy is as the source was then."""
        with self._source.snapshot():
            changed, last = await self._round()
        self._log.forget(last)
        return changed

    async def catch_up_and_compare(self, progress: Progress) -> dict[str, Sum]:
        """One round, and a comparison of everything with the source as it was then."""
        with self._source.snapshot():
            _, last = await self._round()
            sums = await compare(self._source, self.new, progress)
        self._log.forget(last)
        return sums

    async def _round(self) -> tuple[int, int]:
        last = self._log.last()
        keys = {table: self._log.keys(table) for table in TABLES}
        async with self.new.db.transaction():
            # Children go first and come last.
            for table in reversed(TABLES):
                for some in _pieces(keys[table]):
                    kept = {table.key_of(row) for row in self._log.rows(table, some)}
                    if gone := [key for key in some if key not in kept]:
                        await self.new.delete(table, gone)
            for table in TABLES:
                for some in _pieces(keys[table]):
                    await self._bring(table, some)
        return sum(map(len, keys.values())), last

    async def _bring(self, table: Table, keys: Sequence[Key]) -> None:
        rows = self._log.rows(table, keys)
        if rows:
            await self.new.upsert(table, rows)
        found: list[Row] = await self.new.rows(table, keys)
        if Sum().with_rows(found) != Sum().with_rows(rows):
            raise CopyDiffers(f"{table.name} differ after a round of changes")

    async def compare_counts(self) -> dict[str, int]:
        """CopyDiffers if the numbers of rows differ; nobody may write meanwhile."""
        counts = {}
        for table in TABLES:
            counts[table.name] = await self.new.count(table)
            if await self._source.count(table) != counts[table.name]:
                raise CopyDiffers(f"the numbers of {table.name} differ")
        return counts


def _pieces(keys: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(keys), PAGE):
        yield keys[start : start + PAGE]
