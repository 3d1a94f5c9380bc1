"""All reports over 1 and 10 million events: time and peak memory, next to DuckDB's on the same files."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from bench.measure import Row, at_most, print_rows

POLL_SECONDS = 0.2
ALL = "all reports, nothing known yet"
_DUCKDB = """
import sys
from analytics.inputs import Limits, Window
from tests.analytics.reference import TABLES, Reference
import duckdb
files = sys.argv[1] + "/*/*.parquet"
times = "SELECT min(epoch_us(time)), max(epoch_us(time))"
first, last = duckdb.sql(f"{times} FROM read_parquet('{files}', hive_partitioning = false)").fetchall()[0]
reference = Reference(files, Window(first, last + 1), Limits())
for table in TABLES:
    reference.table(table)
"""


@dataclass(frozen=True)
class Cost:
    """What one run took: seconds of wall time and of CPU, megabytes of all its processes at their peak."""

    seconds: float
    cpu: float
    megabytes: float


def run(command: list[str]) -> Cost:
    """Run a command and watch its whole process tree."""
    started = time.perf_counter()
    peak, cpu = 0.0, 0.0
    with tempfile.TemporaryFile() as output:
        process = psutil.Popen(command, stdout=output, stderr=output)
        while process.poll() is None:
            size, used = tree_usage(process)
            peak, cpu = max(peak, size), max(cpu, used)
            time.sleep(POLL_SECONDS)
        output.seek(0)
        if process.returncode:
            raise SystemExit(output.read().decode(errors="replace"))
    return Cost(time.perf_counter() - started, cpu, peak / 1e6)


def tree_usage(process: psutil.Popen) -> tuple[float, float]:
    """Resident bytes and CPU seconds of a process and all its children."""
    size = used = 0.0
    try:
        for member in [process, *process.children(recursive=True)]:
            times = member.cpu_times()
            size += member.memory_info().rss
            used += times.user + times.system
    except psutil.NoSuchProcess:
        pass
    return size, used


def measure(events: int, folder: Path) -> dict[str, Cost]:
    """Generator, reports and DuckDB on a journal of so many events."""
    journal, out = folder / "journal", str(folder / "out")
    command = [sys.executable, "-m", "analytics"]
    report = [*command, "report", "all", "--journal", str(journal), "--out", out]
    costs = {"generate": run([*command, "generate", "--out", str(journal), "--events", str(events)])}
    costs[ALL] = run(report)
    shutil.rmtree(journal / "_rollups")
    last = max(journal.glob("date=*"))
    last.rename(folder / last.name)
    run(report)
    (folder / last.name).rename(last)
    costs["reports after one new day"] = run(report)
    costs["reports, nothing new"] = run(report)
    costs["DuckDB, 14 of the tables, from the events"] = run([sys.executable, "-c", _DUCKDB, str(journal)])
    return costs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, nargs="+", default=[1_000_000, 10_000_000])
    sizes = parser.parse_args().events
    rows: list[Row] = []
    costs: list[tuple[int, Cost]] = []
    for events in sizes:
        with tempfile.TemporaryDirectory() as folder:
            measured = measure(events, Path(folder))
        costs.append((events, measured[ALL]))
        for name, cost in measured.items():
            what = f"{events:,} events: {name}"
            rows.append(Row(what, cost.seconds, "s wall"))
            rows.append(Row(what, cost.cpu, "s CPU"))
            rows.append(Row(what, cost.megabytes, "MB at its peak"))
    for (few, small), (many, large) in pairwise(costs):
        growth = (large.cpu / small.cpu) / (many / few)
        rows.append(at_most(f"CPU growth from {few:,} to {many:,}, 1 is linear", growth, "", 1.0))
    met = print_rows("Analytics", rows)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
