"""What a push means: two layers of encryption, the server's around the router's.

The payload is the `notificationData` of a push. APNs delivers it as an object, Web Push as a JSON text.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent.errors import BadPush
from agent.notifications.records import Token
from agent.notifications.rows import subscription_of_notifier
from protocol.encoding import unb64
from protocol.errors import DecodeError
from protocol.push_messages import NmsgMeta, PnMessage, decode_pn_messages, open_nmsg_meta, open_push

PushPayload = str | bytes | Mapping[str, object]


@dataclass(frozen=True, slots=True)
class VerificationPush:
    """The server wants to know whether this device receives its pushes."""

    nonce: bytes = field(repr=False)
    boxed_code: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class MessagePush:
    """Some queues have news."""

    nonce: bytes = field(repr=False)
    boxed: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CheckPush:
    """It is time to look at all queues."""


@dataclass(frozen=True, slots=True)
class NotificationInfo:
    """A queue to read, and what the router says about the message."""

    connection_id: int
    queue_id: int
    ntf_ts: int
    "When the notification server heard of it."
    meta: NmsgMeta = field(repr=False)


def parse_push(payload: PushPayload) -> VerificationPush | MessagePush | CheckPush:
    """Raises `BadPush`. The payload may also be the whole APNs body."""
    data = _object(payload)
    data = _object(data["notificationData"]) if "notificationData" in data else data
    if data.get("checkMessages") in (True, "true"):  # FCM carries only text
        return CheckPush()
    nonce = _bytes(data, "nonce")
    if "verification" in data:
        return VerificationPush(nonce, _bytes(data, "verification"))
    return MessagePush(nonce, _bytes(data, "message"))


def _object(payload: object) -> Mapping[str, object]:
    if isinstance(payload, str | bytes):
        try:
            payload = json.loads(payload)
        except (ValueError, RecursionError):
            raise BadPush("the payload is not JSON") from None
    if not isinstance(payload, Mapping):
        raise BadPush("the payload is not a JSON object")
    return payload


def _bytes(data: Mapping[str, object], name: str) -> bytes:
    text = data.get(name)
    if not isinstance(text, str):
        raise BadPush(f"the payload has no {name}")
    try:
        return unb64(text.encode("ascii", "replace"))
    except DecodeError:
        raise BadPush(f"the payload's {name} is not base64url") from None


def announced(db: sqlite3.Connection, token: Token, push: MessagePush) -> list[NotificationInfo]:
    """What to fetch, oldest first.

    Pushes repeat earlier notifications. All but the last are left out if a message at least as new was
    already received from that queue. Those of unknown queues, or that do not open, are left out too.
    """
    if token.dh_secret is None:
        raise BadPush("the device is not registered")
    try:
        entries = decode_pn_messages(open_push(token.dh_secret, push.nonce, push.boxed))
    except DecodeError:
        raise BadPush("the push is not for this device") from None
    last = len(entries) - 1
    infos = [_info(db, entry, is_last=index == last) for index, entry in enumerate(entries)]
    return [info for info in infos if info is not None]


def _info(db: sqlite3.Connection, entry: PnMessage, *, is_last: bool) -> NotificationInfo | None:
    row = subscription_of_notifier(db, entry.queue.server, entry.queue.notifier_id)
    if row is None or row.dh_secret is None:
        return None
    try:
        meta = open_nmsg_meta(row.dh_secret, entry.nonce, entry.meta)
    except DecodeError:
        return None
    queue = db.execute("SELECT * FROM receive_queues WHERE queue_id = ?", (row.queue_id,)).fetchone()
    if queue["deleting"] or (not is_last and _is_old(queue, meta)):
        return None
    return NotificationInfo(queue["connection_id"], row.queue_id, entry.timestamp, meta)


def _is_old(queue: Any, meta: NmsgMeta) -> bool:
    """Routers tell whole seconds: of the newest second only the message that came last is old for sure."""
    newest = queue["last_broker_ts"]
    if newest is None or meta.timestamp > newest:
        return False
    return bool(meta.timestamp < newest or queue["last_broker_id"] == meta.message_id)
