"""Nobody attacks: what the other drills are compared with, and that the world itself works."""

from __future__ import annotations

from pathlib import Path

from tests.drills.world import world

SECONDS = 3.0


async def test_everybody_is_served(tmp_path: Path) -> None:
    async with world(tmp_path, seconds=SECONDS) as drill:
        service = await drill.measure(SECONDS)
    print(service.row("nobody"))
    assert service.lost == 0
    for asked in (service.commands, service.newcomers, service.liveness):
        assert asked.answered == asked.asked > 0
