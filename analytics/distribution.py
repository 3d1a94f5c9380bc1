"""Who makes the rollups of which day: threads of this process, or the executors of a Spark cluster.

Either way a day is made by one call of `roll_up`, in native code. Spark's part is to bring it to where there
is a free core, and the bytes of segments to it where only Hadoop can read them.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from analytics.files import Folder, LocalFolder
from analytics.rollups import Made, roll_up
from analytics.segments import Segment
from analytics.spark import LazySpark


@dataclass(frozen=True)
class DayTask:
    """A day to be made, and from which segments."""

    day: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class LocalContents:
    """Segments that can be opened where the task runs."""

    folder: str
    names: tuple[str, ...]

    def __iter__(self) -> Iterator[tuple[str, bytes | None]]:
        for name in self.names:
            try:
                yield name, (Path(self.folder) / name).read_bytes()
            except FileNotFoundError:  # retention may run at the same time
                yield name, None


def make_days(spark: LazySpark, journal: Folder, tasks: Sequence[DayTask]) -> Iterable[Made]:
    """Make all of these days."""
    if not isinstance(journal, LocalFolder):
        return by_hadoop(spark.session, journal.path, tasks)
    make = from_local(journal.path)
    if spark.is_wanted:
        return by_executors(spark.context, make, tasks)
    return by_threads(make, tasks)


def from_local(folder: str) -> Callable[[DayTask], Made]:
    """How to make a day of a journal that is in a folder."""
    return lambda task: roll_up(task.day, LocalContents(folder, task.names))


def by_threads(make: Callable[[DayTask], Made], tasks: Sequence[DayTask]) -> Iterator[Made]:
    """On all cores of this machine; what takes long is native code, which threads run at the same time."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        yield from threads.map(make, tasks)


def by_executors(context: Any, make: Callable[[DayTask], Made], tasks: Sequence[DayTask]) -> list[Made]:
    """On all cores of a cluster, whose machines have the folder too."""
    made: list[Made] = context.parallelize(tasks, len(tasks)).map(make).collect()
    return made


def by_hadoop(session: Any, folder: str, tasks: Sequence[DayTask]) -> Iterator[Made]:
    """The same, from a file system that only Hadoop knows: it reads each segment once for all its days."""
    days: dict[str, list[str]] = {}
    for task in tasks:
        for name in task.names:
            days.setdefault(name, []).append(task.day)
    root = urlparse(folder).path.rstrip("/") + "/"

    def by_day(row: Any) -> list[tuple[str, tuple[str, bytes]]]:
        name = unquote(urlparse(row.path).path).removeprefix(root)
        return [(day, (name, bytes(row.content))) for day in days[name]]

    files = session.read.format("binaryFile").load([f"{folder}/{name}" for name in days])
    by_days = files.select("path", "content").rdd.flatMap(by_day).groupByKey(len(tasks))
    found = {made.day: made for made in by_days.map(lambda pair: roll_up(*pair)).collect()}
    for task in tasks:
        made = found.get(task.day, Made(task.day, [], {}))
        # Spark passes over empty files without a word.
        passed_over = set(task.names) - {segment.path for segment in made.segments}
        made.segments.extend(Segment(name, error="the file is empty") for name in sorted(passed_over))
        yield made
