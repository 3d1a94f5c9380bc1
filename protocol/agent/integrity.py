"""What a message's number and its hash of the previous one say about the messages between."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LastMessage:
    """Of one sender: its id and hash. Before the first message 0 and nothing."""

    message_id: int = 0
    message_hash: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class IntegrityOk:
    pass


@dataclass(frozen=True, slots=True)
class BadId:
    previous_id: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    pass


@dataclass(frozen=True, slots=True)
class Skipped:
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class BadHash:
    pass


Integrity = IntegrityOk | BadId | Duplicate | Skipped | BadHash


def check_integrity(last: LastMessage, message_id: int, previous_hash: bytes) -> Integrity:
    """The message is delivered whatever comes out: the application decides."""
    expected = last.message_id + 1
    if message_id < last.message_id:
        return BadId(last.message_id)
    if message_id == last.message_id:
        return Duplicate()
    if message_id > expected:
        return Skipped(expected, message_id - 1)
    return IntegrityOk() if previous_hash == last.message_hash else BadHash()
