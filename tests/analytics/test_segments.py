"""Telling good segments from bad ones, and each event once."""

import asyncio
import io
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from analytics.files import LocalFolder
from analytics.generator import Plan, write_journal
from analytics.manifest import FoundFile
from analytics.rollups import EVENTS, update_rollups
from analytics.segments import Segment, check_segment, split_overlapping
from analytics.sources import Source
from ntf_server.journal import Journal, WriterConfig
from store.journal_files import SCHEMA, write_parquet
from store.journal_schema import JournalEvent


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("one")
    plan = Plan(events=3_000, days=8, servers=3, gaps=0, mass_disconnects=0, restarts=0)
    write_journal(plan, folder)
    return min(folder.glob("*/*.parquet")).read_bytes()


def test_a_good_segment_tells_its_rows_and_ids(content: bytes) -> None:
    segment = check_segment("a.parquet", content)
    assert segment.error is None
    assert segment.rows == pq.read_metadata(pa.BufferReader(content)).num_rows
    assert segment.first[1] == 0
    assert segment.last[1] == segment.rows - 1
    assert not segment.repeats


def test_every_truncation_is_noticed(content: bytes) -> None:
    for size in [0, 1, 4, 8, 100, *range(1000, len(content), 5000), len(content) - 8, len(content) - 1]:
        assert check_segment("a.parquet", content[:size]).error is not None, size


def test_flipped_bits_are_never_taken_for_other_data(content: bytes) -> None:
    """Every 41st byte of the pages and their headers: noticed, or without any effect on the data."""
    original = pq.read_table(pa.BufferReader(content))
    group = pq.read_metadata(pa.BufferReader(content)).row_group(0)
    noticed = 0
    for index in range(group.num_columns):
        column = group.column(index)
        start = column.dictionary_page_offset or column.data_page_offset
        for place in range(start, start + column.total_compressed_size, 41):
            broken = content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]
            if check_segment("a.parquet", broken).error is None:
                assert pq.read_table(pa.BufferReader(broken)).equals(original), (index, place)
            else:
                noticed += 1
    assert noticed > 100


def test_damage_anywhere_is_an_error_or_harmless_but_never_an_exception(content: bytes) -> None:
    for place in range(0, len(content), 211):
        check_segment("a.parquet", content[:place] + b"\xff" + content[place + 1 :])


def test_other_columns_are_refused(tmp_path: Path) -> None:
    def error_of(table: pa.Table) -> str | None:
        pq.write_table(table, tmp_path / "x.parquet")
        return check_segment("x.parquet", (tmp_path / "x.parquet").read_bytes()).error

    assert "column time is missing" in (error_of(pa.table({"event": ["x"]})) or "")
    assert "column time is int64" in (error_of(pa.table({"time": [1]})) or "")


@pytest.mark.parametrize(
    "lines",
    [
        b"{",
        b"[]\n",
        b'{"time": "x"}\n',
        b'{"time":1,"event":"x","writer":"!","seq":1}\n',
        b"\xff\n",
        b'{"time":',
    ],
)
def test_bad_json_lines_are_refused(lines: bytes) -> None:
    assert check_segment("a.jsonl", lines).error is not None


@pytest.mark.parametrize(
    "absurd", [{"count": 2**63 - 1}, {"time": 2**63 - 1}, {"time": -(2**63)}, {"time": 2**60}]
)
def test_absurd_numbers_make_a_bad_segment(content: bytes, absurd: dict[str, int]) -> None:
    row = {
        "time": 1_767_614_400_000_000,
        "event": "ntf_received",
        "writer": b"w",
        "epoch": 1,
        "server": "s:1",
    }
    rows = [row | absurd | {"seq": seq} for seq in range(2)]
    columns = {
        c.name: pa.array([r.get(c.name) for r in rows], pa.int64() if c.name == "time" else c.type)
        for c in SCHEMA
    }
    columns["time"] = columns["time"].cast(SCHEMA.field("time").type)
    file = io.BytesIO()
    write_parquet(pa.table(columns, schema=SCHEMA).to_batches(), file)
    assert check_segment("good.parquet", content).error is None
    assert check_segment("absurd.parquet", file.getvalue()).error is not None


def segment(path: str, writer: bytes, first: int, last: int, *, repeats: bool = False) -> Segment:
    return Segment(path, last - first + 1, (writer, first), (writer, last), repeats)


def test_only_segments_that_may_share_events_are_compared() -> None:
    a, b, c = segment("a", b"w", 0, 9), segment("b", b"w", 10, 19), segment("c", b"w", 19, 30)
    d, e = segment("d", b"x", 0, 5), segment("e", b"y", 0, 3, repeats=True)
    mixed = Segment("m", 4, (b"z", 0), (b"zz", 7))
    alone, overlapping = split_overlapping([e, d, c, b, a, mixed, Segment("empty")])
    assert alone == [a, d, mixed]
    assert overlapping == [b, c, e]


async def test_the_daemons_segments_of_both_formats_are_read(spark: SparkSession, tmp_path: Path) -> None:
    for file_format in ("parquet", "jsonl"):
        settings = WriterConfig(folder=tmp_path, key=bytes(32), format=file_format)
        journal = Journal(settings, lambda: 1_767_614_400.123456)
        journal.record(JournalEvent.SMP_CONNECTED, server="smp.example:5223", latency_us=5)
        journal.stop()
        async with asyncio.timeout(60):
            await journal.run()
    (tmp_path / "empty.parquet").touch()
    found = LocalFolder(str(tmp_path)).segments()
    source = Source(spark, LocalFolder(str(tmp_path)), EVENTS)
    segments = source.checked({*found, FoundFile("deleted.parquet", 1, 1)})
    assert segments.keys() == set(found)
    assert [segments[file].error for file in found] == [None, None, "the file is empty"]
    assert [segments[file].days for file in found[:2]] == [("2026-01-05",)] * 2
    rollups = tmp_path / "_rollups"
    update_rollups(spark, LocalFolder(str(tmp_path)), LocalFolder(str(rollups)), lambda _: None)
    assert {path.name for path in rollups.glob("*/date=2026-01-05")} == {"date=2026-01-05"}
    assert not list(rollups.glob("hours/*"))
    (day,) = rollups.glob("life/date=*")
    first, second = pq.read_table(day, partitioning=None).drop("writer").to_pylist()
    assert first == second
    assert (first["time"], first["event"], first["latency_us"], first["server"], first["token"]) == (
        datetime.fromtimestamp(1_767_614_400, UTC).replace(microsecond=123_456),
        "smp_connected",
        5,
        "smp.example:5223",
        None,
    )
