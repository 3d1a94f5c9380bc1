"""Leases in PostgreSQL, on a connection of their own: they are renewed however busy the others are.

All times are the database's. What a daemon knows by itself is how long ago it asked; so it stops in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TypeVar

import asyncpg

from store.interface import LeaseLost, StoreUnavailable
from store.leases import (
    FREED,
    GATEWAY,
    HANDED_AT_ONCE,
    LEAST_PATIENCE,
    PATIENCE,
    PUSH,
    PUSH_PARTS,
    PUSH_STATEMENTS,
    VALID_PART,
    Changes,
    DaemonRecord,
    Duty,
    HandedOver,
    Lease,
    Notice,
    TimeTold,
    next_step,
    of_router,
)
from store.postgres_database import CHANNEL, SAY
from store.postgres_engine import Pools
from store.postgres_errors import CAUGHT, store_errors
from store.records import ServerKey, StoredRouter, TokenKey
from store.routers import SERVERS_AMONG
from store.rows import QUEUE_COLUMNS, queue_row, stored_router
from store.sql_store import smp_server
from store.statement_records import PushKey

T = TypeVar("T")

NOTICE_SIZE = 7900
"PostgreSQL takes notices of fewer than 8000 bytes."
NOTICES_KEPT = 10_000
"Of other daemons; more are forgotten, and what they meant is found in the store."
TOLD_AT_ONCE = 50_000
TELL_DELAY = 0.01
"Seconds in which words for other daemons gather."

_JOIN = """
INSERT INTO daemons (daemon_id, name, alive_until, has_gateway) OVERRIDING SYSTEM VALUE
VALUES ($1, $2, clock_timestamp() + $3 * interval '1 second', $4)
ON CONFLICT (daemon_id) DO UPDATE SET alive_until = excluded.alive_until
RETURNING extract(epoch FROM clock_timestamp())::float8
"""
_RENEW = """
UPDATE daemons SET alive_until = clock_timestamp() + $2 * interval '1 second'
WHERE daemon_id = $1 AND alive_until > '-infinity'
RETURNING extract(epoch FROM clock_timestamp())::float8
"""
# What daemons and programs counted that are gone becomes one row: that of nobody.
_FOLD_TOTALS = """
WITH gone AS (
    SELECT daemon_id FROM totals t
    WHERE daemon_id <> 0 AND NOT EXISTS (SELECT 1 FROM daemons d WHERE d.daemon_id = t.daemon_id)
    FOR UPDATE SKIP LOCKED
), deleted AS (
    DELETE FROM totals t USING gone WHERE t.daemon_id = gone.daemon_id RETURNING t.*
)
INSERT INTO totals AS t (daemon_id, tokens, active_tokens, subscriptions, active_subscriptions)
SELECT 0, sum(tokens), sum(active_tokens), sum(subscriptions), sum(active_subscriptions) FROM deleted
HAVING count(*) > 0
ON CONFLICT (daemon_id) DO UPDATE SET tokens = t.tokens + excluded.tokens,
    active_tokens = t.active_tokens + excluded.active_tokens,
    subscriptions = t.subscriptions + excluded.subscriptions,
    active_subscriptions = t.active_subscriptions + excluded.active_subscriptions
"""
# A daemon that is given up is marked first: it cannot renew what is being taken from it.
_GIVE_UP = """
UPDATE daemons SET alive_until = '-infinity' WHERE alive_until < clock_timestamp() AND daemon_id <> $1
RETURNING name
"""
# Locked: nobody gives this daemon up while it claims.
_ALIVE = "SELECT true FROM daemons WHERE daemon_id = $1 AND alive_until > clock_timestamp() FOR SHARE"
_FREE = """
UPDATE leases SET owner = NULL WHERE (duty, id) IN (
    SELECT l.duty, l.id FROM leases l JOIN daemons d ON d.daemon_id = l.owner
    WHERE d.alive_until = '-infinity' FOR UPDATE OF l SKIP LOCKED
)
"""
_FORGET = """
DELETE FROM daemons d WHERE alive_until = '-infinity'
    AND NOT EXISTS (SELECT 1 FROM leases WHERE owner = d.daemon_id)
