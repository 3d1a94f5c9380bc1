"""Device tokens: where a push goes. Whoever holds one can push to the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from protocol.encoding import Reader, Writer
from protocol.errors import DecodeError


class Provider(Enum):
    APNS_DEV = b"AD"
    APNS_PROD = b"AP"
    APNS_TEST = b"AT"
    APNS_NULL = b"AN"
    FCM = b"FC"
    WEB_PUSH = b"WP"

    __hash__ = object.__hash__  # that of Enum is a function in Python, and every push looks its provider up

    def __init__(self, raw: bytes) -> None:
        self.tag = raw.decode("ascii")


_HEX = frozenset({Provider.APNS_DEV, Provider.APNS_PROD})
WEB_PUSH_AUTH_SIZE = 16
P256_POINT_SIZE = 65


@dataclass(frozen=True, slots=True)
class ApnsToken:
    """The token's bytes are its lower-case hex text; those of the test provider are any text."""

    provider: Provider
    token: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if self.provider in _HEX and not self.token.islower():
            object.__setattr__(self, "token", self.token.lower())  # one device has one spelling


@dataclass(frozen=True, slots=True)
class FcmToken:
    token: bytes = field(repr=False)
    provider: Provider = field(default=Provider.FCM, init=False)


@dataclass(frozen=True, slots=True)
class WebPushToken:
    """A push endpoint `https://host[:port]path` and the device's keys (RFC 8291)."""

    host: bytes = field(repr=False)
    port: bytes = field(repr=False)
    path: bytes = field(repr=False)
    auth: bytes = field(repr=False)
    p256dh: bytes = field(repr=False)
    provider: Provider = field(default=Provider.WEB_PUSH, init=False)

    def __post_init__(self) -> None:
        if not self.host.islower():
            object.__setattr__(self, "host", self.host.lower())


DeviceToken = ApnsToken | FcmToken | WebPushToken


def pull_device_token(r: Reader) -> DeviceToken:
    try:
        provider = Provider(r.pull_bytes(2))
    except ValueError:
        raise DecodeError from None
    if provider is Provider.WEB_PUSH:
        return _pull_web_push(r)
    token = r.pull_short()
    return FcmToken(token) if provider is Provider.FCM else ApnsToken(provider, token)


def _pull_web_push(r: Reader) -> WebPushToken:
    token = WebPushToken(*(r.pull_short() for _ in range(5)))
    if len(token.auth) != WEB_PUSH_AUTH_SIZE or len(token.p256dh) != P256_POINT_SIZE:
        raise DecodeError
    return token


def push_device_token(w: Writer, token: DeviceToken) -> None:
    w.push_bytes(token.provider.value)
    if isinstance(token, WebPushToken):
        for part in (token.host, token.port, token.path, token.auth, token.p256dh):
            w.push_short(part)
    else:
        w.push_short(token.token)


def encode_device_token(token: DeviceToken) -> bytes:
    w = Writer()
    push_device_token(w, token)
    return w.value()


def decode_device_token(data: bytes) -> DeviceToken:
    r = Reader(data)
    token = pull_device_token(r)
    r.check_end()
    return token
