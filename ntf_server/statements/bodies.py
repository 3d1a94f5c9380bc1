"""What clients of the gateway send, checked. Pure."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ntf_server.statements.json_scanner import NotJson, Scanner, unique_names
from protocol.device_token import ApnsToken, DeviceToken, FcmToken, Provider
from store.statement_records import Channel, Rule

KEY_SIZE = 32
"Bytes of a public key and of a topic."
CODE_SIZE = 16
"Bytes of the code that is pushed to a device."
MAX_TOKEN = 200
"Hex digits of a device token of Apple's; FCM's are texts within the store's 255 bytes."
MAX_FCM_TOKEN = 255
MAX_IDS = 100
LONGEST_RULE = 1024
"Characters of a rule."
RULE_SIZE = 256
"Bytes of a rule and what stands beside it, as clients usually write it: what a whole body may have for each."
MAX_REGISTRATION = 4096
MAX_UNSUBSCRIBE = 64 * MAX_IDS + 1024
"Bytes of a body."
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII)

_HEX = re.compile(r"(?:0x)?([0-9a-fA-F]*)")


def most_rule_bytes(most: int) -> int:
    """Of a body with at most so many rules."""
    return RULE_SIZE * most + 16 * 1024


class BadBody(Exception):
    """The body is not as documented; the message is for the client."""


class Registration(NamedTuple):
    """Do not print."""

    channel: Channel
    device_token: DeviceToken
    is_call: bool


def json_object(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body.decode(), object_pairs_hook=unique_names)
    except (ValueError, RecursionError, NotJson):
        raise BadBody("the body is not JSON") from None
    if not isinstance(value, dict):
        raise BadBody("the body must be a JSON object")
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


def verification(body: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Of which subscription, and the code."""
    _only(body, "subscription_id", "code")
    code = _fixed(body, "code", CODE_SIZE)
    return _uuid(body.get("subscription_id")), code


def subscription_ids(body: Mapping[str, Any]) -> list[bytes]:
    _only(body, "subscription_ids")
    ids = body.get("subscription_ids")
    if not isinstance(ids, list) or not 0 < len(ids) <= MAX_IDS:
        raise BadBody(f"subscription_ids must be a list of 1 to {MAX_IDS} ids")
    return [_uuid(one) for one in ids]


class RulesBody:
    """Rules of a subscription. Iterating reads one after the other, and may pause anywhere: there may be
    thousands. Raises BadBody at the first thing that is wrong."""

    def __init__(self, body: bytes, most: int) -> None:
        self._body = body
        self._most = most
        self._found: dict[Rule, None] = {}
        self._subscription_id: bytes | None = None

    @property
    def subscription_id(self) -> bytes:
        return _uuid(None) if self._subscription_id is None else self._subscription_id

    @property
    def rules(self) -> list[Rule]:
        return list(self._found)

    def __iter__(self) -> Iterator[None]:
        try:
            yield from self._read(Scanner(self._body.decode("ascii")))
        except (NotJson, UnicodeDecodeError):
            raise BadBody("the body is not JSON as documented") from None

    def _read(self, scanner: Scanner) -> Iterator[None]:
        missing = {"subscription_id", "rules"}
        for name in scanner.members():
            missing.discard(name)
            if name == "subscription_id":
                self._subscription_id = _uuid(scanner.value(LONGEST_RULE))
            elif name == "rules":
                for _ in scanner.items():
                    self._add(scanner.value(LONGEST_RULE))
                    yield
            else:
                raise _unknown(name)
        scanner.end()
        if missing:
            raise BadBody(f"{missing.pop()} is missing")

    def _add(self, value: Any) -> None:
        rule = _rule(value)
        if rule in self._found:
            raise BadBody("the same rule stands in it twice")
        if len(self._found) == self._most:
            raise BadBody(f"rules must be a list of at most {self._most}")
        self._found[rule] = None


def _rule(value: Any) -> Rule:
    if not isinstance(value, dict):
        raise BadBody("a rule must be an object")
    _only(value, "sender_pubkey", "topic")
    return Rule(_key(value, "sender_pubkey"), _key(value, "topic"))


def _key(value: Mapping[str, Any], name: str) -> bytes:
    return _fixed(value, name, KEY_SIZE)


def _fixed(value: Mapping[str, Any], name: str, size: int) -> bytes:
    try:
        found = _hex(value.get(name))
    except ValueError:
        found = b""
    if len(found) != size:
        raise BadBody(f"{name} must be {size} bytes in hex")
    return found


def _hex(text: Any) -> bytes:
    if not isinstance(text, str) or not (digits := _HEX.fullmatch(text)):
        raise ValueError
    return bytes.fromhex(digits[1])


def _uuid(text: Any) -> bytes:
    if not isinstance(text, str) or not _UUID.fullmatch(text):
        raise BadBody("a subscription id must be a UUID")
    return uuid.UUID(text).bytes


def _only(body: Mapping[str, Any], *known: str) -> None:
    for name in body:
        if name not in known:
            raise _unknown(name)


def _unknown(name: str) -> BadBody:
    return BadBody(f"unknown field {name[:40]!r}")
