"""What is pushed, in words and as JSON; and a push provider: one call, and five ways to fail that say what to
do next.

A provider sends one notification to one device token and says what happened. Retries, back-off, coalescing,
breakers and token statuses belong to its caller.

Everything secret in a notification is already ciphertext; base64url has no character that JSON would escape,
so its text is put together from constant parts.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Final, NamedTuple, Protocol, TypeAlias

from protocol.device_token import DeviceToken, Provider, WebPushToken
from protocol.encoding import b64
from protocol.hiding import hides_bytes
from protocol.statuses import InvalidReason

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


@hides_bytes
@dataclass(slots=True)  # not frozen: one is made per push, and freezing doubles its cost
class MessageList:
    """The token's last notifications, boxed for the device."""

    word: ClassVar = b"message"
    nonce: bytes
    boxed: bytes = field(repr=False)


@hides_bytes
@dataclass(slots=True)
class Verification:
    """The registration code, boxed for the device."""

    word: ClassVar = b"verification"
    nonce: bytes
    boxed: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CheckMessages:
    """Wakes the device so that it looks for messages by itself; holds nothing secret."""


@dataclass(frozen=True, slots=True)
class StatementNotice:
    """A statement, in JSON: the whole body for Apple, the data for Google."""

    body: bytes = field(repr=False)
    is_voip: bool
    "For PushKit: the device rings."
    collapse_id: str = ""
    "A push with the same one replaces this one on the device."
    is_background: bool = False
    "Nothing is shown, unless it is for PushKit."
    is_call: bool = False
    "A provider that cannot reach the device at once drops it."


PushNotification: TypeAlias = Verification | MessageList | CheckMessages | StatementNotice


def padded_size(provider: Provider, configured: int) -> int:
    """To how many bytes a text is padded before it is boxed: as configured, or what the provider carries."""
    return min(configured, PADDED_SIZE_LIMITS.get(provider, configured))


def notification_data(notification: PushNotification) -> bytes:
    """The JSON object that the device's code reads; also the whole text of a Web Push."""
    if isinstance(notification, StatementNotice):
        return notification.body
    if isinstance(notification, CheckMessages):
        return b'{"checkMessages":true}'
    nonce, boxed = b64(notification.nonce), b64(notification.boxed)
    return b"".join((b'{"nonce":"', nonce, b'","', notification.word, b'":"', boxed, b'"}'))


def apns_payload(notification: PushNotification) -> bytes:
    """The body of a request to APNs."""
    if isinstance(notification, StatementNotice):
        return notification.body
    head = _ALERT if isinstance(notification, MessageList) else _BACKGROUND
    return b"".join((head, notification_data(notification), b"}"))


def fcm_data(notification: PushNotification) -> dict[str, str]:
    """The data of an FCM message: the same fields, but FCM takes strings only."""
    if isinstance(notification, CheckMessages):
        return {"checkMessages": "true"}
    data: dict[str, str] = json.loads(notification_data(notification))
    return data


@hides_bytes
class Destination(NamedTuple):
    """What fails, slows down and recovers as one: a provider, or one host of Web Push. Do not print: a host
    may be one person's own."""

    provider: Provider
    host: bytes = b""


WHOLE: Final[Mapping[Provider, Destination]] = {
    provider: Destination(provider) for provider in Provider if provider is not Provider.WEB_PUSH
}
"Providers that are one destination."


def destination_of(token: DeviceToken) -> Destination:
    """Where a device's pushes go. Ports of one host count as one, so that nobody has 65,535 of them, and so
    do the spellings of an IPv6 address."""
    if isinstance(token, WebPushToken):
        return Destination(token.provider, one_spelling(token.host) if b":" in token.host else token.host)
    return WHOLE[token.provider]


def one_spelling(host: bytes) -> bytes:
    """Of an IPv6 address, which may stand for an IPv4 one; what is none stays as it is, and is never pushed
    to."""
    try:
        address = ipaddress.IPv6Address(host.decode("ascii"))
    except ValueError:
        return host
    return str(address.ipv4_mapped or address).encode()


