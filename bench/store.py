"""What the store costs, beside plain `sqlite3` writing and reading the same rows.

CPU is of the whole process (event loop and connection threads), in microseconds for each row.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from bench.measure import Row, beside, figure
from bench.part import Part
from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from store import migrate
from store.database_files import open_to_write
from store.records import (
    NewSubscription,
    Notification,
    SentEntry,
    ServerKey,
    TokenKey,
)
from store.sqlite import SqliteStore
from tests.store.builders import create_one

SERVER = SmpServer(("router.example",), "", b"h" * 32)
SERVER_KEY = ServerKey(1)
SUBSCRIPTIONS_PER_TOKEN = 20
BLOCK = 80
"NMSGs in one block of a router."
GROUPS = (1, 50, 500)
"Callers at once."

_INSERT_TOKEN = """
INSERT INTO tokens (token_id, device_token, verify_key, dh_private, dh_secret, code, status, updated_on)
VALUES (?, ?, ?, ?, ?, ?, 'ACTIVE', 0)
"""
_INSERT_SUBSCRIPTION = """
INSERT INTO subscriptions (subscription_id, token_key, server_key, notifier_id, notifier_key, state)
VALUES (?, ?, 1, ?, ?, 'ACTIVE')
"""
_FIND_SUBSCRIPTION = """
SELECT s.sub_key, s.server_key, s.notifier_id, s.state, s.token_key, t.token_id, t.verify_key
FROM subscriptions s JOIN tokens t USING (token_key) WHERE s.subscription_id = ?
"""
_FIND_QUEUE = "SELECT token_key, sub_key FROM subscriptions WHERE server_key = 1 AND notifier_id = ?"
_ADD_NOTIFICATION = """
REPLACE INTO unsent_notifications (seq, token_key, sub_key, received_at, nonce, meta)
VALUES (?, ?, ?, 1, ?, ?)
"""
_WRITE_PAGE = """
UPDATE subscriptions INDEXED BY subscriptions_of_server SET state = ?
WHERE server_key = 1 AND associated = 0 AND sub_key > ? AND sub_key <= ?
"""
_PAGE_END = """
SELECT max(sub_key) FROM (
    SELECT sub_key FROM subscriptions INDEXED BY subscriptions_of_server
    WHERE server_key = 1 AND associated = 0 AND sub_key > ? ORDER BY sub_key LIMIT ?
)
"""
ROW_PAGE = 10_000
_MAKE_ACTIVE = "UPDATE smp_servers SET lost = 0, active_count = (SELECT subscriptions FROM totals)"


class Cost(NamedTuple):
    """Microseconds for each row."""

    cpu: float
    wall: float


def costs(rounds: int, rows: int, run: Callable[[], object]) -> list[Cost]:
    """Of each round."""
    found = []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        found.append(
            Cost((time.process_time() - cpu) / rows * 1e6, (time.perf_counter() - wall) / rows * 1e6)
        )
    return found


def report(name: str, ours: Sequence[Cost], plain: Sequence[Cost]) -> list[Row]:
    bare = beside("sqlite3", *(cost.cpu for cost in plain))
    return [
        figure(f"{name}: CPU", "us CPU", *(cost.cpu for cost in ours), peer=bare),
        figure(
            f"{name}: time",
            "us",
            *(cost.wall for cost in ours),
            peer=beside("sqlite3", *(cost.wall for cost in plain)),
        ),
    ]


class Rows(NamedTuple):
    """A sample of what is in a database."""

    subscription_ids: list[EntityId]
    notifier_ids: list[EntityId]


def make_database(path: Path, subscriptions: int, verify_key: bytes = b"") -> Rows:
    """Tokens and subscriptions of one router, written directly. With a key, it is that of all tokens."""
    migrate.migrate(path)
    randomness = random.Random(1)
    tokens = max(1, subscriptions // SUBSCRIPTIONS_PER_TOKEN)
    sample: list[tuple[bytes, bytes]] = []

    def rows() -> Iterator[tuple[bytes, int, bytes, bytes]]:
        for number in range(subscriptions):
            ids = (randomness.randbytes(24), randomness.randbytes(24))
            if len(sample) < 20_000 and randomness.random() < 40_000 / subscriptions:
                sample.append(ids)
            yield ids[0], number % tokens + 1, ids[1], randomness.randbytes(48)

    with closing(open_to_write(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = OFF")
        db.execute("PRAGMA synchronous = OFF")
        db.execute("PRAGMA cache_size = -400000")
        db.execute("BEGIN")
        db.execute(
            "INSERT INTO smp_servers (hosts, port, key_hash) VALUES (?, '', ?)",
            (SERVER.hosts[0], SERVER.key_hash),
        )
        # An AN device token: provider, length and 32 bytes.
        db.executemany(
            _INSERT_TOKEN,
            (
                (
                    randomness.randbytes(24),
                    b"AN\x20" + randomness.randbytes(32),
                    verify_key or randomness.randbytes(32),
                    *[randomness.randbytes(32)] * 3,
                )
                for _ in range(tokens)
            ),
        )
        db.executemany(_INSERT_SUBSCRIPTION, rows())
        db.execute("UPDATE tokens SET verified = 1")
        db.execute("INSERT INTO token_routers SELECT token_key, 1, count(*) FROM subscriptions GROUP BY 1")
        db.execute("UPDATE smp_servers SET active_count = ?", (subscriptions,))
        db.execute(
            "UPDATE totals SET tokens = ?1, active_tokens = ?1,"
            " subscriptions = ?2, active_subscriptions = ?2, last_server = 1",
            (tokens, subscriptions),
        )
        db.execute("COMMIT")
    randomness.shuffle(sample)
    return Rows([EntityId(a) for a, _ in sample], [EntityId(b) for _, b in sample])


def plain_connection(path: Path, synchronous: str) -> sqlite3.Connection:
    db = open_to_write(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute(f"PRAGMA synchronous = {synchronous}")
    return db


class Bench:
    def __init__(self, path: Path, rows: Rows, size: str, rounds: int) -> None:
        self.path = path
        self.size = size
        self.rows = rows
        self.rounds = rounds
        self.runner = asyncio.Runner()
        self.store = SqliteStore(path)
        self.wait(self.store.open())

    def wait(self, call: Awaitable[object]) -> None:
        async def run() -> None:
            await call

        self.runner.run(run())

    def close(self) -> None:
        self.wait(self.store.close())
        self.runner.close()

    def lookups(self, group: int) -> list[Row]:
        asked = self.rows.subscription_ids[: max(500, min(10_000, group * 40))]

        async def ours() -> None:
            for start in range(0, len(asked), group):
                await asyncio.gather(
                    *(self.store.subscriptions([one]) for one in asked[start : start + group])
                )

        def plain() -> None:
            for subscription_id in asked:
                db.execute(_FIND_SUBSCRIPTION, (subscription_id,)).fetchone()

        with closing(plain_connection(self.path, "NORMAL")) as db:
            return report(
                f"{self.size}: find one, {group} at once",
                costs(self.rounds, len(asked), lambda: self.wait(ours())),
                costs(self.rounds, len(asked), plain),
            )

    def creations(self, group: int) -> list[Row]:
        count = max(200, min(10_000, group * 20))

        async def ours() -> None:
            for _ in range(0, count, group):
                await asyncio.gather(*(create_one(self.store, _new()) for _ in range(group)))

        def plain() -> None:
            for _ in range(0, count, group):
                rows = [(os.urandom(24), 1, os.urandom(24), os.urandom(48)) for _ in range(group)]
                db.execute("BEGIN IMMEDIATE")
                db.executemany(_INSERT_SUBSCRIPTION, rows)
                db.execute("COMMIT")

        with closing(plain_connection(self.path, "FULL")) as db:
            return report(
                f"{self.size}: create one, {group} at once",
                costs(self.rounds, count, lambda: self.wait(ours())),
                costs(self.rounds, count, plain),
            )

    def notifications(self) -> list[Row]:
        """Blocks stored, then given for pushing, then marked sent: as the server does it."""
        blocks = [
            [Notification(notifier_id, bytes(24), bytes(136)) for notifier_id in ids]
            for ids in _blocks(self.rows.notifier_ids[:4000])
        ]
        seconds = {"add": 0.0, "push": 0.0, "sent": 0.0}
        count = sum(map(len, blocks))

        def charge(name: str, cpu: float) -> None:
            seconds[name] += (time.process_time() - cpu) / count * 1e6

        async def ours() -> None:
            for block in blocks:
                cpu = time.process_time()
                stored = await self.store.add_notifications(SERVER_KEY, block, received_at=1)
                charge("add", cpu)
                keys = list({one.token_key for one in stored if one is not None})
                cpu = time.process_time()
                pushes = await self.store.pushes(keys)
                charge("push", cpu)
                entries = [
                    SentEntry(TokenKey(push.token.key), entry.sub_key, entry.seq)
                    for push in pushes
                    for entry in push.entries
                    if not entry.sent
                ]
                cpu = time.process_time()
                await self.store.set_sent(entries)
                charge("sent", cpu)

        self.wait(ours())
        plain = beside("sqlite3 appends", self.plain_notifications(blocks))
        return [
            figure(f"{self.size}: store an NMSG of a block of {BLOCK}", "us CPU", seconds["add"], peer=plain),
            figure(f"{self.size}: read what to push, a token for each", "us CPU", seconds["push"]),
            figure(f"{self.size}: mark it sent", "us CPU", seconds["sent"]),
        ]

    def plain_notifications(self, blocks: Sequence[Sequence[Notification]]) -> float:
        """CPU of an appended row, a transaction for each block."""
        with closing(plain_connection(self.path, "NORMAL")) as db:
            (seq,) = db.execute("SELECT last_seq FROM totals").fetchone()
            cpu = time.process_time()
            for block in blocks:
                db.execute("BEGIN IMMEDIATE")
                for notifier_id, nonce, meta in block:
                    seq += 1
                    token_key, sub_key = db.execute(_FIND_QUEUE, (notifier_id,)).fetchone()
                    db.execute(_ADD_NOTIFICATION, (seq, token_key, sub_key, nonce, meta))
                db.execute("COMMIT")
            count = sum(map(len, blocks))
            cost = (time.process_time() - cpu) / count * 1e6
            db.execute("DELETE FROM unsent_notifications")
            return cost

    def whole_router(self) -> list[Row]:
        """Beside it the same as a write of every row, in transactions that others do not wait long for."""

        def plain() -> None:
            last = 0
            while (end := db.execute(_PAGE_END, (last, ROW_PAGE)).fetchone()[0]) is not None:
                db.execute(_WRITE_PAGE, ("INACTIVE", last, end))
                last = end

        with closing(plain_connection(self.path, "NORMAL")) as db:
            ours = []
            for _ in range(self.rounds):
                db.execute(_MAKE_ACTIVE)
                ours += costs(1, 1, lambda: self.wait(self.store.set_disconnected(SERVER_KEY)))
            return report(f"{self.size}: mark all of a router disconnected", ours, costs(1, 1, plain))


def _blocks(ids: Sequence[EntityId]) -> Iterator[Sequence[EntityId]]:
    for start in range(0, len(ids), BLOCK):
        yield ids[start : start + BLOCK]


def _new() -> NewSubscription:
    return NewSubscription(
        subscription_id=EntityId(os.urandom(24)),
        token_key=TokenKey(1),
        server=SERVER,
        notifier_id=EntityId(os.urandom(24)),
        notifier_key=os.urandom(48),
    )


_OPENED = """
import asyncio, pathlib, sys, time
from store.sqlite import SqliteStore
async def main():
    store = SqliteStore(pathlib.Path(sys.argv[1]))
    started = time.perf_counter()
    await store.open()
    await store.counts()
    await store.servers()
    seconds = time.perf_counter() - started
    print(seconds)
    await store.close()
