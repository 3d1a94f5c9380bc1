"""Reads the deployed server's database, at one moment, and makes a store of ours from it.

Everything is read twice: first to see what there is, what cannot be read, and what the result must be; then
to write it. Keys are the places of rows in the order of their ids, so a later run gives the same ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from protocol.statuses import SubState, TokenStatus
from store.interface import KEPT_NOTIFICATIONS, StoreError
from store.moving import CopyDiffers, Progress
from store.reference import (
    Moment,
    Queues,
    RouterRow,
    Source,
    Unreadable,
    notification_row,
    router,
    subscription_row,
    token_row,
)
from store.tables import (
    PAGE,
    SENT,
    SERVERS,
    SUBSCRIPTIONS,
    TOKENS,
    Marks,
    NewTables,
    Row,
    Sum,
    Table,
    sum_of,
)

_SERVERS = "SELECT * FROM smp_servers ORDER BY smp_server_id"
_TOKENS = """
WITH t AS (SELECT *, row_number() OVER (ORDER BY token_id) AS key FROM tokens)
SELECT t.*, EXISTS (SELECT 1 FROM subscriptions s WHERE s.token_id = t.token_id) AS has_subscriptions
FROM t WHERE key > $1 ORDER BY key
"""
_TOKEN_KEYS = "t AS (SELECT token_id, row_number() OVER (ORDER BY token_id) AS token_key FROM tokens)"
_SUBSCRIPTIONS = f"""
WITH {_TOKEN_KEYS},
    s AS (SELECT *, row_number() OVER (ORDER BY subscription_id) AS key FROM subscriptions)
SELECT s.*, t.token_key FROM s LEFT JOIN t USING (token_id) WHERE s.key > $1 ORDER BY s.key
"""
# The deployed server may have kept more of a token than we do; those would go with the next push anyway.
_NOTIFICATIONS = f"""
WITH {_TOKEN_KEYS},
    s AS (SELECT subscription_id, row_number() OVER (ORDER BY subscription_id) AS sub_key FROM subscriptions),
    n AS (
        SELECT *, row_number() OVER (ORDER BY sent_at, subscription_id) AS seq,
            row_number() OVER (PARTITION BY token_id ORDER BY sent_at DESC, subscription_id) AS place
        FROM last_notifications
    )
SELECT n.*, t.token_key, s.sub_key, t.token_key << 32 | s.sub_key AS key
FROM n JOIN t USING (token_id) JOIN s USING (subscription_id)
WHERE place <= {KEPT_NOTIFICATIONS} AND (t.token_key << 32 | s.sub_key) > $1 ORDER BY key
"""
_QUERIES = {TOKENS: _TOKENS, SUBSCRIPTIONS: _SUBSCRIPTIONS, SENT: _NOTIFICATIONS}
_NAMES = {TOKENS: "tokens", SUBSCRIPTIONS: "subscriptions", SENT: "last_notifications"}
_IDS = {TOKENS: "token_id", SUBSCRIPTIONS: "subscription_id", SENT: "subscription_id"}
_SHOWN = 4
"Bytes of an id that a report shows: enough to find the row."

_PRESENT = """
SELECT count(*) FROM information_schema.tables
WHERE table_schema = $1 AND table_name IN ('tokens', 'smp_servers', 'subscriptions', 'last_notifications')
"""
_OTHERS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""


@dataclass
class Findings:
    """What the deployed server's database holds."""

    sums: dict[str, Sum] = field(
        default_factory=lambda: {table.name: Sum() for table in (SERVERS, *_QUERIES)}
    )
    rows: Counter[str] = field(default_factory=Counter)
    "Rows read, by table there."
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    "What is taken, but not as it was."
    active_tokens: int = 0
    active_subscriptions: int = 0
    last: Counter[str] = field(default_factory=Counter)
    "The highest key of each table of ours."

    def marks(self) -> Marks:
        return Marks(
            tokens=self.sums[TOKENS.name].rows,
            active_tokens=self.active_tokens,
            subscriptions=self.sums[SUBSCRIPTIONS.name].rows,
            active_subscriptions=self.active_subscriptions,
            last_seq=self.last[SENT.name],
            last_server=self.last[SERVERS.name],
            last_token=self.last[TOKENS.name],
            last_sub=self.last[SUBSCRIPTIONS.name],
        )


