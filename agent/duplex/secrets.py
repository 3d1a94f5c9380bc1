"""Where new keys come from."""

from __future__ import annotations

import os
from collections.abc import Callable

from protocol.agent.e2e_params import E2eKeys
from protocol.agent.kem import Encapsulated, KemPair, encapsulate, new_kem_pair
from protocol.agent.x448 import X448_SIZE, X448Pair, x448_pair
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey
from protocol.encoding import NONCE_SIZE

_SEED_SIZE = 32


class Secrets:
    """Implements `Fresh` of the ratchet. Used from the store's thread too: it has no state of its own."""

    def __init__(self, random: Callable[[int], bytes] = os.urandom) -> None:
        self._random = random

    def nonce(self) -> bytes:
        return self._random(NONCE_SIZE)

    def ed25519(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey(self._random(_SEED_SIZE))

    def x25519(self) -> X25519PrivateKey:
        return X25519PrivateKey(self._random(_SEED_SIZE))

    def dh(self) -> X448Pair:
        return x448_pair(self._random(X448_SIZE))

    def kem_pair(self) -> KemPair:
        return new_kem_pair()

    def encapsulate(self, public: bytes) -> Encapsulated:
        return encapsulate(public)

    def e2e_keys(self, pq: bool) -> E2eKeys:
        return E2eKeys(self.dh(), self.dh(), self.kem_pair() if pq else None)
