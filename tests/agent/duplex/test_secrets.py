"""KEM pairs made ahead in another process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

from agent.duplex.secrets import KemPairs
from protocol.agent.kem import decapsulate, encapsulate

DEADLINE = 60.0


def test_pairs_are_made_elsewhere() -> None:
    pairs = KemPairs(2)
    try:
        taken = [pairs.take()]
        end = time.monotonic() + DEADLINE
        while pairs.ready < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        taken += [pairs.take(), pairs.take()]
    finally:
        pairs.close()
    taken.append(pairs.take())
    assert len({pair.secret for pair in taken}) == 4
    for pair in taken:
        made = encapsulate(pair.public)
        assert decapsulate(pair.secret, made.ciphertext) == made.shared


ASKS_FOR_A_PAIR = """
import time
from agent.duplex.secrets import KemPairs

if __name__ == "__main__":
    pairs = KemPairs(1)
    pairs.take()
    while not pairs.ready:
        time.sleep(0.01)
    print("ready", flush=True)
    time.sleep(1000)
"""


def test_the_other_process_ends_with_one_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(ASKS_FOR_A_PAIR)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        helpers = psutil.Process(process.pid).children(recursive=True)
        assert helpers
        process.kill()
    _, alive = psutil.wait_procs(helpers, timeout=30)
    alive = [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    for helper in alive:
        helper.kill()
    assert not alive
