"""Snapshots: tokens, subscriptions and servers of the store as Parquet, with pseudonyms for ids."""

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from protocol.addresses import SmpServer
from store.journal_schema import epoch_of, pseudonym
from store.rows import DELETED
from store.sums import STATE_COLUMNS, read_state

Rows = Iterator[Sequence[Any]]

PAGE = 20_000
BUSY_SECONDS = 10.0

TAKEN = pa.field("taken", pa.timestamp("us", tz="UTC"), nullable=False)
EPOCH = pa.field("epoch", pa.int64(), nullable=False)
TABLES: Mapping[str, pa.Schema] = {
    "tokens": pa.schema(
        [
            TAKEN,
            EPOCH,
            ("token", pa.binary()),
            ("provider", pa.string()),
            ("status", pa.string()),
            ("cron_minutes", pa.int64()),
            ("updated", pa.timestamp("us", tz="UTC")),
        ]
    ),
    "subscriptions": pa.schema(
        [
            TAKEN,
            EPOCH,
            ("subscription", pa.binary()),
            ("token", pa.binary()),
            ("server", pa.string()),
            ("status", pa.string()),
            ("associated", pa.bool_()),
        ]
    ),
    "servers": pa.schema(
        [
            TAKEN,
            EPOCH,
            ("server", pa.string()),
            ("subscriptions", pa.int64()),
            ("associated", pa.int64()),
            ("has_service", pa.bool_()),
        ]
    ),
}


class SnapshotError(Exception):
    """The store cannot be read; the message says why."""


class SnapshotSource(Protocol):
    """A store at one moment. Ids come raw, in the order of the columns of `TABLES` after `epoch`."""

    def tables(self) -> Iterator[tuple[str, Rows]]:
        """Each table's name and rows, all of the same moment."""


HOSTS_AT: Mapping[str, int] = {"subscriptions": 2, "servers": 0}
"Where rows of stores have hosts and port, which together are one column of a snapshot."
STATE_AT = 4
"Where rows of subscriptions have what their state follows from."


def with_names(table: str, row: Sequence[Any]) -> Sequence[Any]:
    """A row with its server as the journal names it, and its state as it is now."""
    if table == "subscriptions":
        stored, turns = read_state(row[STATE_AT:])
        row = [*row[:STATE_AT], stored.now(turns).value, stored.associated]
    at = HOSTS_AT.get(table)
    if at is None:
        return row
    hosts, port = row[at : at + 2]
    name = SmpServer(tuple(hosts.split(",")), port, b"").host_port
    return [*row[:at], name, *row[at + 2 :]]


def queries(*, provider: str) -> Mapping[str, str]:
    """One for each table; `provider` is how a database takes it out of a device token."""
    return {
        "tokens": f"SELECT token_id, {provider}, status, cron_minutes, updated_on * 1000000 FROM tokens"
        f" WHERE status <> '{DELETED}'",
        "subscriptions": f"SELECT s.subscription_id, t.token_id, v.hosts, v.port, {STATE_COLUMNS}"
        " FROM subscriptions s JOIN tokens t USING (token_key) JOIN smp_servers v USING (server_key)"
        f" WHERE t.status <> '{DELETED}'",
        "servers": "SELECT hosts, port,"
        " (SELECT count(*) FROM subscriptions s JOIN tokens t USING (token_key)"
        f" WHERE s.server_key = v.server_key AND t.status <> '{DELETED}'),"
        " associated_count, service_id IS NOT NULL FROM smp_servers v",
    }


class SqliteSource:
    """The embedded store, read in one transaction beside a running daemon."""

    QUERIES = queries(provider="CAST(substr(device_token, 1, 2) AS TEXT)")

    def __init__(self, path: Path) -> None:
        self._path = path

    def tables(self) -> Iterator[tuple[str, Rows]]:
        """See `SnapshotSource.tables`."""
        if not self._path.is_file():
            raise SnapshotError(f"no such file: {self._path}")
        uri = f"file:{quote(str(self._path.absolute()))}?mode=ro"
        with self._explained(), closing(sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS)) as db:
            db.isolation_level = None
            db.execute("BEGIN")
            for name, query in self.QUERIES.items():
                yield name, self._rows(db, name, query)

    def _rows(self, db: sqlite3.Connection, name: str, query: str) -> Rows:
        with self._explained():
            for row in db.execute(query):
                yield with_names(name, row)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise SnapshotError(f"cannot read {self._path}: {error}") from error


@dataclass(frozen=True)
class SnapshotResult:
    """How many rows of each table were written, and where."""

    rows: Mapping[str, int]
    files: Sequence[Path]


def write_snapshot(source: SnapshotSource, key: bytes, taken: datetime, out: Path) -> SnapshotResult:
    """Write every table to `out/<table>/date=<day>/<time>.parquet`; complete files appear, or none."""
    rows: dict[str, int] = {}
    drafts: dict[Path, Path] = {}
    try:
        for name, values in source.tables():
            folder = out / name / f"date={taken.astimezone(UTC):%Y-%m-%d}"
            folder.mkdir(parents=True, exist_ok=True)
            target = folder / f"{taken.astimezone(UTC):%H%M%S}.parquet"
            drafts[target] = folder / f".{target.name}.draft"
            rows[name] = write_table(drafts[target], TABLES[name], values, key, taken)
        for target, draft in drafts.items():
            draft.rename(target)
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
    return SnapshotResult(rows, list(drafts))


def write_table(path: Path, schema: pa.Schema, rows: Rows, key: bytes, taken: datetime) -> int:
    """Write one table page by page; ids are replaced by pseudonyms before anything reaches the disk."""
    given, epoch = schema.names[2:], epoch_of(key)
    ids = [i for i, column in enumerate(given) if column in ("token", "subscription")]
    written = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for page in pages(rows):
            named = [[pseudonym(key, v) if i in ids else v for i, v in enumerate(row)] for row in page]
            columns = [[taken] * len(named), [epoch] * len(named), *zip(*named, strict=True)]
            arrays = [
                pa.array(bools(column) if field.type == pa.bool_() else column, field.type)
                for column, field in zip(columns, schema, strict=True)
            ]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
            written += len(named)
    return written


def pages(rows: Rows) -> Iterator[list[Sequence[Any]]]:
    """Rows in lists of at most `PAGE`."""
    page: list[Sequence[Any]] = []
    for row in rows:
        page.append(row)
        if len(page) == PAGE:
            yield page
            page = []
    if page:
        yield page


def bools(values: Sequence[Any]) -> list[bool]:
    """SQLite has no booleans."""
    return [bool(value) for value in values]
