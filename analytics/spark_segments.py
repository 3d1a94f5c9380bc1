"""Reading the segments of a journal with Spark.

Spark alone cannot skip bad segments safely: `ignoreCorruptFiles` hides some damage without a count, fails on
other damage, and takes flipped bits within a page for data. So each segment is read once, by whichever
executor holds it, with every page's checksum verified, before Spark is given the good ones.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import unquote, urlparse

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from analytics.schema import EVENTS
from analytics.segments import EVENT_ID, Segment, check_segment, split_overlapping


def check_on_executors(spark: SparkSession, folder: str, names: Sequence[str]) -> list[Segment]:
    """Read segments of a folder once; the work is spread over the executors."""
    contents = spark.read.format("binaryFile").load([f"{folder}/{name}" for name in names])
    results = contents.select("path", "content").rdd.mapPartitions(check_contents).collect()
    root = urlparse(folder).path.rstrip("/") + "/"
    found = {}
    for segment in results:
        name = unquote(urlparse(segment.path).path).removeprefix(root)
        found[name] = replace(segment, path=name)
    # Spark passes over empty files without a word.
    return [found.get(name, Segment(name, error="the file is empty")) for name in names]


def check_contents(rows: Iterable[Any]) -> Iterator[Segment]:
    """Check (path, content) rows; runs on executors."""
    for row in rows:
        yield check_segment(row.path, bytes(row.content))


def read_events(spark: SparkSession, folder: str, segments: Iterable[Segment]) -> DataFrame:
    """The events of good segments, each once, whatever copies there are.

    Only segments that may share events are compared row by row: copies are rare, and comparing everything
    would send the whole journal over the network.
    """
    alone, overlapping = split_overlapping(segments)
    once = read_files(spark, [f"{folder}/{segment.path}" for segment in alone])
    if not overlapping:
        return once
    compared = read_files(spark, [f"{folder}/{s.path}" for s in overlapping]).dropDuplicates(EVENT_ID)
    return once.unionByName(compared.persist(StorageLevel.MEMORY_AND_DISK))


def read_files(spark: SparkSession, paths: Sequence[str]) -> DataFrame:
    """Rows of Parquet and JSON Lines files."""
    parquet = [path for path in paths if not path.endswith(".jsonl")]
    lines = [path for path in paths if path.endswith(".jsonl")]
    events = spark.read.schema(EVENTS).parquet(*parquet) if parquet else spark.createDataFrame([], EVENTS)
    return events.unionByName(spark.read.schema(EVENTS).json(lines)) if lines else events
