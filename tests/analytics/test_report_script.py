"""`scripts/report`: from a journal to a page with one command."""

import csv
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from analytics.generator import Plan, write_journal

ROOT = Path(__file__).parent.parent.parent
LIMIT = 550.0
PLAN = Plan(seed=4, events=3_000, days=2, servers=2, gaps=0, mass_disconnects=0, restarts=0)


def test_one_command_from_a_journal_to_a_page(tmp_path: Path) -> None:
    write_journal(PLAN, tmp_path / "journal")
    command = [str(ROOT / "scripts" / "report"), "journal", "--to", "2026-01-07", "--ui"]
    command += ["--conf", "spark.sql.session.timeZone=Pacific/Auckland"]  # no result depends on it
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert run.returncode == 0, run.stderr
    page = tmp_path / run.stdout.strip()
    assert page == tmp_path / "ntf-report" / "page" / "report.html"
    assert "<html" in page.read_text("utf-8")
    days = list(csv.DictReader(page.with_name("capacity_daily.csv").read_text().splitlines()))
    assert [day["day"][:10] for day in days] == ["2026-01-05", "2026-01-06"]
    assert all(int(day["receiving_tokens"]) > 0 for day in days)
    assert re.search(r"^Spark's web interface: http://\S+:\d+$", run.stderr, re.MULTILINE)
    assert "WARN" not in run.stderr
    assert "log4j" not in run.stderr


@contextmanager
def kept_demo(folder: Path) -> Iterator[Path]:
    """The journal of a running `demo --keep`, once a segment of it is closed."""
    command = [sys.executable, "-m", "ntf_server", "demo", "--keep"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None
            line = next(line for line in demo.stdout if " report all --journal " in line)
            words = shlex.split(line)
            journal = Path(words[words.index("--journal") + 1])
            deadline = time.monotonic() + LIMIT
            while not list(journal.glob("*/*.parquet")):
                assert time.monotonic() < deadline
                time.sleep(0.2)
            yield journal
        finally:
            demo.send_signal(signal.SIGINT)


def test_the_journal_of_a_kept_demo(tmp_path: Path) -> None:
    with kept_demo(tmp_path) as journal:
        command = [str(ROOT / "scripts" / "report"), str(journal), "--out", "page"]
        run = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    assert run.returncode == 0, run.stderr
    assert "health: 1 rows" in run.stderr
    page = (tmp_path / run.stdout.strip()).read_text("utf-8")
    assert re.search(r"of [1-9]\d* subscriptions? active", page)