class ReferenceDatabase:
    """Within a transaction of the caller's that sees one moment."""

    def __init__(self, db: asyncpg.Connection, schema: str, moment: Moment) -> None:
        self._db = db
        self._schema = schema
        self._moment = moment
        self._routers: dict[int, RouterRow] = {}
        self._keepers: set[int] = set()
        "Rows whose service is ours now; of several that are one router, one."
        self._merged: set[int] = set()
        self._queues: dict[int, Queues] = {}
        self._seen_queues: set[tuple[int, bytes]] = set()
        self._seen_devices: set[tuple[bytes, bytes]] = set()
        self._left_out: dict[Table, set[int]] = {table: set() for table in _QUERIES}
        self.findings = Findings()

    async def use(self) -> None:
        if await self._db.fetchval(_PRESENT, self._schema) != 4:
            raise StoreError(f"there is no schema {self._schema!r} with the tables of the deployed server")
        await self._db.execute("SELECT set_config('search_path', quote_ident($1), true)", self._schema)

    async def other_sessions(self) -> int:
        return int(await self._db.fetchval(_OTHERS))

    async def look(self, progress: Progress) -> None:
        """Fills `findings`; changes nothing."""
        await self._read_routers()
        for table in _QUERIES:
            name = _NAMES[table]
            total = int(await self._db.fetchval(f"SELECT count(*) FROM {name}"))
            done = 0
            async for sources in self._pages(table, 0):
                done += len(sources)
                rows = [row async for row in self._converted(table, sources, tell=True)]
                self._count(table, rows)
                progress(f"reading {name}", done, max(done, total))
            self.findings.rows[name] = total
            if table is SENT and total > done:
                self.findings.notes.append(
                    f"last_notifications: {total - done} older ones are not taken, beyond the newest"
                    f" {KEPT_NOTIFICATIONS} of each token"
                )
        servers = self._server_rows()
        self.findings.sums[SERVERS.name] = Sum().with_rows(servers)
        self.findings.last[SERVERS.name] = max((row[0] for row in servers), default=0)

    async def _read_routers(self) -> None:
        first: dict[Any, RouterRow] = {}
        for row in await self._db.fetch(_SERVERS):
            self.findings.rows["smp_servers"] += 1
            where = f"smp_servers {row['smp_server_id']}"
            try:
                found = router(row)
            except Unreadable as error:
                self.findings.problems.append(f"{where}: {error}")
                continue
            if found.problem:
                self.findings.notes.append(f"{where}: taken without its service: {found.problem}")
            known = first.setdefault(found.server, found)
            if known is found:
                self._keepers.add(found.key)
            else:
                self._merged |= {found.key, known.key}
                self.findings.notes.append(
                    f"{where}: the same router as smp_servers {known.key}, joined with it"
                )
            self._routers[row["smp_server_id"]] = known._replace(spelling=found.spelling)

    def _server_rows(self) -> list[Row]:
        keys = sorted(self._keepers)
        return [self._routers[key].row(self._queues.get(key, Queues())) for key in keys]

    async def _pages(self, table: Table, after: int) -> AsyncIterator[list[Source]]:
        page: list[Source] = []
        async for row in self._db.cursor(_QUERIES[table], after, prefetch=PAGE):
            page.append(row)
            if len(page) == PAGE:
                yield page
                page = []
        if page:
            yield page

    async def _converted(self, table: Table, sources: Sequence[Source], *, tell: bool) -> AsyncIterator[Row]:
        for source in sources:
            if tell:
                try:
                    row = await self._row(table, source)
                except Unreadable as error:
                    shown = source[_IDS[table]][:_SHOWN].hex()
                    self.findings.problems.append(f"{_NAMES[table]} {shown}…: {error}")
                    self._left_out[table].add(source["key"])
                    continue
                yield row
            elif source["key"] not in self._left_out[table]:
                yield self._plain_row(table, source)

    async def _row(self, table: Table, source: Source) -> Row:
        """Also checks what goes with other rows."""
        if table is TOKENS:
            row = self._plain_row(table, source)
            await self._check_device(source, row)
            return row
        if source["token_key"] is None or source["token_key"] in self._left_out[TOKENS]:
            raise Unreadable("its token is missing or was not taken")
        if table is SENT:
            if source["sub_key"] in self._left_out[SUBSCRIPTIONS]:
                raise Unreadable("its subscription was not taken")
            return self._plain_row(table, source)
        if source["smp_server_id"] not in self._routers:
            raise Unreadable("its router is missing or was not taken")
        row = self._plain_row(table, source)
        if source["smp_server_id"] in self._merged:
            queue = (row[3], row[4])
            if queue in self._seen_queues:
                raise Unreadable("the same queue has a subscription under another spelling of its router")
            self._seen_queues.add(queue)
        return row

    def _plain_row(self, table: Table, source: Source) -> Row:
        if table is TOKENS:
            return token_row(source, self._moment)
        if table is SENT:
            return notification_row(source)
        its_router = self._routers[source["smp_server_id"]]
        keeps_service = source["smp_server_id"] in self._keepers and its_router.has_service
        return subscription_row(source, its_router, self._moment, keeps_service=keeps_service)

    async def _check_device(self, source: Source, row: Row) -> None:
        """A device token has one spelling with us: two of theirs may become one."""
        token = row[2][-len(source["push_provider_token"]) :]
        if token == source["push_provider_token"]:
            return
        device = (row[2], row[3])
        other = await self._db.fetchval(
            "SELECT 1 FROM tokens WHERE push_provider = $1 AND push_provider_token = $2 AND verify_key = $3",
            source["push_provider"],
            token,
            source["verify_key"],
        )
        if other is not None or device in self._seen_devices:
            raise Unreadable("the same device and key are registered in another spelling")
        self._seen_devices.add(device)

    def _count(self, table: Table, rows: Sequence[Row]) -> None:
        findings = self.findings
        findings.sums[table.name] = findings.sums[table.name].with_rows(rows)
        highest = 2 if table is SENT else 0
        findings.last[table.name] = max(findings.last[table.name], *(row[highest] for row in rows), 0)
        if table is TOKENS:
            findings.active_tokens += sum(row[7] == TokenStatus.ACTIVE for row in rows)
        elif table is SUBSCRIPTIONS:
            findings.active_subscriptions += sum(row[6] == SubState.ACTIVE for row in rows)
            for row in rows:
                self._queues[row[3]] = self._queues.get(row[3], Queues()).with_row(row)

    async def write(self, new: NewTables, progress: Progress) -> None:
        """What `look` found, into a new store; goes on where an earlier run ended."""
        if await new.note(SERVERS.name) is None:
            await new.append(SERVERS, self._server_rows(), "done")
        for table in _QUERIES:
            done = await new.count(table)
            after = int(await new.note(table.name) or 0)
            total = self.findings.sums[table.name].rows
            async for sources in self._pages(table, after):
                rows = [row async for row in self._converted(table, sources, tell=False)]
                await new.append(table, rows, str(sources[-1]["key"]))
                done += len(rows)
                progress(f"writing {table.name}", done, max(done, total))
        await new.count_token_routers()
        await new.set_marks(self.findings.marks())
        await new.prepare_use()

    async def compare(self, new: NewTables) -> None:
        for name, expected in self.findings.sums.items():
            found = await sum_of(new, next(table for table in (SERVERS, *_QUERIES) if table.name == name))
            if found != expected:
                raise CopyDiffers(f"{name} differ: expected were {expected}; written were {found}")

    def fingerprint(self) -> str:
        """Changes whenever the result would: an earlier run of another database is not continued."""
        return json.dumps([str(total) for total in self.findings.sums.values()])

    def associations(self) -> Iterator[tuple[RouterRow, int, bytes]]:
        """Routers with queues that their service subscribes: how many, and the hash of their ids."""
        for key, queues in sorted(self._queues.items()):
            if queues.associated:
                yield self._routers[key], queues.associated, queues.digest
