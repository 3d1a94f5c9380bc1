"""Why an operator blocked a queue, as the error BLOCKED says it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from protocol.errors import DecodeError, ErrorType

_REASON, _NOTICE = "reason=", ",notice="


class BlockingReason(Enum):
    SPAM = "spam"
    CONTENT = "content"


@dataclass(frozen=True, slots=True)
class BlockingInfo:
    """`notice` is what clients may show, for example `{"ttl": 86400}`; clients before v18 do not get it."""

    reason: BlockingReason
    notice: str | None = None
    "JSON."

    @property
    def error(self) -> ErrorType:
        return ErrorType(b"BLOCKED " + self.text.encode())

    @property
    def text(self) -> str:
        return _REASON + self.reason.value + ("" if self.notice is None else _NOTICE + self.notice)


def blocking_info(reason: str, notice: dict[str, Any] | None) -> BlockingInfo:
    """From what an operator typed; DecodeError if there is no such reason."""
    try:
        kind = BlockingReason(reason)
    except ValueError:
        raise DecodeError from None
    return BlockingInfo(kind, None if notice is None else json.dumps(notice, separators=(",", ":")))


def parse_blocking_info(text: str) -> BlockingInfo:
    """What `text` gives, back."""
    reason, comma, notice = text.partition(_NOTICE)
    try:
        return BlockingInfo(BlockingReason(reason.removeprefix(_REASON)), notice if comma else None)
    except ValueError:
        raise DecodeError from None
