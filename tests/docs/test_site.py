"""The documentation as a site: builds without a warning, fetches nothing, and what is generated is new."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.reference import GENERATED
from tests.test_architecture import ROOT


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_up_to_date(name: str) -> None:
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == GENERATED[name](), "run: python -m tests.docs.reference"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder),
    ]  # --quiet hides all
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        made = site / "index.html" if page.stem == "index" else site / page.stem / "index.html"
        assert made.exists()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img)[^>]*>", page.read_text(encoding="utf-8")):
            if "canonical" not in tag:
                assert "//" not in tag.replace("://ntf-server.example.org", ""), f"{page}: {tag}"
