"""PostgreSQL's side of the operations: how a statement is run, what a transaction keeps and checks, and
notifications on their way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import asyncpg

from protocol.addresses import SmpServer
from protocol.device_token import Provider
from protocol.encoding import EntityId
from protocol.statuses import SUBSCRIBING, TokenStatus
from store.interface import KEPT_NOTIFICATIONS, UNSENT_LOADED, LeaseLost
from store.leases import FORGET, FORGET_UNASSOCIATED, HANDED_OVER, Duty, Lease, of_router
from store.policy import Owner, RowCaps
from store.records import (
    CreatedSubscription,
    LastNotification,
    SentEntry,
    ServerKey,
    SnewRefusal,
    Stored,
    SubKey,
    TokenKey,
    TokenPush,
)
from store.rows import DELETED, TOKEN_COLUMNS, last_notification, newest_entries, token_record
from store.sql_store import (
    Arrived,
    Database,
    Failure,
    Row,
    Sql,
    Transaction,
    address_columns,
    smp_server,
)

CHANNEL = "ntf"
"On which daemons talk."
SAY = f"SELECT pg_notify('{CHANNEL}', words) FROM unnest($1::text[]) words"

_WRITE_TOTALS = """
INSERT INTO totals AS t (daemon_id, tokens, active_tokens, subscriptions, active_subscriptions)
VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (daemon_id) DO UPDATE SET tokens = t.tokens + excluded.tokens,
    active_tokens = t.active_tokens + excluded.active_tokens,
    subscriptions = t.subscriptions + excluded.subscriptions,
    active_subscriptions = t.active_subscriptions + excluded.active_subscriptions
