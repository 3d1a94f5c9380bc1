"""Segments of the journal on disk: sealed in little memory, and recovered after whatever happened."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from psutil import Process

from ntf_server.journal import Row
from ntf_server.journal_segments import SegmentWriter, whole_batches
from store.journal_files import SCHEMA
from store.journal_schema import GIVEN_COLUMNS, OPEN_PREFIX, JournalEvent
from tests.ntf_server.test_journal import NOON, open_segments, rows, segments, settings
from tests.waiting import DEADLINE


def writer(folder: Path, *, pending_limit: int = 100) -> SegmentWriter:
    config = settings(folder, segment_bytes=1 << 30, segment_seconds=1e9, buffered_events=pending_limit)
    return SegmentWriter(config, b"W" * 16)


def plain(number: int) -> Row:
    given = {"count": number, "error": "dropped"}
    return (NOON + number * 1e-6, JournalEvent.EVENTS_LOST, *map(given.get, GIVEN_COLUMNS))


def test_memory_of_sealed_segments_goes_back_to_the_system(tmp_path: Path) -> None:
    """However many there were: what is used afterwards is what was used after the first few."""
    events = [plain(number) for number in range(20_000)]
    used = []
    for segment in range(50):
        segments_of = writer(tmp_path / str(segment))
        segments_of.write(events, [], NOON)
        segments_of.close()
        used.append(Process().memory_info().rss)
    pa.default_memory_pool().release_unused()
    assert used[-1] - used[9] < 2e6
    assert used[-1] - Process().memory_info().rss < 1e6


SEALING_PROCESS = """
import sys
from pathlib import Path
import pyarrow
from ntf_server.journal import WriterConfig
from ntf_server.journal_segments import SegmentWriter
from store import journal_files

journal_files.ROW_GROUP = 5_000
SegmentWriter(WriterConfig(folder=Path(sys.argv[1]), key=bytes(32)), bytes(16)).recover()
print(pyarrow.default_memory_pool().max_memory())
"""


def test_a_large_segment_is_sealed_in_the_memory_of_a_row_group(tmp_path: Path) -> None:
    needed = {}
    for events in (10_000, 80_000):
        folder = tmp_path / str(events)
        segments_of = writer(folder)
        for first in range(0, events, 500):
            segments_of.write([plain(number) for number in range(first, first + 500)], [], NOON)
        abandon(segments_of)
        sealing = subprocess.run(
            [sys.executable, "-c", SEALING_PROCESS, folder], capture_output=True, check=True
        )
        needed[events] = int(sealing.stdout)
        (path,) = segments(folder)
        assert pq.read_metadata(path).num_row_groups > events / 10_000
        assert [row["count"] for row in rows(folder)] == list(range(events))
    assert needed[80_000] < 1.5 * needed[10_000]


def abandon(segments_of: SegmentWriter) -> None:
    """Leave the open segment as a process that dies does."""
    assert segments_of._open is not None
    segments_of._open.close()


def test_a_disk_that_refuses_loses_nothing_within_bounds(tmp_path: Path) -> None:
    blocked = tmp_path / "journal"
    blocked.write_bytes(b"a file where the folder should be")
    segments_of = writer(blocked, pending_limit=5)
    segments_of.write([plain(n) for n in range(4)], [], NOON)
    assert (segments_of.written, segments_of.lost) == (0, 0)
    segments_of.write([plain(n) for n in range(4, 8)], [], NOON)
    assert (segments_of.written, segments_of.lost) == (0, 3)
    blocked.unlink()
    segments_of.write([plain(8)], [], NOON)
    segments_of.close()
    assert [row["count"] for row in rows(blocked)] == [3, 4, 5, 6, 7, 8]


def test_a_half_written_batch_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments_of = writer(tmp_path)
    segments_of.write([plain(0)], [], NOON)
    real = os.write

    def full_disk(fd: int, data: Any) -> int:
        real(fd, bytes(data)[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full_disk)
    segments_of.write([plain(1)], [], NOON)
    monkeypatch.undo()
    segments_of.write([plain(2)], [], NOON)
    segments_of.close()
    assert [row["count"] for row in rows(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("cut", [1, 10, 500])
def test_recovery_keeps_every_whole_batch(tmp_path: Path, cut: int) -> None:
    first = writer(tmp_path)
    for number in range(3):
        first.write([plain(number)], [], NOON)
    (path,) = open_segments(tmp_path)
    content = path.read_bytes()
    first.close()
    segments(tmp_path)[0].unlink()
    path.write_bytes(content[:-cut])
    writer(tmp_path).recover()
    assert [row["count"] for row in rows(tmp_path)] == [0, 1]
    assert not open_segments(tmp_path)


def test_a_disk_that_cannot_be_read_is_no_damaged_segment() -> None:
    with pytest.raises(OSError, match="Input/output error"):
        list(whole_batches(Path("/proc/self/mem")))  # nothing is at its beginning


def left_open(folder: Path, events: pa.Table) -> Path:
    """An open segment of a process that died, as another version may have written it."""
    path = folder / f"{OPEN_PREFIX}{os.urandom(16).hex()}-{0:015d}.arrows"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, events.schema) as stream:
        stream.write_table(events)
    return path


def test_recovery_seals_what_other_versions_have_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that had fewer columns, one that has more; what has no journal's columns is left, and said."""
    other = writer(tmp_path / "other")
    other.write([plain(7)], [], NOON)
    other.close()
    event = pq.read_table(*segments(tmp_path / "other"), partitioning=None)
    left_open(tmp_path, event.drop_columns(["uptime_us", "daemon"]))
    left_open(tmp_path, event.append_column("colour", pa.array(["blue"])))
    strange = left_open(tmp_path, event.drop_columns(["seq"]))
    writer(tmp_path).recover()
    assert rows(tmp_path) == event.to_pylist() * 2
    assert all(pq.read_schema(path).equals(SCHEMA) for path in segments(tmp_path))
    assert open_segments(tmp_path) == [strange]
    assert [record.message for record in caplog.records] == [
        f"journal: {strange} is left as it is: column seq is missing"
    ]


