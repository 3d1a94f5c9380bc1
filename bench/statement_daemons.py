"""The statement gateway of two daemons on one database: statements a second, memory, and how topics move."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

from bench.cluster import new_device
from bench.measure import Row, figure
from bench.part import Part
from bench.server import Daemon, daemon, init
from ntf_demo.fake_node.server import FakeNode
from ntf_demo.fake_push.program import FakePushProcess, fake_push_process
from ntf_demo.statement_gateway import key_pair, signed_statement
from protocol.device_token import encode_device_token
from store.leases import TOPIC_PARTS
from store.postgres import PostgresStore
from tests.postgres import running_cluster

RULES_PER_SUBSCRIPTION = 100
SENDERS = 50
MATCHED_PART = 10
"One statement of so many meets a rule."
PAUSE = 0.05
MEGABYTE = 1_000_000
_SUBSCRIPTIONS = (
    *("subscription_id", "client_id", "channel", "device_token", "is_call", "created_at", "updated_at"),
    *("device_id", "proven", "renewed_at"),
)
_DECIDED = "SELECT count(*) FROM ntf.statement_pushes"
_SHARES = "SELECT count(DISTINCT owner), max(parts) FROM (SELECT owner, count(*) AS parts FROM ntf.leases"
_SHARED = f"{_SHARES} WHERE duty = 'topics' GROUP BY owner) shares"


class Gateway:
    """Topics that rules name, at a node, and the database in which the rules are."""

    def __init__(self, node: FakeNode, db: asyncpg.Connection, topics: Sequence[bytes]) -> None:
        self.node = node
        self.db = db
        self.topics = topics
        self._published = 0

    async def fill(self, rules: int) -> None:
        """Rules that are evenly spread over topics; every tenth topic has one that statements meet."""
        made = int(time.time())
        records = [
            (
                *(
                    os.urandom(16),
                    os.urandom(32),
                    "apns",
                    encode_device_token(new_device()),
                    False,
                    made,
                    made,
                ),
                *(os.urandom(16), True, made),
            )
            for _ in range(rules // RULES_PER_SUBSCRIPTION)
        ]
        await self._copy("statement_subscriptions", records, _SUBSCRIPTIONS)
        keys = [row[0] for row in await self.db.fetch("SELECT sub_key FROM ntf.statement_subscriptions")]
        await self._copy(
            "statement_rules",
            [
                (topic, self._sender(number), keys[number % len(keys)], 0.0, 0)
                for number, topic in ((at, self.topics[at % len(self.topics)]) for at in range(rules))
            ],
            ("topic", "sender", "sub_key", "created_at", "baseline"),
        )
        await self.db.execute("ANALYZE")

    async def _copy(self, table: str, records: Sequence[tuple[object, ...]], columns: Sequence[str]) -> None:
        await self.db.copy_records_to_table(table, records=records, columns=columns, schema_name="ntf")

    def _sender(self, number: int) -> bytes:
        is_met = number < len(self.topics) and number % MATCHED_PART == 0
        return key_pair(f"sender {number % SENDERS}")[0] if is_met else os.urandom(32)

    async def shared_by(self, daemons: int) -> None:
        """Return when each topic is watched by one of them, and each has its share."""
        while not (self._is_watched_once() and await self._is_shared(daemons)):  # noqa: ASYNC110
            await asyncio.sleep(PAUSE)

    def _is_watched_once(self) -> bool:
        filters = [wanted for client in self.node._clients for wanted in client.filters.values()]
        return sum(len(wanted.topics) for wanted in filters) == len(self.topics) == len(self.node.watched)

    async def _is_shared(self, daemons: int) -> bool:
        owners, most = await self.db.fetchrow(_SHARED)
        return bool(owners == daemons and most == -(-TOPIC_PARTS // daemons))

    async def publish(self, count: int, running: Sequence[Daemon]) -> tuple[float, float]:
        """Statements a second until all are decided on, and microseconds of CPU of the daemons for each."""
        first, self._published = self._published, self._published + count
        senders = [key_pair(f"sender {number}") for number in range(SENDERS)]
        encoded = [
            signed_statement(senders[at % SENDERS], self.topics[at], data=os.urandom(200))
            for at in range(first, first + count)
        ]
        wanted = len([at for at in range(self._published) if at % MATCHED_PART == 0])
        began, cpu = time.perf_counter(), sum(one.cpu() for one in running)
        for statement in encoded:
            await self.node.submit(statement)
        while await self.db.fetchval(_DECIDED) < wanted:  # noqa: ASYNC110
            await asyncio.sleep(PAUSE)
        seconds = time.perf_counter() - began
        return count / seconds, (sum(one.cpu() for one in running) - cpu) / count * 1e6


def settings(url: str, node: FakeNode, push: FakePushProcess, topics: int) -> Mapping[str, str]:
    return {
        "NTF_APNS_ALLOW_TEST_PROVIDER": "on",
        "NTF_APNS_TEST_PORT": str(push.port),
        "NTF_APNS_TEST_CA_FILE": push.ca_file,
        "NTF_STORE_DATABASE": "postgres",
        "NTF_STORE_URL": url,
        "NTF_STORE_LEASE_SECONDS": "4",
        "NTF_STATEMENTS_ENABLED": "on",
        "NTF_STATEMENTS_NODE": node.url,
        "NTF_STATEMENTS_PORT": "0",
        "NTF_STATEMENTS_APNS": "test",
        "NTF_STATEMENTS_WATCHED_TOPICS": str(2 * topics),
    }


@asynccontextmanager
async def filled(url: str, node: FakeNode, rules: int, topics: int) -> AsyncIterator[Gateway]:
    store = PostgresStore(url)
    await store.open()
    await store.close()
    db = await asyncpg.connect(url)
    gateway = Gateway(node, db, [os.urandom(32) for _ in range(topics)])
    await gateway.fill(rules)
    try:
        yield gateway
    finally:
        await db.close()


async def measure(
    folder: Path, *, rules: int = 1_000_000, topics: int = 100_000, statements: int = 5000
) -> list[Row]:
    with running_cluster() as cluster:
        url = cluster.new_database()
        async with (
            fake_push_process(folder / "push") as push,
            FakeNode() as node,
            filled(url, node, rules, topics) as gateway,
        ):
            await asyncio.to_thread(init, folder)
            env = settings(url, node, push, topics)
            return await measured(folder, env, gateway, statements)


async def measured(folder: Path, env: Mapping[str, str], gateway: Gateway, statements: int) -> list[Row]:
    began = time.perf_counter()
    async with daemon(folder, env) as one:
        await gateway.shared_by(1)
        started = time.perf_counter() - began
        alone, cpu_alone = await gateway.publish(statements, [one])
        memory = one.memory()
        began = time.perf_counter()
        async with daemon(folder, env) as two:
            await gateway.shared_by(2)
            joined = time.perf_counter() - began
            together, cpu_together = await gateway.publish(statements, [one, two])
            memory_of_two = two.memory()
            two.process.kill()
            began = time.perf_counter()
            await gateway.shared_by(1)
            taken_over = time.perf_counter() - began
    return [
        figure("statements, 1 daemon", "1/s", alone),
        figure("statements, 2 daemons", "1/s", together),
        figure("a statement, CPU of the daemon: 1 daemon", "us CPU", cpu_alone),
        figure("a statement, CPU of the daemons: 2 daemons", "us CPU", cpu_together),
        figure("memory of a daemon that watches all topics", "MB", memory / MEGABYTE),
        figure("memory of a second daemon with half of the topics", "MB", memory_of_two / MEGABYTE),
        figure("from the start until all topics are watched", "s", started),
        figure("a second daemon joins: from its start until each has its half", "s", joined),
        figure("a daemon is killed: until the other watches all topics", "s", taken_over),
    ]


STATEMENT_DAEMONS = Part(
    name="statement-daemons",
    title="Statement gateway with two daemons",
    measure=measure,
    quick={"rules": 20_000, "topics": 2000, "statements": 500},
    repeats=1,
    seconds=150,
    quick_seconds=40,
    why="Topics are shared by the daemons whose gateway is on, and move when one joins or leaves.",
    how="Two daemons, PostgreSQL, a node in the measuring process and a push provider on one machine; one"
    " statement of ten meets a rule. A rate ends when all are decided on and their pushes are stored. Leases"
    " last 4 seconds instead of 20.",
    bound="the node and the database, which share the cores with the daemons. A daemon that was killed is"
    " missed when its lease ends; one that joins is given a tenth of the parts every 2 seconds.",
)
