"""Snapshots: tokens, subscriptions and servers of the store as Parquet, with pseudonyms for ids."""

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from analytics.errors import AnalyticsError
from protocol.addresses import SmpServer
from store.database_files import open_to_read
from store.journal_schema import epoch_of, pseudonym
from store.rows import DELETED
from store.sums import STATE_COLUMNS, read_state

Ask = Callable[[str], Iterable[Sequence[Any]]]
"A store at one moment: whoever is given a query gives its rows."

PAGE = 20_000
BUSY_SECONDS = 10.0

ID, TEXT, NUMBER, TIME = pa.binary(), pa.string(), pa.int64(), pa.timestamp("us", tz="UTC")


def table(**columns: pa.DataType) -> pa.Schema:
    """Each row says when it was taken, and with which key its pseudonyms were made."""
    taken, epoch = pa.field("taken", TIME, nullable=False), pa.field("epoch", NUMBER, nullable=False)
    return pa.schema([taken, epoch, *columns.items()])


TABLES: Mapping[str, pa.Schema] = {
    "tokens": table(token=ID, provider=TEXT, status=TEXT, cron_minutes=NUMBER, updated=TIME),
    "subscriptions": table(subscription=ID, token=ID, server=TEXT, status=TEXT, associated=pa.bool_()),
    "servers": table(server=TEXT, subscriptions=NUMBER, associated=NUMBER, has_service=pa.bool_()),
}
QUERIES: Mapping[str, str] = {
    "tokens": "SELECT token_id, substr(device_token, 1, 2), status, cron_minutes, updated_on * 1000000"
    f" FROM tokens WHERE status <> '{DELETED}'",
    "subscriptions": f"SELECT s.subscription_id, t.token_id, v.hosts, v.port, {STATE_COLUMNS}"
    " FROM subscriptions s JOIN tokens t USING (token_key) JOIN smp_servers v USING (server_key)"
    f" WHERE t.status <> '{DELETED}'",
    "servers": "SELECT hosts, port,"
    " (SELECT count(*) FROM subscriptions s JOIN tokens t USING (token_key)"
    f" WHERE s.server_key = v.server_key AND t.status <> '{DELETED}'),"
    " associated_count, service_id IS NOT NULL FROM smp_servers v",
}


def shown(table: str, row: Sequence[Any], key: bytes) -> list[Any]:
    """A row in the columns of its table: pseudonyms for ids, the state as it is now."""
    if table == "tokens":
        token_id, provider, *others = row
        return [pseudonym(key, token_id), provider.decode(), *others]
    if table == "subscriptions":
        subscription_id, token_id, hosts, port, *state = row
        stored, turns = read_state(state)
        ids = [pseudonym(key, subscription_id), pseudonym(key, token_id)]
        return [*ids, server_name(hosts, port), stored.now(turns).value, stored.associated]
    hosts, port, subscriptions, associated, has_service = row
    return [server_name(hosts, port), subscriptions, associated, bool(has_service)]


def server_name(hosts: str, port: str) -> str:
    """As the journal has it."""
    return SmpServer(tuple(hosts.split(",")), port, b"").host_port


@contextmanager
def sqlite_store(path: Path) -> Iterator[Ask]:
    """The embedded store, read in one transaction beside a running daemon."""
    if not path.is_file():
        raise AnalyticsError(f"no such file: {path}")
    try:
        with closing(open_to_read(path, timeout=BUSY_SECONDS, isolation_level=None)) as db:
            db.execute("BEGIN")
            yield db.execute
    except sqlite3.Error as error:
        raise AnalyticsError(f"cannot read {path}: {error}") from error


@dataclass(frozen=True)
class SnapshotResult:
    """How many rows of each table were written, and where."""

    rows: Mapping[str, int]
    files: Sequence[Path]


def write_snapshot(ask: Ask, key: bytes, taken: datetime, out: Path) -> SnapshotResult:
    """Write every table to `out/<table>/date=<day>/<time>.parquet`; complete files appear, or none."""
    rows: dict[str, int] = {}
    drafts: dict[Path, Path] = {}
    try:
        for name, query in QUERIES.items():
            folder = out / name / f"date={taken.astimezone(UTC):%Y-%m-%d}"
            folder.mkdir(parents=True, exist_ok=True)
            target = folder / f"{taken.astimezone(UTC):%H%M%S}.parquet"
            drafts[target] = folder / f".{target.name}.draft"
            found = (shown(name, row, key) for row in ask(query))
            rows[name] = write_table(drafts[target], TABLES[name], found, epoch_of(key), taken)
        for target, draft in drafts.items():
            draft.rename(target)
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
    return SnapshotResult(rows, list(drafts))


def write_table(
    path: Path, schema: pa.Schema, rows: Iterator[Sequence[Any]], epoch: int, taken: datetime
) -> int:
    """Write one table page by page; returns the number of its rows."""
    written = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        while page := list(islice(rows, PAGE)):
            columns = [[taken] * len(page), [epoch] * len(page), *zip(*page, strict=True)]
            arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
            written += len(page)
    return written
