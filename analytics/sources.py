"""Segments of a journal where Spark's tasks need them: checked by pyarrow, read by Spark."""

from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from pyspark.sql import DataFrame, SparkSession

from analytics.files import Folder, LocalFolder
from analytics.manifest import FoundFile
from analytics.segments import Segment, check_segment, read_jsonl

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql.types import StructType

LINES = ".jsonl"
SLICES_PER_CORE = 4
"Tasks of a check: small enough that no core waits long for the last."


class Source:
    """A journal's folder, read by a session's tasks."""

    def __init__(self, session: SparkSession, journal: Folder, schema: "StructType") -> None:
        self.session = session
        self._journal = journal
        self._schema = schema

    def checked(self, files: Set[FoundFile]) -> dict[FoundFile, Segment]:
        """Return the segments in these files, good or bad, but for files deleted since listing."""
        self.session.sparkContext.setJobDescription("check segments")
        empty = {file: Segment(file.path, error="the file is empty") for file in files if not file.size}
        ordered = sorted(files - empty.keys(), key=lambda file: (-file.size, file.path))
        if not ordered:
            return empty
        contents = self._contents([file.path for file in ordered])
        found = {segment.path: segment for segment in contents.flatMap(check).collect()}
        return empty | {file: found[file.path] for file in ordered if file.path in found}

    def events(self, segments: Iterable[Segment]) -> DataFrame:
        """Return all events of checked segments; computing them fails if one was deleted in the meantime."""
        names = sorted(segment.path for segment in segments)
        lines = [name for name in names if name.endswith(LINES)]
        columnar = [f"{self._journal.url}/{name}" for name in names if not name.endswith(LINES)]
        reader = self.session.read.schema(self._schema)
        reader = reader.options(__globPaths__="false", ignoreMissingFiles="false")
        events = reader.parquet(*columnar) if columnar else None
        if lines:
            rows = self._contents(lines).flatMap(rows_of)
            others = self.session.createDataFrame(rows, self._schema, verifySchema=False)
            events = others if events is None else events.unionByName(others)
        return self.session.createDataFrame([], self._schema) if events is None else events

    def _contents(self, names: Sequence[str]) -> "RDD[tuple[str, bytes | None]]":
        """Segments by name; None for those that are gone."""
        context, folder = self.session.sparkContext, self._journal.path
        slices = min(len(names), context.defaultParallelism * SLICES_PER_CORE)
        if isinstance(self._journal, LocalFolder):
            return context.parallelize(spread(names, slices), slices).map(
                lambda name: content_of(folder, name)
            )
        root = urlparse(folder).path.rstrip("/") + "/"
        files = self.session.read.format("binaryFile")
        files = files.options(__globPaths__="false", ignoreMissingFiles="true")
        loaded = files.load([f"{self._journal.url}/{name}" for name in names]).select("path", "content")
        return loaded.rdd.map(
            lambda row: (unquote(urlparse(row.path).path).removeprefix(root), bytes(row.content))
        )


def spread(names: Sequence[str], slices: int) -> list[str]:
    """Reorder names so that consecutive slices get large and small files alike."""
    return [name for first in range(slices) for name in names[first::slices]]


def content_of(folder: str, name: str) -> tuple[str, bytes | None]:
    """A file that can be opened where the task runs."""
    try:
        return name, (Path(folder) / name).read_bytes()
    except FileNotFoundError:  # retention may run at the same time
        return name, None


def check(named: tuple[str, bytes | None]) -> Iterator[Segment]:
    """Yield the checked segment, unless it was deleted."""
    name, content = named
    if content is not None:
        yield check_segment(name, content)


def rows_of(named: tuple[str, bytes | None]) -> Iterator[tuple[Any, ...]]:
    """Yield the events of a JSON Lines segment."""
    name, content = named
    if content is None:
        raise FileNotFoundError(name)
    for events in read_jsonl(content):
        yield from zip(*(column.to_pylist() for column in events.columns), strict=True)
