"""Fresh secrets for tests: repeatable, and KEM pairs from a few made once (a pair takes 30 ms)."""

from __future__ import annotations

import random
from functools import cache

from protocol.agent.e2e_params import E2eKeys
from protocol.agent.kem import Encapsulated, KemPair, encapsulate, new_kem_pair
from protocol.agent.ratchet import creator_ratchet, joiner_ratchet
from protocol.agent.versions import E2E_VERSIONS
from protocol.agent.x3dh import joiner_kem, joiner_params
from protocol.agent.x448 import X448_SIZE, X448Pair, x448_pair
from tests.protocol.agent.conversation import Party


@cache
def _some_pairs() -> list[KemPair]:
    return [new_kem_pair() for _ in range(4)]


class RandomSecrets:
    def __init__(self, seed: int = 1) -> None:
        self._random = random.Random(seed)

    def dh(self) -> X448Pair:
        return x448_pair(self._random.randbytes(X448_SIZE))

    def kem_pair(self) -> KemPair:
        return self._random.choice(_some_pairs())

    def encapsulate(self, public: bytes) -> Encapsulated:
        return encapsulate(public)


def new_parties(
    *, creator_pq: bool, joiner_pq: bool, propose: bool, version: int = 3, seed: int = 1
) -> tuple[Party, Party]:
    """Creator and joiner after the joiner's parameters arrived."""
    fresh = RandomSecrets(seed)
    keys = E2eKeys(fresh.dh(), fresh.dh(), fresh.kem_pair() if propose else None)
    theirs = keys.uri(E2E_VERSIONS).at(version)
    joiner = E2eKeys(fresh.dh(), fresh.dh())
    kem = joiner_kem(theirs, joiner_pq, version, fresh)
    params = joiner_params(joiner, kem, version)
    return (
        Party(creator_ratchet(keys, params, version, creator_pq)),
        Party(joiner_ratchet(joiner, kem, theirs, version, fresh)),
    )
