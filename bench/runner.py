"""Runs parts, each repeat in a process of its own: none inherits another's memory, or its failure."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from nacl.signing import SigningKey

from bench.measure import Row, best_of
from bench.part import Measure, Part
from bench.results import PartResult, Results, joined, load_average, this_commit, this_machine

HUNG, HUNG_IF_SET = 10, 100
"A repeat that takes so many times what its part may take is ended; one with sizes set by hand may be longer."
GRACE = 20.0
"Seconds that a repeat has for ending what it started."
Outcome = tuple[list[Row], float] | str


def run_all(
    parts: Sequence[Part], *, quick: bool, given: Mapping[str, Mapping[str, Any]]
) -> Iterator[Results]:
    """Every part, whatever happens to the others: what is known after each. `given` are options by part."""

    def each() -> Iterator[PartResult]:
        for number, part in enumerate(parts, 1):
            options = part.options(quick=quick) | dict(given.get(part.name, {}))
            say(f"[{number}/{len(parts)}] {part.name}")
            yield run_part(part, options, quick=quick)

    return gathered(each(), quick=quick)


def gathered(parts: Iterable[PartResult], *, quick: bool = False) -> Iterator[Results]:
    """What is known after each of them."""
    started, clock, load = datetime.now(UTC), time.monotonic(), load_average()
    commit, machine = this_commit(), this_machine()
    done: list[PartResult] = []
    for part in parts:
        done.append(part)
        yield Results(
            started=started.strftime("%Y-%m-%d %H:%M UTC"),
            commit=commit,
            quick=quick,
            machine=machine,
            load=(load, load_average()),
            seconds=time.monotonic() - clock,
            parts=tuple(done),
        )


def run_part(part: Part, options: Mapping[str, Any], *, quick: bool) -> PartResult:
    """As many repeats as there is time for, at least one."""
    wanted = part.quick_repeats if quick else part.repeats
    allowed = part.quick_seconds if quick else part.seconds
    limit = allowed * (HUNG if options == part.options(quick=quick) else HUNG_IF_SET)
    began, load, longest = time.monotonic(), load_average(), 0.0
    repeats: list[list[Row]] = []
    yardstick: list[float] = []
    error = ""
    while len(repeats) < wanted and not error:
        before = time.monotonic()
        if repeats and before - began + longest > allowed:
            say(f"    {len(repeats)} of {wanted} repeats: no time for more")
            break
        outcome = in_own_process(part.measure, options, limit)
        longest = max(longest, time.monotonic() - before)
        if isinstance(outcome, str):
            error = outcome
            say(f"    FAILED\n{error}")
        else:
            repeats.append(outcome[0])
            yardstick.append(outcome[1])
            say(f"    {len(repeats)} of {wanted}, {time.monotonic() - before:.0f} s")
    return PartResult(
        name=part.name,
        options=options,
        rows=joined(repeats),
        repeats=len(repeats),
        seconds=time.monotonic() - began,
        load=(load, load_average()),
        yardstick=yardstick,
        error=error,
    )


def in_own_process(measure: Measure, options: Mapping[str, Any], limit: float) -> Outcome:
    """Rows and yardstick, or what went wrong. Nothing that it started is left."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_child, args=(theirs, measure, options))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit):
            return f"did not end within {limit:.0f} s"
        outcome: Outcome = ours.recv()
        return outcome
    except EOFError:
        process.join(GRACE)
        return f"its process ended with {process.exitcode}"
    finally:
        _end(process)
        ours.close()


def _end(process: SpawnProcess) -> None:
    """First so that it ends what it started elsewhere, then whatever is still there."""
    assert process.pid is not None
    process.join(0.5)
    if process.is_alive():
        os.kill(process.pid, signal.SIGINT)
        process.join(GRACE)
    with suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _child(pipe: Pipe, measure: Measure, options: Mapping[str, Any]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="ntf-bench-") as folder:
            speed = verification()
            rows = measure(Path(folder), **options)
            if inspect.isawaitable(rows):
                rows = asyncio.run(rows)
        pipe.send((list(rows), speed))
    except BaseException:
        pipe.send(traceback.format_exc())


def verification() -> float:
    """Microseconds of CPU of a bare Ed25519 verification: how fast this machine is just now."""
    key = SigningKey.generate()
    signed, public = key.sign(os.urandom(87)), key.verify_key
    return best_of({"verify": (lambda: public.verify(signed), 1)}, rounds=10)["verify"]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
