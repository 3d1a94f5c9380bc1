"""`python -m tests.mutation`: which removed or negated check no test misses.

Works in a copy of the project, so that the working tree stays as it is. Run it again to go on where it was
interrupted: mutants of modules that did not change keep their result.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.mutation.areas import AREAS, Area
from tests.mutation.choosing import Tests, record
from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.running import in_place, load_libraries, outcome

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.json")
MAX_LINES, LINES_PER_TEST = 600, 20
UNDETECTED = ("survived", "uncovered")


@dataclass
class Results:
    """By mutant; on the disk after each."""

    path: Path
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    def load(self) -> None:
        if self.path.exists():
            self.entries = json.loads(self.path.read_text())

    def add(self, name: str, entry: dict[str, Any]) -> None:
        self.entries[name] = entry
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.entries, indent=1, sort_keys=True) + "\n")
        partial.replace(self.path)


def copy_project(target: Path) -> None:
    """What git knows or would add; files that are the same keep their time."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, copy = ROOT / name, target / name
        if source.is_file() and not (copy.is_file() and copy.read_bytes() == source.read_bytes()):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)


def run_area(name: str, area: Area, args: argparse.Namespace, results: Results, deadline: float) -> bool:
    """False if there was no time for all mutants."""
    data = args.folder / f"{name}.coverage"
    if args.record or not data.exists():
        record(data, area.packages, area.tests)
    tests = Tests(data)
    load_libraries(area.tests)
    _check_harness(area, tests, args.folder / "last.log")
    for path in area.modules(Path.cwd()):
        module = path.relative_to(Path.cwd()).as_posix()
        source = path.read_text()
        version = sha256(source.encode()).hexdigest()[:16]
        for mutant in mutants_of(module, source):
            if not _is_open(results.entries.get(mutant.name), version, args.again):
                continue
            if time.monotonic() > deadline:
                return False
            entry = _try(path, mutant, tests, args.folder / "last.log")
            results.add(mutant.name, {**entry, "module": module, "version": version})
            if entry["outcome"] in UNDETECTED:
                print(f"{entry['outcome']}: {mutant.name}, line {mutant.line}", flush=True)
    return True


def _check_harness(area: Area, tests: Tests, log: Path) -> None:
    """Without a change the tests must pass here, or every mutant would seem to be noticed."""
    lines = range(1, MAX_LINES, LINES_PER_TEST)
    modules = area.modules(Path.cwd())
    chosen = sorted({test for path in modules for line in lines for test in tests.of(path, line)[:1]})
    if outcome(chosen, tests.seconds(chosen), log) != "survived":
        raise SystemExit(f"tests fail without a mutant: see {log}")


def _is_open(entry: Mapping[str, Any] | None, version: str, again: bool) -> bool:
    if entry is None or entry["version"] != version:
        return True
    return again and entry["outcome"] in UNDETECTED


def _try(path: Path, mutant: Mutant, tests: Tests, log: Path) -> dict[str, Any]:
    chosen = tests.of(path, mutant.line)
    if not chosen:
        return {"outcome": "uncovered", "line": mutant.line, "tests": 0}
    with in_place(path, mutant):
        found = outcome(chosen, tests.seconds(chosen), log)
    return {"outcome": found, "line": mutant.line, "tests": len(chosen)}


def unexplained(results: Mapping[str, Mapping[str, Any]], equivalent: Mapping[str, str]) -> list[str]:
    """Mutants that no test notices and nobody explained, and explanations of what is no survivor."""
    survivors = {name for name, entry in results.items() if entry["outcome"] in UNDETECTED}
    wrong = [
        f"explained, but noticed by a test or gone: {name}" for name in sorted({*equivalent} - survivors)
    ]
    return wrong + sorted(survivors - {*equivalent})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=", ".join(AREAS))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/ntf-mutation"), help="%(default)s")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after that time")
    parser.add_argument("--again", action="store_true", help="try the mutants again that survived")
    parser.add_argument("--record", action="store_true", help="find out again which tests cover which lines")
    args = parser.parse_args()
    tree = args.folder / "tree"
    copy_project(tree)
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)
    deadline, complete = time.monotonic() + args.seconds, True
    counts: Counter[str] = Counter()
    open_questions: list[str] = []
    for name in args.areas or AREAS:
        results = Results(args.folder / f"{name}.json")
        results.load()
        complete &= run_area(name, AREAS[name], args, results, deadline)
        current = {n: e for n, e in results.entries.items() if n in _present(AREAS[name])}
        counts.update(entry["outcome"] for entry in current.values())
        mine = {n: why for n, why in _equivalent().items() if n.partition(":")[0] in _names(AREAS[name])}
        open_questions += unexplained(current, mine)
    print("\n".join(open_questions))
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()))
    print(f"{len(open_questions)} unexplained" + ("" if complete else "; there was no time for all"))
    return 1 if open_questions or not complete else 0


def _equivalent() -> dict[str, str]:
    found: dict[str, str] = json.loads(EQUIVALENT.read_text())
    return found


def _names(area: Area) -> set[str]:
    return {path.relative_to(Path.cwd()).as_posix() for path in area.modules(Path.cwd())}


def _present(area: Area) -> set[str]:
    return {
        mutant.name
        for path in area.modules(Path.cwd())
        for mutant in mutants_of(path.relative_to(Path.cwd()).as_posix(), path.read_text())
    }


if __name__ == "__main__":
    sys.exit(main())
