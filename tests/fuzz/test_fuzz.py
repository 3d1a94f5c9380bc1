"""A short run for everybody; `scripts/fuzz --seconds N` is the long one."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from protocol.addresses import parse_smp_queue_ntf
from tests.drills.world import running_daemon
from tests.fuzz.daemon import DaemonRun, complaints, fuzz_daemon
from tests.fuzz.mutation import Mutator, corpus
from tests.fuzz.parsers import SLOW, all_parsers, discovered, fuzz_parsers

SECONDS = 8.0


def test_parsers() -> None:
    run = fuzz_parsers(SECONDS, seed := secrets.randbelow(1 << 32))
    assert not run.findings, f"seed {seed}\n" + "\n".join(map(str, run.findings))
    assert run.inputs > 1000


async def test_live_daemon(tmp_path: Path) -> None:
    run = await fuzz_daemon(tmp_path, SECONDS, seed := secrets.randbelow(1 << 32))
    assert not run.wrong, f"seed {seed}\n" + "\n".join(run.wrong)
    assert run.blocks > 50
    assert run.asked > 5


def test_new_parsers_are_found() -> None:
    names = discovered()
    for name in ("addresses.pull_smp_server", "crypto.decode_public_key", "addresses.parse_ntf_server"):
        assert f"protocol.{name}" in names
    assert len(all_parsers()) > 100
    assert len(corpus()) > 300


def test_mistakes_are_found() -> None:
    """The harness itself: a parser that indexes too far, one that takes too long, one that is right."""

    def careless(data: bytes) -> int:
        return data[3]

    def slow(data: bytes) -> None:
        started = time.process_time()
        while time.process_time() < started + SLOW + 0.1:
            pass

    run = fuzz_parsers(20.0, 1, {"careless": careless, "slow": slow})
    careless_found, slow_found = sorted(run.findings, key=lambda finding: finding.parser)
    assert "IndexError" in careless_found.what
    assert slow_found.what.startswith("took 2.")
    assert fuzz_parsers(0.2, 1, {"right": parse_smp_queue_ntf}).findings == []


def test_a_seed_repeats_a_run() -> None:
    one, other = Mutator(7), Mutator(7)
    for _ in range(100):
        assert one.changed(one.example()) == other.changed(other.example())


async def test_a_daemon_that_ends_is_found(tmp_path: Path) -> None:
    async with running_daemon(tmp_path) as daemon:
        daemon.process.kill()
        daemon.process.wait(30)
        ended, unanswered = complaints(daemon, DaemonRun(asked=1))
    assert ended.startswith("the daemon ended")
    assert unanswered == "1 of 1 honest requests were not answered"
