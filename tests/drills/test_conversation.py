"""A short conversation over bad routers; `python -m tests.drills.conversation` is the long one."""

from __future__ import annotations

from pathlib import Path

from tests.drills.conversation import MOVES, converse


async def test_nothing_is_lost_or_shown_twice(tmp_path: Path) -> None:
    outcome = await converse(tmp_path, messages=300, seed=3)
    print(outcome)
    assert (outcome.lost, outcome.doubled, outcome.failures) == ([], [], 0)
    assert (outcome.moves, outcome.unfinished) == (MOVES, 0)
    assert outcome.faults.total() > 2