"""
_COUNTS = """
SELECT duty, count(*), count(*) FILTER (WHERE owner = $1), count(*) FILTER (WHERE owner IS NULL)
FROM leases GROUP BY duty
"""
_LIVING = """
SELECT count(*), count(*) FILTER (WHERE has_gateway) FROM daemons WHERE alive_until > clock_timestamp()
"""
_CLAIM = """
WITH free AS (
    SELECT id FROM leases WHERE duty = $2 AND owner IS NULL ORDER BY id LIMIT $3 FOR UPDATE SKIP LOCKED
)
UPDATE leases l SET owner = $1, fence = fence + 1 FROM free WHERE l.duty = $2 AND l.id = free.id
RETURNING l.id, l.fence
"""
_GIVE_BACK = """
UPDATE leases l SET owner = NULL FROM unnest($2::text[], $3::bigint[]) i(duty, id)
WHERE l.duty = i.duty AND l.id = i.id AND l.owner = $1
"""
# A claim whose answer was lost: ours in the table, but we do not know it.
_GIVE_BACK_UNKNOWN = """
UPDATE leases l SET owner = NULL WHERE l.owner = $1 AND NOT EXISTS (
    SELECT 1 FROM unnest($2::text[], $3::bigint[]) i(duty, id) WHERE l.duty = i.duty AND l.id = i.id
)
"""
_LEAVE = "UPDATE leases SET owner = NULL WHERE owner = $1"
_GO = "DELETE FROM daemons WHERE daemon_id = $1"
# Goes from router to router, however many queues of each wait: others wait for daemons that are away.
_HANDED_OVER = f"""
WITH RECURSIVE waiting AS (
    (SELECT server_key FROM handovers ORDER BY server_key LIMIT 1)
    UNION ALL
    SELECT (SELECT server_key FROM handovers h WHERE h.server_key > w.server_key ORDER BY server_key LIMIT 1)
    FROM waiting w WHERE server_key IS NOT NULL
)
SELECT h.version, v.server_key, v.hosts, v.port, v.key_hash, {QUEUE_COLUMNS}
FROM waiting w JOIN smp_servers v USING (server_key) CROSS JOIN LATERAL (
    SELECT xmin::text AS version, sub_key FROM handovers h
    WHERE h.server_key = w.server_key ORDER BY sub_key LIMIT $2
) h JOIN subscriptions USING (sub_key)
WHERE (SELECT owner FROM leases WHERE duty = '{Duty.ROUTER}' AND id = w.server_key) = $1
LIMIT $2
"""
# Locked until the commit: no other daemon becomes owner in between.
_TAKEN = f"""
WITH held AS MATERIALIZED (
    SELECT l.id FROM unnest($4::bigint[], $5::bigint[]) i(server_key, fence)
    JOIN leases l ON l.duty = '{Duty.ROUTER}' AND l.id = i.server_key AND l.owner = $6 AND l.fence = i.fence
    ORDER BY l.id FOR SHARE OF l
)
DELETE FROM handovers h
USING unnest($1::bigint[], $2::bigint[], $3::text[]) i(server_key, sub_key, version), held
WHERE h.server_key = held.id
    AND h.server_key = i.server_key AND h.sub_key = i.sub_key AND h.xmin::text = i.version
"""
_DAEMONS = f"""
SELECT name, daemon_id = $1, count(*) FILTER (WHERE duty = '{Duty.ROUTER}'),
    count(*) FILTER (WHERE duty = '{Duty.PUSHES}'), count(*) FILTER (WHERE duty = '{Duty.CHORES}') > 0,
    count(*) FILTER (WHERE duty = '{Duty.STATEMENTS}') > 0, count(*) FILTER (WHERE duty = '{Duty.TOPICS}')
