"""What the statement gateway costs, beside the sr25519 library's bare verification.

CPU is of the whole process (event loop and the store's threads), in microseconds for each statement.
"""

from __future__ import annotations

import os
import sqlite3
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import sr25519

from bench.measure import Peer, Row, beside, figure
from bench.part import Part
from ntf_demo.statement_gateway import key_pair, signed_statement
from ntf_server.clock import SystemClock
from ntf_server.statements.pipeline import Pipeline
from ntf_server.statements.topic_groups import TopicGroups
from protocol.statements import FIELD_SIZE, Signed, decode_statement, signed_part
from store.rule_filter import RuleFilter
from store.sqlite import SqliteStore
from store.statement_records import PushKey

ROUND = 256
"Statements in a round: the library's turn and the gateway's are on the same ones, one after the other."
WARM_UP = 100
TOPICS = 100_000
FEW, SOME = 1000, 100_000
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
        subscriptions = rules // RULES_PER_SUBSCRIPTION + 1
        db.executemany(
            add,
            [(topic, sender, at % subscriptions + 1) for at, (sender, topic) in enumerate(wanted)],
        )
        db.commit()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return (path.stat().st_size - before) / rules


class Cost(NamedTuple):
    """CPU of one statement, in microseconds, and bytes of the database for a rule."""

    verification: float
    gateway: float
    rule: float


async def taking(path: Path, rules: int, rounds: int, matched_part: int = MATCHED_PART) -> Cost:
    """The best round of each."""
    encoded, wanted = made(rounds, matched_part)
    store = SqliteStore(path)
    await store.open()
    await store.close()
    size = fill(path, rules, wanted)
    await store.open()
    pipeline = Pipeline(store, NoPushes(), SystemClock())
    await pipeline.take(encoded[:WARM_UP])
    library, gateway = [], []
    for start in range(WARM_UP, len(encoded), ROUND):
        part = encoded[start : start + ROUND]
        library.append(bare(part))
        started = time.process_time()
        await pipeline.take(part)
        gateway.append((time.process_time() - started) / len(part) * 1e6)
    await store.close()
    return Cost(min(library), min(gateway), size)


def made(rounds: int, matched_part: int) -> tuple[list[bytes], Wanted]:
    """Statements, and the rules that some of them meet."""
    senders = [key_pair(f"sender {number}") for number in range(SENDERS)]
    topics = [os.urandom(32) for _ in range(WARM_UP + rounds * ROUND)]
    encoded = [
        signed_statement(senders[number % SENDERS], topic, data=os.urandom(200))
        for number, topic in enumerate(topics)
    ]
    wanted = [
        (senders[number % SENDERS][0], topic)
        for number, topic in enumerate(topics)
        if number % matched_part == 0
    ]
    return encoded, wanted


def bare(encoded: Sequence[bytes]) -> float:
    """CPU of one verification."""
    statements = [(one, decode_statement(one).proof) for one in encoded]
    works = [
        (proof.signature, signed_part(one, proof), proof.signer)
        for one, proof in statements
        if isinstance(proof, Signed)
    ]
    started = time.process_time()
    for work in works:
        assert sr25519.verify(*work)
    return (time.process_time() - started) / len(works) * 1e6


def watching() -> float:
    """Bytes of memory for a watched topic, in its group of a subscription."""
    groups = TopicGroups()
    return memory_of(lambda: groups.set(os.urandom(FIELD_SIZE) for _ in range(TOPICS))) / TOPICS


def remembering(path: Path, rules: int) -> tuple[float, float]:
    """Seconds of CPU to read the rules once, and bytes of memory for each."""
    with closing(sqlite3.connect(path)) as db:
        started = time.process_time()
        RuleFilter().possible(db, [])
        seconds = time.process_time() - started
        remembered = RuleFilter()
        return seconds, memory_of(lambda: remembered.possible(db, [])) / rules


def memory_of(make: Callable[[], object]) -> int:
    """Bytes that what it made still takes."""
    tracemalloc.start()
    make()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size


async def measure(folder: Path, *, rules: int = 1_000_000, rounds: int = 24) -> list[Row]:
    few = await taking(folder / "few.db", FEW, rounds)
    between = min(SOME, rules)
    some = await taking(folder / "some.db", between, rounds)
    many = await taking(folder / "many.db", rules, rounds)
    all_matched = await taking(folder / "matched.db", between, rounds, matched_part=1)

    reading, remembered = remembering(folder / "many.db", rules)

    def share(cost: Cost) -> Peer:
        return beside("py-sr25519's verification", cost.verification, at_least=AIM)

    return [
        figure(f"a statement, {FEW:,} rules", "us CPU", few.gateway, peer=share(few)),
        figure(f"a statement, {between:,} rules", "us CPU", some.gateway, peer=share(some)),
        figure("a statement, all rules", "us CPU", many.gateway, peer=share(many)),
        figure(
            "a statement, all rules and few",
            "us CPU",
            many.gateway,
            peer=beside(f"{FEW:,} rules", few.gateway),
        ),
        figure("a statement that somebody wants, its push stored", "us CPU", all_matched.gateway),
        figure("statements of one core", "1/s", 1e6 / many.gateway),
        figure("a rule in the database", "B", many.rule),
        figure("memory of a rule", "B", remembered),
        figure("reading all rules, once after a start", "s CPU", reading),
        figure("memory of a watched topic", "B", watching()),
    ]


GATEWAY = Part(
    name="statements",
    title="Statement gateway",
    measure=measure,
    quick={"rules": 50_000, "rounds": 8},
    repeats=1,
    seconds=30,
    quick_seconds=5,
    why="Anybody may publish a statement: each is verified before anything else is done with it.",
    how="Decoding, verifying, looking up who wants it and storing that, in the daemon's pipeline with"
    " a real store; one statement of ten meets a rule. Beside it the library's verification alone, on the"
    " same statements in turn; the best round of each. Rules are in the database, and some bits of memory for"
    " each say which lookups would be in vain.",
    bound="the verification; decoding takes 5 us, looking statements up and storing what comes of them the"
    " rest.",
)
