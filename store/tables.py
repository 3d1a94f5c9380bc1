"""What a store holds, as tables that are the same in every kind of database: for moving it whole.

A row is a tuple of its columns, with 0 and 1 for truth, so that it looks the same wherever it was read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Row = tuple[Any, ...]
Key = tuple[int, ...]

PAGE = 10_000
"Rows read, or written in one transaction, at once: a few megabytes."

SOURCE_NOTE = "source"
"The name of the note that tells what a new store is made from."

_DIGEST_BITS = 128


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    booleans: frozenset[str] = frozenset()

    def key_of(self, row: Row) -> Key:
        return tuple(row[self.columns.index(column)] for column in self.key)

    @property
    def before_all(self) -> Key:
        return (0,) * len(self.key)


def _columns(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


SERVERS = Table(
    "smp_servers",
    _columns(
        "server_key, hosts, port, key_hash, chain, private_key, service_id, associated_count, associated_hash"
    ),
    ("server_key",),
)
TOKENS = Table(
    "tokens",
    _columns(
        "token_key, token_id, device_token, verify_key, dh_private, dh_secret, code, status, verified,"
        " cron_minutes, cron_due, updated_on"
    ),
    ("token_key",),
    frozenset({"verified"}),
)
SUBSCRIPTIONS = Table(
    "subscriptions",
    _columns(
        "sub_key, subscription_id, token_key, server_key, notifier_id, notifier_key, state, detail,"
        " associated, retry_count, retry_at, spelling"
    ),
    ("sub_key",),
    frozenset({"associated"}),
)
TOKEN_ROUTERS = Table(
    "token_routers", _columns("token_key, server_key, subscriptions"), ("token_key", "server_key")
)
_NOTIFICATION = _columns("token_key, sub_key, seq, received_at, nonce, meta")
UNSENT = Table("unsent_notifications", _NOTIFICATION, ("token_key", "sub_key"))
SENT = Table("sent_notifications", _NOTIFICATION, ("token_key", "sub_key"))

PARENTS = (SERVERS, TOKENS)
TABLES = (*PARENTS, SUBSCRIPTIONS, TOKEN_ROUTERS, UNSENT, SENT)
"Rows refer only to rows of tables that stand before their own."


class Marks(NamedTuple):
    """Sums that a store keeps beside its rows, and the highest key of each kind ever given."""

    tokens: int
    active_tokens: int
    subscriptions: int
    active_subscriptions: int
    last_seq: int
    last_server: int
    last_token: int
    last_sub: int

    @property
    def bounds(self) -> Mapping[str, int]:
        return {"server_key": self.last_server, "token_key": self.last_token, "sub_key": self.last_sub}


class Sum(NamedTuple):
    """Of rows in any order: their number, and the sum of their hashes."""

    rows: int = 0
    digest: int = 0

    def with_rows(self, rows: Iterable[Row]) -> Sum:
        count, digest = self
        for row in rows:
            # A repr tells every value and its type apart.
            hashed = hashlib.blake2b(repr(row).encode(), digest_size=_DIGEST_BITS // 8).digest()
            digest += int.from_bytes(hashed, "big")
            count += 1
        return Sum(count, digest % (1 << _DIGEST_BITS))

    def __str__(self) -> str:
        return f"{self.rows} rows, hash {self.digest:032x}"


class ReadTables(Protocol):
    """The rows of a store, by pages in the order of their keys."""

    async def page(self, table: Table, after: Key, bounds: Mapping[str, int] | None) -> list[Row]:
        """The next rows; with `bounds` only those whose keys are not above them."""

    async def count(self, table: Table) -> int: ...

    async def marks(self) -> Marks: ...


class NewTables(ReadTables, Protocol):
    """A store that is being made. Nobody sees it before it is finished; how far it is survives a crash."""

    async def append(self, table: Table, rows: Sequence[Row], note: str) -> None:
        """New rows, and with them in one transaction a note under the table's name: how far the work is."""

    async def note(self, name: str) -> str | None: ...

    async def put_note(self, name: str, note: str) -> None: ...

    async def set_marks(self, marks: Marks) -> None: ...

    async def prepare_use(self) -> None:
        """What takes long and is wanted before the first use."""


async def sum_of(tables: ReadTables, table: Table) -> Sum:
    total, after = Sum(), table.before_all
    while rows := await tables.page(table, after, None):
        total = total.with_rows(rows)
        after = table.key_of(rows[-1])
    return total
