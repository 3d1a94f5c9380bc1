"""The soak for a minute: everything goes wrong at least once, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

from tests.drills.soak import soak


async def test_a_minute_of_everything(tmp_path: Path) -> None:
    verdict = await soak(tmp_path, minutes=1.0, rate=20.0)
    print(verdict)
    assert verdict.passed, verdict
