"""What the journal says of the daemon itself, and what a journal that cannot be written costs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ntf_server.app import running
from ntf_server.clock import SystemClock
from ntf_server.daemon_life import DROPPED, REJECTED, DaemonLife
from ntf_server.journal import Journal, WriterConfig
from ntf_server.router import RouterStatus
from ntf_server.setup import JOURNAL_FOLDER
from protocol.encoding import NO_ENTITY
from protocol.ntf_commands import Ping, Pong
from store.journal_schema import JournalEvent
from store.sqlite import SqliteStore
from tests.ntf_server.conftest import changed, make_app, make_config
from tests.ntf_server.ntf_client import NtfClient
from tests.waiting import until

ROUTER = "smp://AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=@Smp.Example"


def status(**changes: Any) -> RouterStatus:
    known: dict[str, Any] = {
        "server": ROUTER,
        "connected": True,
        "version": 19,
        "service": True,
        "subscribed": True,
        "service_queues": 7,
        "individual_queues": 2,
        "waiting": 1,
        "put_off": 0,
        "taken_over": False,
        "last_error": None,
    }
    return RouterStatus(**{**known, **changes})


def value(metric: Any) -> float:
    (family,) = metric.collect()
    return float(family.samples[0].value)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    tables = [pq.read_table(path, partitioning=None) for path in sorted(folder.glob("date=*/*.parquet"))]
    return list(pa.concat_tables(tables).sort_by("seq").to_pylist())


async def test_the_journal_tells_what_it_lost_and_what_routers_have(tmp_path: Path) -> None:
    beats = asyncio.Semaphore(0)

    async def sleep(seconds: float) -> None:
        await beats.acquire()

    journal = Journal(
        WriterConfig(folder=tmp_path / "journal", key=bytes(32), flush_seconds=0.01, buffered_events=5),
        lambda: 1_767_614_400.0,
    )
    store = SqliteStore(tmp_path / "ntf.db")
    await store.open()
    life = DaemonLife(journal, store, SystemClock(), "ntf:443", lambda: [status()], sleep=sleep)
    async with asyncio.timeout(20), life.recorded():
        for _ in range(9):
            journal.record(JournalEvent.SMP_CONNECTED, server="smp.example:5223", latency_us=1)
        lost = journal.dropped
        assert lost > 0
        assert (value(DROPPED), value(REJECTED)) == (lost, 0)
        await until(lambda: journal._buffered == 0)  # so that there is room again
        beats.release()
        await until(lambda: journal._segments.written >= 8)
        beats.release()  # nothing more was lost meanwhile
        await until(lambda: journal._segments.written >= 10)
    await store.close()
    found = rows_of(tmp_path / "journal")
    named = {row["event"]: row for row in found}
    assert (named["events_lost"]["count"], named["events_lost"]["error"]) == (lost, "dropped")
    samples = [(r["server"], r["status_to"], r["count"]) for r in found if r["event"] == "smp_sampled"]
    assert samples == [("smp.example:5223", "ACTIVE", 9), ("smp.example:5223", "PENDING", 1)]
    assert named["server_alive"]["daemon"] == named["server_stopped"]["daemon"] == "ntf:443"
    assert named["server_started"]["uptime_us"] <= named["server_stopped"]["uptime_us"]


async def test_what_a_full_disk_cost_is_told_when_there_is_room_again(tmp_path: Path) -> None:
    """Whatever the journal said of its losses meanwhile would be lost as well."""
    folder = tmp_path / "journal"
    folder.write_text("a file where the folder should be")
    journal = Journal(
        WriterConfig(folder=folder, key=bytes(32), flush_seconds=0.001, buffered_events=5),
        lambda: 1_767_614_400.0,
    )

    async def sleep(seconds: float) -> None:
        """Long enough that what was noted is written, or was refused: more is taken only then."""
        for _ in ("taken", "written"):
            rows = journal._rows
            await until(lambda rows=rows: journal._rows is not rows)

    store = SqliteStore(tmp_path / "ntf.db")
    await store.open()
    life = DaemonLife(journal, store, SystemClock(), "ntf:443", lambda: [status()], sleep=sleep)
    async with asyncio.timeout(20), life.recorded():
        await until(lambda: journal.dropped > 20)
        folder.unlink()
        await until(lambda: journal._segments.written > 20)
    await store.close()
    told = sum(row["count"] for row in rows_of(folder) if row["event"] == "events_lost")
    assert told == journal.dropped


async def test_a_journal_that_cannot_be_written_does_not_end_the_daemon(tmp_path: Path) -> None:
    config = changed(make_config(tmp_path), JOURNAL={"enabled": True})
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / JOURNAL_FOLDER).write_text("a file where the folder should be")
    async with asyncio.timeout(60), running(make_app(tmp_path, config)) as app:
        client = await NtfClient.open(app.address)
        assert await client.ask(Ping(), NO_ENTITY, None) == Pong()
        client.close()
