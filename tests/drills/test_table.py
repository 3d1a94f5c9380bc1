"""The table of all attacks: it ends, and names what was over the limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drills.table import COMMAND_LIMIT, DRILLS, PUSH_LIMIT, Drill, Row, main
from tests.drills.world import Asked

FAST = Asked(10, [0.001] * 10)
ITEMS = {str(item) for item in range(1, 10)}


def drill(name: str, row: Row | None) -> Drill:
    async def run(folder: Path) -> Row:
        if row is None:
            raise ExceptionGroup("one", [OSError("no port")])
        return row

    return Drill("1", name, run)


async def test_a_drill_that_fails_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    slow = Asked(10, [2 * max(COMMAND_LIMIT, PUSH_LIMIT)] * 10)
    unanswered = Asked(10, [0.001] * 9)
    rows = {
        "good": Row(FAST, FAST, FAST),
        "slow": Row(slow, FAST, slow),
        "silent": Row(FAST, unanswered, FAST, lost=2),
        "broken": None,
    }
    assert await main(drills=[drill(name, row) for name, row in rows.items()]) == 3
    _, _, *printed, _, summary = capsys.readouterr().out.splitlines()
    over = {cells[1]: cells[-2] for cells in ([c.strip() for c in row.split("|")[1:-1]] for row in printed)}
    assert over == {
        "good": "-",
        "slow": "commands, pushes",
        "silent": "unanswered newcomers, lost",
        "broken": "failed",
    }
    assert "OSError no port" in printed[-1]
    limits = "commands p99 150 ms, newcomers p99 500 ms, pushes p99 250 ms"
    assert summary.startswith(f"3 rows over the limits: {limits}")


async def test_words_choose_rows(capsys: pytest.CaptureFixture[str]) -> None:
    good = Row(FAST, FAST, FAST)
    assert await main("Go", "od", drills=[drill("good", good), drill("broken", None)]) == 0
    assert "broken" not in capsys.readouterr().out


def test_every_item_has_a_drill() -> None:
    assert {drill.item for drill in DRILLS} == {"-", *ITEMS}
