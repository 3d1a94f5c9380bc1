"""Bringing the rollups of a journal up to date: only what changed since the last run is read."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from analytics.distribution import make_days
from analytics.errors import JournalNotFoundError
from analytics.files import Folder
from analytics.manifest import MANIFEST_NAME, UNKNOWN_DAY, FoundFile, Manifest
from analytics.rollups import ROLLUPS, Made
from analytics.segments import Checked
from analytics.spark import LazySpark

Progress = Callable[[str], None]
BATCH_BYTES = 2**30
"Of segments whose rollups come to the driver together; they are some tenth as large."


def update_rollups(
    journal: Folder, rollups: Folder, spark: LazySpark, progress: Progress, *, full: bool = False
) -> Checked:
    """Make `rollups` those of the journal; days that are gone from the journal stay as they are.

    A day that is being made is not in the manifest: whatever a crash interrupts is made again.
    """
    progress("looking for segments")
    found = journal.segments()
    manifest = Manifest() if full else Manifest.from_json(rollups.read_text(MANIFEST_NAME))
    if not found and not manifest.days:
        raise JournalNotFoundError(f"no closed journal segments in {journal.path}")
    manifest.keep_only(found)
    while changed := manifest.changed(found):  # once more if segments are not of the days they seemed to be
        if days := len(changed.keys() - {UNKNOWN_DAY}):
            progress(f"rolling up {days} days")
        for batch in batches(changed):
            for day in batch:
                manifest.days.pop(day, None)
            rollups.write(MANIFEST_NAME, manifest.to_json())
            names = {day: [file.path for file in files] for day, files in batch.items()}
            for made in make_days(spark, journal, names):
                take(made, batch[made.day], manifest, rollups)
            rollups.write(MANIFEST_NAME, manifest.to_json())
    return checked(manifest)


def batches(changed: Mapping[str, Sequence[FoundFile]]) -> Iterator[dict[str, Sequence[FoundFile]]]:
    """Days that are made together, the largest first: then no long one is left at the end."""
    sizes = {day: sum(file.size for file in files) for day, files in changed.items()}
    batch: dict[str, Sequence[FoundFile]] = {}
    total = 0
    for day in sorted(changed, key=lambda day: (-sizes[day], day)):
        if batch and total + sizes[day] > BATCH_BYTES:
            yield batch
            batch, total = {}, 0
        batch[day] = changed[day]
        total += sizes[day]
    yield batch


def take(made: Made, files: Sequence[FoundFile], manifest: Manifest, rollups: Folder) -> None:
    """Replace a day's rollups, unless nothing that can be read is left of it."""
    segments = {segment.path: segment for segment in made.segments}
    if not manifest.note(made.day, {file: segments[file.path] for file in files}):
        return
    for name in ROLLUPS:
        folder = f"{name}/date={made.day}"
        rollups.remove(folder)
        if name in made.rollups:
            rollups.write(f"{folder}/rollup.parquet", made.rollups[name])


def checked(manifest: Manifest) -> Checked:
    """What is good and what is not."""
    segments = manifest.segments.values()
    return Checked([s for s in segments if s.error is None], [s for s in segments if s.error is not None])
