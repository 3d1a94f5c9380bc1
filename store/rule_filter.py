"""Which rules there may be, in a few bytes of memory for each.

Most statements are for nobody, and to learn that from the database costs a search that reads a page which is
seldom in memory. A bit for each rule, in a field of bits that stays mostly empty, says it at once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

SMALLEST = 1 << 16
"Rules that there is room for in any case."
BITS = 16
"For each rule that there is room for, at least: so seldom is the database asked in vain."

SenderTopic = tuple[bytes, bytes]
"A rule, whoever has it."

_VERSION = "PRAGMA data_version"
_COUNT = "SELECT count(*) FROM statement_rules"
_RULES = "SELECT sender, topic FROM statement_rules"


class RuleFilter:
    """Belongs to the connection that writes, and is used within its transactions only.

    It may take a rule for one that exists; never one that exists for none. What others wrote to the database
    shows in its version. After a transaction that was rolled back `forget` must be called: what was read in
    it is no longer so.
    """

    def __init__(self) -> None:
        self._version: int | None = None
        self._bits = bytearray(1)
        self._room = 0

    def possible(self, db: sqlite3.Connection, rules: Iterable[SenderTopic]) -> list[SenderTopic]:
        """Those of the rules that may exist."""
        (version,) = db.execute(_VERSION).fetchone()
        if version != self._version:
            self._read(db)
            self._version = version
        bits, last = self._bits, len(self._bits) - 1
        return [rule for rule in rules if bits[(at := hash(rule)) >> 3 & last] >> (at & 7) & 1]

    def add(self, rules: Iterable[SenderTopic]) -> None:
        """These are in the database from now on."""
        if self._version is None:
            return  # all are read before the next question
        self._set(rules)
        if self._room < 0:
            self.forget()

    def forget(self) -> None:
        self._version = None

    def _read(self, db: sqlite3.Connection) -> None:
        (count,) = db.execute(_COUNT).fetchone()
        self._room = max(2 * count, SMALLEST)
        self._bits = bytearray(1 << (self._room * BITS - 1).bit_length() - 3)
        self._set(db.execute(_RULES))

    def _set(self, rules: Iterable[SenderTopic]) -> None:
        bits, last = self._bits, len(self._bits) - 1
        for rule in rules:
            at = hash(rule)
            place, bit = at >> 3 & last, 1 << (at & 7)
            if not bits[place] & bit:
                bits[place] |= bit
                self._room -= 1
