"""What the statement gateway costs, beside the sr25519 library's bare verification.

    python -m bench.statements [--rules 1000000]

CPU is of the whole process (event loop and the store's threads), in microseconds for each statement.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import sr25519

from bench.measure import Row, at_least, print_rows
from ntf_demo.statement_gateway import key_pair, signed_statement
from ntf_server.clock import SystemClock
from ntf_server.statements.pipeline import Pipeline
from protocol.statements import Signed, decode_statement, signed_bytes
from store.sqlite import SqliteStore
from store.statement_records import PushKey

STATEMENTS = 2000
RULES_PER_SUBSCRIPTION = 100
SENDERS = 50
"Few enough to be signed for, many enough that no limit is met."
AIM = 0.7
MATCHED_PART = 10
"One statement of so many meets a rule."


class NoPushes:
    async def notify_statements(self, push_keys: Sequence[PushKey], received_at: float) -> None:
        """Pushing is measured elsewhere."""


def fill(path: Path, rules: int, wanted: Sequence[tuple[bytes, bytes]]) -> float:
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


async def measure(rules: int, encoded: Sequence[bytes], wanted: Sequence[tuple[bytes, bytes]]) -> list[float]:
    """CPU for each statement, and bytes for each rule."""
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder, "ntf.db"))
        await store.open()
        await store.close()
        size = fill(Path(folder, "ntf.db"), rules, wanted)
        await store.open()
        pipeline = Pipeline(store, NoPushes(), SystemClock())
        await pipeline.take(encoded[:100])
        started = time.process_time()
        await pipeline.take(encoded[100:])
        spent = time.process_time() - started
        await store.close()
    return [spent / len(encoded[100:]) * 1e6, size]


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", type=int, default=1_000_000)
    args = parser.parse_args()
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
    few, _ = asyncio.run(measure(1000, encoded, wanted))
    many, size = asyncio.run(measure(args.rules, encoded, wanted))
    rows = [
        Row("the library's verification", library, "us"),
        Row("a statement, 1,000 rules", few, "us"),
        Row(f"a statement, {args.rules:,} rules", many, "us"),
        Row("statements a second of one core", 1e6 / many, "1/s"),
        at_least("share of the library's rate", library / many, "", AIM),
        Row("cost with all rules to that with few", many / few, ""),
        Row("database for a rule", size, "bytes"),
    ]
    return 0 if print_rows("Statement gateway", rows) else 1


if __name__ == "__main__":
    sys.exit(main())
