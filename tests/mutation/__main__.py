"""`python -m tests.mutation`: which removed or negated check no test misses.

Works in a copy of the project, so that the working tree stays as it is. Run it again to go on where it was
interrupted: mutants of functions that did not change keep their result, test files that did not change are
not recorded again.
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
from pathlib import Path
from typing import Any

from tests.mutation.areas import AREAS, Area
from tests.mutation.mutants import mutants_of
from tests.mutation.results import Results, unexplained

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.json")
NEVER = 1e12


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


def run_area(name: str, args: argparse.Namespace, tree: Path, deadline: float) -> bool:
    """False if not all mutants were tried."""
    order = {
        "area": name,
        "folder": str(args.folder),
        "cpu_seconds": args.cpu_seconds,
        "again": args.again,
        "only": args.only,
        "deadline": deadline,
    }
    command = [sys.executable, "-m", "tests.mutation.session", json.dumps(order)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run(command, cwd=tree, env=environment, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=", ".join(AREAS))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/ntf-mutation"), help="%(default)s")
    parser.add_argument("--seconds", type=float, default=NEVER, help="stop after that time")
    parser.add_argument(
        "--cpu-seconds", type=float, default=6.0, help="of tests for one mutant (default %(default)s)"
    )
    parser.add_argument("--again", action="store_true", help="try the mutants again that survived")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants with TEXT in their names")
    args = parser.parse_args()
    tree = args.folder / "tree"
    copy_project(tree)
    deadline, complete = time.time() + args.seconds, True
    counts: Counter[str] = Counter()
    open_questions: list[str] = []
    for name in args.areas or AREAS:
        complete &= run_area(name, args, tree, deadline)
        modules, mutants = _present(AREAS[name], tree)
        entries = Results(args.folder / f"{name}.json").entries
        current = {n: e for n, e in entries.items() if n in mutants}
        counts.update(entry["outcome"] for entry in current.values())
        mine = {n: why for n, why in _equivalent().items() if n.partition(":")[0] in modules}
        open_questions += unexplained(current, mine)
        _say(name, len(mutants), Counter(entry["outcome"] for entry in current.values()), len(mine))
    print("\n".join(open_questions))
    print(f"{len(open_questions)} unexplained" + ("" if complete else "; not all mutants were tried"))
    return 1 if open_questions or not complete else 0


def _say(name: str, total: int, counts: Counter[str], explained: int) -> None:
    words = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    print(f"{name}: {counts.total()} of {total} mutants tried: {words}; {explained} explained", flush=True)


def _equivalent() -> dict[str, str]:
    found: dict[str, str] = json.loads(EQUIVALENT.read_text())
    return found


def _present(area: Area, tree: Path) -> tuple[set[str], set[str]]:
    """The modules of an area and their mutants."""
    sources: dict[str, Any] = {
        path.relative_to(tree).as_posix(): path.read_text() for path in area.modules(tree)
    }
    return {*sources}, {mutant.name for name, text in sources.items() for mutant in mutants_of(name, text)}


if __name__ == "__main__":
    sys.exit(main())
