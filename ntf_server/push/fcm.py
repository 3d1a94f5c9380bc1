"""Firebase Cloud Messaging, HTTP v1."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from ntf_server.config import FcmConfig
from ntf_server.push.credentials import KeyFileError, Reloading, WallClock, read_key_file
from ntf_server.push.http2 import CurlHttp2, NoAnswer, Origin, Response
from ntf_server.push.provider import (
    CheckMessages,
    DeviceGone,
    Meaning,
    ProviderDown,
    ProviderRefusesUs,
    PushError,
    PushNotification,
    PushRefused,
    StatementNotice,
    error_for,
    fcm_data,
    unanswered,
    usual_meaning,
)
from ntf_server.statements.payloads import FCM_LIMIT, urgent
from protocol.device_token import DeviceToken, FcmToken
from protocol.statuses import InvalidReason

SCOPE: Final = "https://www.googleapis.com/auth/firebase.messaging"
GRANT_TYPE: Final = "urn:ietf:params:oauth:grant-type:jwt-bearer"
GRANT_LIFETIME: Final = 3600
RENEW_BEFORE: Final = 5 * 60.0
FORCED_RENEWAL_INTERVAL: Final = 60.0
"Seconds: whoever makes FCM refuse pushes must not make Google's token service refuse us, too."
AUTHORIZATION_ERRORS: Final = frozenset({401, 403})
MISMATCH: Final = "SENDER_ID_MISMATCH"
OTHER_PLATFORM: Final = "THIRD_PARTY_AUTH_ERROR"
"The project has no key for Apple's devices or browsers; anyone can register one."
ABOUT_DEVICE: Final = frozenset({MISMATCH, OTHER_PLATFORM})
"Codes of refusals that another access token does not change."
ANSWERS: Final[Mapping[tuple[int, str], Meaning]] = {
    (400, "INVALID_ARGUMENT"): Meaning.LATER,
    (400, "INVALID_ARGUMENT token"): Meaning.BAD_DEVICE,
    (401, OTHER_PLATFORM): Meaning.LATER,
    (401, "UNAUTHENTICATED"): Meaning.US,
    (403, "PERMISSION_DENIED"): Meaning.US,
    (403, MISMATCH): Meaning.MISMATCH,
    (404, "UNREGISTERED"): Meaning.UNREGISTERED_DEVICE,
    (404, "NOT_FOUND"): Meaning.LATER,  # without UNREGISTERED: perhaps the project
    (429, "QUOTA_EXCEEDED"): Meaning.LATER,
    (500, "INTERNAL"): Meaning.DOWN,
    (503, "UNAVAILABLE"): Meaning.DOWN,
}
"Every answer that Google documents, by status and FCM's own error code, or else the API's status word."
BY_STATUS: Final[Mapping[int, Meaning]] = {401: Meaning.US, 403: Meaning.US, 413: Meaning.PUSH}
"Answers with another code, or none."
ADVICE: Final = (
    "check [FCM] service_account_file, its project and rights, and this machine's clock; a file that was put"
    " right is read again by itself"
)
TOKEN_FIELD: Final = "message.token"
JSON_TYPE: Final = "content-type: application/json"
FORM_TYPE: Final = "content-type: application/x-www-form-urlencoded"


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """Who asks for access tokens."""

    email: str
    project: str
    token_uri: str
    key: rsa.RSAPrivateKey = field(repr=False)
    key_id: str | None = None


def load_service_account(path: Path) -> ServiceAccount:
    """Read the JSON file that Google gives out."""
    text = read_key_file(path)
    try:
        value = json.loads(text)
        key = serialization.load_pem_private_key(value["private_key"].encode(), password=None)
        if not isinstance(key, rsa.RSAPrivateKey):
            raise TypeError
        names = (value["client_email"], value["project_id"], value["token_uri"])
        return ServiceAccount(*names, key, value.get("private_key_id"))
    except KeyError as missing:
        raise KeyFileError(f"{path} is not a service account file: {missing} is missing") from None
    except (ValueError, TypeError, AttributeError):
        raise KeyFileError(
            f"{path} is not a service account file: it must be the JSON file that Google gives out"
        ) from None


class AccessToken:
    """The OAuth2 access token: asked for once, shared, renewed 5 minutes before it expires."""

    def __init__(
        self,
        account: ServiceAccount,
        config: FcmConfig,
        http: CurlHttp2,
        clock: WallClock,
        timeout: float,
    ) -> None:
        self._account = account
        self.project = urllib.parse.quote(account.project, safe="")
        self._uri = config.token_uri or account.token_uri
        self._origin, self._path = split_url(self._uri, _ca_file(config))
        self._http = http
        self._clock = clock
        self._timeout = timeout
        self._lock = asyncio.Lock()
        self._header = ""
        self._renew_at = float("-inf")
        self._forced_at = float("-inf")

    async def header(self) -> str:
        """`Bearer <token>`."""
        if self._is_old():
            async with self._lock:
                if self._is_old():
                    await self._renew()
        return self._header

    async def renewed(self, refused: str) -> str | None:
        """Another value than the one that was refused; None if it was renewed for that reason just now."""
        async with self._lock:
            if self._header == refused:
                now = self._clock()
                if 0 <= now - self._forced_at < FORCED_RENEWAL_INTERVAL:
                    return None
                self._forced_at = now
                await self._renew()
        return self._header

    def _is_old(self) -> bool:
        return self._clock() >= self._renew_at

    async def _renew(self) -> None:
        now = self._clock()
        form = urllib.parse.urlencode({"grant_type": GRANT_TYPE, "assertion": self._grant(int(now))})
        response = await self._http.post(self._origin, self._path, [FORM_TYPE], form.encode(), self._timeout)
        if response.status >= 500 or response.status == 429:
            reason = f"Google's token service answered {response.status}"
            raise ProviderDown(reason, after=response.retry_after)
        try:
            if response.status != 200:
                raise ValueError
            answer = json.loads(response.body)
            token, lifetime = str(answer["access_token"]), float(answer["expires_in"])
        except (ValueError, TypeError, KeyError, RecursionError):
            reason = f"Google's token service answered {response.status} without a token: {ADVICE}"
            raise ProviderRefusesUs(reason) from None
        self._header = f"Bearer {token}"
        self._renew_at = now + lifetime - RENEW_BEFORE

    def _grant(self, now: int) -> str:
        account = self._account
        claims = {"iss": account.email, "scope": SCOPE, "aud": self._uri}
        times = {"iat": now, "exp": now + GRANT_LIFETIME}
        headers = {"kid": account.key_id} if account.key_id else None
        return jwt.encode(claims | times, account.key, algorithm="RS256", headers=headers)


@dataclass(slots=True)
class FcmProvider:
    """Pushes to Google's devices."""

    config: FcmConfig
    "With a service account."
    http: CurlHttp2
    clock: WallClock
    response_timeout: float
    _origin: Origin = field(init=False)
    _base: str = field(init=False)
    _access: Reloading[AccessToken] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        config = self.config
        self._origin, path = split_url(config.endpoint, _ca_file(config))
        self._base = path.rstrip("/")
        assert config.service_account_file is not None
        self._access = Reloading(config.service_account_file, self._access_token)

    async def deliver(self, token: DeviceToken, notification: PushNotification, push_id: str) -> None:
        """See PushProvider. FCM has no place for the push id."""
        body = message_body(token, notification)
        try:
            async with asyncio.timeout(self.response_timeout):
                response = await self._send(body)
                if response.status != 200:
                    raise push_error(response)
        except TimeoutError:
            raise ProviderDown("no answer in time") from None
        except NoAnswer as error:
            raise unanswered(error.reason, whole_origin=error.whole_origin) from None
        except ProviderRefusesUs as refusal:
            if not refusal.is_mismatch:
                self._access.refused()
            raise

    def read_key_again(self) -> None:
        """Its file may have changed."""
        self._access.read_again()

    async def close(self) -> None:
        """See PushProvider; the HTTP client is closed by who made it."""

    def _access_token(self, path: Path) -> AccessToken:
        account = load_service_account(path)
        return AccessToken(account, self.config, self.http, self.clock, self.response_timeout)

    async def _send(self, body: bytes) -> Response:
        access = self._access.current()
        path = f"{self._base}/v1/projects/{access.project}/messages:send"
        authorization = await access.header()
        response = await self._post(path, authorization, body)
        if response.status in AUTHORIZATION_ERRORS and _code(_error(response)) not in ABOUT_DEVICE:
            renewed = await access.renewed(authorization)
            if renewed is not None:
                response = await self._post(path, renewed, body)
        return response

    async def _post(self, path: str, authorization: str, body: bytes) -> Response:
        headers = [f"authorization: {authorization}", JSON_TYPE]
        return await self.http.post(self._origin, path, headers, body, self.response_timeout)


