"""Daily rollups: all that the reports need of a journal, as Parquet tables partitioned by date.

Nine events of ten are received notifications and pushes. They are summed by hour (`hours`) and by token
(`tokens`); everything else (`life`) is kept as it is. A day's rollups depend on that day's events only, and
rollups of several days together are those of all their events, so days can be made again one by one. Spark's
executors read segments and write rollups; the driver knows their names only.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from analytics.errors import JournalNotFoundError, UnreadableError
from analytics.files import Folder
from analytics.manifest import MANIFEST_NAME, FoundFile, Manifest
from analytics.rollups_schema import BUCKETS_PER_OCTAVE, TRAFFIC
from analytics.segments import EVENT_ID, Checked, Segment, split_overlapping
from analytics.sources import Source
from analytics.tables import by_date
from analytics.times import DAY_US, HOUR_US
from store.journal_schema import COLUMNS, ColumnType

Progress = Callable[[str], None]

SPARK_TYPES: Mapping[ColumnType, DataType] = {
    "timestamp_us": TimestampType(),
    "string": StringType(),
    "binary": BinaryType(),
    "int64": LongType(),
}
EVENTS = StructType([StructField(c.name, SPARK_TYPES[c.type]) for c in COLUMNS])
"A segment's columns; those that an older version did not write are NULL."
DATE = StructField("date", DateType())
SCHEMAS: Mapping[str, StructType] = {
    "life": StructType([*EVENTS, DATE]),
    "hours": StructType(
        [
            StructField("hour_us", LongType()),
            *(StructField(name, StringType()) for name in ("event", "server", "provider", "kind", "error")),
            StructField("bucket", IntegerType()),
            *(StructField(name, LongType()) for name in ("number", "entries", "total")),
            DATE,
        ]
    ),
    "tokens": StructType(
        [
            StructField("token", BinaryType()),
            *(StructField(name, LongType()) for name in ("received", "pushes", "last_push_us")),
            DATE,
        ]
    ),
}
"Columns of each rollup's files, and the date of their folder."
STAGING = ".spark-staging-"
"Where Spark writes days before they replace those that were there."

TRAFFIC_NAMES = ", ".join(f"'{event.value}'" for event in TRAFFIC)
ROLLUPS: Mapping[str, str] = {
    # What became of tokens, subscriptions, routers and daemons?
    "life": f"""
SELECT {", ".join(f"`{column.name}`" for column in COLUMNS)}, date FROM {{events}}
WHERE event NOT IN ({TRAFFIC_NAMES})""",
    # How many notifications and pushes were there in each hour, and how late were they?
    "hours": f"""
SELECT unix_micros(time) div {HOUR_US} * {HOUR_US} AS hour_us, event, server, provider, kind, error,
  CASE WHEN latency_us IS NOT NULL
    THEN CAST(floor(log2(greatest(latency_us, 1)) * {BUCKETS_PER_OCTAVE} + 1e-9) AS INT) END AS bucket,
  count(*) AS number, sum(coalesce(`count`, 1)) AS entries, sum(coalesce(total, `count`, 1)) AS total, date
FROM {{events}} WHERE event IN ({TRAFFIC_NAMES}) GROUP BY ALL""",
    # How many notifications and pushes did each token have, and when was its last push?
    "tokens": """
SELECT token, count_if(event = 'ntf_received') AS received, count_if(event <> 'ntf_received') AS pushes,
  max(CASE WHEN event <> 'ntf_received' THEN unix_micros(time) END) AS last_push_us, date
