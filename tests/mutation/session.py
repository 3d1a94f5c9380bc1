"""One process for an area: it has collected all tests and forks for each mutant.

A test process for each mutant would spend seconds with imports, and milliseconds in the tests.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage

from tests.mutation.areas import AREAS, Area
from tests.mutation.choosing import Records, Tests
from tests.mutation.mutants import Mutant, Places, mutants_of
from tests.mutation.results import UNDETECTED, Results
from tests.mutation.running import Stage, forked, in_place
from tests.mutation.swapping import Functions

OPTIONS = ("-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", "-o", "timeout=60")
APART = Stage("a process of its own", cpu=60.0, wall=60.0)
FILE_SECONDS = 300.0
"CPU time for one test file."


@dataclass(frozen=True, slots=True)
class Order:
    """What the main process asks for."""

    area: str
    folder: Path
    cpu_seconds: float
    "Of tests, by what they took before, for one mutant."
    again: bool
    only: str
    deadline: float


@dataclass
class Session:
    """The pytest plugin that takes the place of the run."""

    order: Order
    is_complete: bool = False
    _items: dict[str, pytest.Item] = field(default_factory=dict)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items if not _needs_postgres(item)}
        functions = Functions(Path.cwd())
        gc.freeze()  # children share its pages; hides what Functions looks for
        records = Records(self._path("records.json"))
        self._record(records)
        files = {item.path for item in self._items.values()}
        tests = Tests({name: one for name, one in records.of(files).items() if name in self._items})
        self.is_complete = self._try_all(tests, functions)
        return True

    @property
    def _area(self) -> Area:
        return AREAS[self.order.area]

    def _path(self, name: str) -> Path:
        return self.order.folder / f"{self.order.area}.{name}"

    def _record(self, records: Records) -> None:
        for file in sorted({item.path for item in self._items.values()}):
            if records.is_new(file):
                items = [item for item in self._items.values() if item.path == file]
                answer = self._path("recorded")
                answer.unlink(missing_ok=True)
                log = self._path("recording.log")
                whole = partial(Stage, str(file), FILE_SECONDS, FILE_SECONDS)
                forked(partial(self._run_recorded, items, answer), log, whole)
                tests = json.loads(answer.read_text()) if answer.exists() else {}
                records.add(file, tests)
                _say(f"{file.relative_to(Path.cwd())}: {len(tests)} of {len(items)} tests recorded")

    def _run_recorded(self, items: Sequence[pytest.Item], answer: Path) -> int:
        coverage = Coverage(data_file=None, source=list(self._area.packages), config_file=False)
        passed: dict[str, tuple[float, float]] = {}
        coverage.start()
        for item, following in _with_following(items):
            failures = item.session.testsfailed
            coverage.switch_context(item.nodeid)
            cpu, wall = _cpu(), time.monotonic()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if item.session.testsfailed == failures:
                passed[item.nodeid] = _cpu() - cpu, time.monotonic() - wall
        coverage.stop()
        lines = _lines(coverage, self._area.modules(Path.cwd()))
        answer.write_text(
            json.dumps(
                {
                    name: {"cpu": cpu, "wall": wall, "lines": lines.get(name, {})}
                    for name, (cpu, wall) in passed.items()
                }
            )
        )
        return 0

    def _try_all(self, tests: Tests, functions: Functions) -> bool:
        """False if there was no time for all mutants."""
        results = Results(self.order.folder / f"{self.order.area}.json")
        for path in self._area.modules(Path.cwd()):
            module = path.relative_to(Path.cwd()).as_posix()
            source = path.read_text()
            for mutant in mutants_of(module, source):
                version = sha256(mutant.function.encode()).hexdigest()[:16]
                if self.order.only not in mutant.name or not results.is_open(
                    mutant.name, version, self.order.again
                ):
                    continue
                if time.time() > self.order.deadline:
                    return False
                began = time.monotonic()
                entry = self._try(path, module, source, mutant, tests, functions)
                took = round(time.monotonic() - began, 2)
                results.add(mutant.name, {**entry, "module": module, "version": version, "seconds": took})
                if entry["outcome"] in UNDETECTED:
                    _say(f"{entry['outcome']}: {mutant.name}, line {mutant.line}")
        return True

    def _try(
        self, path: Path, module: str, source: str, mutant: Mutant, tests: Tests, functions: Functions
    ) -> dict[str, Any]:
        chosen = tests.of(module, mutant, self.order.cpu_seconds)
        if not chosen:
            return {"outcome": "uncovered", "line": mutant.line, "tests": 0}
        at = self._path("at")
        at.write_text(chosen[0])

        def stage() -> Stage:
            test = tests.passed.get(name := at.read_text())
            return APART if test is None else Stage(name, test.cpu, test.wall)

        def work() -> int:
            if tests.come_by(module, mutant) and functions.exchange(path, source, mutant.source):
                return self._run(chosen, at)
            at.write_text(APART.name)
            return _run_apart(chosen)

        with in_place(path, mutant.source):
            code = forked(work, self._path("log"), stage)
        entry = {"line": mutant.line, "tests": len(chosen)}
        if code == 0:
            tests.count(chosen)
            return {"outcome": "survived", **entry}
        killer = at.read_text()
        if killer in chosen:
            tests.count(chosen[: chosen.index(killer) + 1], killer)
        return {"outcome": "timeout" if code is None else "killed", "by": killer, **entry}

    def _run(self, chosen: Sequence[str], at: Path) -> int:
        for item, following in _with_following([self._items[name] for name in chosen]):
            at.write_text(item.nodeid)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if item.session.testsfailed:
                return 1
        return 0


def _run_apart(chosen: Sequence[str]) -> int:
    """A change of what runs during the import needs a process that has not imported it."""
    return subprocess.call([sys.executable, "-m", "pytest", "-x", *OPTIONS, *chosen])


def _needs_postgres(item: pytest.Item) -> bool:
    """A cluster for each mutant would take longer than all other tests of it."""
    values = getattr(getattr(item, "callspec", None), "params", {}).values()
    wanted = getattr(item, "fixturenames", ())
    return "postgres" in wanted or any(isinstance(value, str) and value == "postgres" for value in values)


def _with_following(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    return zip(items, [*items[1:], None], strict=True)


def _cpu() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _lines(
    coverage: Coverage, modules: Sequence[Path]
) -> Mapping[str, Mapping[str, Mapping[str, list[int]]]]:
    """By test, module and function."""
    found: dict[str, dict[str, dict[str, list[int]]]] = {}
    for path in modules:
        module, places = path.relative_to(Path.cwd()).as_posix(), Places(path.read_text())
        for line, contexts in coverage.get_data().contexts_by_lineno(str(path)).items():
            function, offset = places.of(line)
            for test in filter(None, contexts):
                found.setdefault(test, {}).setdefault(module, {}).setdefault(function, []).append(offset)
    return found


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(asked: str) -> int:
    fields = json.loads(asked)
    order = Order(**{**fields, "folder": Path(fields["folder"])})
    session = Session(order)
    base = f"--basetemp={order.folder / order.area}.tmp"
    code = pytest.main([*OPTIONS, base, *AREAS[order.area].tests], plugins=[session])
    return code or int(not session.is_complete)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
