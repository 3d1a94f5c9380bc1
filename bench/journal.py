"""What the event journal costs the daemon: CPU per event, on the event loop's thread and altogether."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measure import at_most, best_of, print_rows
from ntf_server.journal import FLUSH_EVENTS, Journal, JournalSettings
from ntf_server.journal_items import JournalItem, ReceivedBlock, Row
from ntf_server.journal_segments import SegmentWriter
from store.journal_schema import GIVEN_COLUMNS, MESSAGE_PUSH, JournalEvent

BLOCK = 80  # notifications in a block of an SMP router
NMSG_BUDGET_US = 40.0  # CPU per notification up to its commit
SHARE = 0.05
SUBSCRIPTIONS = 20_000
SEGMENT_FLUSHES = 20
NOW = 1_767_614_400_000_000

Ids = list[tuple[bytes, bytes]]


def received_blocks(ids: Ids) -> list[JournalItem]:
    """As many blocks as one flush takes, from all over the subscriptions."""
    blocks = FLUSH_EVENTS // BLOCK
    return [ReceivedBlock(NOW + i, "smp1.example.org", pick(ids, i)) for i in range(blocks)]


def pick(ids: Ids, number: int) -> Ids:
    """One block's ids."""
    return [ids[(number * BLOCK * 7 + i * 131) % len(ids)] for i in range(BLOCK)]


def sent_pushes(ids: Ids) -> list[JournalItem]:
    """One flush of pushes."""
    name, server, tag = JournalEvent.PUSH_SENT, "smp1.example.org", "AP"
    given = {"server": server, "provider": tag, "kind": MESSAGE_PUSH, "count": 1, "total": 1}

    def row(i: int) -> Row:
        columns = {**given, "token": ids[i % len(ids)][0], "latency_us": 40_000 + i}
        values: Any = [columns.get(column) for column in GIVEN_COLUMNS]
        return (NOW + i, name, *values)

    return [row(i) for i in range(FLUSH_EVENTS)]


def writing(folder: Path, items: list[JournalItem]) -> Callable[[], None]:
    """Pseudonyms, Arrow, the open segment and sealing it as Parquet: all that the writing thread does."""

    def write_and_seal() -> None:
        writer = SegmentWriter(
            folder=folder,
            key=bytes(32),
            writer_id=os.urandom(16),
            segment_bytes=1 << 40,
            segment_us=1 << 60,
            pending_limit=1 << 20,
        )
        for _ in range(SEGMENT_FLUSHES):
            writer.write(items, NOW)
        writer.close()
        shutil.rmtree(folder)

    return write_and_seal


def main() -> int:
    ids = [(os.urandom(24), os.urandom(24)) for _ in range(SUBSCRIPTIONS)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "journal"
        journal = Journal(JournalSettings(folder=folder, key=bytes(32), buffered_events=1 << 40), lambda: NOW)
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

        events = SEGMENT_FLUSHES * FLUSH_EVENTS
        loop = best_of({"received": (received, 100 * BLOCK), "sent": (sent, 1000)})
        thread = best_of(
            {
                "received": (writing(folder, received_blocks(ids)), events),
                "sent": (writing(folder, sent_pushes(ids)), events),
            },
            rounds=8,
        )
    limit = SHARE * NMSG_BUDGET_US
    total = loop["received"] + thread["received"]
    rows = [
        at_most("received, on the event loop", loop["received"], "us CPU/event", limit),
        at_most("received, altogether", total, "us CPU/event", limit),
        at_most("received, share of an NMSG's budget", 100 * total / NMSG_BUDGET_US, "%", 100 * SHARE),
        at_most("push sent, on the event loop", loop["sent"], "us CPU/event", limit),
        at_most("push sent, altogether", loop["sent"] + thread["sent"], "us CPU/event", 0.05 * 150),
    ]
    return 0 if print_rows("Journal", rows) else 1


if __name__ == "__main__":
    sys.exit(main())
