"""What a store holds, as tables that are the same in every kind of database: for moving it whole.

A row is a tuple of its columns, with 0 and 1 for truth, so that it looks the same wherever it was read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Row = tuple[Any, ...]
Key = tuple[int | bytes, ...]

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
    bounds: Mapping[str, str] = field(default_factory=dict, compare=False)
    "Rows of a store in use are copied up to these marks; later ones refer to rows that may be missing yet."
    booleans: frozenset[str] = frozenset()
    neutral: str = ""
    "A unique column whose values rows may have swapped; none is as short as a key."

    def key_of(self, row: Row) -> Key:
        return tuple(row[self.columns.index(column)] for column in self.key)

    @property
    def before_all(self) -> Key:
        return tuple(b"" if column in BYTE_KEYS else 0 for column in self.key)


BYTE_KEYS = frozenset({"topic", "sender", "client_id", "request_id", "device_id"})


def _columns(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


SERVERS = Table(
    "smp_servers",
    _columns(
        "server_key, hosts, port, key_hash, chain, private_key, service_id, associated_count,"
        " associated_hash, lost, served, active_count, active_associated"
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
    booleans=frozenset({"verified"}),
    neutral="verify_key",
)
SUBSCRIPTIONS = Table(
    "subscriptions",
    _columns(
        "sub_key, subscription_id, token_key, server_key, notifier_id, notifier_key, state, detail,"
        " associated, retry_count, retry_at, spelling, as_of"
    ),
    ("sub_key",),
    {"sub_key": "last_sub"},
    frozenset({"associated"}),
)
TOKEN_ROUTERS = Table(
    "token_routers",
    _columns("token_key, server_key, subscriptions"),
    ("token_key", "server_key"),
    {"token_key": "last_token", "server_key": "last_server"},
)
_NOTIFICATION = _columns("token_key, sub_key, seq, received_at, nonce, meta")
_OF_QUEUES = {"token_key": "last_token", "sub_key": "last_sub"}
UNSENT = Table("unsent_notifications", _NOTIFICATION, ("token_key", "sub_key"), _OF_QUEUES)
SENT = Table("sent_notifications", _NOTIFICATION, ("token_key", "sub_key"), _OF_QUEUES)

STATEMENT_SUBSCRIPTIONS = Table(
    "statement_subscriptions",
    _columns(
        "sub_key, subscription_id, client_id, channel, device_token, is_call, created_at, updated_at,"
        " device_id, proven, renewed_at"
    ),
    ("sub_key",),
    booleans=frozenset({"is_call", "proven"}),
    neutral="device_token",
)
STATEMENTS = (
    Table(
        "statement_rules",
        _columns("topic, sender, sub_key, created_at, baseline"),
        ("topic", "sender", "sub_key"),
        {"sub_key": "last_statement_sub"},
    ),
    Table("statement_requests", _columns("request_id, valid_until"), ("request_id",)),
    Table(
        "statement_rates",
        _columns("sender, client_id, accepted, silent_until, idle_at"),
        ("sender", "client_id"),
    ),
    Table(
        "statement_pushes",
        _columns(
            "push_key, device_id, subscription_id, statement_hash, sender, topic, accepted_at, sent_at,"
            " keep_until, outcome"
        ),
        ("push_key",),
        {"push_key": "last_statement_push"},
    ),
    Table(
        "pending_statements",
        _columns("push_key, sub_key, data, attempted, topics, signature, expiry, expires_at, received_at"),
        ("push_key",),
        {"push_key": "last_statement_push"},
        frozenset({"attempted"}),
    ),
    Table("statement_devices", _columns("device_id, accepted, dropped, idle_at"), ("device_id",)),
)

COUNT_TOKEN_ROUTERS = (
    f"DELETE FROM {TOKEN_ROUTERS.name}",
    f"INSERT INTO {TOKEN_ROUTERS.name} ({', '.join(TOKEN_ROUTERS.columns)})"
    f" SELECT token_key, server_key, count(*) FROM {SUBSCRIPTIONS.name} GROUP BY 1, 2",
)
"For a store that is made from subscriptions alone."

PARENTS = (SERVERS, TOKENS, STATEMENT_SUBSCRIPTIONS)
TABLES = (*PARENTS, SUBSCRIPTIONS, TOKEN_ROUTERS, UNSENT, SENT, *STATEMENTS)
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
    last_statement_sub: int = 0
    last_statement_push: int = 0

    def limits(self, table: Table) -> str:
        """SQL for the rows up to these marks."""
        return "".join(f" AND {column} <= {getattr(self, mark)}" for column, mark in table.bounds.items())


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

    async def page(self, table: Table, after: Key, upto: Marks | None) -> list[Row]:
        """The next rows; with `upto` only those that were there then."""

    async def count(self, table: Table) -> int: ...

    async def marks(self) -> Marks: ...


class NewTables(ReadTables, Protocol):
    """A store that is being made. Nobody sees it before it is finished; how far it is survives a crash."""

    async def append(self, table: Table, rows: Sequence[Row], note: str) -> None:
        """New rows, and with them in one transaction a note under the table's name: how far the work is."""

    async def begin(self, source: str) -> None:
        """Notes what the new store is made from; what an earlier run made from something else is removed."""

    async def count_token_routers(self) -> None: ...

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
