"""One Reader, one Writer: the only place that knows offsets and length prefixes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import NewType, TypeVar

from protocol.errors import DecodeError

T = TypeVar("T")

EntityId = NewType("EntityId", bytes)
"Names a token, a subscription, a queue side or a service; empty in requests that create one."

CorrId = NewType("CorrId", bytes)
"Pairs a response with its request; empty in events."

NO_ENTITY = EntityId(b"")
NO_CORR = CorrId(b"")

NONCE_SIZE = 24

new_tuple = tuple.__new__
"Makes a NamedTuple in half the time of its own constructor; for those that come by the block."

LENGTHS = [bytes((length,)) for length in range(256)]
"What stands before a short string, by its length."


class Reader:
    """Reads primitives from the front of `data`; anything short raises DecodeError."""

    __slots__ = ("_data", "_end", "_pos")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._pos = 0
        self._end = len(data)

    @property
    def at_end(self) -> bool:
        return self._pos == self._end

    def check_end(self) -> None:
        if self._pos != self._end:
            raise DecodeError

    def peek(self) -> bytes:
        """The next byte, or nothing at the end."""
        return self._data[self._pos : self._pos + 1]

    def pull_bytes(self, size: int) -> bytes:
        start = self._pos
        end = start + size
        if end > self._end:
            raise DecodeError
        self._pos = end
        return self._data[start:end]

    def pull_short(self) -> bytes:
        start = self._pos + 1
        if start > self._end:
            raise DecodeError
        end = start + self._data[start - 1]
        if end > self._end:
            raise DecodeError
        self._pos = end
        return self._data[start:end]

    def pull_large(self) -> bytes:
        return self.pull_bytes(self.pull_word16())

    def pull_tail(self) -> bytes:
        start = self._pos
        self._pos = self._end
        return self._data[start:]

    def pull_byte(self) -> int:
        pos = self._pos
        if pos >= self._end:
            raise DecodeError
        self._pos = pos + 1
        return self._data[pos]

    def pull_bool(self) -> bool:
        char = self.pull_bytes(1)
        if char == b"T":
            return True
        if char == b"F":
            return False
        raise DecodeError

    def pull_word16(self) -> int:
        return int.from_bytes(self.pull_bytes(2), "big")

    def pull_int64(self) -> int:
        return int.from_bytes(self.pull_bytes(8), "big", signed=True)

    def pull_optional(self, pull: Callable[[Reader], T]) -> T | None:
        char = self.pull_bytes(1)
        if char == b"0":
            return None
        if char == b"1":
            return pull(self)
        raise DecodeError

    def pull_nonempty(self, pull: Callable[[Reader], T]) -> list[T]:
        count = self.pull_byte()
        if count == 0:
            raise DecodeError
        return [pull(self) for _ in range(count)]

    def pull_word(self) -> bytes:
        """The bytes up to the next space; the space is consumed too."""
        end = self._data.find(b" ", self._pos)
        if end < 0:
            raise DecodeError
        word = self._data[self._pos : end]
        self._pos = end + 1
        return word


class Writer:
    """Collects encoded parts; `value()` joins them."""

    __slots__ = ("_parts",)

    def __init__(self, start: bytes = b"") -> None:
        self._parts = [start] if start else []

    def value(self) -> bytes:
        return b"".join(self._parts)

    def push_bytes(self, data: bytes) -> None:
        self._parts.append(data)

    def push_short(self, data: bytes) -> None:
        self._parts.append(short(data))

    def push_large(self, data: bytes) -> None:
        self._parts.append(large(data))

    def push_bool(self, flag: bool) -> None:
        self._parts.append(b"T" if flag else b"F")

    def push_word16(self, number: int) -> None:
        self._parts.append(number.to_bytes(2, "big"))

    def push_int64(self, number: int) -> None:
        self._parts.append(number.to_bytes(8, "big", signed=True))

    def push_nonce(self, value: bytes) -> None:
        self._parts.append(nonce(value))

    def push_optional(self, value: T | None, push: Callable[[Writer, T], None]) -> None:
        if value is None:
            self._parts.append(b"0")
        else:
            self._parts.append(b"1")
            push(self, value)

    def push_nonempty(self, values: Sequence[T], push: Callable[[Writer, T], None]) -> None:
        if not 0 < len(values) <= 255:
            raise ValueError("a list on the wire holds 1 to 255 items")
        self._parts.append(bytes((len(values),)))
        for value in values:
            push(self, value)


def split_short(data: bytes) -> tuple[bytes, bytes]:
    """A short string from the front of `data`, and what is behind it: a Reader unrolled."""
    if not data or len(data) <= data[0]:
        raise DecodeError
    end = 1 + data[0]
    return data[1:end], data[end:]


def split_two_shorts(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Two short strings from the front of `data`, and what is behind them: a Reader unrolled."""
    try:
        first = 1 + data[0]
        second = first + 1 + data[first]
    except IndexError:
        raise DecodeError from None
    if second > len(data):
        raise DecodeError
    return data[1:first], data[first + 1 : second], data[second:]


def split_three_shorts(data: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Three short strings from the front of `data`, and what is behind them: a Reader unrolled."""
    try:
        first = 1 + data[0]
        second = first + 1 + data[first]
        third = second + 1 + data[second]
    except IndexError:
        raise DecodeError from None
    if third > len(data):
        raise DecodeError
    return data[1:first], data[first + 1 : second], data[second + 1 : third], data[third:]


def short(data: bytes) -> bytes:
    """`data` behind one length byte; longer than 255 bytes is a programming error."""
    return LENGTHS[len(data)] + data


def large(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def nonce(data: bytes) -> bytes:
    """Any string as a nonce: cut at 24 bytes, or filled with zeros to 24."""
    return data[:NONCE_SIZE].ljust(NONCE_SIZE, b"\0")


def b64(data: bytes) -> bytes:
    """base64url with padding, as every text form of the protocol has it."""
    # Two searches for a byte are faster than a table for every byte.
    return binascii.b2a_base64(data, newline=False).replace(b"+", b"-").replace(b"/", b"_")


def unb64(text: bytes) -> bytes:
    """base64url with or without padding."""
    bare = text.rstrip(b"=")
    if b"+" in bare or b"/" in bare:  # the other alphabet: the decoder takes both
        raise DecodeError
    try:
        return base64.b64decode(bare + b"=" * (-len(bare) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        raise DecodeError from None
