"""Which tests come by a line, and how long they take: found out once by running them with coverage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from coverage import CoverageData

MOST_SECONDS = 10.0
"Of tests that are run for one mutant, by the time they took before."
DURATIONS = "durations.json"


class Recorder:
    """A pytest plugin: seconds of each test that passed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.seconds[report.nodeid] = -1.0
        elif self.seconds.get(report.nodeid, 0.0) >= 0:
            self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration


def record(data_file: Path, packages: Sequence[str], tests: Sequence[str]) -> None:
    """Run the tests of an area in the present folder; leaves the coverage data and the durations."""
    code = "import sys; from tests.mutation.choosing import record_here; record_here(*sys.argv[1:])"
    arguments = [str(data_file), ",".join(packages), *tests]
    environment = {**os.environ, "COVERAGE_FILE": str(data_file)}
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, env=environment)


def record_here(data_file: str, packages: str, *tests: str) -> None:
    recorder = Recorder()
    options = [f"--cov={package}" for package in packages.split(",")]
    options += ["--cov-context=test", "--cov-report=", "-q", "-p", "no:xdist"]
    pytest.main([*options, *tests], plugins=[recorder])
    Path(data_file).with_suffix(f".{DURATIONS}").write_text(json.dumps(recorder.seconds))


class Tests:
    """Those that `record` ran."""

    def __init__(self, data_file: Path) -> None:
        self._data = CoverageData(str(data_file))
        self._data.read()
        seconds = json.loads(data_file.with_suffix(f".{DURATIONS}").read_text())
        self._seconds: Mapping[str, float] = seconds
        self._lines: dict[str, Mapping[int, list[str]]] = {}

    def of(self, path: Path, line: int) -> list[str]:
        """The quickest ones first, no more than there is time for, none that fails without a mutant."""
        name = str(path)
        if name not in self._lines:
            self._lines[name] = self._data.contexts_by_lineno(name)
        lines = self._lines[name]
        # What is run when a module is loaded belongs to no test: all tests of the module are close to it.
        contexts = lines.get(line) or [context for found in lines.values() for context in found]
        found = {context.rpartition("|")[0] for context in contexts if "|" in context}
        known = sorted((self._seconds[test], test) for test in found if self._seconds.get(test, -1.0) >= 0)
        chosen: list[str] = []
        total = 0.0
        for seconds, test in known:
            if chosen and total + seconds > MOST_SECONDS:
                break
            chosen.append(test)
            total += seconds
        return chosen

    def seconds(self, tests: Sequence[str]) -> float:
        return sum(self._seconds[test] for test in tests)