def message_body(token: DeviceToken, notification: PushNotification) -> bytes:
    """The request's JSON; DeviceGone or PushRefused if the push cannot be put into one."""
    if not isinstance(token, FcmToken):
        raise PushRefused(f"FCM is not for tokens of provider {token.provider.tag}")
    if not token.token.isascii() or not token.token.decode().isprintable() or not token.token:
        raise DeviceGone(InvalidReason.BAD)
    data = fcm_data(notification)
    if sum(len(key) + len(value) for key, value in data.items()) > FCM_LIMIT:
        raise PushRefused(f"the notification does not fit FCM's {FCM_LIMIT} bytes")
    is_call = isinstance(notification, StatementNotice) and notification.is_call
    android = {"priority": "normal"} if isinstance(notification, CheckMessages) else urgent(is_call=is_call)
    message = {"token": token.token.decode(), "data": data, "android": android}
    return json.dumps({"message": message}, separators=(",", ":")).encode()


def push_error(response: Response) -> PushError:
    """What an answer other than 200 means for the push."""
    status, code = answer = (response.status, _code(_error(response)))
    meaning = ANSWERS.get(answer) or BY_STATUS.get(status) or usual_meaning(status)
    return error_for(meaning, f"FCM answered {status} {code}".rstrip(), response.retry_after, ADVICE)


