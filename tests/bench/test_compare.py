"""Comparing results: what got slower beyond the spread is found, a slower machine is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench import results
from bench.__main__ import main
from bench.compare import changes
from bench.measure import Row, beside, figure
from bench.results import PartResult, Results


def made(rows: Sequence[Row], *, speed: float = 60, error: str = "", size: int = 1) -> Results:
    part = PartResult(
        name="part",
        options={"size": size},
        rows=rows,
        repeats=1,
        seconds=1.0,
        load=(0.0, 0.0),
        yardstick=[speed],
        error=error,
    )
    machine = results.this_machine()
    return Results(
        started="then", commit="c", quick=False, machine=machine, load=(0.0, 0.0), seconds=1.0, parts=[part]
    )


def cost(*values: float) -> list[Row]:
    return [figure("cost", "us CPU", *values)]


def rate(*values: float) -> list[Row]:
    return [figure("rate", "1/s", *values)]


def shared(ours: float, theirs: float) -> list[Row]:
    return [figure("cost", "us CPU", ours, ours * 1.01, peer=beside("other", theirs, theirs))]


WORSE, SAME, BETTER = "worse", "same", "better"
CASES = {
    "spreads that meet": (cost(10, 11, 12), cost(12, 13, 14), SAME),
    "spreads apart": (cost(10, 11, 12), cost(12.5, 13, 14), WORSE),
    "apart, but hardly": (cost(10.0, 10.1), cost(10.2, 10.3), SAME),
    "a lower rate": (rate(100, 110), rate(80, 85), WORSE),
    "a higher rate": (rate(100, 110), rate(130, 140), BETTER),
    "less": (cost(10, 11), cost(5, 6), BETTER),
    "measured once": (cost(10), cost(12), SAME),
    "measured once, and much worse": (cost(10), cost(14), WORSE),
    "less than nothing": (cost(500, 600), cost(-1900, -1800), BETTER),
    "more, after less than nothing": (cost(-1900, -1800), cost(500, 600), WORSE),
    "a rate where there was none": (rate(0, 0), rate(5, 6), BETTER),
    "nothing twice": (cost(0, 0), cost(0, 0), SAME),
    "both slower": (shared(10, 5), shared(20, 10), SAME),
    "slower than its peer": (shared(10, 5), shared(20, 5), WORSE),
}


@pytest.mark.parametrize(("old", "new", "verdict"), CASES.values(), ids=CASES)
def test_verdicts(old: list[Row], new: list[Row], verdict: str) -> None:
    [change] = changes(made(old), made(new))
    assert verdict == (WORSE if change.worse else BETTER if change.beyond else SAME)


def test_a_slower_machine_is_no_slower_program() -> None:
    [change] = changes(made(cost(10, 11)), made(cost(20, 22), speed=120))
    assert not change.beyond
    [change] = changes(made(rate(10, 11)), made(rate(5, 5.5), speed=120))
    assert not change.beyond
    [change] = changes(made([figure("size", "MB", 10, 11)]), made([figure("size", "MB", 20, 22)], speed=120))
    assert change.worse


def test_other_sizes_are_not_compared() -> None:
    assert not list(changes(made(cost(1)), made(cost(9), size=2)))


def compare(folder: Path, old: Results, new: Results) -> int:
    results.write(old, folder / "old.json")
    results.write(new, folder / "new.json")
    return main(["compare", str(folder / "old.json"), str(folder / "new.json")])


def test_the_command_fails_if_anything_got_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(tmp_path, made(cost(10, 11)), made(cost(20, 21))) == 1
    assert "SLOWER  part: cost" in capsys.readouterr().out
    assert compare(tmp_path, made(cost(10, 11)), made(cost(10, 11))) == 0
    assert capsys.readouterr().out == "1 figures compared: 0 slower beyond the spread, 0 better\n"


def test_the_command_fails_if_a_part_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(tmp_path, made(cost(10, 11)), made([], error="E: broken")) == 1
    assert "part: failed: E: broken" in capsys.readouterr().out


def test_figures_that_are_gone_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(tmp_path, made([*cost(10, 11), *rate(1, 2)]), made(rate(1, 2)))
    assert capsys.readouterr().out.startswith("part: cost: not in the new results\n1 figures compared")


def test_a_run_that_is_cut_short_leaves_the_results_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError

    results.write(made(cost(1)), tmp_path / "x.json")
    before = (tmp_path / "x.json").read_text()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(OSError):
            results.write(made(cost(2)), tmp_path / "x.json")
    assert (tmp_path / "x.json").read_text() == before


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    whole = made([*shared(10, 5), figure("lost", "lost", 0, aim=0)])
    results.write(whole, tmp_path / "x.json")
    again = results.read(tmp_path / "x.json")
    assert replace(again, machine=whole.machine, parts=()) == replace(whole, parts=())
    assert again.parts[0].rows == whole.parts[0].rows


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"schema": 99}', "schema 99, this program reads 1"),
        ('{"schema": 1}', "holds no results of a run"),
        ("[]", "holds no results of a run"),
        ('{"schema": 1, "parts": [', "holds no results of a run"),
        (None, "No such file or directory"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "page"])
def test_what_is_no_result_is_refused_in_one_line(
    tmp_path: Path, command: str, text: str | None, complaint: str
) -> None:
    file = tmp_path / "x.json"
    if text is not None:
        file.write_text(text)
    others = [str(file)] if command == "compare" else ["--out", str(tmp_path / "page.md")]
    with pytest.raises(SystemExit, match=complaint):
        main([command, str(file), *others])
    assert not (tmp_path / "page.md").exists()
