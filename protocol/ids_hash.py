"""The fingerprint of a set of queue ids: XOR of their MD5 sums, so that adding is also removing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

IDS_HASH_SIZE = 16
NO_IDS = bytes(IDS_HASH_SIZE)


def ids_hash(ids: Iterable[bytes]) -> bytes:
    total = 0
    for queue_id in ids:
        digest = hashlib.md5(queue_id, usedforsecurity=False).digest()
        total ^= int.from_bytes(digest, "big")
    return total.to_bytes(IDS_HASH_SIZE, "big")


def xor(a: bytes, b: bytes) -> bytes:
    return (int.from_bytes(a, "big") ^ int.from_bytes(b, "big")).to_bytes(IDS_HASH_SIZE, "big")