class PushError(Exception):
    """A push was not accepted; the subclass says what to do next. `reason` is for logs and has no secret."""

    def __init__(self, reason: str, *, after: float | None = None, is_answer: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = after
        "Seconds that the provider asked us to wait."
        self.is_answer = is_answer
        "The service answered the push to this device; False: no device could be pushed to."


class DeviceGone(PushError):
    """The provider does not know this device token (any more): stop and mark it INVALID."""

    def __init__(self, invalid: InvalidReason) -> None:
        super().__init__(invalid.name, is_answer=True)
        self.invalid = invalid


class PushRefused(PushError):
    """This one push will never be accepted as it is."""


class TooLate(PushError):
    """A call that was not accepted while it was worth anything; nothing is known about the destination."""


class RetryLater(PushError):
    """Not accepted now, and only this device is concerned; the same push may be accepted later."""


class ProviderDown(PushError):
    """No device of this destination can be pushed to now: an outage."""


class ProviderRefusesUs(PushError):
    """The destination takes no push of ours, whatever the device: a key, a clock or a setting is wrong.
    `reason` says what to do."""

    is_mismatch = False
    "A device that never took a push of ours belongs to another sender, and is invalid."


class Meaning(Enum):
    """What an answer of a push service is about. The tables of the providers end here."""

    BAD_DEVICE = "the device token is none"
    OTHER_TOPIC = "the device belongs to another app"
    EXPIRED_DEVICE = "the device token has expired"
    UNREGISTERED_DEVICE = "the device or the app on it is gone"
    PUSH = "this push can never be accepted"
    MISMATCH = "the device belongs to another sender, or this server is no longer the one it was"
    US = "the service refuses this server"
    LATER = "this device cannot be pushed to now"
    DOWN = "the service does not work now"


_DEVICE_GONE: Final = {
    Meaning.BAD_DEVICE: InvalidReason.BAD,
    Meaning.OTHER_TOPIC: InvalidReason.TOPIC,
    Meaning.EXPIRED_DEVICE: InvalidReason.EXPIRED,
    Meaning.UNREGISTERED_DEVICE: InvalidReason.UNREGISTERED,
}
_ERRORS: Final[Mapping[Meaning, Callable[..., PushError]]] = {
    Meaning.PUSH: PushRefused,
    Meaning.LATER: RetryLater,
    Meaning.DOWN: ProviderDown,
}


def usual_meaning(status: int) -> Meaning:
    """Of an answer that is in no table: it drops nothing at once."""
    return Meaning.DOWN if status >= 500 else Meaning.LATER


def error_for(meaning: Meaning, answer: str, after: float | None, advice: str) -> PushError:
    """The error that tells the dispatcher. `advice`: what to do if the service refuses this server."""
    if meaning in _DEVICE_GONE:
        return DeviceGone(_DEVICE_GONE[meaning])
    if meaning in (Meaning.US, Meaning.MISMATCH):
        refusal = ProviderRefusesUs(f"{answer}: {advice}", after=after, is_answer=True)
        refusal.is_mismatch = meaning is Meaning.MISMATCH
        return refusal
    return _ERRORS[meaning](answer, after=after, is_answer=True)


def detached(error: PushError) -> PushError:
    """The error alone, for a caller that keeps it in a variable: its traceback and that of the error it came
    from hold the frames of the whole delivery, the caller's with this variable included."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def unanswered(reason: str, *, whole_origin: bool) -> PushError:
    """There was no answer; `whole_origin`: other devices must expect the same."""
    return (ProviderDown if whole_origin else RetryLater)(reason)


class PushProvider(Protocol):
    """Sends notifications to the device tokens of one push service."""

    async def deliver(self, token: DeviceToken, notification: PushNotification, push_id: str) -> None:
        """Return once accepted; raise a PushError.

        Ends within the provider's response time limit. Cancelling it harms no other delivery.
        `push_id`, a UUID as text, stays the same over the retries of one push.
        """

    async def close(self) -> None:
        """Close connections and stop; deliveries under way fail with ProviderDown. May be called twice."""


class NullProvider:
    """Accepts every push and sends none: for tokens of the null provider (`AN`)."""

    async def deliver(self, token: DeviceToken, notification: PushNotification, push_id: str) -> None:
        """Accept."""

    async def close(self) -> None:
        """Nothing to close."""
