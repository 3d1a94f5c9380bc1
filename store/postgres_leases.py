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
    LEAST_PATIENCE,
    PATIENCE,
    PUSH,
    PUSH_PARTS,
    VALID_PART,
    Changes,
    DaemonRecord,
    Duty,
    HandedOver,
    Lease,
    Notice,
    next_step,
)
from store.postgres_engine import CHANNEL, SAY, Pools
from store.postgres_errors import CAUGHT, store_error
from store.postgres_migrate import SCHEMA
from store.postgres_routers import SERVERS_AMONG
from store.records import ServerKey, StoredRouter, TokenKey
from store.rows import QUEUE_COLUMNS, queue_row, smp_server, stored_router

T = TypeVar("T")

NOTICE_SIZE = 7900
"PostgreSQL takes notices of fewer than 8000 bytes."
NOTICES_KEPT = 10_000
"Of other daemons; more are forgotten, and what they meant is found in the store."
TOLD_AT_ONCE = 50_000
TELL_DELAY = 0.01
"Seconds in which words for other daemons gather."

_JOIN = """
INSERT INTO daemons (daemon_id, name, alive_until) OVERRIDING SYSTEM VALUE
VALUES ($1, $2, clock_timestamp() + $3 * interval '1 second')
ON CONFLICT (daemon_id) DO UPDATE SET alive_until = excluded.alive_until
"""
_RENEW = """
UPDATE daemons SET alive_until = clock_timestamp() + $2 * interval '1 second'
WHERE daemon_id = $1 AND alive_until > '-infinity' RETURNING true
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
_LIVING = "SELECT count(*) FROM daemons WHERE alive_until > clock_timestamp()"
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
_TAKE_HANDED_OVER = f"""
WITH taken AS (
    DELETE FROM handovers h USING leases l
    WHERE l.duty = '{Duty.ROUTER}' AND l.id = h.server_key AND l.owner = $1 RETURNING h.server_key, h.sub_key
)
SELECT t.server_key, v.hosts, v.port, v.key_hash, {QUEUE_COLUMNS}
FROM taken t JOIN subscriptions USING (sub_key) JOIN smp_servers v ON v.server_key = t.server_key
"""
_DAEMONS = f"""
SELECT name, daemon_id = $1, count(*) FILTER (WHERE duty = '{Duty.ROUTER}'),
    count(*) FILTER (WHERE duty = '{Duty.PUSHES}'), count(*) FILTER (WHERE duty = '{Duty.CHORES}') > 0
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
        clock: Callable[[], float] = _clock,
    ) -> None:
        self._pools = pools
        self._daemon_id = daemon_id
        self._name = name
        self._seconds = seconds
        self._patience = max(seconds * PATIENCE, LEAST_PATIENCE)
        self._clock = clock
        self._fences: dict[Lease, int] = {}
        self._suspended: set[Lease] = set()
        self._valid_until = 0.0
        self._has_unknown = False
        "Leases may be ours of which we do not know."
        self.has_joined = False
        self._db: asyncpg.Connection | None = None
        self._lock = asyncio.Lock()
        self._heard: deque[Notice] = deque(maxlen=NOTICES_KEPT)
        self._hears = asyncio.Event()
        self._elsewhere: set[TokenKey] = set()
        self._has_words = asyncio.Event()

    # What is known

    def owns(self, lease: Lease) -> bool:
        return lease in self._fences and lease not in self._suspended and self._clock() < self._valid_until

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
        if lease not in self._fences or self._clock() >= self._valid_until:
            raise LeaseLost("another daemon may own it by now")
        return self._fences[lease]

    def refused(self, lease: Lease) -> LeaseLost:
        """The database knows another owner."""
        self._fences.pop(lease, None)
        return LeaseLost("another daemon owns it by now")

    def seconds_left(self) -> float:
        return self._valid_until - self._clock()

    def lapse(self) -> None:
        self._fences.clear()
        self._suspended.clear()
        self._has_unknown = True
        self._hears.set()

    def suspend(self, leases: Collection[Lease]) -> None:
        self._suspended.update(leases)

    # What is asked

    async def join(self) -> None:
        asked = self._clock()
        await self._run(lambda db: db.execute(_JOIN, self._daemon_id(), self._name, self._seconds))
        self.has_joined = True
        self._valid_until = asked + self._seconds * VALID_PART

    async def renew(self) -> None:
        asked = self._clock()
        if await self._run(lambda db: db.fetchval(_RENEW, self._daemon_id(), self._seconds)):
            self._valid_until = asked + self._seconds * VALID_PART
            return
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
        self._fences |= claimed
        self._suspended -= claimed.keys()
        return changes

    async def _step(self, db: asyncpg.Connection) -> tuple[Changes, dict[Lease, int]]:
        daemons = await db.fetchval(_LIVING)
        claimed: dict[Lease, int] = {}
        surplus: list[Lease] = []
        for name, total, mine, free in await db.fetch(_COUNTS, self._daemon_id()):
            duty, step = Duty(name), next_step(total=total, mine=mine, daemons=daemons)
            if step.claim and free:
                rows = await db.fetch(_CLAIM, self._daemon_id(), name, step.claim)
                claimed |= {Lease(duty, id): fence for id, fence in rows}
            if step.give_back:
                surplus += [lease for lease in self._fences if lease.duty is duty][-step.give_back :]
        return Changes(list(claimed), surplus), claimed

    async def give_back(self, leases: Collection[Lease]) -> None:
        for lease in leases:
            self._fences.pop(lease, None)
        self._suspended -= set(leases)

        async def run(db: asyncpg.Connection) -> None:
            await db.execute(_GIVE_BACK, self._daemon_id(), *_arrays(leases))
            await db.execute(SAY, [self._words(Notice(FREED, ()))])

        await self._run(run)

    async def routers(self, keys: Sequence[ServerKey]) -> list[StoredRouter]:
        rows = await self._run(lambda db: db.fetch(SERVERS_AMONG, keys))
        return [stored_router(row) for row in rows]

    async def handed_over(self) -> list[HandedOver]:
        rows = await self._run(lambda db: db.fetch(_TAKE_HANDED_OVER, self._daemon_id()))
        return [
            HandedOver(StoredRouter(ServerKey(key), smp_server(*address), was_there=False), queue_row(queue))
            for key, *address, queue in ((row[0], *row[1:4], row[4:]) for row in rows)
        ]

    async def daemons(self) -> list[DaemonRecord]:
        rows = await self._run(lambda db: db.fetch(_DAEMONS, self._daemon_id()))
        return [DaemonRecord(*row) for row in rows]

    # Words between daemons

    def push_elsewhere(self, keys: Collection[TokenKey]) -> None:
        if len(self._elsewhere) < TOLD_AT_ONCE:
            self._elsewhere.update(keys)
            self._has_words.set()

    async def tell(self) -> None:
        await self._has_words.wait()
        await asyncio.sleep(TELL_DELAY)
        self._has_words.clear()
        keys, self._elsewhere = self._elsewhere, set()
        words = [self._words(Notice(PUSH, part)) for part in _parts(map(str, keys))]
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
            try:
                async with asyncio.timeout(self._patience):
                    return await call(await self._connected())
            except CAUGHT as error:
                await self.disconnect()
                raise store_error(error) from None

    async def _connected(self) -> asyncpg.Connection:
        if self._db is None or self._db.is_closed():
            db = await self._pools.connect()
            try:
                milliseconds = int(self._patience * 1000)
                await db.execute(f"SET search_path = {SCHEMA}; SET statement_timeout = {milliseconds}")
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
