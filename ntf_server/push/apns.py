"""Apple Push Notification service."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from ntf_server.push.apns_client import ApnsClient, ApnsRequest, CurlApnsClient
from ntf_server.push.credentials import ApnsJwt, WallClock, load_p256_key
from ntf_server.push.http2 import CurlHttp2, Origin, Response, TransportError
from ntf_server.push.payloads import apns_payload, is_background
from ntf_server.push.provider import (
    DEFAULT_RESPONSE_TIMEOUT,
    PushNotification,
    Refused,
    RetryLater,
    TokenInvalid,
)
from protocol.device_token import ApnsToken, DeviceToken, Provider
from protocol.statuses import InvalidReason

PRODUCTION_HOST: Final = "api.push.apple.com"
DEVELOPMENT_HOST: Final = "api.sandbox.push.apple.com"
PRIORITY_ALERT: Final = 10
PRIORITY_BACKGROUND: Final = 5  # Apple refuses 10 for background pushes
HEX: Final = re.compile(rb"[0-9a-fA-F]{1,200}")
TOKEN_ERRORS: Final[Mapping[tuple[int, str], InvalidReason]] = {
    (400, "BadDeviceToken"): InvalidReason.BAD,
    (400, "DeviceTokenNotForTopic"): InvalidReason.TOPIC,
    (410, "ExpiredToken"): InvalidReason.EXPIRED,
    (410, "Unregistered"): InvalidReason.UNREGISTERED,
}
EXPIRED_JWT: Final = (403, "ExpiredProviderToken")
IDLE_CONNECTION: Final = (400, "IdleTimeout")
TOO_MANY_JWTS: Final = (429, "TooManyProviderTokenUpdates")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApnsConfig:
    """How to reach APNs and who we are there."""

    key_file: Path
    "The `.p8` file with the signing key."
    key_id: str
    team_id: str
    topic: str = "chat.simplex.app"
    "The app's bundle id."
    client: Literal["curl", "aioapns"] = "curl"
    port: int = 443
    "443 or 2197."
    test_host: str | None = None
    "Where tokens of the test provider (`AT`) are pushed; without it they are refused."
    test_port: int = 443
    test_ca_file: str | None = None
    "Certificates trusted for the test host instead of the system's."
    expiration: int | None = None
    "Seconds that APNs keeps a push for a device that is offline; None: Apple's default."
    response_timeout: float = DEFAULT_RESPONSE_TIMEOUT
    max_in_flight: int = 1000
    "Used by the aioapns client; the libcurl client has its own."


def make_apns_client(config: ApnsConfig, http: CurlHttp2) -> ApnsClient:
    """The configured client."""
    if config.client == "aioapns":
        from ntf_server.push.aioapns_client import AioapnsClient  # a library that only this choice needs

        return AioapnsClient(max_in_flight=config.max_in_flight)
    return CurlApnsClient(http)


@dataclass(slots=True)
class ApnsProvider:
    """Pushes to Apple's devices."""

    config: ApnsConfig
    client: ApnsClient
    clock: WallClock
    _jwt: ApnsJwt = field(init=False, repr=False)
    _origins: Mapping[Provider, Origin] = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        self._jwt = ApnsJwt(load_p256_key(config.key_file), config.key_id, config.team_id, self.clock)
        origins = {
            Provider.APNS_PROD: Origin(PRODUCTION_HOST, config.port),
            Provider.APNS_DEV: Origin(DEVELOPMENT_HOST, config.port),
        }
        if config.test_host is not None:
            test = Origin(config.test_host, config.test_port, ca_file=config.test_ca_file)
            origins[Provider.APNS_TEST] = test
        self._origins = origins

    async def deliver(self, token: DeviceToken, notification: PushNotification, push_id: uuid.UUID) -> None:
        """See PushProvider."""
        deadline = asyncio.get_running_loop().time() + self.config.response_timeout
        authorization = self._jwt.header()
        request = self._request(token, notification, push_id, authorization)
        response = await self._send(request, deadline)
        if (response.status, _reason(response)) == EXPIRED_JWT:
            renewed = self._jwt.renewed(authorization)
            if renewed is not None:
                request.authorization = renewed
                response = await self._send(request, deadline)
        if response.status != 200:
            raise push_error(response)

    async def close(self) -> None:
        """See PushProvider."""
        await self.client.close()

    def _request(
        self, token: DeviceToken, notification: PushNotification, push_id: uuid.UUID, authorization: str
    ) -> ApnsRequest:
        if not isinstance(token, ApnsToken) or token.provider not in self._origins:
            raise Refused(f"APNs is not set up for tokens of provider {token.provider.tag}")
        if not HEX.fullmatch(token.token):
            raise TokenInvalid(InvalidReason.BAD)  # it would become part of the request's path
        background = is_background(notification)
        keep = self.config.expiration
        return ApnsRequest(
            origin=self._origins[token.provider],
            device_token=token.token.decode(),
            push_id=str(push_id),
            topic=self.config.topic,
            push_type="background" if background else "alert",
            priority=PRIORITY_BACKGROUND if background else PRIORITY_ALERT,
            authorization=authorization,
            body=apns_payload(notification),
            expiration=None if keep is None else int(self.clock()) + keep,
        )

    async def _send(self, request: ApnsRequest, deadline: float) -> Response:
        left = max(deadline - asyncio.get_running_loop().time(), 0.001)
        try:
            return await self.client.send(request, left)
        except TransportError as error:
            raise RetryLater(error.reason, provider_wide=error.whole_origin) from None


def push_error(response: Response) -> TokenInvalid | RetryLater | Refused:
    """What an answer other than 200 means for the push."""
    status, reason = error = (response.status, _reason(response))
    if error in TOKEN_ERRORS:
        return TokenInvalid(TOKEN_ERRORS[error])
    text = f"APNs answered {status} {reason}".rstrip()
    if status >= 500 or error == TOO_MANY_JWTS:
        return RetryLater(text, after=response.retry_after, provider_wide=True)
    if status in (410, 429) or error == IDLE_CONNECTION:
        return RetryLater(text, after=response.retry_after, provider_wide=False)
    return Refused(text)


def _reason(response: Response) -> str:
    """Apple's word for an error; empty if the answer has none that is safe to log."""
    if not response.body:
        return ""
    try:
        reason = json.loads(response.body)["reason"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return reason if isinstance(reason, str) and reason.isascii() and reason.isalnum() else ""
