"""What pytest returns is what the tests say, whatever libraries do when the interpreter ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOADS_WALLYCORE = "tests/protocol/test_statements.py"


def test_a_run_that_loads_wallycore_returns_its_own_code() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, LOADS_WALLYCORE], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