FROM {events} WHERE event IN ('ntf_received', 'push_sent', 'cron_sent') AND token IS NOT NULL
GROUP BY token, date""",
}
"From a day's events. The summand 1e-9 is for powers of two, whose logarithms Java rounds either way."

DAY = (
    f"date_from_unix_date(CAST((unix_micros(time) - pmod(unix_micros(time), {DAY_US})) div {DAY_US} AS INT))"
)
"SQL: the UTC day of an event, also before 1970; a cast would make objects of Java's calendar for each event."


def update_rollups(
    session: SparkSession, journal: Folder, rollups: Folder, progress: Progress, *, full: bool = False
) -> Checked:
    """Bring `rollups` up to date with the journal; days that are gone from the journal stay as they are.

    Only new and changed segments are checked, only days with such are rebuilt. A day that is being rebuilt is
    not in the manifest: what a crash interrupts is repeated. Retention and compaction may delete segments at
    any time: a rollup of what is left of a day would lose the rest, so none is written, and the journal is
    listed once more.
    """
    progress("looking for segments")
    manifest = Manifest() if full else Manifest.from_json(rollups.read_text(MANIFEST_NAME))
    source = Source(session, journal, EVENTS)
    while True:
        found = journal.segments()
        if not found and not manifest.days:
            raise JournalNotFoundError(f"no closed journal segments in {journal.path}")
        try:
            roll_up(source, found, manifest, rollups, progress)
        except (PySparkException, Py4JError, UnreadableError):
            if set(found) <= set(journal.segments()):
                raise
            progress("segments were deleted: looking for segments again")
        else:
            return checked(manifest)


def roll_up(
    source: Source, listed: Sequence[FoundFile], manifest: Manifest, rollups: Folder, progress: Progress
) -> None:
    """Check new segments and rebuild the days that have such; fails if one of them is deleted in between."""
    manifest.keep_only(listed)
    if unchecked := manifest.unchecked(listed):
        progress(f"checking {len(unchecked)} segments")
        manifest.segments |= source.checked(unchecked)
        if left := manifest.unchecked(listed):
            raise UnreadableError(f"cannot read segment {min(file.path for file in left)}")
    if changed := manifest.changed(listed):
        progress(f"rolling up {len(changed)} days")
        for day in changed:
            manifest.days.pop(day, None)
        rollups.write(MANIFEST_NAME, manifest.to_json())
        used = {file for files in changed.values() for file in files}
        make_days(source, [manifest.segments[file] for file in used], rollups, list(changed))
        manifest.note(changed)
    if unchecked or changed:
        rollups.write(MANIFEST_NAME, manifest.to_json())


def make_days(source: Source, segments: Sequence[Segment], rollups: Folder, days: Sequence[str]) -> None:
    """Replace all rollups of some days; the segments are all that have events of them."""
    events = (
        events_once(source, segments).selectExpr("*", f"{DAY} AS date").where(f"date IN ({quoted(days)})")
    )
    with ThreadPoolExecutor(len(ROLLUPS)) as threads:  # while one is planned, another is computed
        for done in [threads.submit(make_rollup, source, events, rollups, name, days) for name in ROLLUPS]:
            done.result()


def make_rollup(source: Source, events: DataFrame, rollups: Folder, name: str, days: Sequence[str]) -> None:
    """Replace one rollup of some days by what its query says, which may be nothing."""
    before = {day: rollups.names(f"{name}/date={day}") for day in days}
    rollup = source.session.sql(ROLLUPS[name], events=events)
    if name != "life":  # whose rows stay where they are: tasks write large files of their own
        rollup = by_date(rollup)
    rollups.remove_left(f"{name}/{STAGING}")
    source.session.sparkContext.setJobDescription(f"rollup {name}")
    rollup.write.mode("overwrite").partitionBy("date").parquet(f"{rollups.url}/{name}")
    for day, files in before.items():
        if files and rollups.names(f"{name}/date={day}") == files:  # nothing was written over them
            rollups.remove(f"{name}/date={day}")


def events_once(source: Source, segments: Iterable[Segment]) -> DataFrame:
    """Each event of the segments once, whatever copies there are."""
    alone, overlapping = split_overlapping(segments)
    events = source.events(alone)
    return events.unionByName(source.events(overlapping).dropDuplicates(EVENT_ID)) if overlapping else events


def quoted(days: Iterable[str]) -> str:
    """SQL: a list of dates."""
    return ", ".join(f"DATE'{date.fromisoformat(day)}'" for day in days)


def checked(manifest: Manifest) -> Checked:
    """What is good and what is not."""
    segments = manifest.segments.values()
    return Checked([s for s in segments if s.error is None], [s for s in segments if s.error is not None])
