"""JSON texts of notifications.

Everything secret in them is already ciphertext; base64url has no character that JSON would escape, so the
texts are put together from constant parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final, assert_never

from ntf_server.push.provider import (
    CheckMessages,
    MessageList,
    PushNotification,
    StatementNotice,
    Verification,
)
from protocol.device_token import Provider
from protocol.encoding import b64

ALERT_TEXT: Final = b"Encrypted message or another app event"  # what a device shows if it cannot decrypt
ALERT_CATEGORY: Final = b"NTF_CAT_CHECK_MESSAGE"
PADDED_SIZE_LIMITS: Final[Mapping[Provider, int]] = {
    Provider.FCM: 3000,  # FCM takes 4096 bytes of data, as text
    Provider.WEB_PUSH: 2900,  # push services must take 4096 bytes, after another encryption
}
_BACKGROUND: Final = b'{"aps":{"content-available":1},"notificationData":'
_ALERT: Final = (
    b'{"aps":{"mutable-content":1,"alert":"' + ALERT_TEXT + b'","category":"' + ALERT_CATEGORY + b'"}'
    b',"notificationData":'
)


def padded_size(provider: Provider, configured: int) -> int:
    """To how many bytes a text is padded before it is boxed: as configured, or what the provider carries."""
    return min(configured, PADDED_SIZE_LIMITS.get(provider, configured))


def is_background(notification: PushNotification) -> bool:
    """Whether the device handles it without showing anything; only messages are shown, and statements."""
    return not isinstance(notification, MessageList | StatementNotice)


def notification_data(notification: PushNotification) -> bytes:
    """The JSON object that the device's code reads; also the whole text of a Web Push."""
    match notification:
        case Verification(nonce, boxed):
            return _boxed_data(b"verification", nonce, boxed)
        case MessageList(nonce, boxed):
            return _boxed_data(b"message", nonce, boxed)
        case CheckMessages():
            return b'{"checkMessages":true}'
        case StatementNotice(body):
            return body
        case _:
            assert_never(notification)


def apns_payload(notification: PushNotification) -> bytes:
    """The body of a request to APNs."""
    if isinstance(notification, StatementNotice):
        return notification.body
    head = _BACKGROUND if is_background(notification) else _ALERT
    return b"".join((head, notification_data(notification), b"}"))


def fcm_data(notification: PushNotification) -> dict[str, str]:
    """The data of an FCM message: the same fields, but FCM takes strings only."""
    match notification:
        case Verification(nonce, boxed):
            return {"nonce": _text(nonce), "verification": _text(boxed)}
        case MessageList(nonce, boxed):
            return {"nonce": _text(nonce), "message": _text(boxed)}
        case CheckMessages():
            return {"checkMessages": "true"}
        case StatementNotice(body):
            data: dict[str, str] = json.loads(body)
            return data
        case _:
            assert_never(notification)


def _boxed_data(name: bytes, nonce: bytes, boxed: bytes) -> bytes:
    return b"".join((b'{"nonce":"', b64(nonce), b'","', name, b'":"', b64(boxed), b'"}'))


def _text(data: bytes) -> str:
    return b64(data).decode()
