"""`scripts/report`: from a journal to a page with one command."""

import subprocess
from pathlib import Path

from analytics.generator import Plan, write_journal

ROOT = Path(__file__).parent.parent.parent
LIMIT = 550.0
PLAN = Plan(seed=4, events=3_000, days=2, servers=2, gaps=0, mass_disconnects=0, restarts=0)


def test_one_command_from_a_journal_to_a_page(tmp_path: Path) -> None:
    write_journal(PLAN, tmp_path / "journal")
    command = [str(ROOT / "scripts" / "report"), "journal", "--to", "2026-01-07"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert run.returncode == 0, run.stderr
    page = tmp_path / run.stdout.strip()
    assert page == tmp_path / "ntf-report" / "page" / "report.html"
    assert "<html" in page.read_text("utf-8")
    assert "WARN" not in run.stderr
    assert "log4j" not in run.stderr
