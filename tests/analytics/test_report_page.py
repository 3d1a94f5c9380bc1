"""The page in a real browser: with and without JavaScript, light and dark, wide and narrow, on paper."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from analytics.findings import Thresholds, figures, find
from analytics.job import REPORTS
from analytics.page import ReportPage, render
from tests.analytics.test_incidents_found import plant
from tests.ntf_server.test_status_page import BROWSER, needs_browser

DEADLINE = 300.0


def written(folder: Path) -> Path:
    """A page that has something in every section."""
    warehouse, answers = plant(folder, 5, events=60_000, gaps=1)
    sections = {name: report(warehouse) for name, report in REPORTS.items()}
    tables = {name: rows for section in sections.values() for name, rows in section.items()}
    page = ReportPage(
        window=warehouse.window,
        segments=answers.segments,
        events=answers.events,
        bad=[("date=2026-01-05/broken.parquet", "ArrowInvalid: too short")],
        notes=warehouse.notes,
        findings=find(tables, Thresholds()),
        figures=figures(warehouse),
        sections=sections,
    )
    file = folder / "report.html"
    file.write_text(render(page), "utf-8")
    return file


@needs_browser
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    file = written(tmp_path)
    node = shutil.which("node")
    assert node is not None
    done = subprocess.run(
        [node, "report.mjs", str(file), str(tmp_path)],
        cwd=BROWSER,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    seen = json.loads(done.stdout)
    assert seen["errors"] == []
    assert seen["fetched"] == [f"file://{file}"]
    for look in (*seen["looks"], *seen["unfolded"]):
        assert look["violations"] == [], look["name"]
        assert look["wider"] <= 0, look["name"]
    assert seen["plots"] >= 8
    before, after = seen["sorted"]["before"], seen["sorted"]["after"]
    assert before != after == sorted(before)
    for text in (seen["withoutScript"], seen["printed"]):
        for words in ("What needs attention", "AP was down on", "subscriptions active", "broken.parquet"):
            assert words in text
    assert "health outages" in seen["withoutScript"]
    assert "service_coverage" in seen["printed"]  # nothing is folded on paper
    assert (tmp_path / "report.pdf").stat().st_size > 10_000
