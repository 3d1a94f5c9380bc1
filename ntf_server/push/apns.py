"""Apple Push Notification service: the request, what sends it (libcurl here, aioapns in its own module), and
what the answer means."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from ntf_server.config import ApnsConfig
from ntf_server.push.credentials import ApnsJwt, Reloading, WallClock, load_p256_key
from ntf_server.push.http2 import CurlHttp2, NoAnswer, Origin, Response
from ntf_server.push.provider import (
    DeviceGone,
    Meaning,
    MessageList,
    ProviderRefusesUs,
    PushError,
    PushNotification,
    StatementNotice,
    apns_payload,
    error_for,
    unanswered,
    usual_meaning,
)
from protocol.device_token import ApnsToken, DeviceToken, Provider
from protocol.statuses import InvalidReason

COMMON_HEADERS: Final = 16
"Sets of headers that are kept: of each type of push, under two authorizations."

PRODUCTION_HOST: Final = "api.push.apple.com"
DEVELOPMENT_HOST: Final = "api.sandbox.push.apple.com"
VOIP_SUFFIX: Final = ".voip"
ONLY_NOW: Final = "apns-expiration: 0"  # not to be kept for a device that is offline
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
"Answers with another reason, or none."
ADVICE: Final = (
    "check [APNS] key_file, key_id, team_id and topic, and this machine's clock; a key file put right is read"
    " again by itself"
)


class Http2Client(Protocol):
    """CurlHttp2, or something that can be put in its place."""

    async def post(
        self, origin: Origin, path: str, headers: Sequence[str], body: bytes, timeout: float
    ) -> Response:
        """The answer, whatever its status; NoAnswer if there is none within `timeout` seconds."""

    async def close(self) -> None:
        """Close connections; requests under way fail."""


def make_apns_client(config: ApnsConfig, http: CurlHttp2) -> Http2Client:
    """The configured client."""
    if config.client == "aioapns":
        from ntf_server.push.aioapns_client import AioapnsClient  # a library that only this choice needs

        return AioapnsClient()
    return http


@dataclass(slots=True)
class ApnsProvider:
    """Pushes to Apple's devices."""

    config: ApnsConfig
    "With a key file."
    client: Http2Client
    clock: WallClock
    response_timeout: float
    _signer: Reloading[ApnsJwt] = field(init=False, repr=False)
    _origins: Mapping[Provider, Origin] = field(init=False)
    _common_headers: dict[tuple[str, str], list[str]] = field(init=False, default_factory=dict, repr=False)

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

    async def deliver(self, token: DeviceToken, notification: PushNotification, push_id: str) -> None:
        """See PushProvider."""
        if not isinstance(token, ApnsToken) or token.provider not in self._origins:
            raise ProviderRefusesUs(f"APNs is not set up for tokens of provider {token.provider.tag}")
        time = asyncio.get_running_loop().time
        deadline = time() + self.response_timeout
        body = apns_payload(notification)
        signer = self._signer.current()
        authorization = signer.header()
        headers = self._headers(notification, push_id, authorization)
        response = await self._post(token, headers, body, self.response_timeout)
        if response.status == 200:
            return
        if (response.status, _reason(response)) == EXPIRED_JWT:
            renewed = signer.renewed(authorization)
            if renewed is not None:
                headers = self._headers(notification, push_id, renewed)
                response = await self._post(token, headers, body, max(deadline - time(), 0.001))
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
        """See PushProvider. The libcurl client is shared; who made it closes it."""
        if not isinstance(self.client, CurlHttp2):
            await self.client.close()

    def _headers(self, notification: PushNotification, push_id: str, authorization: str) -> list[str]:
        push_type, priority, topic = "alert", PRIORITY_ALERT, self.config.topic
        own = [f"apns-id: {push_id}"]
        if isinstance(notification, StatementNotice):
            if notification.is_voip:
                push_type, topic = "voip", topic + VOIP_SUFFIX
                own.append(ONLY_NOW)
            elif notification.is_background:
                push_type, priority = "background", PRIORITY_BACKGROUND
            if notification.collapse_id:
                own.append(f"apns-collapse-id: {notification.collapse_id}")
        elif not isinstance(notification, MessageList):
            push_type, priority = "background", PRIORITY_BACKGROUND
        common = self._common_headers.get((push_type, authorization))
        if common is None:
            if len(self._common_headers) >= COMMON_HEADERS:
                self._common_headers.clear()
            common = self._common_headers[push_type, authorization] = [
                f"authorization: {authorization}",
                f"apns-topic: {topic}",
                f"apns-push-type: {push_type}",
                f"apns-priority: {priority}",
                "content-type: application/json",
            ]
        return common + own

    async def _post(self, token: ApnsToken, headers: Sequence[str], body: bytes, timeout: float) -> Response:
        try:
            return await self.client.post(
                self._origins[token.provider], f"/3/device/{path_of(token)}", headers, body, timeout
            )
        except NoAnswer as error:
            raise unanswered(error.reason, whole_origin=error.whole_origin) from None


def path_of(token: ApnsToken) -> str:
    """The device token as part of a request's path; DeviceGone if it cannot be one."""
    if HEX.fullmatch(token.token):
        return token.token.decode()
    if token.provider is Provider.APNS_TEST and token.token:
        return urllib.parse.quote(token.token, safe="")  # any text
    raise DeviceGone(InvalidReason.BAD)


def push_error(response: Response) -> PushError:
    """What an answer other than 200 means for the push."""
    status, reason = answer = (response.status, _reason(response))
    meaning = ANSWERS.get(answer) or BY_STATUS.get(status) or usual_meaning(status)
    return error_for(meaning, f"APNs answered {status} {reason}".rstrip(), response.retry_after, ADVICE)


def _reason(response: Response) -> str:
    """Apple's word for an error; empty if the answer has none that is safe to log."""
    if not response.body:
        return ""
    try:
        reason = json.loads(response.body)["reason"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return reason if isinstance(reason, str) and reason.isascii() and reason.isalnum() else ""
