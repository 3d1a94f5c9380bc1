"""The event journal: what reaches the disk, when, and what a crash leaves."""

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ntf_server.clock import SECONDS_PER_DAY
from ntf_server.journal import EventSink, Journal, WriterConfig
from ntf_server.journal_segments import MAX_TEXT, PSEUDONYMS_KEPT, Pseudonyms, SegmentWriter
from store.journal_files import SCHEMA
from store.journal_schema import (
    COLUMNS,
    CONTRACT,
    GIVEN_COLUMNS,
    KEY_SIZE,
    OPEN_PREFIX,
    JournalEvent,
    JournalKeyError,
    epoch_of,
    load_key,
    load_or_create_key,
    pseudonym,
)
from tests.strict_journal import ContractError
from tests.waiting import DEADLINE, until

KEY = bytes(range(KEY_SIZE))
NOON = 1_767_614_400.0  # 2026-01-05 12:00


class Clock:
    """Wall time that stands still until it is moved."""

    def __init__(self, now: float = NOON) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def settings(folder: Path, **changes: Any) -> WriterConfig:
    return WriterConfig(**{"folder": folder, "key": KEY, "flush_seconds": 0.01, **changes})


@asynccontextmanager
async def running(journal: Journal) -> AsyncIterator[Journal]:
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        tasks.create_task(journal.run(), name="journal")
        yield journal
        journal.stop()


def note(journal: Journal, **changes: Any) -> None:
    """Record an event that has few columns."""
    journal.record(JournalEvent.EVENTS_LOST, **{"count": 1, "error": "dropped", **changes})


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("date=*/[!.]*"))


