"""Spark: on any master, started only when there is something for it to do."""

import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from analytics.java import find_java

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

LOCAL_MASTER = "local[*]"
STDERR = 2
QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
"What takes long is no Java: JVMs that start quickly are the best ones."


class LazySpark(AbstractContextManager["LazySpark"]):
    """A context that is made when first asked for, and stopped at the end. Executors are sent this package.

    Without a `master`, that of spark-submit is taken, else this machine with all its cores.
    """

    def __init__(
        self, master: str | None, memory: str, more: Mapping[str, str] | None = None, *, quiet: bool = False
    ) -> None:
        self._submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # spark-submit has started the JVM already
        self.is_wanted = master is not None or self._submitted
        "Whether Spark was asked for; without it everything but Hadoop's file systems works as well."
        self.master = master if self.is_wanted else LOCAL_MASTER
        self._memory = memory
        self._more = more or {}
        self._quiet = quiet
        self._stack = ExitStack()

    @property
    def is_local(self) -> bool:
        """Whether the executors are on this machine, with what is installed here."""
        return self.master is not None and self.master.startswith("local")

    @property
    def session(self) -> "SparkSession":
        """For SQL, which takes seconds more to start."""
        from pyspark.sql import SparkSession

        return SparkSession.builder.config(conf=self.context.getConf()).getOrCreate()

    @cached_property
    def context(self) -> "SparkContext":
        """The one context, started when first asked for."""
        find_java()
        from pyspark import SparkConf, SparkContext

        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        if self._submitted:  # so that the configuration is what spark-submit was told
            SparkContext._ensure_initialized()
        conf = SparkConf().setAppName("ntf-analytics")
        if self.master is not None:
            conf.setMaster(self.master)
        for name, value in self._settings().items():
            conf.setIfMissing(name, value)
        for name, value in self._more.items():
            conf.set(name, value)
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="ntf-analytics-"))
        with unheard() if self._quiet else nullcontext():
            context = SparkContext.getOrCreate(conf)
        self._stack.callback(context.stop)
        root = Path(__file__).parent.parent
        if not self.is_local and root.is_dir():  # else it came with --py-files, and executors have it
            send_package(context, root, Path(folder) / "ntf_analytics.zip")
        return context

    def _settings(self) -> dict[str, str]:
        settings = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
            "spark.driver.memory": self._memory,
            "spark.driver.extraJavaOptions": QUICK_START,
            "spark.executor.extraJavaOptions": QUICK_START,
            "spark.sql.files.ignoreMissingFiles": "true",  # retention may run at the same time
            "spark.hadoop.fs.permissions.umask-mode": "077",
        }
        if self.is_local:
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        return settings

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextmanager
def unheard() -> Iterator[None]:
    """A JVM started here says nothing: its greetings are no errors, and its errors reach Python anyway."""
    kept, nowhere = os.dup(STDERR), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, STDERR)
        yield
    finally:
        os.dup2(kept, STDERR)
        os.close(kept)
        os.close(nowhere)


def send_package(context: "SparkContext", root: Path, archive: Path) -> None:
    """Make `analytics` and `store` importable on executors, which only need Python, pyarrow and DuckDB."""
    with zipfile.ZipFile(archive, "w") as file:
        for package in ("analytics", "store"):
            for source in sorted((root / package).rglob("*.py")):
                file.write(source, source.relative_to(root))
    context.addPyFile(str(archive))
