"""Apple Push Notification service."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.parse
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ntf_server.config import ApnsConfig
from ntf_server.push.apns_client import ApnsClient, ApnsRequest, CurlApnsClient
from ntf_server.push.credentials import ApnsJwt, Reloading, WallClock, load_p256_key
from ntf_server.push.http2 import CurlHttp2, NoAnswer, Origin, Response
from ntf_server.push.payloads import apns_payload, is_background
from ntf_server.push.provider import (
    DeviceGone,
    Meaning,
    ProviderDown,
    ProviderRefusesUs,
    PushError,
    PushNotification,
    RetryLater,
    StatementNotice,
    error_for,
)
from protocol.device_token import ApnsToken, DeviceToken, Provider
from protocol.statuses import InvalidReason

PRODUCTION_HOST: Final = "api.push.apple.com"
DEVELOPMENT_HOST: Final = "api.sandbox.push.apple.com"
VOIP_SUFFIX: Final = ".voip"
PRIORITY_ALERT: Final = 10
PRIORITY_BACKGROUND: Final = 5  # Apple refuses 10 for background pushes
HEX: Final = re.compile(rb"[0-9a-fA-F]{1,200}")
EXPIRED_JWT: Final = (403, "ExpiredProviderToken")
ANSWERS: Final[Mapping[tuple[int, str], Meaning]] = {
    (400, "BadDeviceToken"): Meaning.BAD_DEVICE,
    (400, "DeviceTokenNotForTopic"): Meaning.OTHER_TOPIC,
    (410, "ExpiredToken"): Meaning.EXPIRED_DEVICE,
    (410, "Unregistered"): Meaning.UNREGISTERED_DEVICE,
    (413, "PayloadTooLarge"): Meaning.PUSH,
    (400, "BadTopic"): Meaning.US,
    (400, "MissingTopic"): Meaning.US,
    (400, "TopicDisallowed"): Meaning.US,
    (403, "BadCertificate"): Meaning.US,
    (403, "BadCertificateEnvironment"): Meaning.US,
    (403, "BadEnvironmentKeyInToken"): Meaning.US,
    (403, "BadEnvironmentKeyIdInToken"): Meaning.US,
    EXPIRED_JWT: Meaning.US,
    (403, "Forbidden"): Meaning.US,
    (403, "InvalidProviderToken"): Meaning.US,
    (403, "MissingProviderToken"): Meaning.US,
    (403, "UnrelatedKeyIdInToken"): Meaning.US,
    # Of the following, our own requests are the cause, or nobody knows: seen for one push among accepted ones
    # it is that push, and it is given up after some tries.
    (400, "BadCollapseId"): Meaning.LATER,
    (400, "BadExpirationDate"): Meaning.LATER,
    (400, "BadMessageId"): Meaning.LATER,
    (400, "BadPriority"): Meaning.LATER,
    (400, "DuplicateHeaders"): Meaning.LATER,
    (400, "IdleTimeout"): Meaning.LATER,
    (400, "InvalidPushType"): Meaning.LATER,
    (400, "MissingDeviceToken"): Meaning.LATER,
    (400, "PayloadEmpty"): Meaning.LATER,
    (404, "BadPath"): Meaning.LATER,
    (405, "MethodNotAllowed"): Meaning.LATER,
    (429, "TooManyRequests"): Meaning.LATER,
    (429, "TooManyProviderTokenUpdates"): Meaning.DOWN,
    (500, "InternalServerError"): Meaning.DOWN,
    (503, "ServiceUnavailable"): Meaning.DOWN,
    (503, "Shutdown"): Meaning.DOWN,
}
"Every answer that Apple documents."
BY_STATUS: Final[Mapping[int, Meaning]] = {403: Meaning.US, 413: Meaning.PUSH}
"Answers with another reason, or none; what is not here either is LATER, and DOWN from 500 on."
ADVICE: Final = (
    "check [APNS] key_file, key_id, team_id and topic, and this machine's clock; a key file put right is read"
    " again by itself"
)


def make_apns_client(config: ApnsConfig, http: CurlHttp2) -> ApnsClient:
    """The configured client."""
    if config.client == "aioapns":
        from ntf_server.push.aioapns_client import AioapnsClient  # a library that only this choice needs

        return AioapnsClient()
    return CurlApnsClient(http)


@dataclass(slots=True)
class ApnsProvider:
    """Pushes to Apple's devices."""

    config: ApnsConfig
    "With a key file."
    client: ApnsClient
    clock: WallClock
    response_timeout: float
    _signer: Reloading[ApnsJwt] = field(init=False, repr=False)
    _origins: Mapping[Provider, Origin] = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        assert config.key_file is not None
        self._signer = Reloading(
            config.key_file,
            lambda path: ApnsJwt(load_p256_key(path), config.key_id, config.team_id, self.clock),
        )
        origins = {
            Provider.APNS_PROD: Origin(PRODUCTION_HOST, config.port),
            Provider.APNS_DEV: Origin(DEVELOPMENT_HOST, config.port),
        }
        if config.allow_test_provider:
            ca_file = None if config.test_ca_file is None else str(config.test_ca_file)
            origins[Provider.APNS_TEST] = Origin(config.test_host, config.test_port, ca_file=ca_file)
        self._origins = origins

    async def deliver(self, token: DeviceToken, notification: PushNotification, push_id: uuid.UUID) -> None:
        """See PushProvider."""
        time = asyncio.get_running_loop().time
        deadline = time() + self.response_timeout
        signer = self._signer.current()
        authorization = signer.header()
        request = self._request(token, notification, push_id, authorization)
        response = await self._send(request, self.response_timeout)
        if response.status == 200:
            return
        if (response.status, _reason(response)) == EXPIRED_JWT:
            renewed = signer.renewed(authorization)
            if renewed is not None:
                request.authorization = renewed
                response = await self._send(request, max(deadline - time(), 0.001))
                if response.status == 200:
                    return
        error = push_error(response)
        if isinstance(error, ProviderRefusesUs):
            self._signer.refused()
        raise error

    def read_key_again(self) -> None:
        """Its file may have changed."""
        self._signer.read_again()

    async def close(self) -> None:
        """See PushProvider."""
        await self.client.close()

    def _request(
        self, token: DeviceToken, notification: PushNotification, push_id: uuid.UUID, authorization: str
    ) -> ApnsRequest:
        if not isinstance(token, ApnsToken) or token.provider not in self._origins:
            raise ProviderRefusesUs(f"APNs is not set up for tokens of provider {token.provider.tag}")
        background = is_background(notification)
        request = ApnsRequest(
            origin=self._origins[token.provider],
            device_token=path_of(token),
            push_id=str(push_id),
            topic=self.config.topic,
            push_type="background" if background else "alert",
            priority=PRIORITY_BACKGROUND if background else PRIORITY_ALERT,
            authorization=authorization,
            body=apns_payload(notification),
        )
        if isinstance(notification, StatementNotice):
            request.collapse_id = notification.collapse_id
            if notification.is_voip:
                request.topic += VOIP_SUFFIX
                request.push_type = "voip"
                request.only_now = True
        return request

    async def _send(self, request: ApnsRequest, timeout: float) -> Response:
        try:
            return await self.client.send(request, timeout)
        except NoAnswer as error:
            raise (ProviderDown if error.whole_origin else RetryLater)(error.reason) from None


def path_of(token: ApnsToken) -> str:
    """The device token as part of a request's path; DeviceGone if it cannot be one."""
    if HEX.fullmatch(token.token):
        return token.token.decode()
    if token.provider is Provider.APNS_TEST and token.token:
        return urllib.parse.quote(token.token, safe="")  # any text
    raise DeviceGone(InvalidReason.BAD)


def push_error(response: Response) -> PushError:
    """What an answer other than 200 means for the push. An unknown one drops nothing at once."""
    status, reason = answer = (response.status, _reason(response))
    meaning = ANSWERS.get(answer)
    if meaning is None:
        meaning = BY_STATUS.get(status, Meaning.DOWN if status >= 500 else Meaning.LATER)
    text = f"APNs answered {status} {reason}".rstrip()
    if meaning is Meaning.US:
        text = f"{text}: {ADVICE}"
    return error_for(meaning, text, response.retry_after)


def _reason(response: Response) -> str:
    """Apple's word for an error; empty if the answer has none that is safe to log."""
    if not response.body:
        return ""
    try:
        reason = json.loads(response.body)["reason"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return reason if isinstance(reason, str) and reason.isascii() and reason.isalnum() else ""
