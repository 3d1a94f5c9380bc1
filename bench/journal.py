"""What the event journal costs the daemon: CPU per event, on the event loop's thread and altogether."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from bench.measure import Row, best_of, figure
from bench.part import Part
from ntf_server.journal import FLUSH_EVENTS, Journal, ReceivedBlock, WriterConfig
from ntf_server.journal import Row as JournalRow
from ntf_server.journal_segments import SegmentWriter
from store.journal_schema import MESSAGE_PUSH, JournalEvent

BLOCK = 80  # notifications in a block of an SMP router
NMSG_BUDGET_US = 40.0  # CPU per notification up to its commit
PUSH_BUDGET_US = 150.0
SHARE = 0.05
SUBSCRIPTIONS = 20_000
SEGMENT_FLUSHES = 20
NOW = 1_767_614_400.0

Ids = list[tuple[bytes, bytes]]
Work = tuple[Callable[[], object], int]


def received_blocks(ids: Ids) -> list[ReceivedBlock]:
    """As many blocks as one flush takes, from all over the subscriptions."""
    blocks = FLUSH_EVENTS // BLOCK
    return [(NOW + i * 1e-6, "smp1.example.org", pick(ids, i)) for i in range(blocks)]


def pick(ids: Ids, number: int) -> Ids:
    """One block's ids."""
    return [ids[(number * BLOCK * 7 + i * 131) % len(ids)] for i in range(BLOCK)]


def sent_pushes(journal: Journal, ids: Ids) -> list[JournalRow]:
    """One flush of pushes, as the journal notes them."""
    for i in range(FLUSH_EVENTS):
        journal.record(
            JournalEvent.PUSH_SENT,
            server="smp1.example.org",
            provider="AP",
            token=ids[i % len(ids)][0],
            kind=MESSAGE_PUSH,
            latency_us=40_000 + i,
            count=1,
            total=1,
        )
    return journal._take()[0]


def writing(folder: Path, rows: list[JournalRow], blocks: list[ReceivedBlock]) -> Callable[[], None]:
    """Pseudonyms, Arrow, the open segment and sealing it as Parquet: all that the writing thread does."""

    def write_and_seal() -> None:
        config = WriterConfig(
            folder=folder,
            key=bytes(32),
            segment_bytes=1 << 40,
            segment_seconds=1e9,
            buffered_events=1 << 20,
        )
        writer = SegmentWriter(config, os.urandom(16))
        for _ in range(SEGMENT_FLUSHES):
            writer.write(rows, blocks, NOW)
        writer.close()
        shutil.rmtree(folder)

    return write_and_seal


def recording(journal: Journal, ids: Ids) -> dict[str, Work]:
    """What the event loop does: noting that something happened."""
    block, token = pick(ids, 0), ids[0][0]

    def received() -> None:
        for _ in range(100):
            journal.record_received("smp1.example.org", block)
        journal._take()

    def sent() -> None:
        for _ in range(1000):
            journal.record(
                JournalEvent.PUSH_SENT,
                server="smp1",
                provider="AP",
                token=token,
                kind=MESSAGE_PUSH,
                latency_us=40_000,
                count=1,
                total=1,
            )
        journal._take()

    return {"received": (received, 100 * BLOCK), "sent": (sent, 1000)}


def measure(folder: Path, *, rounds: int = 20, segments: int = 4) -> list[Row]:
    ids = [(os.urandom(24), os.urandom(24)) for _ in range(SUBSCRIPTIONS)]
    written, events = folder / "journal", SEGMENT_FLUSHES * FLUSH_EVENTS
    settings = WriterConfig(folder=written, key=bytes(32), buffered_events=1 << 40)
    journal = Journal(settings, lambda: NOW)
    loop = best_of(recording(journal, ids), rounds)
    works: dict[str, Work] = {
        "received": (writing(written, [], received_blocks(ids)), events),
        "sent": (writing(written, sent_pushes(journal, ids), []), events),
    }
    thread = best_of(works, segments)
    limit = SHARE * NMSG_BUDGET_US
    total = loop["received"] + thread["received"]
    return [
        figure("received, on the event loop", "us CPU", loop["received"], aim=limit),
        figure("received, altogether", "us CPU", total, aim=limit),
        figure("received, of an NMSG", "% of budget", 100 * total / NMSG_BUDGET_US, aim=100 * SHARE),
        figure("push sent, on the event loop", "us CPU", loop["sent"], aim=limit),
        figure("push sent, altogether", "us CPU", loop["sent"] + thread["sent"], aim=SHARE * PUSH_BUDGET_US),
    ]


JOURNAL = Part(
    name="journal",
    title="Event journal",
    measure=measure,
    quick={"rounds": 6, "segments": 2},
    seconds=15,
    quick_seconds=4,
    why="What happened is written down for the reports; that must not slow down what happens.",
    how="For each event: noting it on the event loop, and what the writing thread does (pseudonyms,"
    " Arrow, the open segment, sealing it as Parquet). The budget is 40 us of CPU for an NMSG and"
    " 150 us for a push.",
    bound="two keyed hashes for an event that is seen for the first time; Arrow and Parquet for the rest.",
)
