"""The generator: seeded, whole, with its answers beside it."""

import json
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from analytics.errors import AnalyticsError
from analytics.generator import ANSWERS_NAME, Plan, write_journal
from analytics.segments import check_segment
from store.journal_schema import JournalEvent

PLAN = Plan(
    seed=5, events=20_000, days=10, servers=5, gaps=0, mass_disconnects=1, restarts=2, rows_per_segment=700
)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.parquet")}


def test_same_plan_same_bytes_other_seed_other_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        write_journal(Plan(**{**PLAN.__dict__, "seed": seed}), tmp_path / name)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert files(tmp_path / "a") != files(tmp_path / "c")


def test_segments_are_good_and_numbered_without_holes(tmp_path: Path) -> None:
    answers = write_journal(PLAN, tmp_path)
    segments = [check_segment(path, content) for path, content in sorted(files(tmp_path).items())]
    assert all(s.error is None and s.rows <= 700 for s in segments)
    assert sum(s.rows for s in segments) == answers.events
    assert len(segments) == answers.segments
    for writer in {s.first[0] for s in segments}:
        own = sorted((s for s in segments if s.first[0] == writer), key=lambda s: s.first)
        assert [s.first[1] for s in own] == [0, *[s.last[1] + 1 for s in own[:-1]]]
    assert len({s.first[0] for s in segments}) == 3
    assert json.loads((tmp_path / ANSWERS_NAME).read_text())["events"] == answers.events


def test_about_as_many_events_as_asked_for_and_of_all_kinds(tmp_path: Path) -> None:
    plan = Plan(seed=5, events=200_000, days=28, servers=5)
    answers = write_journal(plan, tmp_path)
    assert 0.8 * plan.events < answers.events < 1.2 * plan.events
    table = pq.read_table(sorted(tmp_path.rglob("*.parquet")), partitioning=None)
    seen = set(pc.unique(table.column("event")).to_pylist())
    assert seen == {e.value for e in JournalEvent}
    times = table.column("time").cast("int64")
    assert plan.start_us <= pc.min(times).as_py() <= pc.max(times).as_py() < plan.end_us


def test_too_few_days_for_the_incidents(tmp_path: Path) -> None:
    with pytest.raises(AnalyticsError, match="6 days are too few"):
        write_journal(Plan(days=6, restarts=2), tmp_path)
