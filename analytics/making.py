"""Bringing the rollups of a journal up to date: only what changed since the last run is read."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from analytics.files import Folder, LocalFolder
from analytics.manifest import MANIFEST_NAME, FoundFile, Manifest
from analytics.rollups import ROLLUPS, day
from analytics.segments import Checked, JournalNotFoundError, Segment, check_segment
from analytics.spark import LazySpark
from analytics.spark_segments import check_on_executors, read_events

Progress = Callable[[str], None]


def update_rollups(
    journal: Folder, rollups: Folder, spark: LazySpark, progress: Progress, *, full: bool = False
) -> Checked:
    """Make `rollups` those of the journal; days that are gone from the journal stay as they are.

    The manifest is written last: whatever a crash interrupts is made again by the next run.
    """
    progress("looking for segments")
    found = journal.segments()
    manifest = Manifest() if full else Manifest.from_json(rollups.read_text(MANIFEST_NAME))
    if not found and not manifest.days:
        raise JournalNotFoundError(f"no closed journal segments in {journal.path}")
    if new := manifest.unchecked(found):
        progress(f"checking {len(new)} segments")
        manifest.segments.update(zip(new, check(journal, new, spark), strict=True))
    manifest.keep_only(found)
    wanted = manifest.fingerprints()
    changed = sorted(day for day, made_from in wanted.items() if manifest.days.get(day) != made_from)
    if changed:
        progress(f"rolling up {len(changed)} days")
        roll_up(journal, rollups, spark, list(manifest.segments.values()), changed)
    manifest.days |= wanted
    if new or changed:
        rollups.write_text(MANIFEST_NAME, manifest.to_json())
    return checked(manifest)


def checked(manifest: Manifest) -> Checked:
    """What is good and what is not."""
    outcome = Checked()
    for segment in manifest.segments.values():
        (outcome.good if segment.error is None else outcome.bad).append(segment)
    return outcome


def check(journal: Folder, files: Sequence[FoundFile], spark: LazySpark) -> list[Segment]:
    """Look at every segment: here if they are here, else where the executors are."""
    names = [file.path for file in files]
    spark.begin()  # what is new will be rolled up
    if not isinstance(journal, LocalFolder) or not spark.is_local:
        return check_on_executors(spark.session, journal.path, names)

    def look(name: str) -> Segment:
        try:
            content = (Path(journal.path) / name).read_bytes()
        except FileNotFoundError:
            return Segment(name, error="the file is gone")
        return check_segment(name, content) if content else Segment(name, error="the file is empty")

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(look, names))


def roll_up(
    journal: Folder, rollups: Folder, spark: LazySpark, segments: Sequence[Segment], days: Sequence[str]
) -> None:
    """Make the rollups of these days anew."""
    wanted = set(days)
    needed = [segment for segment in segments if wanted.intersection(segment.days)]
    events = read_events(spark.session, journal.path, needed)
    if any(not wanted.issuperset(segment.days) for segment in needed):
        events = events.where(day().cast("string").isin(list(days)))
    before = {name: rollups.files_below(name) for name in ROLLUPS}
    with ThreadPoolExecutor(len(ROLLUPS)) as threads:  # one is planned while another is made
        made = [
            threads.submit(write_days, make(events), f"{rollups.path}/{name}")
            for name, make in ROLLUPS.items()
        ]
    for rollup in made:
        rollup.result()
    for name, old in before.items():
        remove_days_without_rows(rollups, name, old, days)


def remove_days_without_rows(rollups: Folder, name: str, old: set[str], days: Sequence[str]) -> None:
    """Spark replaces the days that a rollup has rows of; what is left of the others is not true any more."""
    left = old & rollups.files_below(name)
    for folder in sorted({file.rpartition("/")[0] for file in left}):
        if folder.rpartition("date=")[2] in days:
            rollups.remove(folder)


def write_days(rollup: DataFrame, path: str) -> None:
    """Write one file per day, replacing the days that the rollup has."""
    rollup.repartition(F.col("date")).write.mode("overwrite").partitionBy("date").parquet(path)
