"""Random numbers out of a source of random bytes, so that one source serves everything."""

from __future__ import annotations

from collections.abc import Callable

_SIZE = 7
_RANGE = 1 << 8 * _SIZE


def random_part(random: Callable[[int], bytes]) -> float:
    """A number from 0 up to, but not including, 1."""
    return int.from_bytes(random(_SIZE), "big") / _RANGE
