"""Payloads of every channel: their JSON, and their size at the limit and beside it."""

from __future__ import annotations

import json

import pytest

from ntf_server.config import ConfigError, parse_config
from ntf_server.config_kinds import SHORT, SHORT_TEXT
from ntf_server.statements.payloads import (
    APNS_LIMIT,
    FCM_LIMIT,
    VOIP_LIMIT,
    Matched,
    NotifyType,
    Payload,
    payload,
)
from store.statement_records import Channel

SENDER = bytes(range(32))
TOPIC = bytes(range(100, 132))
TITLE = "Notification"
LIMITS = {Channel.APNS: APNS_LIMIT, Channel.VOIP: VOIP_LIMIT, Channel.FCM: FCM_LIMIT}


def made(channel: Channel, kind: NotifyType, data: bytes, title: str = TITLE) -> Payload:
    return payload(channel, kind, Matched(SENDER, TOPIC, data), title)


def test_alert() -> None:
    assert json.loads(made(Channel.APNS, NotifyType.ALERT, b"\x01\x02").body) == {
        "aps": {"alert": {"title": TITLE}, "mutable-content": 1},
        "statement": {"data": "0102", "topic": TOPIC.hex(), "sender_pubkey": SENDER.hex()},
        "truncated": False,
        "notify_type": "alert",
    }


def test_voip() -> None:
    assert json.loads(made(Channel.VOIP, NotifyType.VOIP, b"\x01\x02").body) == {
        "aps": {},
        "statement": {"data": "0102", "topic": TOPIC.hex(), "sender_pubkey": SENDER.hex()},
        "truncated": False,
        "notify_type": "voip",
    }


@pytest.mark.parametrize("kind", NotifyType)
def test_fcm(kind: NotifyType) -> None:
    assert json.loads(made(Channel.FCM, kind, b"\x01\x02").body) == {
        "statement_data": "0102",
        "statement_topic": TOPIC.hex(),
        "sender_pubkey": SENDER.hex(),
        "truncated": "false",
        "notify_type": kind.value,
    }


def test_truncated_alert() -> None:
    assert json.loads(made(Channel.APNS, NotifyType.ALERT, bytes(5000)).body) == {
        "aps": {"alert": {"title": TITLE}, "mutable-content": 1, "content-available": 1},
        "statement": {"data": None, "topic": TOPIC.hex(), "sender_pubkey": SENDER.hex()},
        "truncated": True,
        "notify_type": "alert",
    }


def test_truncated_voip() -> None:
    body = json.loads(made(Channel.VOIP, NotifyType.VOIP, bytes(5000)).body)
    assert body["aps"] == {}
    assert body["statement"]["data"] is None
    assert body["truncated"] is True


def test_truncated_fcm() -> None:
    body = json.loads(made(Channel.FCM, NotifyType.ALERT, bytes(5000)).body)
    assert "statement_data" not in body
    assert body["truncated"] == "true"
    assert all(isinstance(value, str) for value in body.values())


def size_of(channel: Channel, notify_type: NotifyType, body: bytes) -> int:
    """Of what counts for the limit: for Google the data and the object that it stands in."""
    if channel is not Channel.FCM:
        return len(body)
    ttl = b',"ttl":"0s"' if notify_type is NotifyType.VOIP else b""
    return len(b'{"data":' + body + b',"android":{"priority":"high"' + ttl + b"}}")


@pytest.mark.parametrize("channel", Channel)
def test_sizes_at_the_limit(channel: Channel) -> None:
    limit = LIMITS[channel]
    # Hex makes two characters of a byte; the other sizes are reached if both types differ by an odd number.
    seen = set()
    for notify_type in NotifyType:
        empty = size_of(channel, notify_type, made(channel, notify_type, b"").body)
        for size in range((limit - empty) // 2 - 2, (limit - empty) // 2 + 4):
            result = made(channel, notify_type, bytes(size))
            full = empty + 2 * size
            seen.add(full - limit)
            assert result.truncated is (full > limit)
            size_made = size_of(channel, notify_type, result.body)
            assert size_made <= limit
            if not result.truncated:
                assert size_made == full
    assert {-1, 1} <= seen or {0, 2} <= seen


def test_sizes_are_of_bytes_not_of_characters() -> None:
    title = "ü" * 1000
    assert len(made(Channel.APNS, NotifyType.ALERT, b"", title).body) > 2000
    assert made(Channel.APNS, NotifyType.ALERT, bytes(1000), title).truncated
    assert not made(Channel.APNS, NotifyType.ALERT, bytes(1000), "u" * 1000).truncated


def test_a_title_always_leaves_room_for_the_rest() -> None:
    longest = "\x01" * SHORT_TEXT  # each becomes six characters
    assert SHORT.parse(longest) == longest
    assert len(made(Channel.APNS, NotifyType.ALERT, bytes(5000), longest).body) <= APNS_LIMIT
    with pytest.raises(ConfigError, match=r"title must be text of at most 500 bytes"):
        parse_config("[STATEMENTS]\ntitle = " + "ü" * SHORT_TEXT, "f.ini", {})
