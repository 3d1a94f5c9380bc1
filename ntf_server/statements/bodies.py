"""What clients of the gateway send, checked. Pure."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from protocol.device_token import ApnsToken, DeviceToken, FcmToken, Provider
from store.statement_records import Channel, Rule

KEY_SIZE = 32
"Bytes of a public key and of a topic."
MAX_TOKEN = 200
"Hex digits of a device token of Apple's; FCM's are texts within the store's 255 bytes."
MAX_FCM_TOKEN = 255
MAX_IDS = 100
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII)


class BadBody(Exception):
    """The body is not as documented; the message is for the client."""


class Registration(NamedTuple):
    """Do not print."""

    channel: Channel
    device_token: DeviceToken
    is_call: bool


def json_object(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body.decode(), object_pairs_hook=_object)
    except (ValueError, RecursionError):
        raise BadBody("the body is not JSON") from None
    if not isinstance(value, dict):
        raise BadBody("the body must be a JSON object")
    return value


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """What stands twice in an object would be read differently by different readers."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise BadBody("a field stands twice in an object")
    return value


def registration(body: Mapping[str, Any], apple: Provider) -> Registration:
    """`apple`: which of Apple's services tokens of `apns` and `voip` are for."""
    _only(body, "notificationType", "platform", "token", "call")
    channel = _channel(body)
    token, is_call = body.get("token"), body.get("call", False)
    if not isinstance(is_call, bool):
        raise BadBody("call must be true or false")
    if is_call and channel is not Channel.FCM:
        raise BadBody("call is for fcm only")
    if not isinstance(token, str):
        raise BadBody("token must be a text")
    return Registration(channel, _device_token(channel, token, apple), is_call)


def _channel(body: Mapping[str, Any]) -> Channel:
    named = [body[name] for name in ("notificationType", "platform") if name in body]
    if not named:
        raise BadBody("notificationType is missing")
    if any(one != named[0] for one in named):
        raise BadBody("notificationType and platform differ")
    try:
        return Channel(named[0])
    except ValueError:
        raise BadBody("notificationType must be apns, voip or fcm") from None


def _device_token(channel: Channel, token: str, apple: Provider) -> DeviceToken:
    if channel is Channel.FCM:
        if not (token.isascii() and token.isprintable() and 0 < len(token) <= MAX_FCM_TOKEN):
            raise BadBody(f"token must be printable ASCII of at most {MAX_FCM_TOKEN} characters")
        return FcmToken(token.encode())
    try:
        raw = _hex(token)
    except ValueError:
        raise BadBody("token must be hex") from None
    if not 0 < 2 * len(raw) <= MAX_TOKEN:
        raise BadBody(f"token must have at most {MAX_TOKEN} hex digits")
    return ApnsToken(apple, raw.hex().encode())


def subscription_ids(body: Mapping[str, Any]) -> list[bytes]:
    _only(body, "subscription_ids")
    ids = body.get("subscription_ids")
    if not isinstance(ids, list) or not 0 < len(ids) <= MAX_IDS:
        raise BadBody(f"subscription_ids must be a list of 1 to {MAX_IDS} ids")
    return [_uuid(one) for one in ids]


def rules(body: Mapping[str, Any], most: int) -> tuple[bytes, list[Rule]]:
    """Of which subscription, and which."""
    _only(body, "subscription_id", "rules")
    listed = body.get("rules")
    if not isinstance(listed, list) or len(listed) > most:
        raise BadBody(f"rules must be a list of at most {most}")
    found = [_rule(one) for one in listed]
    if len(set(found)) < len(found):
        raise BadBody("the same rule stands in it twice")
    return _uuid(body.get("subscription_id")), found


def _rule(value: Any) -> Rule:
    if not isinstance(value, dict):
        raise BadBody("a rule must be an object")
    _only(value, "sender_pubkey", "topic")
    return Rule(_key(value, "sender_pubkey"), _key(value, "topic"))


def _key(value: Mapping[str, Any], name: str) -> bytes:
    try:
        key = _hex(value.get(name))
    except ValueError:
        key = b""
    if len(key) != KEY_SIZE:
        raise BadBody(f"{name} must be {KEY_SIZE} bytes in hex")
    return key


def _hex(text: Any) -> bytes:
    if not isinstance(text, str) or not text.isascii() or any(letter.isspace() for letter in text):
        raise ValueError
    return bytes.fromhex(text.removeprefix("0x"))


def _uuid(text: Any) -> bytes:
    if not isinstance(text, str) or not _UUID.fullmatch(text):
        raise BadBody("a subscription id must be a UUID")
    return uuid.UUID(text).bytes


def _only(body: Mapping[str, Any], *known: str) -> None:
    if unknown := sorted(set(body) - set(known)):
        raise BadBody(f"unknown field {unknown[0][:40]!r}")