"""


_HELD = """
SELECT l.duty, l.id FROM unnest($1::text[], $2::bigint[], $3::bigint[]) i(duty, id, fence)
JOIN leases l ON l.duty = i.duty AND l.id = i.id AND l.owner = $4 AND l.fence = i.fence
ORDER BY l.duty, l.id FOR SHARE OF l
"""
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(encode($1::bytea, 'hex'), 18))"
# Locked, so that the caps of a token are counted by one daemon at a time.
_LOCK_OWNERS = f"""
SELECT token_key, status, verified FROM tokens
WHERE token_key = ANY($1::bigint[]) AND status <> '{DELETED}' ORDER BY token_key FOR NO KEY UPDATE
"""
_USED = "SELECT token_key, server_key, subscriptions FROM token_routers WHERE token_key = ANY($1::bigint[])"
_NEW_SERVERS = """
INSERT INTO smp_servers (hosts, port, key_hash)
SELECT hosts, port, key_hash FROM unnest($1::text[], $2::text[], $3::bytea[]) i(hosts, port, key_hash)
ORDER BY 1, 2, 3 ON CONFLICT DO NOTHING
"""
_SERVERS = """
SELECT v.hosts, v.port, v.key_hash, v.server_key
FROM unnest($1::text[], $2::text[], $3::bytea[]) i(hosts, port, key_hash)
JOIN smp_servers v USING (hosts, port, key_hash)
"""
_NEW_KEYS = """
SELECT nextval(pg_get_serial_sequence('subscriptions', 'sub_key')) FROM generate_series(1, $1)
"""
_INSERT = """
WITH inserted AS (
    INSERT INTO subscriptions
        (sub_key, subscription_id, token_key, notifier_id, notifier_key, spelling, server_key, state)
    OVERRIDING SYSTEM VALUE
    SELECT * FROM unnest(
        $1::bigint[], $2::bytea[], $3::bigint[], $4::bytea[], $5::bytea[], $6::text[], $7::bigint[],
        $8::text[]
    )
    RETURNING token_key, server_key
)
INSERT INTO token_routers AS r (token_key, server_key, subscriptions)
SELECT token_key, server_key, count(*) FROM inserted GROUP BY 1, 2 ORDER BY 1, 2
ON CONFLICT (token_key, server_key) DO UPDATE SET subscriptions = r.subscriptions + excluded.subscriptions
"""
# Locked until the rows are committed: whoever becomes owner of a router finds them there, or handed over.
_HAND_OVER = f"""
WITH locked AS MATERIALIZED (
    SELECT id, owner FROM leases WHERE duty = '{Duty.ROUTER}' AND id = ANY($1::bigint[]) ORDER BY id FOR SHARE
), foreigners AS (
    SELECT i.server_key, i.sub_key, coalesce(l.owner, 0) AS owner
    FROM unnest($1::bigint[], $2::bigint[]) i(server_key, sub_key) JOIN locked l ON l.id = i.server_key
    WHERE l.owner IS DISTINCT FROM $3
), added AS (
    INSERT INTO handovers (server_key, sub_key) SELECT DISTINCT server_key, sub_key FROM foreigners
    ON CONFLICT (server_key, sub_key) DO UPDATE SET sub_key = excluded.sub_key -- a new version of the row
)
SELECT pg_notify('{CHANNEL}', concat_ws(' ', '{HANDED_OVER}', '0', owner))
FROM (SELECT DISTINCT owner FROM foreigners) o
"""


class Fences(Protocol):
    """What a transaction asks of the leases of its daemon."""

    has_joined: bool

    def owns(self, lease: Lease) -> bool: ...

    def fence(self, lease: Lease) -> int | None: ...

    def shown(self, lease: Lease) -> int | None: ...

    def refused(self, lease: Lease) -> LeaseLost: ...

    def words_about(self, verb: str, words: Iterable[str], first: str) -> list[str]: ...


class PostgresDatabase(Database):
    def __init__(self, db: asyncpg.Connection) -> None:
        self.db = db

    async def fetch(self, statement: Sql, *parameters: Any) -> Sequence[Row]:
        rows: Sequence[Row] = await self.db.fetch(statement.postgres, *parameters)
        return rows

    async def fetch_each(self, statement: Sql, ids: Sequence[bytes]) -> Sequence[Row]:
        return await self.fetch(statement, ids)

    async def fetch_rows(self, statement: Sql, rows: Sequence[Row]) -> Sequence[Row]:
        return await self.fetch(statement, *_columns(rows)) if rows else []

    async def execute(self, statement: Sql, *parameters: Any) -> int:
        tag: str = await self.db.execute(statement.postgres, *parameters)
        rows = tag.rpartition(" ")[2]
        return int(rows) if rows.isdigit() else 0

    async def execute_rows(self, statement: Sql, rows: Sequence[Row]) -> int:
        return await self.execute(statement, *_columns(rows)) if rows else 0


def _columns(rows: Iterable[Row]) -> list[list[Any]]:
    """As arrays."""
    return [list(column) for column in zip(*rows, strict=True)]


class PostgresTransaction(PostgresDatabase, Transaction):
    def __init__(self, db: asyncpg.Connection, daemon_id: int, leases: Fences, caps: RowCaps) -> None:
        Transaction.__init__(self, caps)
        self.db = db
        self.daemon_id = daemon_id
        self.leases = leases
        self._checked: set[Lease] = set()
        self._deleted: dict[tuple[str, ServerKey], list[EntityId]] = {}

    async def check_owner(self, lease: Lease) -> None:
        """LeaseLost unless this daemon owns it, and then until the end of the transaction."""
        fence = self.leases.fence(lease)
        if fence is None or lease in self._checked:
            return
        if not await self._held({lease: fence}):
            raise self.leases.refused(lease)
        self._checked.add(lease)

    async def held(self, leases: Iterable[Lease]) -> set[Lease]:
        asked = set(leases)
        if not self.leases.has_joined:
            return asked
        held = await self._held(
            {lease: fence for lease in asked if (fence := self.leases.shown(lease)) is not None}
        )
        for lease in asked - held:
            self.leases.refused(lease)
        return held

    async def _held(self, fences: Mapping[Lease, int]) -> set[Lease]:
        duties, ids = [lease.duty.value for lease in fences], [lease.id for lease in fences]
        rows = await self.db.fetch(_HELD, duties, ids, list(fences.values()), self.daemon_id)
        return {Lease(Duty(duty), id) for duty, id in rows}

    def deleted(self, key: ServerKey, notifier_id: EntityId, *, associated: bool) -> None:
        if self.leases.has_joined and not self.leases.owns(of_router(key)):
            verb = FORGET if associated else FORGET_UNASSOCIATED
            self._deleted.setdefault((verb, key), []).append(notifier_id)

    async def lock(self, name: bytes) -> None:
        await self.db.execute(_LOCK, name)

    async def kept(self, statement: Sql, keys: Iterable[int]) -> set[int]:
        asked = list(keys)
        return {row[0] for row in await self.fetch(statement, asked)} if asked else set()

    async def flush(self) -> None:
        await self.settle_routers()
        changes = (self.tokens, self.active_tokens, self.subscriptions, self.active_subscriptions)
        if any(changes):
            await self.db.execute(_WRITE_TOTALS, self.daemon_id, *changes)
        words = [
            notice
            for (verb, key), ids in self._deleted.items()
            for notice in self.leases.words_about(verb, [id.hex() for id in ids], str(key))
        ]
        if words:
            await self.db.execute(SAY, words)

    async def owners(self, keys: Sequence[TokenKey]) -> dict[TokenKey, Owner]:
        owners = {
            TokenKey(key): Owner(verified and status in SUBSCRIBING, set(), 0)
            for key, status, verified in await self.db.fetch(_LOCK_OWNERS, keys)
        }
        for key, server_key, count in await self.db.fetch(_USED, list(owners)):
            owners[TokenKey(key)].routers.add(ServerKey(server_key))
            owners[TokenKey(key)].subscriptions += count
        return owners

    async def new_keys(self, count: int) -> Iterator[SubKey]:
        return iter([SubKey(row[0]) for row in await self.db.fetch(_NEW_KEYS, count)])

    async def new_servers(self, servers: Collection[SmpServer]) -> dict[SmpServer, ServerKey]:
        """Those that another daemon just made as well."""
        addresses = _columns(address_columns(server) for server in servers)
        await self.db.execute(_NEW_SERVERS, *addresses)
        rows = await self.db.fetch(_SERVERS, *addresses)
        return {smp_server(*row[:3]): ServerKey(row[3]) for row in rows}

    async def insert(self, rows: Sequence[Row]) -> None:
        await self.db.execute(_INSERT, *_columns(rows))

    async def hand_over(self, created: Sequence[CreatedSubscription | SnewRefusal]) -> None:
        new = [one for one in created if isinstance(one, CreatedSubscription) and one.handed_over]
        if new and self.leases.has_joined:
            keys, queues = [one.server_key for one in new], [one.queue.key for one in new]
            await self.db.execute(_HAND_OVER, keys, queues, self.daemon_id)


# Notifications: one statement for a whole group of NMSGs, never one for each

# Of several notifications of one queue the last one stays. Rows are locked in the order of their keys, as by
# everyone who locks more than one of them.
_ADD = f"""
WITH held AS MATERIALIZED (
    {{}}
), input AS (
    SELECT * FROM unnest($1::bigint[], $2::bytea[], $3::bigint[], $4::bytea[], $5::bytea[])
        WITH ORDINALITY i(server_key, notifier_id, received_at, nonce, meta, place)
), target AS (
    SELECT i.*, s.sub_key, s.token_key, s.subscription_id, t.token_id, substr(t.device_token, 1, 2) AS tag
    FROM input i JOIN held USING (server_key)
    JOIN subscriptions s USING (server_key, notifier_id) JOIN tokens t USING (token_key)
    WHERE t.status = '{TokenStatus.ACTIVE}'
), newest AS (
    SELECT DISTINCT ON (sub_key) * FROM target ORDER BY sub_key, place DESC
), numbered AS (
    SELECT *, nextval(pg_get_serial_sequence('unsent_notifications', 'seq')) AS seq
    FROM (SELECT * FROM newest ORDER BY place) in_order
), added AS (
    INSERT INTO unsent_notifications (seq, token_key, sub_key, received_at, nonce, meta)
    SELECT seq, token_key, sub_key, received_at, nonce, meta FROM numbered ORDER BY sub_key
    ON CONFLICT (token_key, sub_key) {{}}
)
SELECT place, token_key, sub_key, token_id, subscription_id, tag FROM target
UNION ALL SELECT 0, server_key, 0, '', '', '' FROM held
"""
_REPLACE = """
    DO UPDATE SET seq = excluded.seq, received_at = excluded.received_at, nonce = excluded.nonce,
        meta = excluded.meta
