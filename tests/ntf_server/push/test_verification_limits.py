"""The limits of pushes to devices that were never verified, with time as an argument."""

from __future__ import annotations

from dataclasses import replace

from ntf_server.config import LimitsConfig
from ntf_server.push.provider import destination_of
from ntf_server.push.verification_limits import VerificationLimits, device_key
from protocol.device_token import (
    ApnsToken,
    FcmToken,
    Provider,
    WebPushToken,
    decode_device_token,
    encode_device_token,
)

HOUR = 3600.0


def endpoint(path: bytes, *, host: bytes = b"push.example", key: bytes = bytes(65)) -> WebPushToken:
    return WebPushToken(host, b"", path, bytes(16), key)


def limits(device: int = 3, host: int = 0) -> VerificationLimits:
    return VerificationLimits(
        LimitsConfig(device_verifications_per_hour=device, host_verifications_per_hour=host)
    )


def test_a_device_is_pushed_to_so_often_an_hour() -> None:
    counted = limits()
    apple = ApnsToken(Provider.APNS_PROD, b"ab01")
    assert [counted.allows(apple, 0.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert counted.allows(ApnsToken(Provider.APNS_PROD, b"ab02"), 0.0)
    assert [counted.allows(apple, HOUR) for _ in range(5)] == [True] * 3 + [False] * 2


def test_another_spelling_is_the_same_device() -> None:
    lower = ApnsToken(Provider.APNS_PROD, b"ab01")
    upper = ApnsToken(Provider.APNS_PROD, b"AB01")
    assert lower == upper == decode_device_token(b"AP\x04aB01")
    assert encode_device_token(upper) == b"AP\x04ab01"
    assert device_key(endpoint(b"/a")) == device_key(endpoint(b"/a", host=b"PUSH.example"))
    assert device_key(endpoint(b"/a")) == device_key(endpoint(b"/a", key=b"\x04" + bytes(64)))
    default_port = WebPushToken(b"push.example", b"443", b"/a", bytes(16), bytes(65))
    assert device_key(endpoint(b"/a")) == device_key(default_port)
    assert device_key(endpoint(b"/a")) == device_key(replace(default_port, port=b"0443"))
    assert device_key(endpoint(b"/a")) == device_key(endpoint(b"/%61"))
    assert device_key(endpoint(b"/a")) != device_key(replace(default_port, port=b"4430"))


def test_an_ipv6_host_is_one_host_however_it_is_written() -> None:
    short, *others = (b"2001:db8::1", b"2001:DB8:0::1", b"2001:0db8:0:0:0:0:0:1", b"2001:db8::0.0.0.1")
    for other in others:
        assert destination_of(endpoint(b"/a", host=short)) == destination_of(endpoint(b"/a", host=other))
        assert device_key(endpoint(b"/a", host=short)) == device_key(endpoint(b"/a", host=other))
    mapped, plain = endpoint(b"/a", host=b"::ffff:192.0.2.1"), endpoint(b"/a", host=b"192.0.2.1")
    assert destination_of(mapped) == destination_of(plain)
    assert destination_of(endpoint(b"/a", host=b"not:an:address\xff")).host == b"not:an:address\xff"


def test_texts_with_a_case_of_their_own_stay_as_they_are() -> None:
    for one, other in (
        (ApnsToken(Provider.APNS_TEST, b"Any Text"), ApnsToken(Provider.APNS_TEST, b"any text")),
        (FcmToken(b"aB"), FcmToken(b"ab")),
        (endpoint(b"/A"), endpoint(b"/a")),
    ):
        assert one != other
        assert device_key(one) != device_key(other)


def test_a_web_push_host_is_counted_whatever_the_endpoints() -> None:
    counted = limits(host=10)
    allowed = [counted.allows(endpoint(b"/%d" % number), 0.0) for number in range(20)]
    assert allowed == [True] * 10 + [False] * 10
    assert counted.allows(endpoint(b"/1", host=b"other.example"), 0.0)
    assert all(counted.allows(FcmToken(b"%d" % number), 0.0) for number in range(20))


def test_zero_is_no_limit() -> None:
    counted = limits(device=0)
    assert all(counted.allows(endpoint(b"/a"), 0.0) for _ in range(1000))


def test_no_device_token_is_kept() -> None:
    assert b"ab01" not in device_key(ApnsToken(Provider.APNS_PROD, b"ab01"))
