"""What people see, or one JSON object per line for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from agent.duplex.events import (
    Confirmed,
    Connected,
    ContactRequested,
    Event,
    Failed,
    Fetched,
    MessageReceived,
    RatchetSync,
    SwitchProgress,
)


class Output:
    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def say(self, values: dict[str, Any], text: str) -> None:
        print(json.dumps(values, default=_plain) if self._as_json else text, flush=True)

    def show(self, event: Event) -> None:
        if self._as_json:
            if not isinstance(event, Fetched):
                self.say({"event": type(event).__name__} | asdict(event), "")
            return
        text = _text(event)
        if text is not None:
            print(text, flush=True)


def _text(event: Event) -> str | None:
    match event:
        case MessageReceived():
            return f"Connection {event.connection_id}: {_safe(event.body)}"
        case Confirmed():
            return f"Connection {event.connection_id}: {_safe(event.info)} joined"
        case Connected():
            return f"Connection {event.connection_id} is made"
        case ContactRequested():
            return f"Request {event.invitation_id} from {_safe(event.info)}: accept it, or reject it"
        case SwitchProgress():
            whose = "our" if event.receiving else "their"
            return f"Connection {event.connection_id}: {whose} queue moves, {event.phase}"
        case RatchetSync():
            return f"Connection {event.connection_id}: ratchet {event.state.value}"
        case Failed():
            return f"Connection {event.connection_id}: {event.error}"
    return None


def _safe(body: bytes) -> str:
    """Whoever sent it must not be able to steer this terminal."""
    text = body.decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _plain(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