"""
_ANYBODY = "SELECT DISTINCT server_key FROM unnest($1::bigint[]) i(server_key)"
_ADD_ALONE = _ADD.format(_ANYBODY, _REPLACE)
_ADD_LATE = _ADD.format(_ANYBODY, "DO NOTHING")
# Locked until the commit: no other daemon becomes owner in between.
_ADD_AS_OWNER = _ADD.format(
    f"""
    SELECT l.id AS server_key FROM unnest($6::bigint[], $7::bigint[]) i(server_key, fence)
    JOIN leases l ON l.duty = '{Duty.ROUTER}' AND l.id = i.server_key AND l.owner = $8 AND l.fence = i.fence
    FOR SHARE OF l
    """,
    _REPLACE,
)
_ENTRY = """
n.sub_key, n.seq, v.hosts, v.port, v.key_hash, s.notifier_id, n.received_at, n.nonce, n.meta, s.spelling
"""
_ENTRIES = f"""
SELECT true, t.token_key, {_ENTRY}
FROM unnest($1::bigint[]) t(token_key)
CROSS JOIN LATERAL (
    SELECT * FROM unsent_notifications u WHERE u.token_key = t.token_key ORDER BY u.seq LIMIT {UNSENT_LOADED}
) n
JOIN subscriptions s ON s.sub_key = n.sub_key JOIN smp_servers v USING (server_key)
UNION ALL
SELECT false, n.token_key, {_ENTRY}
FROM sent_notifications n JOIN subscriptions s ON s.sub_key = n.sub_key JOIN smp_servers v USING (server_key)
WHERE n.token_key = ANY($1::bigint[])
ORDER BY 4
"""
_ACTIVE_TOKENS = f"""
SELECT {TOKEN_COLUMNS} FROM tokens WHERE token_key = ANY($1::bigint[]) AND status = '{TokenStatus.ACTIVE}'
"""
_SET_SENT = """
WITH marked AS (
    SELECT seq FROM unsent_notifications WHERE seq = ANY($1::bigint[]) ORDER BY sub_key FOR UPDATE
), moved AS (
    DELETE FROM unsent_notifications u USING marked m WHERE u.seq = m.seq
    RETURNING u.token_key, u.sub_key, u.seq, u.received_at, u.nonce, u.meta
)
INSERT INTO sent_notifications (token_key, sub_key, seq, received_at, nonce, meta)
SELECT * FROM moved ORDER BY token_key, sub_key
ON CONFLICT (token_key, sub_key) DO UPDATE SET
    seq = excluded.seq, received_at = excluded.received_at, nonce = excluded.nonce, meta = excluded.meta
