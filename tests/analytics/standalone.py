"""A standalone cluster of Spark on the loopback address, for tests and benchmarks."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pyspark

START_DEADLINE = 120.0


@dataclass(frozen=True)
class Standalone:
    """A running cluster: its address, and the logs of its workers."""

    url: str
    workers: list[Path]

    def executors(self, option: str = "") -> list[int]:
        """How many each worker has started, or with an option of Java's."""
        return [
            sum("Launch command" in line and option in line for line in log.read_text().splitlines())
            for log in self.workers
        ]


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started meanwhile stays on one core of this machine."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def standalone(
    folder: Path, *, workers: int, memory: str = "1g", cores: Sequence[int] = ()
) -> Iterator[Standalone]:
    """A master and so many workers with a core each: what Spark counts as one, or just those of `cores`."""
    with ExitStack() as stack:
        log = folder / "master.log"
        stack.enter_context(_process(log, "master.Master", "--port", "0"))
        url = _wait_for(log, r"Starting Spark master at (spark://127\.0\.0\.1:\d+)")
        logs = [folder / f"worker{number}.log" for number in range(workers)]
        for number, worker in enumerate(logs):
            with on_core(cores[number]) if cores else nullcontext():
                stack.enter_context(
                    _process(worker, "worker.Worker", "--cores", "1", "--memory", memory, url)
                )
        _wait_for(log, r"Registering worker", times=workers)
        yield Standalone(url, logs)


@contextmanager
def _process(log: Path, name: str, *arguments: str) -> Iterator[None]:
    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_WORKER_DIR": str(log.with_suffix(".work")),
        "PYSPARK_PYTHON": sys.executable,
    }
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--webui-port", "0", *arguments], stdout=output, stderr=output, env=environment
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(log: Path, pattern: str, times: int = 1) -> str:
    """The first match in a log once it is there often enough."""
    limit = time.monotonic() + START_DEADLINE
    while time.monotonic() < limit:
        found = re.findall(pattern, log.read_text(errors="replace"))
        if len(found) >= times:
            return str(found[0])
        time.sleep(0.1)
    raise AssertionError(f"{pattern} not in {log.read_text(errors='replace')[-2000:]}")
