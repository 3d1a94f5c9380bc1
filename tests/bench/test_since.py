"""What got slower since a commit: each version runs its own code, and their rounds become one result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench import results
from bench.since import measure, merged
from tests.bench.test_compare import cost, made
from tests.test_architecture import ROOT

EARLIER = """
import sys
from pathlib import Path

import ntf_server

ours = Path(__file__).parent.parent
assert Path(ntf_server.__file__).is_relative_to(ours)
Path(sys.argv[-1]).write_text((ours / "measured.json").read_text())
"""


def test_a_tree_measures_its_own_code(tmp_path: Path) -> None:
    for package in ("bench", "ntf_server"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "bench" / "__main__.py").write_text(EARLIER)
    results.write(made(cost(7)), tmp_path / "measured.json")
    found = measure(tmp_path, "part", quick=False)
    assert found is not None
    assert found.parts[0].rows == cost(7)


def test_a_part_that_a_version_lacks_is_not_measured(tmp_path: Path) -> None:
    assert measure(tmp_path, "part", quick=False) is None
    assert measure(ROOT, "no-such-part", quick=True) is None


def test_rounds_become_one_result() -> None:
    (part,) = merged([made(cost(10), speed=50), made(cost(12), speed=60)]).parts
    assert part.rows == cost(10, 12)
    assert (part.repeats, part.yardstick) == (2, [50, 60])


def test_todays_commit_beside_todays_files() -> None:
    if not (ROOT / ".git").exists():
        return  # a source distribution has no history
    command = [sys.executable, "-m", "bench", "--quick", "--only", "protocol", "--rounds", "1", "--since"]
    done = subprocess.run([*command, "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "figures compared" in done.stdout, done.stderr
    assert "protocol: decode one NMSG of a block of 80" in done.stdout
    done = subprocess.run([*command, "0" * 40], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "this needs a clone with the history" in done.stderr
