"""What the statement gateway costs, beside the sr25519 library's bare verification.

CPU is of the whole process (event loop and the store's threads), in microseconds for each statement.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import sr25519

from bench.measure import Row, beside, figure
from bench.part import Part
from ntf_demo.statement_gateway import key_pair, signed_statement
from ntf_server.clock import SystemClock
from ntf_server.statements.pipeline import Pipeline
from protocol.statements import Signed, decode_statement, signed_bytes
from store.sqlite import SqliteStore
from store.statement_records import PushKey

STATEMENTS = 2000
FEW = 1000
RULES_PER_SUBSCRIPTION = 100
SENDERS = 50
"Few enough to be signed for, many enough that no limit is met."
AIM = 0.7
MATCHED_PART = 10
"One statement of so many meets a rule."


Wanted = Sequence[tuple[bytes, bytes]]


class NoPushes:
    async def notify_statements(self, push_keys: Sequence[PushKey], received_at: float) -> None:
        """Pushing is measured elsewhere."""


def fill(path: Path, rules: int, wanted: Wanted) -> float:
    """Rules of others, and those that statements meet; bytes of the database for each rule."""
    before = path.stat().st_size
    with closing(sqlite3.connect(path)) as db:
        db.executemany(
            "INSERT INTO statement_subscriptions (sub_key, subscription_id, client_id, channel, device_token,"
            " is_call, created_at, updated_at) VALUES (?, ?, ?, 'apns', ?, 0, 0, 0)",
            (
                (key, os.urandom(16), os.urandom(32), b"AP\x20" + os.urandom(16).hex().encode())
                for key in range(1, rules // RULES_PER_SUBSCRIPTION + 2)
            ),
        )
        add = "INSERT INTO statement_rules (topic, sender, sub_key) VALUES (?, ?, ?)"
        db.executemany(
            add,
            (
                (os.urandom(32), os.urandom(32), number // RULES_PER_SUBSCRIPTION + 1)
                for number in range(rules)
            ),
        )
        db.executemany(add, [(topic, sender, 1) for sender, topic in wanted])
        db.commit()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return (path.stat().st_size - before) / rules


async def taking(path: Path, rules: int, encoded: Sequence[bytes], wanted: Wanted) -> tuple[float, float]:
    """CPU for each statement, and bytes for each rule."""
    store = SqliteStore(path)
    await store.open()
    await store.close()
    size = fill(path, rules, wanted)
    await store.open()
    pipeline = Pipeline(store, NoPushes(), SystemClock())
    await pipeline.take(encoded[:100])
    started = time.process_time()
    await pipeline.take(encoded[100:])
    spent = time.process_time() - started
    await store.close()
    return spent / len(encoded[100:]) * 1e6, size


def bare(encoded: Sequence[bytes]) -> float:
    """CPU of one verification."""
    statements = [decode_statement(one) for one in encoded]
    works = [
        (one.proof.signature, signed_bytes(one), one.proof.signer)
        for one in statements
        if isinstance(one.proof, Signed)
    ]
    started = time.process_time()
    for work in works:
        assert sr25519.verify(*work)
    return (time.process_time() - started) / len(works) * 1e6


async def measure(folder: Path, *, rules: int = 1_000_000) -> list[Row]:
    senders = [key_pair(f"sender {number}") for number in range(SENDERS)]
    topics = [os.urandom(32) for _ in range(STATEMENTS)]
    encoded = [
        signed_statement(senders[number % SENDERS], topic, data=os.urandom(200))
        for number, topic in enumerate(topics)
    ]
    wanted = [
        (senders[number % SENDERS][0], topic)
        for number, topic in enumerate(topics)
        if number % MATCHED_PART == 0
    ]
    library = min(bare(encoded) for _ in range(3))
    few, _ = await taking(folder / "few.db", FEW, encoded, wanted)
    many, size = await taking(folder / "many.db", rules, encoded, wanted)
    share = beside("py-sr25519's verification", library, at_least=AIM)
    return [
        figure(f"a statement, {FEW:,} rules", "us CPU", few, peer=share),
        figure("a statement, all rules", "us CPU", many, peer=share),
        figure("a statement, all rules and few", "us CPU", many, peer=beside(f"{FEW:,} rules", few)),
        figure("statements of one core", "1/s", 1e6 / many),
        figure("a rule in the database", "B", size),
    ]


GATEWAY = Part(
    name="statements",
    title="Statement gateway",
    measure=measure,
    quick={"rules": 50_000},
    repeats=1,
    seconds=20,
    quick_seconds=5,
    why="Anybody may publish a statement: each is verified before anything else is done with it.",
    how="Decoding, verifying, looking up who wants it and storing that, in the daemon's pipeline with"
    " a real store; one statement of ten meets a rule. Beside it the library's verification alone.",
    bound="the verification.",
)
