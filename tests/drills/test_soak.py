"""The soak for a minute: everything goes wrong at least once, and nothing is lost. And what it calls flat."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drills.soak import SLACK, Course, soak

MB = 1e6
COURSES = {
    "as it should be": ([150 * MB + n % 7 * MB for n in range(600)], True),
    "warming up": ([150 * MB + min(n, 150) * MB / 8 for n in range(600)], True),
    "a crowd in the end": ([150 * MB + (n > 560) * 60 * MB for n in range(600)], True),
    "a leak": ([150 * MB + n * MB / 30 for n in range(600)], False),
    "a leak that starts late": ([150 * MB + max(0, n - 400) * MB / 10 for n in range(600)], False),
    "steps": ([150 * MB + n // 200 * 20 * MB for n in range(600)], False),
    "a peak that stays": ([150 * MB + (n > 210) * 30 * MB for n in range(600)], False),
}


@pytest.mark.parametrize(("values", "is_flat"), COURSES.values(), ids=COURSES.keys())
def test_what_is_flat(values: list[float], is_flat: bool) -> None:
    assert Course(values, SLACK["memory"]).is_flat is is_flat


async def test_a_minute_of_everything(tmp_path: Path) -> None:
    verdict = await soak(tmp_path, minutes=1.0, rate=20.0)
    print(verdict)
    assert verdict.passed, verdict
