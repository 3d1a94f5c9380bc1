"""The Spark session: for any master, made once per command, settings by the size of the input."""

import logging
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from analytics.class_archive import archive_options
from analytics.errors import AnalyticsError
from analytics.java import find_java

LOCAL_MASTER = "local[*]"
STDERR = 2
LINES_TOLD = 3
QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto -Xmn256m -Xlog:disable -Xlog:all=off"
"JVM options for small inputs: most of the time is spent loading classes and compiling."
LONG_RUN = "-XX:+UseSerialGC -Xshare:auto -Xlog:disable -Xlog:all=off"
BYTES_PER_PARTITION = 64 * 2**20
"Of the journal's segments, some 3 million events: a task handles them in seconds, in little memory."
UNKNOWN_PARTITIONS = 64
"For inputs of unknown size: adaptive execution joins those that turn out to be small."

REQUIRED = {
    "spark.sql.ansi.enabled": "true",
    "spark.sql.caseSensitive": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
}
"Results depend on these: what a cluster or `--conf` says of them does not count."


@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """Where Spark runs and with what. Without a `master`, that of spark-submit, else this machine."""

    master: str | None = None
    memory: str = "1g"
    settings: Mapping[str, str] = field(default_factory=dict)
    "Any of Spark's own, which override ours."
    input_bytes: int | None = None
    "The size of the journal; None if unknown, which counts as large."
    ui: bool = False

    @property
    def is_small(self) -> bool:
        """Whether starting takes longer than computing: one partition is enough."""
        return self.partitions == 1

    @property
    def partitions(self) -> int:
        """How many partitions shuffles have."""
        if self.input_bytes is None:
            return UNKNOWN_PARTITIONS
        return max(1, -(-self.input_bytes // BYTES_PER_PARTITION))


@contextmanager
def spark_session(options: SparkOptions) -> Iterator[SparkSession]:
    """Yield the session of this process, which ends with the block unless it was there before."""
    if (existing := SparkSession.getActiveSession()) is not None:
        yield existing
        return
    java = find_java()
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)  # what it logs is raised as well
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # spark-submit has started the JVM already
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if submitted:  # use the configuration that was given to spark-submit
        SparkContext._ensure_initialized()
    conf = SparkConf().setAppName("ntf-analytics")
    if options.master is not None or not submitted:
        conf.setMaster(options.master or LOCAL_MASTER)
    local = str(conf.get("spark.master")).startswith("local")
    defaults = {**common_settings(options), **(local_settings() if local else {})}
    if not submitted:
        defaults["spark.driver.extraJavaOptions"] += archive_options(java)
    for name, value in defaults.items():
        conf.setIfMissing(name, value)
    for name, value in options.settings.items():
        conf.set(name, value)
    with ExitStack() as stack:
        with unheard():
            session = SparkSession.builder.config(conf=conf).getOrCreate()
        stack.callback(session.stop)
        for name, value in REQUIRED.items():
            session.conf.set(name, value)
        root = Path(__file__).parent.parent
        if not local and root.is_dir():  # else it came with --py-files, and executors have it
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ntf-analytics-"))
            send_package(session.sparkContext, root, Path(folder) / "ntf_analytics.zip")
        yield session


def common_settings(options: SparkOptions) -> dict[str, str]:
    """For every master. Each can be overridden with `--conf`, unlike those required."""
    java = QUICK_START if options.is_small else LONG_RUN
    return {
        **sized_settings(options),
        "spark.ui.enabled": str(options.ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.driver.memory": options.memory,
        "spark.driver.extraJavaOptions": java,
        "spark.executor.extraJavaOptions": java,
        "spark.hadoop.fs.permissions.umask-mode": "077",
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.sql.codegen.cache.maxEntries": "1000",
        "spark.sql.icu.caseMappings.enabled": "false",  # hexadecimal digits need no library of languages
        "spark.sql.execution.arrow.pyspark.enabled": "false",
        "spark.python.worker.reuse": "true",
    }


def sized_settings(options: SparkOptions) -> dict[str, str]:
    """How queries are planned for an input of some size.

    Tasks that read large inputs get less than Spark's 128 MB, in which each file counts 4 MB more: a few long
    ones would leave cores idle.
    """
    return {
        "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000" if options.is_small else "1000",
        "spark.sql.files.maxPartitionBytes": "128m" if options.is_small else "32m",
        "spark.sql.shuffle.partitions": str(options.partitions),
        "spark.sql.adaptive.enabled": str(not options.is_small).lower(),
        "spark.sql.autoBroadcastJoinThreshold": "-1" if options.is_small else "10m",
    }


def resize(session: SparkSession, options: SparkOptions) -> None:
    """Plan queries from now on for an input of another size."""
    for name, value in sized_settings(options).items():
        session.conf.set(name, options.settings.get(name, value))


def local_settings() -> dict[str, str]:
    """For a Spark of one process, reached from this machine only."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


@contextmanager
def unheard() -> Iterator[None]:
    """Silence a JVM that is started in the block: its greetings are no errors, later ones reach Python.

    If it does not start, what it said is in the error.
    """
    kept = os.dup(STDERR)
    with tempfile.TemporaryFile() as said:
        try:
            os.dup2(said.fileno(), STDERR)
            yield
        except PySparkException as error:
            said.seek(0)
            last = said.read().decode(errors="replace").strip().splitlines()[-LINES_TOLD:]
            raise AnalyticsError("\n".join(["Spark did not start:", *last])) from error
        finally:
            os.dup2(kept, STDERR)
            os.close(kept)


def send_package(context: SparkContext, root: Path, archive: Path) -> None:
    """Make `analytics` and `store` importable on executors, which need Python and pyarrow only."""
    with zipfile.ZipFile(archive, "w") as file:
        for package in ("analytics", "store"):
            for source in sorted((root / package).rglob("*.py")):
                file.write(source, source.relative_to(root))
    context.addPyFile(str(archive))
