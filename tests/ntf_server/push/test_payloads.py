"""The JSON texts, byte for byte."""

from __future__ import annotations

import json
import uuid

import pytest

from ntf_server.config import ApnsConfig
from ntf_server.push.provider import (
    CheckMessages,
    DeviceGone,
    MessageList,
    NullProvider,
    PushNotification,
    RetryLater,
    Verification,
    apns_payload,
    fcm_data,
    notification_data,
)
from protocol.device_token import ApnsToken, Provider
from protocol.statuses import InvalidReason

NONCE, BOXED = bytes(23) + b"\xff", b"\xfb\xef\xbe\xff"
NONCE_TEXT = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAD_"
BOXED_TEXT = "----_w=="


@pytest.mark.parametrize(
    ("notification", "text"),
    [
        (
            Verification(NONCE, BOXED),
            '{"aps":{"content-available":1},"notificationData":'
            f'{{"nonce":"{NONCE_TEXT}","verification":"{BOXED_TEXT}"}}}}',
        ),
        (
            MessageList(NONCE, BOXED),
            '{"aps":{"mutable-content":1,"alert":"Encrypted message or another app event",'
            '"category":"NTF_CAT_CHECK_MESSAGE"},"notificationData":'
            f'{{"nonce":"{NONCE_TEXT}","message":"{BOXED_TEXT}"}}}}',
        ),
        (CheckMessages(), '{"aps":{"content-available":1},"notificationData":{"checkMessages":true}}'),
    ],
)
def test_apns_texts(notification: PushNotification, text: str) -> None:
    assert apns_payload(notification).decode() == text
    assert json.loads(text)["notificationData"] == json.loads(notification_data(notification))


def test_fcm_values_are_strings() -> None:
    assert fcm_data(MessageList(NONCE, BOXED)) == {"nonce": NONCE_TEXT, "message": BOXED_TEXT}
    assert fcm_data(Verification(NONCE, BOXED)) == {"nonce": NONCE_TEXT, "verification": BOXED_TEXT}
    assert fcm_data(CheckMessages()) == {"checkMessages": "true"}


def test_standard_padding_gives_the_usual_size() -> None:
    assert 4200 < len(apns_payload(MessageList(NONCE, bytes(3072 + 16)))) < 4400


def test_what_is_secret_is_not_shown() -> None:
    assert "fb" not in repr(MessageList(NONCE, BOXED))
    assert str(DeviceGone(InvalidReason.BAD)) == "BAD"
    assert str(RetryLater("outage")) == "outage"
    assert ApnsConfig.__dataclass_params__.frozen  # type: ignore[attr-defined]


async def test_null_provider_accepts() -> None:
    provider = NullProvider()
    await provider.deliver(ApnsToken(Provider.APNS_NULL, b""), CheckMessages(), str(uuid.uuid4()))
    await provider.close()
