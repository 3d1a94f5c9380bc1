"""The body of MSG, both ways."""

from __future__ import annotations

import pytest

from protocol.blocks import pad
from protocol.crypto import box
from protocol.errors import DecodeError, TooLarge
from protocol.messages_crypto import (
    MAX_MESSAGE_FIRST,
    PADDED_SIZE,
    RECEIVED_HEADER,
    QuotaExceeded,
    RcvMessage,
    decode_message,
    max_message_length,
    open_message,
    seal_message,
)

SECRET, MESSAGE_ID = bytes(range(32)), bytes(range(24))
TIME = 1_700_000_000


@pytest.mark.parametrize(
    "message",
    [
        RcvMessage(TIME, True, b""),
        RcvMessage(TIME, False, b"a body with spaces "),
        RcvMessage(TIME, True, bytes(MAX_MESSAGE_FIRST)),
        QuotaExceeded(TIME),
    ],
)
def test_round_trip_in_one_size(message: RcvMessage | QuotaExceeded) -> None:
    boxed = seal_message(SECRET, MESSAGE_ID, message)
    assert len(boxed) == PADDED_SIZE + 16 == 16122
    assert open_message(SECRET, MESSAGE_ID, boxed) == message


def test_bytes() -> None:
    time = TIME.to_bytes(8, "big")
    assert RcvMessage(TIME, True, b"hi").encode() == time + b"T hi"
    assert QuotaExceeded(TIME).encode() == b"QUOTA " + time
    assert decode_message(time + b"Fmore flags") == RcvMessage(TIME, False, b"flags")


def test_other_padding_opens() -> None:
    boxed = box(SECRET, MESSAGE_ID, pad(QuotaExceeded(TIME).encode(), 16050))
    assert open_message(SECRET, MESSAGE_ID, boxed) == QuotaExceeded(TIME)


@pytest.mark.parametrize("content", [b"", b"QUOTA ", b"QUOTA 1234567", b"QUOTA 123456789", bytes(9)])
def test_what_is_no_message(content: bytes) -> None:
    boxed = box(SECRET, MESSAGE_ID, pad(content, 100))
    with pytest.raises(DecodeError):
        open_message(SECRET, MESSAGE_ID, boxed)


def test_changed_bytes_and_wrong_keys_do_not_open() -> None:
    boxed = seal_message(SECRET, MESSAGE_ID, QuotaExceeded(TIME))
    for secret, message_id, data in (
        (bytes(32), MESSAGE_ID, boxed),
        (SECRET, bytes(24), boxed),
        (SECRET, MESSAGE_ID, boxed[:-1] + b"x"),
        (SECRET, MESSAGE_ID, boxed[:10]),
        (SECRET, MESSAGE_ID, b""),
    ):
        with pytest.raises(DecodeError):
            open_message(secret, message_id, data)


def test_limits_by_version() -> None:
    assert [max_message_length(version) for version in (6, 7, 8, 10, 11, 19)] == [
        16088, 16088, 16064, 16064, 16048, 16048
    ]  # fmt: skip
    with pytest.raises(TooLarge):
        seal_message(SECRET, MESSAGE_ID, RcvMessage(TIME, True, bytes(MAX_MESSAGE_FIRST + RECEIVED_HEADER)))
