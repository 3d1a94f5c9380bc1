"""Every fault planted around a real daemon is named by the report; a healthy day has none."""

from __future__ import annotations

from pathlib import Path

from tests.drills.planted import SMALL, carry_out, check_faults, check_healthy


async def test_the_report_names_every_planted_fault_and_none_of_a_good_day(tmp_path: Path) -> None:
    planted = await carry_out(tmp_path, SMALL)
    check_faults(tmp_path, planted, SMALL.settings)
    check_healthy(tmp_path, SMALL.settings)
