"""Reading the segments of a journal with Spark.

Spark alone cannot skip bad segments safely: `ignoreCorruptFiles` hides some damage without a count, fails on
other damage, and takes flipped bits within a page for data. So each segment is read once, by whichever
executor holds it, with every page's checksum verified, before Spark is given the good ones.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from analytics.schema import EVENTS
from analytics.segments import (
    EVENT_ID,
    Checked,
    JournalNotFoundError,
    Segment,
    check_segment,
    plain_path,
    split_overlapping,
)

SEGMENT_GLOB = "*.{parquet,jsonl}"


def list_segments(spark: SparkSession, path: str) -> list[str]:
    """Paths of all closed segments under `path`."""
    reader = spark.read.format("binaryFile").option("recursiveFileLookup", "true")
    try:
        files = reader.option("pathGlobFilter", SEGMENT_GLOB).load(path).inputFiles()
    except Exception as error:
        if "PATH_NOT_FOUND" in str(error):
            raise JournalNotFoundError(f"no such folder: {path}") from error
        raise
    return sorted(plain_path(unquote(file)) for file in files)


def check_segments(spark: SparkSession, paths: Sequence[str]) -> Checked:
    """Read every segment once and sort good from bad; the work is spread over the executors."""
    if not paths:
        return Checked()
    contents = spark.read.format("binaryFile").load(list(paths)).select("path", "content")
    results = contents.rdd.mapPartitions(check_contents).collect()
    checked = Checked()
    seen = {plain_path(segment.path) for segment in results}
    # Spark passes over empty files without a word.
    results += [Segment(path, error="the file is empty") for path in paths if plain_path(path) not in seen]
    for segment in sorted(results, key=lambda s: s.path):
        (checked.good if segment.error is None else checked.bad).append(segment)
    return checked


def check_contents(rows: Iterable[Any]) -> Iterator[Segment]:
    """Check (path, content) rows; runs on executors."""
    for row in rows:
        yield check_segment(row.path, bytes(row.content))


def read_events(spark: SparkSession, segments: Iterable[Segment]) -> DataFrame:
    """The events of good segments, each once, whatever copies there are.

    Only segments that may share events are compared row by row: copies are rare, and comparing everything
    would send the whole journal over the network.
    """
    alone, overlapping = split_overlapping(segments)
    once = read_files(spark, [s.path for s in alone])
    if not overlapping:
        return once
    compared = read_files(spark, [s.path for s in overlapping]).dropDuplicates(EVENT_ID)
    return once.unionByName(compared.persist(StorageLevel.MEMORY_AND_DISK))


def read_files(spark: SparkSession, paths: Sequence[str]) -> DataFrame:
    """Rows of Parquet and JSON Lines files."""
    parquet = [path for path in paths if not path.endswith(".jsonl")]
    lines = [path for path in paths if path.endswith(".jsonl")]
    events = spark.read.schema(EVENTS).parquet(*parquet) if parquet else spark.createDataFrame([], EVENTS)
    return events.unionByName(spark.read.schema(EVENTS).json(lines)) if lines else events