def open_segments(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{OPEN_PREFIX}*"))


def rows(folder: Path) -> list[dict[str, Any]]:
    tables = [pq.read_table(path, partitioning=None) for path in segments(folder)]
    return [row for table in tables for row in table.to_pylist()]


async def test_events_reach_a_sealed_segment_with_all_columns(tmp_path: Path) -> None:
    async with running(Journal(settings(tmp_path), Clock(), b"W" * 16)) as journal:
        journal.record(
            JournalEvent.PUSH_SENT,
            server="smp.example",
            provider="AP",
            token=b"t" * 24,
            kind="message",
            latency_us=1500,
            count=2,
            total=3,
        )
        journal.record(
            JournalEvent.SUB_STATUS_CHANGED,
            subscription=b"s" * 24,
            token=b"t" * 24,
            server="smp.example",
            status_from="PENDING",
            status_to="ACTIVE",
        )
        assert journal.recorded == 2
    (path,) = segments(tmp_path)
    assert path.parent.name == "date=2026-01-05"
    assert path.name == f"{(b'W' * 16).hex()}-{0:015d}.parquet"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert pq.read_schema(path).equals(SCHEMA)
    first, second = rows(tmp_path)
    assert {k: v for k, v in first.items() if v is not None and k != "time"} == {
        "event": "push_sent",
        "writer": b"W" * 16,
        "seq": 0,
        "epoch": epoch_of(KEY),
        "server": "smp.example",
        "provider": "AP",
        "kind": "message",
        "token": pseudonym(KEY, b"t" * 24),
        "latency_us": 1500,
        "count": 2,
        "total": 3,
    }
    assert first["time"].timestamp() == NOON
    assert second["subscription"] == pseudonym(KEY, b"s" * 24)
    assert (second["status_from"], second["status_to"], second["seq"]) == ("PENDING", "ACTIVE", 1)
    assert not open_segments(tmp_path)


async def test_a_block_is_one_event_per_notification(tmp_path: Path) -> None:
    async with running(Journal(settings(tmp_path), Clock())) as journal:
        journal.record_received("a.example", [(bytes([i]) * 24, bytes([i + 100]) * 24) for i in range(80)])
        journal.record(JournalEvent.CRON_SENT, token=b"c" * 24, provider="AP")
        journal.record_received("b.example", [(b"x" * 24, b"y" * 24)])
        journal.record_received("c.example", [])
    found = rows(tmp_path)
    assert sorted(row["seq"] for row in found) == list(range(82))
    received = [(r["server"], r["token"], r["subscription"]) for r in found if r["event"] == "ntf_received"]
    expected = [
        ("a.example", pseudonym(KEY, bytes([i]) * 24), pseudonym(KEY, bytes([i + 100]) * 24))
        for i in range(80)
    ]
    assert received == [*expected, ("b.example", pseudonym(KEY, b"x" * 24), pseudonym(KEY, b"y" * 24))]


async def test_raw_ids_never_reach_the_disk(tmp_path: Path) -> None:
    token, subscription = os.urandom(24), os.urandom(24)
    async with running(Journal(settings(tmp_path), Clock())) as journal:
        journal.record(JournalEvent.SUB_CREATED, token=token, subscription=subscription, server="smp.example")
        await until(lambda: journal._segments.written == 1)
        on_disk = b"".join(path.read_bytes() for path in open_segments(tmp_path))
    (sealed,) = segments(tmp_path)
    table = pq.read_table(sealed, partitioning=None)
    assert token not in on_disk
    assert subscription not in on_disk
    assert pseudonym(KEY, token) in on_disk  # so the check above looked at the right bytes
    assert table.column("token").to_pylist() == [pseudonym(KEY, token)]


def test_pseudonyms_depend_on_the_key_and_stay_when_the_cache_is_emptied() -> None:
    assert pseudonym(KEY, b"id") != pseudonym(b"other key" * 3, b"id")
    names = Pseudonyms(KEY)
    first = names[b"first"]
    for i in range(PSEUDONYMS_KEPT + 10):
        assert names[i.to_bytes(8, "big")] is not None
    assert len(names) < PSEUDONYMS_KEPT
    assert names[b"first"] == first
    assert names[None] is None


async def test_rotation_by_size(tmp_path: Path) -> None:
    async with running(Journal(settings(tmp_path, segment_bytes=4_000), Clock())) as journal:
        for number in range(5):
            journal.record_received("smp.example", [(os.urandom(24), os.urandom(24))] * 40)
            await until(lambda n=number: len(segments(tmp_path)) == n + 1)
    assert sorted(row["seq"] for row in rows(tmp_path)) == list(range(200))


async def test_rotation_by_time(tmp_path: Path) -> None:
    clock = Clock()
    async with running(Journal(settings(tmp_path, segment_seconds=60), clock)) as journal:
        note(journal)
        await until(lambda: open_segments(tmp_path))
        assert not segments(tmp_path)
        clock.now += 59
        note(journal)
        await until(lambda: journal._segments.written == 2)
        assert not segments(tmp_path)
        clock.now += 1
        await until(lambda: len(segments(tmp_path)) == 1 and not open_segments(tmp_path))


async def test_each_day_has_its_own_segments(tmp_path: Path) -> None:
    clock = Clock(NOON + SECONDS_PER_DAY / 2 - 1e-6)
    async with running(Journal(settings(tmp_path), clock)) as journal:
        note(journal)
        clock.now += 1e-6
        note(journal)
        clock.now += SECONDS_PER_DAY
        note(journal)
    assert [path.parent.name for path in segments(tmp_path)] == [f"date=2026-01-0{day}" for day in (5, 6, 7)]
    assert [row["seq"] for row in rows(tmp_path)] == [0, 1, 2]


async def test_what_was_noted_around_midnight_makes_one_segment_for_each_day(tmp_path: Path) -> None:
    clock = Clock(NOON + SECONDS_PER_DAY / 2 - 1)
    journal = Journal(settings(tmp_path), clock)
    for _ in range(2):
        note(journal)
        journal.record_received("smp.example", [(b"t" * 24, b"s" * 24)] * 2)
        clock.now += 2
    async with running(journal):
        pass
    assert [path.parent.name for path in segments(tmp_path)] == ["date=2026-01-05", "date=2026-01-06"]
    assert [pq.read_metadata(path).num_rows for path in segments(tmp_path)] == [3, 3]
    assert sorted(row["seq"] for row in rows(tmp_path)) == list(range(6))


async def test_json_lines(tmp_path: Path) -> None:
    async with running(Journal(settings(tmp_path, format="jsonl"), Clock(), b"W" * 16)) as journal:
        journal.record(JournalEvent.CRON_SENT, token=b"t" * 24, provider="AP")
    (path,) = segments(tmp_path)
    assert path.suffix == ".jsonl"
    row = json.loads(path.read_text())
    assert row.keys() == {"time", "event", "writer", "seq", "epoch", "token", "provider"}
    assert row["time"] == "2026-01-05T12:00:00.000000+00:00"


async def test_cancellation_seals_what_was_recorded(tmp_path: Path) -> None:
    journal = Journal(settings(tmp_path, flush_seconds=60.0), Clock())
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(journal.run(), name="journal")
        await asyncio.sleep(0)  # lets it begin
        note(journal)
        task.cancel()
    assert [row["event"] for row in rows(tmp_path)] == ["events_lost"]


async def test_a_full_buffer_drops_and_counts(tmp_path: Path) -> None:
    journal = Journal(settings(tmp_path, buffered_events=10), Clock())
    for _ in range(4):
        journal.record_received("smp.example", [(b"t" * 24, b"s" * 24)] * 3)
    for _ in range(2):
        note(journal)
    assert (journal.recorded, journal.dropped) == (10, 4)
    async with running(journal):
        pass
    assert len(rows(tmp_path)) == 10


async def test_malformed_events_are_left_out_and_counted(tmp_path: Path) -> None:
    async with running(Journal(settings(tmp_path), Clock())) as journal:
        note(journal, error="good")
        note(journal, error="\ud800")
        note(journal, count=2**70)
        note(journal, error="E" * 5000)
    found = rows(tmp_path)
    assert [row["error"] for row in found] == ["good", "E" * MAX_TEXT]
    assert journal.rejected == 2
    assert [row["seq"] for row in found] == [0, 1]


def test_key_is_made_once_for_the_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "journal.key"
    key = load_or_create_key(path)
    assert len(key) == KEY_SIZE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create_key(path) == key == load_key(path)
    assert [p.name for p in tmp_path.iterdir()] == ["journal.key"]


def test_bad_keys_are_refused_without_being_shown(tmp_path: Path) -> None:
    path = tmp_path / "journal.key"
    with pytest.raises(JournalKeyError, match="cannot read"):
        load_key(path)
    path.write_bytes(b"short secret")
    with pytest.raises(JournalKeyError, match="12 bytes instead of 32") as caught:
        load_or_create_key(path)
    assert "secret" not in str(caught.value)
    with pytest.raises(JournalKeyError, match="cannot create"):
        load_or_create_key(tmp_path / "nowhere" / "journal.key")


def test_key_is_not_shown_by_settings(tmp_path: Path) -> None:
    assert repr(KEY) not in repr(settings(tmp_path))


def test_null_journal_takes_everything(tmp_path: Path) -> None:
    journal = EventSink()
    journal.record(JournalEvent.CRON_SENT, token=b"t", provider="AP")
    journal.record_received("smp.example", [(b"t", b"s")])


async def test_what_breaks_the_contract_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Journal, "record", Journal.record.__wrapped__)  # type: ignore[attr-defined]
    async with running(Journal(settings(tmp_path), Clock())) as journal:
        note(journal)
        note(journal, server="smp.example")  # a column that it may not have
        journal.record(
            JournalEvent.SUB_DELETED, subscription=b"s", token=b"t", error="requested"
        )  # no server
    assert [row["event"] for row in rows(tmp_path)] == ["events_lost"]
    assert journal.rejected == 2


