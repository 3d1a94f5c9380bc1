"""What people see, or one JSON object per line for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from enum import Enum
from typing import Any, get_args

from agent.duplex.events import (
    Confirmed,
    Connected,
    ContactRequested,
    Event,
    Failed,
    Fetched,
    LinkReady,
    MessageDelayed,
    MessageFailed,
    MessageReceived,
    PeerInfo,
    QueueDeleted,
    RatchetSync,
    ReceiptsReceived,
    SubscriptionEnded,
    SwitchProgress,
)
from protocol.agent.integrity import BadHash, BadId, Duplicate, Integrity, Skipped
from protocol.smp_messages import QueueSet


class Output:
    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def say(self, values: dict[str, Any], text: str) -> None:
        print(json.dumps(values, default=_plain) if self._as_json else text, flush=True)

    def show(self, event: Event) -> None:
        if self._as_json:
            if not isinstance(event, Fetched):
                self.say({"event": type(event).__name__} | _values(event), "")
            return
        text = _text(event)
        if text is not None:
            print(text, flush=True)


def _text(event: Event) -> str | None:
    match event:
        case MessageReceived():
            return f"Connection {event.connection_id}: {_safe(event.body)}{_remark(event.integrity)}"
        case ReceiptsReceived():
            ids = ", ".join(str(message_id) for message_id, _ in event.receipts)
            return f"Connection {event.connection_id}: received {ids}"
        case MessageFailed():
            return f"Connection {event.connection_id}: message {event.message_id} is not sent: {event.error}"
        case MessageDelayed():
            return f"Connection {event.connection_id}: message {event.message_id} waits: {event.error}"
        case Confirmed():
            return f"Connection {event.connection_id}: {_safe(event.info)} joined"
        case PeerInfo():
            return f"Connection {event.connection_id}: {_safe(event.info)} lets us in"
        case Connected():
            return f"Connection {event.connection_id} is made"
        case ContactRequested():
            return f"Request {event.invitation_id} from {_safe(event.info)}: accept it, or reject it"
        case SwitchProgress():
            whose = "our" if event.receiving else "their"
            return f"Connection {event.connection_id}: {whose} queue moves, {event.phase}"
        case RatchetSync():
            return f"Connection {event.connection_id}: ratchet {event.state.value}"
        case QueueDeleted():
            what = "another queue replaces it" if event.is_replaced else "no messages arrive any more"
            return f"Connection {event.connection_id}: the router has deleted its queue; {what}"
        case LinkReady():
            return f"Connection {event.connection_id}: the link works"
        case SubscriptionEnded():
            return f"Connection {event.connection_id}: another program receives its messages"
        case Failed():
            return f"Connection {event.connection_id}: {event.error}"
    return None


def _remark(integrity: Integrity) -> str:
    """What is wrong with the messages before this one."""
    match integrity:
        case Skipped(first, last):
            return f" [messages {first} to {last} are missing before it]"
        case BadId():
            return " [came late]"
        case Duplicate():
            return " [its number was used before]"
        case BadHash():
            return " [the message before it was another]"
    return ""


def _safe(body: bytes) -> str:
    """Whoever sent it must not be able to steer this terminal."""
    text = body.decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _values(event: Event) -> dict[str, Any]:
    return {each.name: getattr(event, each.name) for each in fields(event)}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, QueueSet):
        return {"count": value.count, "hash": value.ids_hash and value.ids_hash.hex()}
    if isinstance(value, get_args(Integrity)):
        return {"outcome": type(value).__name__} | asdict(value)
    return str(value)
