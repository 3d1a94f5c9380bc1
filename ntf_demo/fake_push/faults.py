"""Misbehaviour on command: what the fake push service does instead of accepting a push."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, TypeVar, get_args

Action = Literal["answer", "silence", "reset", "drop", "goaway"]
ACTIONS: Final = frozenset(get_args(Action))
REFUSED_STREAM: Final = 7  # HTTP/2 error code: the request was not processed
INTERNAL_ERROR: Final = 2


@dataclass(slots=True, kw_only=True)
class Fault:
    """Which requests are treated differently, and how."""

    action: Action = "answer"
    "answer: with `status`; silence: never; reset: RST_STREAM; drop: cut the connection; goaway: GOAWAY."
    api: str | None = None
    "Only requests of this API: apns, fcm, webpush or oauth."
    token: str | None = field(default=None, repr=False)
    "Only pushes to this device token (Web Push: path)."
    skip: int = 0
    "Matching requests to leave alone first."
    count: int | None = None
    "Matching requests to treat; None: all from now on."
    delay: float = 0.0
    "Seconds to wait before acting."
    status: int = 200
    reason: str = ""
    "The provider's word for the error; empty: an answer without body."
    split: bool = False
    "Send the body of the answer in DATA frames of one byte."
    retry_after: int | None = None
    location: str | None = None
    "For answers that redirect."
    error_code: int = INTERNAL_ERROR
    "For reset."
    processed: bool = False
    "For reset, drop and goaway: whether the push counts as accepted all the same."
    close: bool = False
    "For goaway: close the connection once open streams are answered. For drop: end TLS in good order."

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"unknown action {self.action!r}")

    def matches(self, api: str, token: str) -> bool:
        """Whether the request is treated by this fault; counts it if so."""
        if self.api not in (None, api) or self.token not in (None, token) or self.count == 0:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.count is not None:
            self.count -= 1
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """HTTP/2 limits announced to clients."""

    max_streams: int = 1000
    window: int = 1 << 20
    "Initial window of a stream, in bytes."
    connection_window: int = 1 << 24
    "Window of the connection; below 65535 it is still that much at first."
    window_delay: float = 0.0
    "Seconds by which window updates are held back."


T = TypeVar("T", Fault, ConnectionSettings)


def from_json(kind: type[T], value: Any) -> T:
    """A fault or settings as the control endpoint takes them; ValueError if they make no sense."""
    names = {item.name for item in fields(kind)}
    if not isinstance(value, dict) or not value.keys() <= names:
        raise ValueError(f"expected an object with keys out of {sorted(names)}")
    return kind(**value)
