"""The drills against another server, such as an earlier one, and against this one, in turn.

    python -m tests.drills.compare PYTHON [pytest's arguments]

`PYTHON` is of the environment in which the other server is installed. Each drill is run against the one and
then against the other, so that both have the same machine. Prints the rows of docs/reliability.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence

from tests.drills.world import ANOTHER_PYTHON

DRILLS = tuple(
    f"tests/drills/test_{name}.py"
    for name in (
        "calm", "tokens", "providers", "stop", "outputs", "data_folder", "routers", "probe", "garbage",
        "handshakes", "gateway", "open_files", "cannon", "quiet", "control_port",
    )
)  # fmt: skip
ROW = re.compile(r"\| .* \|$", re.MULTILINE)
_PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q")


def collected(arguments: Sequence[str]) -> list[str]:
    listed = subprocess.run(
        [*_PYTEST, "--collect-only", *arguments], capture_output=True, text=True, check=True
    )
    return [line for line in listed.stdout.splitlines() if "::" in line]


def rows(test: str, python: str) -> Iterator[str]:
    """What a drill prints; it may well fail against an earlier server."""
    env = os.environ | {ANOTHER_PYTHON: python}
    ran = subprocess.run([*_PYTEST, "-s", test], capture_output=True, text=True, env=env, check=False)
    found = [row for row in ROW.findall(ran.stdout) if "Exception" not in row]
    yield from found or [f"| {test}: no row; exit {ran.returncode} |"]


def main(other: str, *arguments: str) -> None:
    for test in collected(arguments or DRILLS):
        print(test, flush=True)
        for name, python in (("before", other), ("after", sys.executable)):
            for row in rows(test, python):
                print(f"| {name}: {row.removeprefix('| ')}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
