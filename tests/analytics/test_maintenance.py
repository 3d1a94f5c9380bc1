"""Compaction and retention of a local journal."""

import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analytics.files import ROLLUPS_FOLDER, LocalFolder
from analytics.generator import Plan, write_journal
from analytics.maintenance import compact, groups_of_rows, not_rolled_up, retain
from analytics.manifest import MANIFEST_NAME, Manifest
from analytics.segments import Segment

PLAN = Plan(events=6_000, days=8, servers=3, gaps=0, mass_disconnects=0, restarts=1, rows_per_segment=150)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    write_journal(PLAN, tmp_path)
    return tmp_path


def contents(journal: Path) -> Any:
    tables = [pq.read_table(p, partitioning=None) for p in sorted(journal.glob("date=*/[!.]*.parquet"))]
    return pa.concat_tables(tables).sort_by([("writer", "ascending"), ("seq", "ascending")]).to_pylist()


def test_compaction_keeps_every_event_once(journal: Path) -> None:
    before = contents(journal)
    files = len(list(journal.glob("*/*.parquet")))
    folder = min(journal.glob("date=*"))
    first = min(folder.iterdir())
    shutil.copy(first, folder / "copy.parquet")
    copies = pq.read_metadata(first).num_rows
    done = compact(journal, date(2026, 1, 20))
    assert contents(journal) == before
    assert (done.files_before, done.copies, done.events) == (files + 1, copies, len(before))
    assert done.files_after == len(list(journal.glob("*/*.parquet"))) == 8
    again = compact(journal, date(2026, 1, 20))
    assert again.files_before == 0


def test_compaction_joins_segments_of_other_versions(journal: Path) -> None:
    """One that had fewer columns, one that has more."""
    before = contents(journal)
    older, newer, *_ = sorted(min(journal.glob("date=*")).iterdir())
    fewer, more = (pq.read_table(path, partitioning=None) for path in (older, newer))
    empty = [name for name in fewer.column_names if fewer[name].null_count == fewer.num_rows]
    assert empty
    pq.write_table(fewer.drop_columns(empty), older)
    pq.write_table(more.append_column("colour", pa.array(["blue"] * more.num_rows)), newer)
    assert compact(journal, date(2026, 1, 20)).bad == []
    assert contents(journal) == before


def test_compaction_leaves_days_from_the_limit_on_alone(journal: Path) -> None:
    compact(journal, date(2026, 1, 7))
    counts = {folder.name: len(list(folder.iterdir())) for folder in journal.glob("date=*")}
    assert counts["date=2026-01-05"] == counts["date=2026-01-06"] == 1
    assert counts["date=2026-01-07"] > 1


def test_compaction_leaves_bad_and_open_segments_alone(journal: Path) -> None:
    folder = min(journal.glob("date=*"))
    bad, hidden = folder / "bad.parquet", folder / ".x.parquet.draft"
    bad.write_bytes(b"PAR1 not really")
    hidden.write_bytes(b"being written")
    done = compact(journal, date(2026, 1, 20))
    assert [segment.path for segment in done.bad] == [str(bad)]
    assert bad.read_bytes() == b"PAR1 not really"
    assert hidden.read_bytes() == b"being written"


def test_groups_never_part_segments_that_may_share_events() -> None:
    def piece(path: str, first: int, last: int) -> Segment:
        return Segment(path, last - first + 1, (b"w", first), (b"w", last))

    a, b, c, d = piece("a", 0, 9), piece("b", 5, 14), piece("c", 15, 24), piece("d", 25, 34)
    assert list(groups_of_rows([a, b, c, d], 15)) == [[a, b], [c], [d]]


def test_retention_deletes_whole_days(journal: Path) -> None:
    (journal / "date=nonsense").mkdir()
    assert retain(journal, date(2026, 1, 8)) == [date(2026, 1, day) for day in (5, 6, 7)]
    assert sorted(p.name for p in journal.glob("*date=2*")) == [f"date=2026-01-{d:02d}" for d in range(8, 13)]
    assert (journal / "date=nonsense").is_dir()


def test_retention_removes_what_an_interrupted_one_left(journal: Path) -> None:
    first = min(journal.glob("date=*"))
    shutil.copytree(first, journal / f".deleted-{first.name}")
    retain(journal, date(2026, 1, 6))
    assert not list(journal.glob(".deleted-*"))


def test_days_with_segments_that_no_report_has_read_are_known(journal: Path) -> None:
    oldest = date(2026, 1, 8)
    assert not_rolled_up(journal, oldest) == [date(2026, 1, day) for day in (5, 6, 7)]
    read = Manifest({file: Segment(file.path) for file in LocalFolder(str(journal)).segments()})
    LocalFolder(str(journal / ROLLUPS_FOLDER)).write(MANIFEST_NAME, read.to_json())
    assert not_rolled_up(journal, oldest) == []
    late = journal / "date=2026-01-06" / "late.parquet"
    shutil.copy(min(late.parent.iterdir()), late)
    assert not_rolled_up(journal, oldest) == [date(2026, 1, 6)]
