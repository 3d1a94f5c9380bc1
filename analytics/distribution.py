"""Who makes the rollups of which day: threads of this process, or the executors of a Spark cluster.

Either way a day is made by one call of `roll_up`, in native code. Spark's part is to bring it to where there
is a free core, and the bytes of segments to it where only Hadoop can read them.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from analytics.files import Folder, LocalFolder
from analytics.rollups import Made, roll_up
from analytics.segments import Segment
from analytics.spark import LazySpark

Days = Mapping[str, Sequence[str]]
"Days to be made, and from which segments."


@dataclass(frozen=True)
class LocalContents:
    """Segments that can be opened where the task runs."""

    folder: str
    names: Sequence[str]

    def __iter__(self) -> Iterator[tuple[str, bytes | None]]:
        for name in self.names:
            try:
                yield name, (Path(self.folder) / name).read_bytes()
            except FileNotFoundError:  # retention may run at the same time
                yield name, None


def make_days(spark: LazySpark, journal: Folder, days: Days) -> Iterator[Made]:
    """Make all of these days, on all cores of this machine or of a cluster."""
    folder = journal.path

    def make(task: tuple[str, Sequence[str]]) -> Made:
        return roll_up(task[0], LocalContents(folder, task[1]))

    if not isinstance(journal, LocalFolder):
        yield from by_hadoop(spark.session, folder, days)
    elif spark.is_wanted:
        yield from spark.context.parallelize(list(days.items()), len(days)).map(make).collect()
    else:  # what takes long is native code, which threads run at the same time
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            yield from threads.map(make, days.items())


def by_hadoop(session: Any, folder: str, days: Days) -> Iterator[Made]:
    """The same, from a file system that only Hadoop knows: it reads each segment once for all its days."""
    days_of: dict[str, list[str]] = {}
    for day, names in days.items():
        for name in names:
            days_of.setdefault(name, []).append(day)
    root = urlparse(folder).path.rstrip("/") + "/"

    def by_day(row: Any) -> list[tuple[str, tuple[str, bytes]]]:
        name = unquote(urlparse(row.path).path).removeprefix(root)
        return [(day, (name, bytes(row.content))) for day in days_of[name]]

    files = session.read.format("binaryFile").load([f"{folder}/{name}" for name in days_of])
    by_days = files.select("path", "content").rdd.flatMap(by_day).groupByKey(len(days))
    found = {made.day: made for made in by_days.map(lambda pair: roll_up(*pair)).collect()}
    for day, names in days.items():
        made = found.get(day, Made(day, [], {}))
        # Spark passes over empty files without a word.
        passed_over = set(names) - {segment.path for segment in made.segments}
        made.segments.extend(Segment(name, error="the file is empty") for name in sorted(passed_over))
        yield made