def test_recovery_leaves_the_segment_of_a_living_process_alone(tmp_path: Path) -> None:
    living = writer(tmp_path)
    living.write([plain(0)], [], NOON)
    writer(tmp_path).recover()
    assert len(open_segments(tmp_path)) == 1
    assert not segments(tmp_path)
    living.close()
    assert len(rows(tmp_path)) == 1


def test_sealing_again_after_a_crash_in_between_adds_nothing(tmp_path: Path) -> None:
    first = writer(tmp_path)
    first.write([plain(0)], [], NOON)
    (path,) = open_segments(tmp_path)
    content = path.read_bytes()
    first.close()
    path.write_bytes(content)  # as if the process had died before it removed the open segment
    writer(tmp_path).recover()
    assert [row["seq"] for row in rows(tmp_path)] == [0]


WRITING_PROCESS = """
import asyncio, os, sys, time
from pathlib import Path
from ntf_server.journal import Journal, WriterConfig

async def main():
    options = dict(folder=Path(sys.argv[1]), key=bytes(32), flush_seconds=0.005, segment_bytes=60_000)
    journal = Journal(WriterConfig(**options), time.time)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(journal.run())
        while True:
            journal.record_received("smp.example", [(os.urandom(24), os.urandom(24))] * 20)
            sys.stdout.write(f"{journal._segments.written}\\n")
            sys.stdout.flush()
            await asyncio.sleep(0.001)

asyncio.run(main())
"""


@pytest.mark.parametrize("kills_after", [1, 4])
async def test_kill_9_loses_at_most_the_tail(tmp_path: Path, kills_after: int) -> None:
    """Closed segments stay, events that had reached the open one are recovered by the next process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITING_PROCESS, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    reported = 0
    async with asyncio.timeout(DEADLINE):
        while len(segments(tmp_path)) < kills_after or not open_segments(tmp_path):
            reported = int(await process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        closed = {path: path.read_bytes() for path in segments(tmp_path)}
        rest = await process.stdout.read()
        await process.wait()
    reported = max([reported, *map(int, rest.split(b"\n")[:-1])])
    writer(tmp_path).recover()
    assert not open_segments(tmp_path)
    assert all(path.read_bytes() == content for path, content in closed.items())
    numbers = [row["seq"] for row in rows(tmp_path)]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= reported > 0


def test_readers_ignore_open_segments(tmp_path: Path) -> None:
    living = writer(tmp_path)
    living.write([plain(0)], [], NOON)
    assert all(path.name.startswith(".") for path in tmp_path.iterdir())
    living.close()


def test_arrow_stream_is_readable_while_open(tmp_path: Path) -> None:
    living = writer(tmp_path)
    living.write([plain(0)], [], NOON)
    living.write([plain(1)], [], NOON)
    (path,) = open_segments(tmp_path)
    batches = list(pa.ipc.open_stream(path.read_bytes()))
    assert sum(batch.num_rows for batch in batches) == 2
    living.close()
