"""Running parts: repeats, failures, parts that hang, and the command as a whole."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench import results
from bench.measure import Row, beside, figure
from bench.part import Measure, Part, Rows
from bench.runner import run_all, run_part
from bench.table import cells, summary
from tests.test_architecture import ROOT


def part(measure: Measure, *, name: str = "made", repeats: int = 2, seconds: float = 60) -> Part:
    return Part(
        name=name,
        title=name,
        measure=measure,
        repeats=repeats,
        seconds=seconds,
        quick_seconds=seconds,
        why="",
        how="",
        bound="",
    )


async def working(folder: Path, *, size: int = 3) -> Rows:
    assert not os.listdir(folder)
    return [figure("pid", "in all", os.getpid()), figure("size", "1/s", size, peer=beside("other", 6))]


def failing(_: Path) -> Rows:
    raise RuntimeError("as it must")


def ending(_: Path) -> Rows:
    os._exit(7)


def slow(_: Path) -> Rows:
    time.sleep(2)
    return [figure("slept", "s", 2)]


def hanging(folder: Path) -> Rows:
    """With a child that would outlive it, and something to tidy up."""
    child = subprocess.Popen(["sleep", "1000"])
    told = Path(os.environ["TOLD"])
    told.write_text(f"{child.pid}")
    try:
        time.sleep(1000)
    finally:
        told.with_suffix(".tidy").write_text(str(folder))
    return []


def test_repeats_are_processes_of_their_own_and_their_values_are_kept() -> None:
    done = run_part(part(working), {"size": 4}, quick=False)
    assert (done.repeats, done.error, len(done.yardstick)) == (2, "", 2)
    pid, size = done.rows
    assert len({*pid.values, os.getpid()}) == 3
    assert size.values == (4, 4)
    assert size.ratios == pytest.approx((2 / 3, 2 / 3))


def test_a_failure_stops_nothing_else() -> None:
    parts = [part(failing, name="a"), part(ending, name="b"), part(working, name="c", repeats=1)]
    *_, done = run_all(parts, quick=False, given={"c": {"size": 5}})
    first, second, third = done.parts
    assert "as it must" in first.error
    assert "7" in second.error
    assert third.rows[1].values == (5,)
    assert summary(done).endswith("failed: a, b")


def test_no_repeat_is_begun_that_would_not_end_in_time() -> None:
    assert run_part(part(slow, repeats=9, seconds=3), {}, quick=False).repeats == 1


def test_what_hangs_is_ended_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    done = run_part(part(hanging, seconds=0.8), {}, quick=False)
    assert done.error == "did not end within 8 s"
    assert not Path((tmp_path / "told.tidy").read_text()).exists()
    gone = Path("/proc", (tmp_path / "told").read_text())
    deadline = time.monotonic() + 10
    while gone.exists() and "Z" not in (gone / "stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "its child is still there"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("row", "met"),
    [
        (figure("x", "us CPU", 9, 11, 30, aim=11), True),
        (figure("x", "us CPU", 9, 12, 30, aim=11), False),
        (figure("x", "1/s", 9, 12, 30, aim=11), True),
        (figure("x", "1/s", 9, 10, 30, aim=11), False),
        (figure("x", "us CPU", 10, peer=beside("y", 7, at_least=0.7)), True),
        (figure("x", "us CPU", 10, peer=beside("y", 6, at_least=0.7)), False),
        (figure("x", "1/s", 10, peer=beside("y", 6, at_least=1.6)), True),
        (figure("x", "us CPU", 10, aim=20, peer=beside("y", 6, at_least=0.7)), False),
        (figure("x", "us CPU", 10, peer=beside("y", 6)), None),
    ],
)
def test_aims_are_met_by_the_median(row: Row, met: bool | None) -> None:
    assert row.met is met
    assert cells(row)[-1] == {True: "met", False: "MISSED", None: ""}[met]


def test_unknown_units_are_refused() -> None:
    with pytest.raises(ValueError, match="parsecs"):
        figure("x", "parsecs", 1)


async def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "bench", "--quick", "--only", "protocol", "tls"]
    command += ["--set", "protocol.rounds=1", "--json", str(out)]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    table, progress = await process.communicate()
    assert process.returncode == 0, progress.decode()
    assert b"[2/2] tls" in progress
    done = results.read(out)
    assert [one.name for one in done.parts] == ["protocol", "tls"]
    assert done.parts[0].options == {"rounds": 1}
    assert done.machine.cores >= 1
    for row in (row for one in done.parts for row in one.rows):
        assert all(value > 0 for value in row.values)
        assert row.name.encode() in table


def test_an_end_in_the_middle_loses_one_part_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "bench", "--quick", "--only", "protocol", "idle", "--json", str(out)]
    command += ["--set", "protocol.rounds=1", "idle.connections=100000"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    while "[2/2] idle" not in process.stderr.readline():
        assert process.poll() is None
    child = until_child(process)
    while process.poll() is None:  # `timeout`, too, says it more than once
        process.terminate()
        time.sleep(0.01)
    process.communicate()
    assert process.returncode == 1
    assert [part.name for part in results.read(out).parts] == ["protocol"]
    assert not psutil.pid_exists(child.pid)


def until_child(process: subprocess.Popen[str]) -> psutil.Process:
    """The process of the part that runs: the daemon that it started is there."""
    while True:
        for child in psutil.Process(process.pid).children():
            if child.children():
                return child
        time.sleep(0.01)