FROM daemons LEFT JOIN leases ON owner = daemon_id
WHERE alive_until > clock_timestamp() GROUP BY daemon_id, name ORDER BY name, daemon_id
"""


def _clock() -> float:
    """Goes on while the machine sleeps, where there is such a clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class PostgresLeases:
    """The leases of one daemon. A program that never joins owns nothing and is not asked for fences."""

    is_shared = True

    def __init__(
        self,
        pools: Pools,
        daemon_id: Callable[[], int],
        name: str,
        *,
        seconds: float,
        duties: Collection[Duty] = frozenset(Duty),
        clock: Callable[[], float] = _clock,
    ) -> None:
        self._pools = pools
        self._daemon_id = daemon_id
        self._name = name
        self._seconds = seconds
        self._duties = duties
        self._patience = max(seconds * PATIENCE, LEAST_PATIENCE)
        self._clock = clock
        self._fences: dict[Lease, int] = {}
        self._former: dict[Lease, int] = {}
        "Fences of what was ours last."
        self._suspended: set[Lease] = set()
        self._valid_until = 0.0
        self._has_unknown = False
        "Leases may be ours of which we do not know."
        self.has_joined = False
        self._db: asyncpg.Connection | None = None
        self._lock = asyncio.Lock()
        self._heard: deque[Notice] = deque(maxlen=NOTICES_KEPT)
        self._hears = asyncio.Event()
        self._elsewhere: dict[str, set[int]] = {PUSH: set(), PUSH_STATEMENTS: set()}
        self._has_words = asyncio.Event()

    # What is known

    def owns(self, lease: Lease) -> bool:
        return lease in self._fences and lease not in self._suspended and self._clock() < self._valid_until

    def term(self, lease: Lease) -> int:
        return self._fences.get(lease, 0)

    def owned(self) -> Collection[Lease]:
        return list(self._fences)

    def push_parts(self) -> list[int] | None:
        """Those whose pushes we send; None: all."""
        if not self.has_joined:
            return None
        return [part for part in range(PUSH_PARTS) if self.owns(Lease(Duty.PUSHES, part))]

    def fence(self, lease: Lease) -> int | None:
        """To be shown when writing as its owner; None if nobody asks."""
        if not self.has_joined:
            return None
        fence = self.shown(lease)
        if fence is None:
            raise LeaseLost("another daemon may own it by now")
        return fence

    def shown(self, lease: Lease) -> int | None:
        """None, which equals no fence, if another daemon may own it by now."""
        return self._fences.get(lease) if self._clock() < self._valid_until else None

    def refused(self, lease: Lease) -> LeaseLost:
        """The database knows another owner, or an older lease of ours was shown."""
        self._lose([lease])
        self._has_unknown = True
        return LeaseLost("another daemon owns it by now")

    def seconds_left(self) -> float:
        return self._valid_until - self._clock()

    def _lose(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            if (fence := self._fences.pop(lease, None)) is not None:
                self._former[lease] = fence

    def lapse(self) -> None:
        self._lose(list(self._fences))
        self._suspended.clear()
        self._has_unknown = True
        self._hears.set()

    def suspend(self, leases: Collection[Lease]) -> None:
        self._suspended.update(leases)

    # What is asked

    async def join(self) -> TimeTold:
        await self._run(lambda db: db.execute(_FOLD_TOTALS))
        told = await self._sign_of_life(
            *(_JOIN, self._daemon_id(), self._name, self._seconds, Duty.TOPICS in self._duties)
        )
        assert told is not None
        self.has_joined = True
        return told

    async def _sign_of_life(self, statement: str, *arguments: object) -> TimeTold | None:
        async def ask(db: asyncpg.Connection) -> TimeTold | None:
            asked = self._clock()
            now: float | None = await db.fetchval(statement, *arguments)
            if now is None:
                return None
            self._valid_until = asked + self._seconds * VALID_PART
            return TimeTold(now, self._clock() - asked)

        return await self._run(ask)

    async def renew(self) -> TimeTold:
        told = await self._sign_of_life(_RENEW, self._daemon_id(), self._seconds)
        if told is not None:
            return told
        self.lapse()
        await self.join()
        raise LeaseLost("this daemon was taken for dead")

    async def leave(self) -> None:
        """As well as it can: what is left behind lapses."""
        self.lapse()
        with contextlib.suppress(StoreUnavailable):
            await self._run(self._leave)
        await self.disconnect()

    async def _leave(self, db: asyncpg.Connection) -> None:
        async with db.transaction():
            await db.execute(_LEAVE, self._daemon_id())
            await db.execute(_GO, self._daemon_id())
            await db.execute(SAY, [self._words(Notice(FREED, ()))])

    async def balance(self) -> Changes:
        return await self._run(self._balance)

    async def _balance(self, db: asyncpg.Connection) -> Changes:
        if self._has_unknown:
            await db.execute(_GIVE_BACK_UNKNOWN, self._daemon_id(), *_arrays(self._fences))
            self._has_unknown = False
        async with db.transaction():
            if await db.fetch(_GIVE_UP, self._daemon_id()):
                await db.execute(_FREE)
                await db.execute(_FORGET)
        async with db.transaction():
            if not await db.fetchval(_ALIVE, self._daemon_id()):
                return Changes()  # it has to show signs of life first
            changes, claimed = await self._step(db)
        resumed = {lease for lease, fence in claimed.items() if self._former.pop(lease, None) == fence - 1}
        self._fences |= claimed
        self._suspended -= claimed.keys()
        return changes._replace(resumed=resumed)

    async def _step(self, db: asyncpg.Connection) -> tuple[Changes, dict[Lease, int]]:
        all_daemons, gateways = await db.fetchrow(_LIVING)
        claimed: dict[Lease, int] = {}
        surplus: list[Lease] = []
        for name, total, mine, free in await db.fetch(_COUNTS, self._daemon_id()):
            duty = Duty(name)
            daemons = gateways if duty in GATEWAY else all_daemons
            step = next_step(total=total, mine=mine, daemons=daemons)
            if step.claim and free and duty in self._duties:
                rows = await db.fetch(_CLAIM, self._daemon_id(), name, step.claim)
                claimed |= {Lease(duty, id): fence for id, fence in rows}
            if step.give_back:
                surplus += [lease for lease in self._fences if lease.duty is duty][-step.give_back :]
        return Changes(list(claimed), surplus), claimed

    async def give_back(self, leases: Collection[Lease]) -> None:
        self._lose(leases)
        self._suspended -= set(leases)

        async def run(db: asyncpg.Connection) -> None:
            await db.execute(_GIVE_BACK, self._daemon_id(), *_arrays(leases))
            await db.execute(SAY, [self._words(Notice(FREED, ()))])

        await self._run(run)

    async def routers(self, keys: Sequence[ServerKey]) -> list[StoredRouter]:
        rows = await self._run(lambda db: db.fetch(SERVERS_AMONG, keys))
        return [stored_router(row) for row in rows]

    async def handed_over(self) -> list[HandedOver]:
        rows = await self._run(lambda db: db.fetch(_HANDED_OVER, self._daemon_id(), HANDED_AT_ONCE))
        return [
            HandedOver(
                StoredRouter(ServerKey(key), smp_server(*row[2:5]), was_there=False),
                queue_row(row[5:]),
                version,
            )
            for row in rows
            for version, key in (row[:2],)
        ]

    async def taken(self, handed: Sequence[HandedOver]) -> None:
        """By version: what was handed over again meanwhile stays, and what is another daemon's by now."""
        keys, queues = [each.router.key for each in handed], [each.queue.key for each in handed]
        versions = [each.version for each in handed]
        routers = list(set(keys))
        fences = [self.shown(of_router(key)) for key in routers]
        await self._run(
            lambda db: db.execute(_TAKEN, keys, queues, versions, routers, fences, self._daemon_id())
        )

    async def daemons(self) -> list[DaemonRecord]:
        rows = await self._run(lambda db: db.fetch(_DAEMONS, self._daemon_id()))
        return [DaemonRecord(*row) for row in rows]

    # Words between daemons

    def push_elsewhere(self, keys: Collection[TokenKey]) -> None:
        self._tell_later(PUSH, keys)

    def push_statements_elsewhere(self, keys: Collection[PushKey]) -> None:
        self._tell_later(PUSH_STATEMENTS, keys)

    def _tell_later(self, verb: str, keys: Collection[int]) -> None:
        if keys and len(self._elsewhere[verb]) < TOLD_AT_ONCE:
            self._elsewhere[verb].update(keys)
            self._has_words.set()

    async def tell(self) -> None:
        await self._has_words.wait()
        await asyncio.sleep(TELL_DELAY)
        self._has_words.clear()
        words = []
        for verb, keys in self._elsewhere.items():
            words += [self._words(Notice(verb, part)) for part in _parts(map(str, keys))]
            keys.clear()
        await self._run(lambda db: db.execute(SAY, words))

    async def say(self, notice: Notice) -> None:
        await self._run(lambda db: db.execute(SAY, [self._words(notice)]))

    async def notices(self, timeout: float) -> list[Notice]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._hears.wait()
        self._hears.clear()
        heard = list(self._heard)
        self._heard.clear()
        return heard

    def words_about(self, verb: str, words: Iterable[str], first: str) -> list[str]:
        """Notices to be sent in a transaction of the store; `first` stands in each of them."""
        return [self._words(Notice(verb, (first, *part))) for part in _parts(words)]

    def _words(self, notice: Notice) -> str:
        return " ".join((notice.verb, str(self._daemon_id()), *notice.words))

    def _hear(self, connection: object, pid: int, channel: str, payload: object) -> None:
        verb, sender, *words = str(payload).split(" ")
        if sender != str(self._daemon_id()):
            self._heard.append(Notice(verb, tuple(words)))
            self._hears.set()

    # The connection

    async def _run(self, call: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
        async with self._lock:
            with store_errors():
                try:
                    async with asyncio.timeout(self._patience):
                        return await call(await self._connected())
                except CAUGHT:
                    await self.disconnect()
                    raise

    async def _connected(self) -> asyncpg.Connection:
        if self._db is None or self._db.is_closed():
            db = await self._pools.connect()
            try:
                milliseconds = int(self._patience * 1000)
                await db.execute(f"{self._pools.own_settings}; SET statement_timeout = {milliseconds}")
                await db.add_listener(CHANNEL, self._hear)
            except BaseException:
                db.terminate()
                raise
            self._db, self._has_unknown = db, True
            self._hears.set()  # something may have been said meanwhile
        return self._db

    async def disconnect(self) -> None:
        if self._db is not None:
            self._db.terminate()
            self._db = None


def _arrays(leases: Iterable[Lease]) -> tuple[list[str], list[int]]:
    each = list(leases)
    return [lease.duty.value for lease in each], [lease.id for lease in each]


def _parts(words: Iterable[str]) -> list[tuple[str, ...]]:
    """As many words as fit in a notice, again and again."""
    parts: list[list[str]] = []
    room = 0
    for word in words:
        room -= len(word) + 1
        if room < 0:
            parts.append([])
            room = NOTICE_SIZE - 64 - len(word)
        parts[-1].append(word)
    return [tuple(part) for part in parts]
