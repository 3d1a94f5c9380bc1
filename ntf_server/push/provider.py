"""What the dispatcher needs of a push provider: one call, three ways to fail.

A provider sends one notification to one device token and says what happened. Retries, back-off,
coalescing and token statuses belong to its caller.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from protocol.device_token import DeviceToken
    from protocol.statuses import InvalidReason

DEFAULT_RESPONSE_TIMEOUT = 10.0
"Seconds from handing a push to the provider until its answer must be there."


@dataclass(frozen=True, slots=True)
class Verification:
    """The registration code, boxed for the device."""

    nonce: bytes
    boxed: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Message:
    """A list of last notifications, boxed for the device."""

    nonce: bytes
    boxed: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CheckMessages:
    """Wakes the device so that it looks for messages by itself; holds nothing secret."""


PushNotification: TypeAlias = Verification | Message | CheckMessages


class PushError(Exception):
    """A push was not accepted; the subclass says what to do next."""


class TokenInvalid(PushError):
    """The provider does not know this device token (any more): stop and mark it INVALID."""

    def __init__(self, reason: InvalidReason) -> None:
        super().__init__(reason.name)
        self.reason = reason


class RetryLater(PushError):
    """Not accepted now; the same push may be accepted later.

    `after` is the provider's own wish in seconds, if it said one. `provider_wide` tells an outage
    (every token of the provider would fail) from a limit of this token alone. `reason` is for logs and
    names no secret.
    """

    def __init__(self, reason: str, *, after: float | None = None, provider_wide: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = after
        self.provider_wide = provider_wide


class Refused(PushError):
    """This push will never be accepted as it is: a fault of configuration or of ours, to be told loudly."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class PushProvider(Protocol):
    """Sends notifications to the device tokens of one push service."""

    async def deliver(self, token: DeviceToken, notification: PushNotification, push_id: uuid.UUID) -> None:
        """Return once accepted; raise TokenInvalid, RetryLater or Refused.

        Ends within the provider's response time limit. Cancelling it harms no other delivery.
        `push_id` stays the same over the retries of one push.
        """

    async def close(self) -> None:
        """Close connections and stop; deliveries under way fail with RetryLater. May be called twice."""


class NullProvider:
    """Accepts every push and sends none: for tokens of the null provider (`AN`)."""

    async def deliver(self, token: DeviceToken, notification: PushNotification, push_id: uuid.UUID) -> None:
        """Accept."""

    async def close(self) -> None:
        """Nothing to close."""