"""
_FORGET = f"""
DELETE FROM sent_notifications n USING (
    SELECT token_key, sub_key, row_number() OVER (PARTITION BY token_key ORDER BY seq DESC) AS place
    FROM sent_notifications WHERE token_key = ANY($1::bigint[])
) o
WHERE n.token_key = o.token_key AND n.sub_key = o.sub_key AND o.place > {KEPT_NOTIFICATIONS}
"""


def late_adder(
    leases: Fences,
) -> Callable[[asyncpg.Connection, Sequence[Arrived]], Awaitable[list[list[Stored | None] | Failure]]]:
    """The batch of `add_late_notifications`: it asks for no fence, and replaces nothing."""

    async def add(db: asyncpg.Connection, blocks: Sequence[Arrived]) -> list[list[Stored | None] | Failure]:
        return _results(blocks, await _add(db, _ADD_LATE, blocks), leases)

    return add


def adder(
    daemon_id: Callable[[], int], leases: Fences
) -> Callable[[asyncpg.Connection, Sequence[Arrived]], Awaitable[list[list[Stored | None] | Failure]]]:
    """The batch of `add_notifications`."""

    async def add(db: asyncpg.Connection, blocks: Sequence[Arrived]) -> list[list[Stored | None] | Failure]:
        keys = list({block.server_key for block in blocks})
        if not leases.has_joined:
            return _results(blocks, await _add(db, _ADD_ALONE, blocks), leases)
        fences = [leases.shown(of_router(key)) for key in keys]
        rows = await _add(db, _ADD_AS_OWNER, blocks, keys, fences, daemon_id())
        return _results(blocks, rows, leases)

    return add


async def _add(
    db: asyncpg.Connection, statement: str, blocks: Sequence[Arrived], *owner: Any
) -> list[asyncpg.Record]:
    all_of = [(block, notification) for block in blocks for notification in block.notifications]
    rows: list[asyncpg.Record] = await db.fetch(
        statement,
        [block.server_key for block, _ in all_of],
        [notification.notifier_id for _, notification in all_of],
        [block.received_at for block, _ in all_of],
        [notification.nonce for _, notification in all_of],
        [notification.meta for _, notification in all_of],
        *owner,
    )
    return rows


def _results(
    blocks: Sequence[Arrived], rows: Sequence[asyncpg.Record], leases: Fences
) -> list[list[Stored | None] | Failure]:
    stored: list[Stored | None] = [None] * sum(len(block.notifications) for block in blocks)
    held: set[ServerKey] = set()
    for place, key, sub_key, token_id, subscription_id, tag in rows:
        if place:
            ids = EntityId(token_id), EntityId(subscription_id)
            stored[place - 1] = Stored(TokenKey(key), SubKey(sub_key), *ids, Provider(tag))
        else:
            held.add(ServerKey(key))
    left = iter(stored)
    results: list[list[Stored | None] | Failure] = []
    for block in blocks:
        entries = [next(left) for _ in block.notifications]
        is_held = block.server_key in held or not entries
        results.append(entries if is_held else Failure(leases.refused(of_router(block.server_key))))
    return results


async def pushes(db: asyncpg.Connection, keys: Sequence[TokenKey]) -> list[TokenPush]:
    tokens = {TokenKey(row[0]): token_record(row) for row in await db.fetch(_ACTIVE_TOKENS, keys)}
    unsent: dict[TokenKey, list[LastNotification]] = {key: [] for key in tokens}
    sent: dict[TokenKey, list[LastNotification]] = {key: [] for key in tokens}
    for is_unsent, key, *entry in await db.fetch(_ENTRIES, list(tokens)):
        (unsent if is_unsent else sent)[key].append(last_notification(entry, sent=not is_unsent))
    found = ((token, newest_entries(unsent[key], sent[key])) for key, token in tokens.items())
    return [TokenPush(token, entries) for token, entries in found if entries]


async def set_sent(db: asyncpg.Connection, calls: Sequence[Sequence[SentEntry]]) -> list[None]:
    """A number is given once and goes with its entry, so it alone tells if the entry is still the same.

    Two statements: what the second one forgets needs no transaction with the first.
    """
    entries = [entry for call in calls for entry in call]
    await db.execute(_SET_SENT, [entry.seq for entry in entries])
    await db.execute(_FORGET, list({entry.token_key for entry in entries}))
    return [None] * len(calls)
