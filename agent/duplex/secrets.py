"""Where new keys come from."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from threading import Lock, Thread

from protocol.agent.e2e_params import E2eKeys
from protocol.agent.kem import Encapsulated, KemPair, encapsulate, new_kem_pair
from protocol.agent.x448 import X448_SIZE, X448Pair, x448_pair
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey
from protocol.encoding import NONCE_SIZE

_SEED_SIZE = 32
_NUMBER_SIZE = 8


def _end_with_parent() -> None:
    """A process that was killed cannot tell its helper to end: that would wait for work for ever."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(0)

    Thread(target=watch, name="end with parent", daemon=True).start()


class KemPairs:
    """KEM pairs made ahead of need, in another process: making one holds the interpreter for 20 to 30 ms.

    The process starts with the first pair that is asked for; until it has made some, they are made here.
    """

    def __init__(self, size: int) -> None:
        """A `size` of 0 makes each pair when it is needed."""
        self._size = size
        self._pairs: deque[KemPair] = deque()
        self._coming = 0
        self._lock = Lock()
        self._workers: ProcessPoolExecutor | None = None

    def take(self) -> KemPair:
        with self._lock:
            pair = self._pairs.popleft() if self._pairs else None
            asked = self._refill()
        for future in asked:  # one that is done calls back at once, and needs the lock
            future.add_done_callback(self._made)
        return pair or new_kem_pair()

    def _refill(self) -> list[Future[KemPair]]:
        made: list[Future[KemPair]] = []
        if self._workers is None and self._size:
            self._workers = ProcessPoolExecutor(1, get_context("spawn"), initializer=_end_with_parent)
        while self._workers is not None and len(self._pairs) + self._coming < self._size:
            self._coming += 1
            made.append(self._workers.submit(new_kem_pair))
        return made

    def _made(self, future: Future[KemPair]) -> None:
        """On the executor's thread."""
        with self._lock:
            self._coming -= 1
            if not future.cancelled() and future.exception() is None:
                self._pairs.append(future.result())

    @property
    def ready(self) -> int:
        return len(self._pairs)

    def close(self) -> None:
        with self._lock:
            workers, self._workers, self._size = self._workers, None, 0
        if workers is not None:
            workers.shutdown(wait=True, cancel_futures=True)


class Secrets:
    """Implements `Fresh` of the ratchet. Used from the store's thread and from the agent's."""

    def __init__(self, random: Callable[[int], bytes] = os.urandom, pairs: KemPairs | None = None) -> None:
        self._random = random
        self._pairs = pairs or KemPairs(0)

    def nonce(self) -> bytes:
        return self._random(NONCE_SIZE)

    def below(self, limit: int) -> int:
        return int.from_bytes(self._random(_NUMBER_SIZE), "big") % limit

    def ed25519(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey(self._random(_SEED_SIZE))

    def x25519(self) -> X25519PrivateKey:
        return X25519PrivateKey(self._random(_SEED_SIZE))

    def dh(self) -> X448Pair:
        return x448_pair(self._random(X448_SIZE))

    def kem_pair(self) -> KemPair:
        return self._pairs.take()

    def encapsulate(self, public: bytes) -> Encapsulated:
        return encapsulate(public)

    def e2e_keys(self, pq: bool) -> E2eKeys:
        return E2eKeys(self.dh(), self.dh(), self.kem_pair() if pq else None)
