"""What `ntf-analytics` does where neither Spark nor DuckDB nor Java is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pyspark", "py4j", "duckdb"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from analytics.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
DEADLINE = 120.0


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", WITHOUT, *map(str, arguments)]
    where = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=where)


def test_everything_but_reports_works(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    for arguments in (
        ("generate", "--out", folder, "--events", "3000", "--days", "10"),
        ("compact", "--journal", folder),
        ("retain", "--journal", folder, "--days", "1"),
    ):
        done = run(*arguments)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("environment", "advice"),
    [
        ({}, "pip install 'ntf-server[analytics]'"),
        ({"JAVA_HOME": "/nowhere"}, "Spark needs Java 17 or newer"),
    ],
)
def test_reports_say_in_one_line_what_to_install(
    tmp_path: Path, environment: dict[str, str], advice: str
) -> None:
    done = run("report", "all", "--journal", tmp_path, "--out", tmp_path / "out", **environment)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("ntf-analytics: ")
    assert advice in line
