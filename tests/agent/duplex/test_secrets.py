"""KEM pairs made ahead in another process."""

from __future__ import annotations

import time

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
