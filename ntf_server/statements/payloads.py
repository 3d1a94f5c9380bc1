"""What a push for a statement says, in the form of each channel, cut down where it would be too long."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from protocol.hiding import hides_bytes
from store.statement_records import Channel

APNS_LIMIT = 4096
VOIP_LIMIT = 5120
FCM_LIMIT = 4096


class NotifyType(StrEnum):
    """How the app shows it."""

    ALERT = "alert"
    VOIP = "voip"


@hides_bytes
@dataclass(frozen=True, slots=True)
class Matched:
    """The part of a statement that a push carries; `topic` is the one whose rule matched."""

    sender: bytes
    topic: bytes
    data: bytes = field(repr=False)
    signature: bytes = field(default=b"", repr=False)
    expiry: bytes = b""

    @property
    def proof(self) -> dict[str, str]:
        """What the app needs besides to check who made the statement, and until when it is good."""
        if not self.signature:
            return {}
        return {"signature": self.signature.hex(), "expiry": str(int.from_bytes(self.expiry, "little"))}


@dataclass(frozen=True, slots=True)
class Payload:
    """`body` is JSON: the whole request body for Apple, the `data` object for Google."""

    body: bytes = field(repr=False)
    truncated: bool


def payload(channel: Channel, notify_type: NotifyType, matched: Matched, title: str) -> Payload:
    """The full statement if its encoded payload is within the channel's limit; else without signature and
    expiry; else without its data, too."""
    build, limit = _CHANNELS[channel]
    room = limit - _around(channel, notify_type)
    bare = replace(matched, signature=b"")
    for carried in (matched, bare):
        full = _encode(build(carried, notify_type, title, False))
        if len(full) <= room:
            return Payload(full, truncated=False)
    return Payload(_encode(build(bare, notify_type, title, True)), truncated=True)


def code_payload(channel: Channel, subscription_id: bytes, code: bytes) -> bytes:
    """What a device shows to prove that pushes reach it."""
    verification = {"subscription_id": str(uuid.UUID(bytes=subscription_id)), "code": code.hex()}
    if channel is Channel.FCM:
        return _encode({f"verification_{key}": value for key, value in verification.items()})
    aps = {} if channel is Channel.VOIP else {"content-available": 1}
    return _encode({"aps": aps, "verification": verification})


def _encode(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _alert(matched: Matched, notify_type: NotifyType, title: str, truncated: bool) -> dict[str, Any]:
    aps: dict[str, Any] = {"alert": {"title": title}, "mutable-content": 1}
    if truncated:
        aps["content-available"] = 1  # wakes the app, which fetches the statement
    return {"aps": aps, **_statement(matched, notify_type, truncated)}


def _voip(matched: Matched, notify_type: NotifyType, title: str, truncated: bool) -> dict[str, Any]:
    return {"aps": {}, **_statement(matched, notify_type, truncated)}


def _statement(matched: Matched, notify_type: NotifyType, truncated: bool) -> dict[str, Any]:
    return {
        "statement": {
            "data": None if truncated else matched.data.hex(),
            "topic": matched.topic.hex(),
            "sender_pubkey": matched.sender.hex(),
            **matched.proof,
        },
        "truncated": truncated,
        "notify_type": notify_type,
    }


def _fcm(matched: Matched, notify_type: NotifyType, title: str, truncated: bool) -> dict[str, Any]:
    """All values are strings."""
    data = {} if truncated else {"statement_data": matched.data.hex()}
    return {
        **data,
        "statement_topic": matched.topic.hex(),
        "sender_pubkey": matched.sender.hex(),
        **{f"statement_{key}": value for key, value in matched.proof.items()},
        "truncated": "true" if truncated else "false",
        "notify_type": notify_type.value,
    }


def urgent(*, is_call: bool) -> dict[str, str]:
    """For Android. Google drops a call that it cannot deliver at once, as Apple does with expiration 0."""
    return {"priority": "high", "ttl": "0s"} if is_call else {"priority": "high"}


def _around(channel: Channel, notify_type: NotifyType) -> int:
    """Bytes of the object that Google's data stands in: they count, too."""
    if channel is not Channel.FCM:
        return 0
    return len(_encode({"data": {}, "android": urgent(is_call=notify_type is NotifyType.VOIP)})) - len("{}")


_Build = Callable[[Matched, NotifyType, str, bool], dict[str, Any]]
_CHANNELS: Mapping[Channel, tuple[_Build, int]] = {
    Channel.APNS: (_alert, APNS_LIMIT),
    Channel.VOIP: (_voip, VOIP_LIMIT),
    Channel.FCM: (_fcm, FCM_LIMIT),
}
