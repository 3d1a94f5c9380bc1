"""Keeping a local journal small: compaction of past days, retention."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from analytics.files import ROLLUPS_FOLDER, LocalFolder
from analytics.manifest import MANIFEST_NAME, Manifest
from analytics.segments import EVENT_ID, Segment, check_segment
from store.journal_files import SCHEMA, atomic_file, parquet_writer, sync_folder, with_all_columns

DELETED_PREFIX = ".deleted-"
COMPACT_ROWS = 5_000_000  # events per compacted file: some 100 MB


@dataclass
class Compaction:
    """What was done: files before and after, events, copies of events left out, bad segments left alone."""

    files_before: int = 0
    files_after: int = 0
    events: int = 0
    copies: int = 0
    bad: list[Segment] = field(default_factory=list)


def day_folders(journal: Path) -> Iterator[tuple[date, Path]]:
    """The journal's day partitions in order."""
    for folder in sorted(journal.glob("date=*")):
        try:
            day = date.fromisoformat(folder.name.removeprefix("date="))
        except ValueError:
            continue
        if folder.is_dir():
            yield day, folder


def compact(journal: Path, before: date) -> Compaction:
    """Join the Parquet segments of each day before `before`, each event once.

    The joined file appears complete before its parts go: whoever reads meanwhile, or after a crash, finds
    events twice at worst and counts them once.
    """
    done = Compaction()
    for day, folder in day_folders(journal):
        if day < before:
            compact_day(folder, done)
    return done


def compact_day(folder: Path, done: Compaction) -> None:
    """Join one day's segments, if there are several."""
    paths = sorted(folder.glob("[!.]*.parquet"))
    if len(paths) < 2:
        return
    checked = [check_segment(str(path), path.read_bytes()) for path in paths]
    done.bad += [segment for segment in checked if segment.error]
    good = sorted((s for s in checked if not s.error), key=lambda s: (s.first, s.last, s.path))
    if len(good) < 2:
        return
    new: list[Path] = []
    for group in groups_of_rows(good, COMPACT_ROWS):
        written, copies, path = join_segments(folder, group, new)
        done.events += written
        done.copies += copies
        new.append(path)
    for segment in good:
        if Path(segment.path) not in new:
            Path(segment.path).unlink()
    sync_folder(folder)
    done.files_before += len(good)
    done.files_after += len(new)


def groups_of_rows(segments: Sequence[Segment], rows: int) -> Iterator[list[Segment]]:
    """Segments in order, cut where a group would have more than `rows` events and no copies cross the cut."""
    group: list[Segment] = []
    for segment in segments:
        separate = all(segment.first > other.last for other in group)
        if group and separate and sum(s.rows for s in group) + segment.rows > rows:
            yield group
            group = []
        group.append(segment)
    yield group


def join_segments(folder: Path, segments: Sequence[Segment], taken: Sequence[Path]) -> tuple[int, int, Path]:
    """Write one file with every event of the segments once: (events, copies left out, path)."""
    tables = pa.concat_tables(
        [with_all_columns(pq.read_table(s.path, partitioning=None)).cast(SCHEMA) for s in segments]
    )
    numbered = tables.append_column("row", pa.array(np.arange(tables.num_rows)))
    firsts = numbered.group_by(EVENT_ID).aggregate([("row", "min")])
    events = tables.take(firsts.sort_by([(name, "ascending") for name in EVENT_ID])["row_min"])
    writer, seq = segments[0].first
    target = folder / f"compact-{writer.hex()}-{seq:015d}-{len(segments)}.parquet"
    while target in taken or target.exists():
        target = target.with_name(f"{target.stem}-again.parquet")
    with atomic_file(target) as file, parquet_writer(file) as parquet:
        parquet.write_table(events)
    return events.num_rows, tables.num_rows - events.num_rows, target


def not_rolled_up(journal: Path, oldest: date) -> list[date]:
    """Days before `oldest` with segments that no report has read: once they are deleted none can."""
    manifest = Manifest.from_json(LocalFolder(str(journal / ROLLUPS_FOLDER)).read_text(MANIFEST_NAME))
    new = {Path(file.path).parts[0] for file in manifest.unchecked(LocalFolder(str(journal)).segments())}
    return [day for day, folder in day_folders(journal) if day < oldest and folder.name in new]


def retain(journal: Path, oldest: date) -> list[date]:
    """Delete whole days before `oldest`; returns them."""
    for left in journal.glob(f"{DELETED_PREFIX}*"):  # by a run that was interrupted
        shutil.rmtree(left)
    gone = []
    for day, folder in day_folders(journal):
        if day < oldest:
            # Out of the readers' sight in one step, then removed at leisure.
            hidden = folder.with_name(f"{DELETED_PREFIX}{folder.name}")
            folder.rename(hidden)
            shutil.rmtree(hidden)
            gone.append(day)
    return gone
