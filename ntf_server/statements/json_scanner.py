"""JSON from others, read a little at a time: whoever reads may pause between two values, or stop.

A whole document costs what its sender likes, and `json.loads` holds up the process until its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

LONGEST_SPACE = 1000
"Characters of white space between two words."
LONGEST_NAME = 200
_SPACE = re.compile(rf"[ \t\r\n]{{0,{LONGEST_SPACE}}}")
_SPACES = frozenset(" \t\r\n")


class NotJson(Exception):
    """It is not JSON that all readers read alike, or one of its values is longer than allowed."""


def unique_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object. What stands twice in it would be read differently by different readers."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise NotJson
    return value


_DECODE = json.JSONDecoder(object_pairs_hook=unique_names).raw_decode


class Scanner:
    """Reads a document from its beginning. Each method raises NotJson if something else comes next."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def members(self) -> Iterator[str]:
        """The names in an object; the value of each is to be read before the next."""
        self._expect("{")
        if self._accepts("}"):
            return
        named: set[str] = set()
        while True:
            name = self.value(LONGEST_NAME)
            if not isinstance(name, str) or name in named:
                raise NotJson
            named.add(name)
            self._expect(":")
            yield name
            if not self._accepts(","):
                break
        self._expect("}")

    def items(self) -> Iterator[None]:
        """The items of a list; each is to be read before the next."""
        self._expect("[")
        if self._accepts("]"):
            return
        while True:
            yield
            if not self._accepts(","):
                break
        self._expect("]")

    def value(self, limit: int) -> Any:
        """Any value that is written in at most `limit` characters."""
        self._skip()
        try:
            value, size = _DECODE(self._text[self._at : self._at + limit])
        except (ValueError, RecursionError):
            raise NotJson from None
        self._at += size
        return value

    def plain_text(self) -> str:
        """What stands between two quotes, of any length, as it is written: nothing is unescaped."""
        self._expect('"')
        end = self._text.find('"', self._at)
        if end < 0:
            raise NotJson
        start, self._at = self._at, end + 1
        return self._text[start:end]

    def end(self) -> None:
        """Nothing may follow."""
        self._skip()
        if self._at < len(self._text):
            raise NotJson

    def _accepts(self, mark: str) -> bool:
        self._skip()
        found = self._text.startswith(mark, self._at)
        self._at += found
        return found

    def _expect(self, mark: str) -> None:
        if not self._accepts(mark):
            raise NotJson

    def _skip(self) -> None:
        if self._text[self._at : self._at + 1] in _SPACES:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._at = space.end()