async def test_what_breaks_the_contract_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else is written with it: other events, the same with other columns, in their order."""
    monkeypatch.setattr(Journal, "record", Journal.record.__wrapped__)  # type: ignore[attr-defined]
    async with running(Journal(settings(tmp_path), Clock())) as journal:
        for number in range(20):
            note(journal, count=number)
            journal.record(JournalEvent.CRON_SENT, token=b"t", provider="AP" if number % 3 else None)
            journal.record(JournalEvent.NTF_RECEIVED, server="smp.example", count=number or None)
            journal.record("made_up" if number % 2 else None, count=number)  # type: ignore[arg-type]
            note(journal, error=number)
    found = rows(tmp_path)
    assert [row["count"] for row in found if row["event"] == "events_lost"] == list(range(20))
    assert [row["count"] for row in found if row["event"] == "ntf_received"] == [None, *range(1, 20)]
    assert [row["provider"] for row in found if row["event"] == "cron_sent"] == ["AP"] * 13
    assert [row["seq"] for row in found] == list(range(53))
    assert journal.rejected == 7 + 20 + 20


def test_an_event_is_noted_in_the_order_of_its_columns(tmp_path: Path) -> None:
    journal = Journal(settings(tmp_path), Clock())
    Journal.record.__wrapped__(  # type: ignore[attr-defined]
        journal, JournalEvent.CRON_SENT, **{name: name for name in GIVEN_COLUMNS}
    )
    assert journal._rows == [(NOON, JournalEvent.CRON_SENT, *GIVEN_COLUMNS)]


def test_tests_are_told_at_once_who_breaks_the_contract(tmp_path: Path) -> None:
    journal = Journal(settings(tmp_path), Clock())
    with pytest.raises(ContractError, match=r"sub_deleted lacks \['server'\] and may not have \['count'\]"):
        journal.record(JournalEvent.SUB_DELETED, subscription=b"s", token=b"t", error="requested", count=1)


def test_every_event_has_a_contract_over_known_columns() -> None:
    assert set(CONTRACT) == set(JournalEvent)
    for event, contract in CONTRACT.items():
        assert contract.must | contract.may <= set(GIVEN_COLUMNS), event
        assert not contract.must & contract.may, event
        known = contract.must | contract.may
        names_somebody = bool(known & {"token", "subscription"})
        assert (contract.resolution_us > 1) is names_somebody, event
    used = frozenset().union(*(c.must | c.may for c in CONTRACT.values()))
    assert used == set(GIVEN_COLUMNS)
    for sink in (EventSink, Journal):
        assert list(signature(sink.record).parameters) == ["self", "event", *GIVEN_COLUMNS]


async def test_times_are_no_finer_than_reports_need(tmp_path: Path) -> None:
    clock = Clock(NOON + 61.234375)
    async with running(Journal(settings(tmp_path), clock)) as journal:
        journal.record_received("smp.example:5223", [(b"t" * 24, b"s" * 24)])
        journal.record(JournalEvent.CRON_SENT, token=b"t", provider="AP")
        journal.record(JournalEvent.TOKEN_REGISTERED, token=b"t", provider="AP")
        note(journal)
    times = {row["event"]: row["time"].timestamp() - NOON for row in rows(tmp_path)}
    assert times == {
        "ntf_received": 60,
        "cron_sent": 60,
        "token_registered": 61,
        "events_lost": 61.234375,
    }


async def test_whatever_goes_wrong_costs_events_not_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(SegmentWriter, "_seal_if_due", broken)
    async with running(Journal(settings(tmp_path), Clock())) as journal:
        note(journal)
        await until(lambda: journal.dropped == 1)


def documented() -> list[str]:
    """The contract as the tables of the documentation have it."""
    columns = [f"| `{column.name}` | {column.meaning} |" for column in COLUMNS]
    spans = {1: "exact", 1_000_000: "second", 60_000_000: "minute"}
    events = [
        f"| `{event}` | {' '.join(sorted(c.must))} | {' '.join(sorted(c.may))} | {spans[c.resolution_us]} "
        f"| {c.meaning} |"
        for event, c in CONTRACT.items()
    ]
    return columns + events


def test_the_documentation_has_the_contract() -> None:
    text = (Path(__file__).parents[2] / "docs" / "analytics.md").read_text("utf-8")
    assert [line for line in documented() if line not in text.splitlines()] == []
