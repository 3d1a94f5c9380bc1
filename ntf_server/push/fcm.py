"""Firebase Cloud Messaging, HTTP v1."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from ntf_server.push.credentials import KeyFileError, WallClock
from ntf_server.push.http2 import CurlHttp2, Origin, Response, TransportError
from ntf_server.push.payloads import fcm_data
from ntf_server.push.provider import (
    DEFAULT_RESPONSE_TIMEOUT,
    CheckMessages,
    PushNotification,
    Refused,
    RetryLater,
    TokenInvalid,
)
from protocol.device_token import DeviceToken, FcmToken
from protocol.statuses import InvalidReason

GOOGLE_ENDPOINT: Final = "https://fcm.googleapis.com"
SCOPE: Final = "https://www.googleapis.com/auth/firebase.messaging"
GRANT_TYPE: Final = "urn:ietf:params:oauth:grant-type:jwt-bearer"
GRANT_LIFETIME: Final = 3600
RENEW_BEFORE: Final = 5 * 60.0
DATA_LIMIT: Final = 4096
AUTHORIZATION_ERRORS: Final = frozenset({401, 403})
JSON_TYPE: Final = "content-type: application/json"
FORM_TYPE: Final = "content-type: application/x-www-form-urlencoded"


@dataclass(frozen=True, kw_only=True, slots=True)
class FcmConfig:
    """How to reach FCM and who we are there."""

    service_account_file: Path
    "JSON file of the Google service account."
    project: str | None = None
    "None: the service account's."
    endpoint: str = GOOGLE_ENDPOINT
    token_uri: str | None = None
    "Where access tokens are asked for; None: where the service account says."
    ca_file: str | None = None
    "Trusted certificates instead of the system's."
    response_timeout: float = DEFAULT_RESPONSE_TIMEOUT


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
    try:
        value = json.loads(path.read_bytes())
        key = serialization.load_pem_private_key(value["private_key"].encode(), password=None)
        if not isinstance(key, rsa.RSAPrivateKey):
            raise TypeError
        names = (value["client_email"], value["project_id"], value["token_uri"])
        return ServiceAccount(*names, key, value.get("private_key_id"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise KeyFileError(f"{path} is not a service account file: {type(error).__name__}") from None


class AccessToken:
    """The OAuth2 access token: asked for once, shared, renewed 5 minutes before it expires."""

    def __init__(self, account: ServiceAccount, config: FcmConfig, http: CurlHttp2, clock: WallClock) -> None:
        self._account = account
        self._uri = config.token_uri or account.token_uri
        self._origin, self._path = split_url(self._uri, config.ca_file)
        self._http = http
        self._clock = clock
        self._timeout = config.response_timeout
        self._lock = asyncio.Lock()
        self._header = ""
        self._renew_at = float("-inf")

    async def header(self, refused: str | None = None) -> str:
        """`Bearer <token>`; another one than the one that was refused."""
        if not self._is_good(refused):
            async with self._lock:
                if not self._is_good(refused):
                    await self._renew()
        return self._header

    def _is_good(self, refused: str | None) -> bool:
        return self._clock() < self._renew_at and self._header != refused

    async def _renew(self) -> None:
        now = self._clock()
        form = urllib.parse.urlencode({"grant_type": GRANT_TYPE, "assertion": self._grant(int(now))})
        response = await self._http.post(self._origin, self._path, [FORM_TYPE], form.encode(), self._timeout)
        if response.status >= 500 or response.status == 429:
            reason = f"Google's token service answered {response.status}"
            raise RetryLater(reason, after=response.retry_after, provider_wide=True)
        try:
            if response.status != 200:
                raise ValueError
            answer = json.loads(response.body)
            token, lifetime = str(answer["access_token"]), float(answer["expires_in"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise Refused(f"Google's token service answered {response.status} without a token") from None
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
    http: CurlHttp2
    clock: WallClock
    _origin: Origin = field(init=False)
    _path: str = field(init=False)
    _access: AccessToken = field(init=False, repr=False)

    def __post_init__(self) -> None:
        account = load_service_account(self.config.service_account_file)
        project = urllib.parse.quote(self.config.project or account.project, safe="")
        self._origin, path = split_url(self.config.endpoint, self.config.ca_file)
        self._path = f"{path.rstrip('/')}/v1/projects/{project}/messages:send"
        self._access = AccessToken(account, self.config, self.http, self.clock)

    async def deliver(self, token: DeviceToken, notification: PushNotification, push_id: uuid.UUID) -> None:
        """See PushProvider. FCM has no place for the push id."""
        body = message_body(token, notification)
        try:
            async with asyncio.timeout(self.config.response_timeout):
                response = await self._send(body)
        except TimeoutError:
            raise RetryLater("no answer in time", provider_wide=True) from None
        except TransportError as error:
            raise RetryLater(error.reason, provider_wide=error.whole_origin) from None
        if response.status != 200:
            raise push_error(response)

    async def close(self) -> None:
        """See PushProvider; the HTTP client is closed by who made it."""

    async def _send(self, body: bytes) -> Response:
        authorization = await self._access.header()
        response = await self._post(authorization, body)
        if response.status in AUTHORIZATION_ERRORS:
            authorization = await self._access.header(refused=authorization)
            response = await self._post(authorization, body)
        return response

    async def _post(self, authorization: str, body: bytes) -> Response:
        headers = [f"authorization: {authorization}", JSON_TYPE]
        timeout = self.config.response_timeout
        return await self.http.post(self._origin, self._path, headers, body, timeout)


def message_body(token: DeviceToken, notification: PushNotification) -> bytes:
    """The request's JSON; TokenInvalid or Refused if the push cannot be put into one."""
    if not isinstance(token, FcmToken):
        raise Refused(f"FCM is not for tokens of provider {token.provider.tag}")
    if not token.token.isascii() or not token.token.decode().isprintable() or not token.token:
        raise TokenInvalid(InvalidReason.BAD)
    data = fcm_data(notification)
    if sum(len(key) + len(value) for key, value in data.items()) > DATA_LIMIT:
        raise Refused(f"the notification does not fit FCM's {DATA_LIMIT} bytes")
    priority = "normal" if isinstance(notification, CheckMessages) else "high"
    message = {"token": token.token.decode(), "data": data, "android": {"priority": priority}}
    return json.dumps({"message": message}, separators=(",", ":")).encode()


def push_error(response: Response) -> TokenInvalid | RetryLater | Refused:
    """What an answer other than 200 means for the push."""
    error = _error(response)
    if response.status == 404:
        return TokenInvalid(InvalidReason.UNREGISTERED)
    if response.status == 400 and _is_about_token(error):
        return TokenInvalid(InvalidReason.BAD)
    text = f"FCM answered {response.status}"
    if response.status == 429:
        return RetryLater(text, after=response.retry_after, provider_wide=False)
    if response.status >= 500:
        return RetryLater(text, after=response.retry_after, provider_wide=True)
    return Refused(text)


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


def _is_about_token(error: Mapping[str, Any]) -> bool:
    """Google names the field, or says it in words that are part of its documentation."""
    if "registration token" in str(error.get("message", "")):
        return True
    details = error.get("details")
    violations = [
        violation
        for detail in (details if isinstance(details, list) else [])
        if isinstance(detail, dict) and isinstance(detail.get("fieldViolations"), list)
        for violation in detail["fieldViolations"]
    ]
    return any(isinstance(v, dict) and v.get("field") == "message.token" for v in violations)
