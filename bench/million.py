"""A start with a million subscriptions: time and memory, and what a command then costs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import asyncpg

from bench.measure import Row, beside, figure
from bench.part import Part
from bench.server import Daemon, Load, checks, daemon, init, measure_checks, settled
from bench.store import SUBSCRIPTIONS_PER_TOKEN, make_database
from store.postgres import PostgresStore
from tests.ntf_server.conftest import null_token
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.postgres import running_cluster

FEW = 1000
MEMORY_MB = 150

_FILL = """
SET search_path = ntf;
SET session_replication_role = replica;
INSERT INTO smp_servers (hosts, port, key_hash) VALUES ('127.0.0.1', '1', decode(repeat('6b', 32), 'hex'));
INSERT INTO leases (duty, id) SELECT 'router', server_key FROM smp_servers;
INSERT INTO tokens
    (token_id, device_token, verify_key, dh_private, dh_secret, code, status, verified, updated_on)
    SELECT int8send(n) || pad, '\\x414e20'::bytea || pad || pad, pad || int8send(n), pad || pad, pad || pad,
        pad || pad, 'ACTIVE', true, 0
    FROM generate_series(1::bigint, {tokens}) n, decode(repeat('00', 16), 'hex') pad;
INSERT INTO subscriptions (subscription_id, token_key, server_key, notifier_id, notifier_key, state)
    SELECT int8send(n) || pad, n % {tokens} + 1, 1, int8send(n) || pad, pad || pad || pad, 'ACTIVE'
    FROM generate_series(1::bigint, {subscriptions}) n, decode(repeat('00', 16), 'hex') pad;
INSERT INTO token_routers SELECT token_key, 1, count(*) FROM subscriptions GROUP BY 1;
UPDATE smp_servers SET active_count = {subscriptions};
INSERT INTO totals VALUES (0, {tokens}, {tokens}, {subscriptions}, {subscriptions});
SET session_replication_role = origin;
ANALYZE;
"""


class Started(NamedTuple):
    daemon: Daemon
    seconds: float
    memory: int

    def rows(self, where: str) -> list[Row]:
        return [
            figure(f"until ready: {where}", "s", self.seconds),
            figure(f"memory after the start: {where}", "MB", self.memory / 1e6, aim=MEMORY_MB),
        ]


async def start(stack: AsyncExitStack, folder: Path, env: Mapping[str, str]) -> Started:
    began = time.perf_counter()
    running = await stack.enter_async_context(daemon(folder, env))
    return Started(running, time.perf_counter() - began, running.memory())


async def on_sqlite(
    folder: Path, subscriptions: int, asked: int, rounds: int
) -> tuple[Started, float, float]:
    """How it started, CPU of a SCHK, and the same in verifications of that minute."""
    init(folder)
    device = Device.make(null_token())
    path = folder / "d" / "ntf-server.db"
    ids = make_database(path, subscriptions, device.key.public.der).subscription_ids
    async with AsyncExitStack() as stack:
        started = await start(stack, folder, {})
        await settled(started.daemon)
        client = await NtfClient.open(started.daemon.address)
        load = Load.prepare(client, checks(device, ids, asked), 120)
        _, cpu, verify = await measure_checks([started.daemon], [load], rounds)
        client.close()
    return started, cpu, cpu / verify


async def on_postgres(folder: Path, subscriptions: int) -> list[Started]:
    """Two daemons, one after the other."""
    init(folder)
    with running_cluster() as cluster:
        url = cluster.new_database()
        store = PostgresStore(url)
        await store.open()
        await store.close()
        db = await asyncpg.connect(url)
        tokens = max(1, subscriptions // SUBSCRIPTIONS_PER_TOKEN)
        await db.execute(_FILL.format(tokens=tokens, subscriptions=subscriptions))
        await db.close()
        env = {"NTF_STORE_DATABASE": "postgres", "NTF_STORE_URL": url}
        async with AsyncExitStack() as stack:
            return [
                await start(stack, folder, {**env, "NTF_STORE_DAEMON": f"d{number}"}) for number in (1, 2)
            ]


async def million(
    folder: Path, *, subscriptions: int = 1_000_000, checks: int = 12_000, rounds: int = 3
) -> list[Row]:
    _, small, few = await on_sqlite(folder / "few", FEW, checks, rounds)
    started, large, many = await on_sqlite(folder / "many", subscriptions, checks, rounds)
    first, second = await on_postgres(folder / "postgres", subscriptions)
    share = beside(f"{FEW:,} subscriptions", few, at_least=0.87)
    return [
        *started.rows("SQLite"),
        *first.rows("PostgreSQL, first daemon"),
        *second.rows("PostgreSQL, second daemon"),
        figure("a SCHK: SQLite", "us CPU", large, peer=beside(f"{FEW:,} subscriptions", small)),
        figure("a SCHK, in bare verifications meanwhile: SQLite", "times", many, peer=share),
    ]


MILLION = Part(
    name="million",
    title="A million subscriptions",
    measure=million,
    quick={"subscriptions": 50_000, "checks": 3_600, "rounds": 1},
    repeats=1,
    seconds=50,
    quick_seconds=10,
    why="A start must not take longer, nor a command cost more, because the database is large.",
    how="Daemons as processes, with databases made beforehand; time and memory once they answer. The second"
    " daemon on PostgreSQL starts beside the first.",
    bound="Python's own start; the depth of the database's trees and the pages that are not in its cache:"
    " a row takes 11 us of SQLite's thread among a thousand and 22 among a million. The less all else"
    " takes, the more these 11 us weigh in the ratio. A cache four times as large changes nothing, as few"
    " commands meet the same page. Mapping the file into memory"
    " would bring 22 down to 15, but then an error of the disk, or a file cut short, kills the"
    " process instead of failing a command.",
)