def _ca_file(config: FcmConfig) -> str | None:
    return None if config.ca_file is None else str(config.ca_file)


def split_url(url: str, ca_file: str | None) -> tuple[Origin, str]:
    """Origin and path of an https URL."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" or not parts.hostname:
        raise ValueError(f"not an https URL: {url}")
    return Origin(parts.hostname, parts.port or 443, ca_file=ca_file), parts.path or "/"


def _error(response: Response) -> Mapping[str, Any]:
    try:
        error = json.loads(response.body)["error"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}
    return error if isinstance(error, dict) else {}


def _code(error: Mapping[str, Any]) -> str:
    """FCM's code in the details, or the API's status word; marked if it is about the device token."""
    details = error.get("details")
    parts = [part for part in (details if isinstance(details, list) else []) if isinstance(part, dict)]
    codes = [part["errorCode"] for part in parts if isinstance(part.get("errorCode"), str)]
    code = codes[0] if codes else error.get("status")
    if not isinstance(code, str) or not re.fullmatch(r"[A-Z_]{1,40}", code):
        return ""
    about_token = code == "INVALID_ARGUMENT" and _is_about_token(error, parts)
    return f"{code} token" if about_token else code


def _is_about_token(error: Mapping[str, Any], details: Sequence[Mapping[str, Any]]) -> bool:
    """Google names the field, or says it in words that are part of its documentation."""
    if "registration token" in str(error.get("message", "")):
        return True
    violations = [
        violation
        for detail in details
        if isinstance(detail.get("fieldViolations"), list)
        for violation in detail["fieldViolations"]
    ]
    return any(isinstance(v, dict) and v.get("field") == TOKEN_FIELD for v in violations)
