"""Tables made of named queries, each when a query first needs it: the one place that knows about partitions,
checkpoints and collecting.

How the pieces fit: `sources` checks and reads segments, `rollups` writes daily Parquet from them, as
`manifest` says which days changed. `warehouse` reads the rollups, puts wrong clocks aside and opens the base
tables `life`, `hours`, `tokens` and `history` of a window. `lives.DERIVED` and `reports.*.TABLES` are queries
over those and each other. `Tables.frame` gives the result of one: tables it mentions are made first, the
plans of derived ones are cut, so that no step is planned or computed twice. `Tables.rows` brings the first
rows of a result to the driver, `write` lets executors write what is larger. `job` puts it together.
"""

import itertools
import re
import threading
from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from analytics.files import Folder
from analytics.results import TIME_COLUMNS, Rows

UNCUT = frozenset({"outage_events", "bounds", "believed", "believed_hours", "believed_tokens"})
"Derived tables that one query uses, or that cost no more than what they are made from."
WORD = re.compile(r"\w+")
VIEWS = threading.Lock()
"Names are the session's: whoever asks a query gives them the meaning of its own tables first."
MEANINGS: dict[str, DataFrame] = {}
"What each name was given last, in whichever session: it need not be given that again."
ISO = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSxxx"
PART = "part-"
NUMBERS = itertools.count()
"Of instances, whose tables have the same names."


def partitions_of(session: SparkSession) -> int:
    """How many partitions shuffles of a session have; 1 if the input is small."""
    return int(session.conf.get("spark.sql.shuffle.partitions") or 1)


def together(frame: DataFrame) -> DataFrame:
    """All in one partition if the input is small: then no query shuffles it."""
    return frame.coalesce(1) if partitions_of(frame.sparkSession) == 1 else frame


def by_date(frame: DataFrame) -> DataFrame:
    """Each date in one task, which writes one file for it; a small input is in one partition anyway."""
    return frame if partitions_of(frame.sparkSession) == 1 else frame.repartition("date")


class Tables:
    """Tables by name: given ones, and those that queries say how to make. For several threads at once."""

    def __init__(
        self, session: SparkSession, queries: Mapping[str, str], values: Mapping[str, Any], work: Folder
    ) -> None:
        self.session = session
        self.values = dict(values)
        "What `:name` in a query stands for."
        self._queries = queries
        self._folder = f"{work.url}/{next(NUMBERS)}"
        self._frames: dict[str, DataFrame] = {}
        self._locks = {name: threading.Lock() for name in queries}

    def add(self, name: str, frame: DataFrame, *, cut: bool = False) -> None:
        """A table that queries can name from now on."""
        self._frames[name] = self._cut(name, frame) if cut else frame

    def frame(self, query: str) -> DataFrame:
        """A query's result, not computed yet; the tables that it mentions are made first."""
        mentioned = set(WORD.findall(query))
        for name in self._queries:
            if name in mentioned:
                self._make(name)
        with VIEWS:
            for name in mentioned & self._frames.keys():
                if MEANINGS.get(name) is not self._frames[name]:
                    self._frames[name].createOrReplaceTempView(name)
                    MEANINGS[name] = self._frames[name]
            return self.session.sql(query, args=self.values)

    def _make(self, name: str) -> None:
        with self._locks[name]:  # tables depend on each other in one direction: no deadlock
            if name not in self._frames:
                self.add(name, self.frame(self._queries[name]), cut=name not in UNCUT)

    def _cut(self, name: str, frame: DataFrame) -> DataFrame:
        """The same rows, computed, with a plan that says nothing of how.

        Small ones stay in the executors' memory, as one partition: then no query over them shuffles. Others
        go to files, which outlive executors.
        """
        self.session.sparkContext.setJobDescription(name)
        if partitions_of(self.session) == 1:
            return together(frame).localCheckpoint()
        frame.write.mode("overwrite").parquet(f"{self._folder}/{name}")
        return self.session.read.schema(frame.schema).parquet(f"{self._folder}/{name}")

    def rows(self, name: str, frame: DataFrame, most: int | None = None) -> Rows:
        """The first rows of a result, or all, and how many there are."""
        self.session.sparkContext.setJobDescription(name)
        found = [row.asDict() for row in (frame if most is None else frame.limit(most + 1)).collect()]
        count = len(found) if most is None or len(found) <= most else frame.count()
        return Rows(frame.columns, found[:most], count)


def write(name: str, frame: DataFrame, out: Folder) -> None:
    """Write a large result as one Parquet and one CSV file: by an executor, in the result's order."""
    frame.sparkSession.sparkContext.setJobDescription(name)
    times = [column for column in frame.columns if column in TIME_COLUMNS]
    stamps = frame.withColumns({column: F.timestamp_micros(column) for column in times}).coalesce(1)
    texts = stamps.withColumns({column: F.date_format(column, ISO) for column in times})
    parquet, csv = f"{name}.parquet", f"{name}.csv"
    stamps.write.mode("overwrite").parquet(f"{out.url}/.{parquet}")
    texts.write.mode("overwrite").csv(f"{out.url}/.{csv}", header=True, emptyValue="")
    for file in (parquet, csv):
        (part,) = [found for found in out.names(f".{file}") if found.startswith(PART)]
        out.rename(f".{file}/{part}", file)
        out.remove(f".{file}")
