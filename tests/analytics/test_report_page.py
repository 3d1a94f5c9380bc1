"""The page in a real browser: with and without JavaScript, light and dark, wide and narrow, on paper."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from analytics.figures import compared, figures
from analytics.findings import Finding, Thresholds, find
from analytics.inputs import Window
from analytics.job import REPORTS
from analytics.page import MOST_PROBLEMS, ReportPage, asset, heat_heads, problems, render, tiles
from analytics.results import Rows
from analytics.segments import Checked, Segment
from analytics.times import HOUR_US
from tests.analytics.conftest import START_US
from tests.analytics.test_incidents_found import plant
from tests.ntf_server.test_status_page import BROWSER, needs_browser

DEADLINE = 300.0
PAPER_PIXELS = 794  # A4 at 96 to the inch
LEAST_CONTRAST = 4.5
LINES = ("c1", "c2", "c3", "c4", "c5")


def written(spark: SparkSession, folder: Path) -> Path:
    """A page that has something in every section."""
    warehouse, answers = plant(spark, folder, 5, events=60_000, gaps=1)
    sections = {
        report: {name: warehouse.rows(name, query) for name, query in queries.items()}
        for report, queries in REPORTS.items()
    }
    tables = {name: rows for section in sections.values() for name, rows in section.items()}
    page = ReportPage(
        window=warehouse.window,
        checked=Checked(
            [Segment("date=2026-01-05/whole.parquet", answers.events)],
            [Segment("date=2026-01-05/broken.parquet", error="ArrowInvalid: too short")],
        ),
        notes=warehouse.notes,
        findings=find(tables, Thresholds()),
        figures=compared(figures(warehouse, tables), None),
        sections=sections,
    )
    file = folder / "report.html"
    file.write_text(render(page), "utf-8")
    return file


@needs_browser
def test_the_page_in_a_browser(spark: SparkSession, tmp_path: Path) -> None:
    file = written(spark, tmp_path)
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
    assert seen["days"][:2] == ["entire period", "Monday, 5 January 2026"]
    assert len(seen["days"]) == 23
    assert seen["zoom"] == {"changed": [True, False], "back": True}  # what is known by day stays
    assert len(seen["printedPlots"]) == seen["plots"]
    assert all(0 < width < PAPER_PIXELS for width in seen["printedPlots"])
    before, after = seen["sorted"]["before"], seen["sorted"]["after"]
    assert before != after == sorted(before)
    for text in (seen["withoutScript"], seen["printed"]):
        for words in (
            "What needs attention",
            "Apple (AP) was down on",
            "subscriptions active",
            "broken.parquet",
        ):
            assert words in text
    assert "health outages" in seen["withoutScript"]
    assert "service_coverage" in seen["printed"]  # nothing is folded on paper
    assert (tmp_path / "report.pdf").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("from_hour", "hours", "step", "labels"),
    [
        (0, 7 * 24, 3, [(8, f"{day} Jan") for day in range(5, 12)]),  # eight cells are a day
        (5, 3 * 24, 2, [(9, ""), (12, "6 Jan"), (12, "7 Jan"), (3, "8 Jan")]),
        (6, 24, 1, [(3, f"{hour % 24:02}:00") for hour in range(6, 30, 3)]),
        (0, 60 * 24, 24, [(7, f"{d} Jan") for d in (5, 12, 19, 26)] + [(7, "2 Feb"), (7, "9 Feb")]),
    ],
)
def test_labels_stand_where_their_days_begin(
    from_hour: int, hours: int, step: int, labels: list[tuple[int, str]]
) -> None:
    heads = heat_heads(START_US + from_hour * HOUR_US, step * HOUR_US, hours // step)
    told = [(int(cells), text) for cells, text in re.findall(r'colspan="(\d+)">(.*?)<', heads)]
    assert told[: len(labels)] == labels
    assert sum(cells for cells, _ in told) == hours // step


def lightness(colour: str) -> float:
    """Relative luminance, as WCAG defines it."""
    full = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
    parts = [int(full[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_words_and_lines_stand_out(theme: int) -> None:
    """axe sees words, but nothing that is drawn: the labels of plots, and their lines."""
    themes = re.findall(r":root\{([^}]*)\}", asset("page.css"))
    colours = dict(re.findall(r"--(\w+):#([0-9a-f]+)", themes[theme]))
    for name in ("text", "soft", "accent", "good", "warn", "bad", *LINES):
        for ground in ("bg", "panel"):
            darker, lighter = sorted(lightness(colours[which]) for which in (name, ground))
            assert (lighter + 0.05) / (darker + 0.05) >= LEAST_CONTRAST, (name, ground)


def test_tiles_and_the_list_of_problems_speak_as_operators_do() -> None:
    latency = {"latency_ms_p95": {"value": 961_442.0, "previous": 961_542.0, "change": -100.0}}
    page = ReportPage(
        window=Window(START_US, START_US + HOUR_US),
        checked=Checked([], []),
        notes=[],
        findings=[Finding(weight, f"problem {weight}", "outage") for weight in range(MOST_PROBLEMS + 1)],
        figures=latency,
        sections={"delivery": {"delivery_providers": Rows(["provider"], [{"provider": "AP"}])}},
    )
    assert "<b>16 min</b><span>p95 push latency</span><span>-100 ms</span>" in tiles(page)
    assert "<summary>1 minor issue</summary>" in problems(page)
    assert "No problems found" in problems(replace(page, findings=[]))
