"""Header blocks of requests (HPACK, RFC 7541).

The table and the Huffman code are the library's. Its decoder takes three times as long, more than all the
rest of a push together, and a push service must not be what a load test measures.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

INDEXED, LITERAL_KEPT, RESIZED = 0x80, 0x40, 0x20
HUFFMAN: Final = 0x80
KNOWN_STRINGS: Final = 4096
"Decoded strings that are remembered: the long one, the authorization, comes with every push."


class HeaderDecoder:
    """The blocks of one connection, in their order: each may refer to what came before."""

    def __init__(self) -> None:
        self._table = HeaderTable()

    def decode(self, block: bytes) -> dict[str, str]:
        """Raises ValueError, IndexError or HPACKError for what is none."""
        headers: dict[str, str] = {}
        at = 0
        while at < len(block):
            first = block[at]
            if first & INDEXED:
                index, at = _integer(block, at, 7)
                name, value = self._table.get_by_index(index)
            elif first & (LITERAL_KEPT | RESIZED) == RESIZED:
                size, at = _integer(block, at, 5)
                if size > HeaderTable.DEFAULT_SIZE:
                    raise ValueError("a larger table than was offered")
                self._table.maxsize = size
                continue
            else:
                name, value, at = self._literal(block, at, kept=bool(first & LITERAL_KEPT))
            headers[name.decode()] = value.decode()
        return headers

    def _literal(self, block: bytes, at: int, *, kept: bool) -> tuple[bytes, bytes, int]:
        index, at = _integer(block, at, 6 if kept else 4)
        if index:
            name = self._table.get_by_index(index)[0]
        else:
            name, at = _string(block, at)
        value, at = _string(block, at)
        if kept:
            self._table.add(name, value)
        return name, value, at


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value = block[at] & most
    at += 1
    if value == most:
        shift = 0
        while block[at] & 0x80:
            value += (block[at] & 0x7F) << shift
            shift += 7
            at += 1
        value += block[at] << shift
        at += 1
    return value, at


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    is_huffman = block[at] & HUFFMAN
    size, at = _integer(block, at, 7)
    end = at + size
    if end > len(block):
        raise ValueError("a string that does not end")
    data = block[at:end]
    return (_from_huffman(data) if is_huffman else data), end


@lru_cache(maxsize=KNOWN_STRINGS)
def _from_huffman(data: bytes) -> bytes:
    return decode_huffman(data)
