"""Records leave bytes out of their text, wherever in a field they are."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from protocol.hiding import hides_bytes

SECRET = b"secret"


@hides_bytes
class Row(NamedTuple):
    number: int
    value: Any


@hides_bytes
@dataclass(frozen=True, slots=True)
class Record:
    number: int
    value: Any
    word: str = field(default="word", repr=False)


HIDDEN = [
    SECRET,
    bytearray(SECRET),
    memoryview(SECRET),
    (1, SECRET),
    [[SECRET]],
    {SECRET},
    frozenset({SECRET}),
    deque([SECRET]),
    {SECRET: 1},
    {1: (SECRET,)},
]


@pytest.mark.parametrize("kind", [Row, Record])
@pytest.mark.parametrize("value", HIDDEN, ids=lambda value: type(value).__name__)
def test_bytes_are_left_out(kind: Any, value: Any) -> None:
    record = kind(1, value)
    assert repr(record) == str(record) == f"{record}" == f"{kind.__name__}(number=1)"


@pytest.mark.parametrize("value", ["text", None, (1, 2), {"name": 1}, [], Row(1, "text")], ids=repr)
def test_the_rest_is_shown(value: Any) -> None:
    assert repr(Row(1, value)) == f"Row(number=1, value={value!r})"
    assert repr(Record(1, value)) == f"Record(number=1, value={value!r})"


def test_a_record_in_a_record_hides_its_own() -> None:
    assert repr(Record(1, (Row(2, SECRET),))) == "Record(number=1, value=(Row(number=2),))"
