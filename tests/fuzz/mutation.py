"""Changes of valid bytes: small ones that get far into a parser, and rough ones."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

VECTORS = Path(__file__).parents[1] / "vectors"
MAX_SIZE = 20_000
"A little more than the largest block."
LENGTHS = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF)
"What a length byte is when somebody means harm."


@cache
def corpus() -> tuple[bytes, ...]:
    """Every byte string of the captured vectors, and every text."""
    found: set[bytes] = set()
    for file in sorted([*VECTORS.rglob("*.json"), *VECTORS.rglob("*.json.xz")]):
        data = file.read_bytes()
        found.update(_byte_strings(json.loads(lzma.decompress(data) if file.suffix == ".xz" else data)))
    return tuple(sorted(data for data in found if len(data) <= MAX_SIZE))


def _byte_strings(value: Any) -> Iterator[bytes]:
    match value:
        case dict():
            for inner in value.values():
                yield from _byte_strings(inner)
        case list():
            for inner in value:
                yield from _byte_strings(inner)
        case str():
            yield value.encode()
            try:
                yield bytes.fromhex(value)
            except ValueError:
                return


class Mutator:
    """The same seed gives the same bytes."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._changes: Sequence[Callable[[bytearray], None]] = (
            self._flip,
            self._flip,
            self._length,
            self._length,
            self._cut,
            self._insert,
            self._repeat,
            self._drop,
            self._splice,
        )

    def example(self) -> bytes:
        """A valid byte string of some parser."""
        return self._random.choice(corpus())

    def changed(self, data: bytes) -> bytes:
        """One to four changes."""
        result = bytearray(data)
        for _ in range(self._random.choice((1, 1, 1, 2, 3, 4))):
            self._random.choice(self._changes)(result)
        return bytes(result[:MAX_SIZE])

    def noise(self, size: int) -> bytes:
        return self._random.randbytes(size)

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def pick(self, values: Sequence[Any]) -> Any:
        return self._random.choice(values)

    def _at(self, data: bytearray) -> int:
        return self._random.randrange(len(data) + 1)

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)

    def _length(self, data: bytearray) -> None:
        if data:
            at = self._random.randrange(len(data))
            near = ((data[at] + 1) % 256, (data[at] - 1) % 256)
            data[at] = self._random.choice((*LENGTHS, *near))

    def _cut(self, data: bytearray) -> None:
        del data[self._at(data) :]

    def _insert(self, data: bytearray) -> None:
        at = self._at(data)
        data[at:at] = self._random.randbytes(self._random.choice((1, 2, 8, 64, 300)))

    def _repeat(self, data: bytearray) -> None:
        start, end = sorted((self._at(data), self._at(data)))
        data[end:end] = data[start:end] * self._random.choice((1, 2, 16))

    def _drop(self, data: bytearray) -> None:
        start, end = sorted((self._at(data), self._at(data)))
        del data[start:end]

    def _splice(self, data: bytearray) -> None:
        other = self.example()
        at = self._at(data)
        data[at:] = other[self._random.randrange(len(other) + 1) :]
