"""Why a queue is blocked, and what of an error may be told."""

from __future__ import annotations

import pytest

from protocol.blocking import BlockingReason, blocking_info, parse_blocking_info
from protocol.errors import AUTH, DecodeError, ErrorType, proxy_protocol_error, store_error


@pytest.mark.parametrize("reason", BlockingReason)
@pytest.mark.parametrize("notice", [None, {"ttl": 5}])
def test_round_trip(reason: BlockingReason, notice: dict[str, int] | None) -> None:
    info = blocking_info(reason.value, notice)
    assert parse_blocking_info(info.text) == info
    assert info.error.text == b"BLOCKED " + info.text.encode()


def test_texts() -> None:
    assert blocking_info("spam", None).text == "reason=spam"
    assert blocking_info("spam", {"ttl": 5}).text == 'reason=spam,notice={"ttl":5}'


def test_unknown_reasons() -> None:
    with pytest.raises(DecodeError):
        blocking_info("boredom", None)
    with pytest.raises(DecodeError):
        parse_blocking_info("reason=boredom")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (AUTH, "AUTH"),
        (store_error("a path"), "STORE"),
        (ErrorType(b"CMD SYNTAX"), "CMD SYNTAX"),
        (blocking_info("spam", {"ttl": 5}).error, "BLOCKED reason=spam"),
        (proxy_protocol_error(AUTH), "PROXY"),
    ],
)
def test_errors_without_the_words_of_a_peer(error: ErrorType, shown: str) -> None:
    assert error.without_text == shown


def test_the_kind_of_an_error() -> None:
    assert AUTH.word == "AUTH"
    assert ErrorType(b"CMD SYNTAX").word == "CMD"