asyncio.run(main())
"""


def opened(path: Path) -> float:
    """Seconds until a new process has opened the store and knows its counts and routers."""
    command = [sys.executable, "-c", _OPENED, str(path)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure(
    folder: Path,
    *,
    sizes: tuple[int, ...] = (1000, 1_000_000),
    between: tuple[int, ...] = (100_000,),
    rounds: int = 3,
) -> list[Row]:
    """`between`: sizes that only matter to what happens to whole routers."""
    rows: list[Row] = []
    for subscriptions in sizes:
        path = folder / f"{subscriptions}.db"
        found, size = make_database(path, subscriptions), f"{subscriptions:,}"
        rows.append(
            figure(f"{size}: a subscription in the database", "B", path.stat().st_size / subscriptions)
        )
        rows.append(figure(f"{size}: open", "ms", *(opened(path) * 1000 for _ in range(rounds))))
        bench = Bench(path, found, size, rounds)
        for group in GROUPS:
            rows += bench.lookups(group)
        for group in GROUPS:
            rows += bench.creations(group)
        rows += bench.notifications()
        rows += bench.whole_router()
        bench.close()
    return rows + whole_routers(folder, between, rounds)


def whole_routers(folder: Path, sizes: Sequence[int], rounds: int) -> list[Row]:
    rows: list[Row] = []
    for subscriptions in sizes:
        path = folder / f"{subscriptions}.db"
        bench = Bench(path, make_database(path, subscriptions), f"{subscriptions:,}", rounds)
        rows += bench.whole_router()
        bench.close()
    return rows


STORE = Part(
    name="store",
    title="The store on SQLite",
    measure=measure,
    quick={"sizes": (1000, 50_000), "between": ()},
    repeats=1,
    seconds=45,
    quick_seconds=10,
    why="Everything that the daemon acknowledges is in its database first.",
    how="With few and with many subscriptions in the file, and one, 50 or 500 callers at once. Beside"
    " it plain sqlite3 in a loop with the same rows: prepared statements, no threads, no event"
    " loop, no checks. Three rounds.",
    bound="one hop to SQLite's thread costs 0.1 to 0.2 ms of CPU, so all that waits goes together. Each"
    " row that sqlite3 hands over gives up the interpreter's lock, so a block's lookups are one"
    " row; unsent notifications are a table of their own, because ordered by token they changed"
    " one page each. A router's loss is a number in its row, and none of its queues is written; beside"
    " it is plain sqlite3 that writes them all, in pages of 10,000.",
)
