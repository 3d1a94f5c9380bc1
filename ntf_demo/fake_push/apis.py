"""The three push APIs, as strict as the real services about what clients get wrong."""

from __future__ import annotations

import base64
import json
import re
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

Headers: TypeAlias = Mapping[str, str]
APNS_PATH: Final = re.compile(r"/3/device/([^/?]*)")
HEX: Final = re.compile(r"[0-9a-fA-F]*")
FCM_PATH: Final = re.compile(r"/v1/projects/([^/]+)/messages:send")
OAUTH_PATH: Final = "/token"
OAUTH_GRANT: Final = "urn:ietf:params:oauth:grant-type:jwt-bearer"
APNS_JWT_MAX_AGE: Final = 3600
CLOCK_SKEW: Final = 300
FCM_DATA_LIMIT: Final = 4096
ACCESS_TOKEN_LIFETIME: Final = 3600
MAX_KNOWN_TOKENS: Final = 1000
WEB_PUSH_MAX_TTL: Final = 2592000
AES128GCM_OVERHEAD: Final = 86 + 17  # header with a P-256 key, delimiter and tag
VOIP_EXTRA = 1024
"Bytes that Apple takes beyond the limit of other pushes."


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a request is answered if no fault says otherwise."""

    api: str
    token: str = field(repr=False)
    push_id: str
    status: int
    reason: str = ""
    body: bytes = b""
    "Of a success; errors get their API's error text."


@dataclass(slots=True)
class PushApis:
    """Checks requests; keeps the access tokens it gave out."""

    clock: Callable[[], float]
    apns_key: ec.EllipticCurvePublicKey | None = None
    "Verifies the JWTs of APNs clients; None: their form only."
    fcm_key: rsa.RSAPublicKey | None = None
    "Verifies the service account's grants; None: their form only."
    body_limit: int | None = None
    "Bytes of an APNs or Web Push body; the real services say 4096."
    _known_jwts: dict[str, float] = field(default_factory=dict, repr=False)
    _access_tokens: dict[str, float] = field(default_factory=dict, repr=False)

    def judge(self, headers: Headers, body: bytes) -> Verdict:
        """The verdict on a POST request."""
        path = headers.get(":path", "")
        if match := APNS_PATH.fullmatch(path):
            return self._judge_apns(urllib.parse.unquote(match[1]), headers, body)
        if FCM_PATH.fullmatch(path):
            return self._judge_fcm(headers, body)
        if path == OAUTH_PATH:
            return self._judge_oauth(headers, body)
        return self._judge_webpush(path, headers, body)

    def expire_access_tokens(self) -> None:
        """Forget the access tokens: the next FCM requests are answered 401."""
        self._access_tokens.clear()

    def _judge_apns(self, token: str, headers: Headers, body: bytes) -> Verdict:
        push_id = headers.get("apns-id") or str(uuid.uuid4())
        status, reason = self._apns_fault(token, push_id, headers, body) or (200, "")
        return Verdict("apns", token, push_id, status, reason)

    def _apns_fault(self, token: str, push_id: str, headers: Headers, body: bytes) -> tuple[int, str] | None:
        if not token or (HEX.fullmatch(token) and len(token) % 2):
            return 400, "BadDeviceToken"
        try:
            uuid.UUID(push_id)
        except ValueError:
            return 400, "BadMessageId"
        if not headers.get("apns-topic"):
            return 400, "MissingTopic"
        push_type, priority = headers.get("apns-push-type"), headers.get("apns-priority", "10")
        if push_type not in ("alert", "background", "voip"):
            return 400, "InvalidPushType"
        if priority not in ("5", "10") or (push_type == "background" and priority != "5"):
            return 400, "BadPriority"
        extra = VOIP_EXTRA if push_type == "voip" else 0
        if self.body_limit is not None and len(body) > self.body_limit + extra:
            return 413, "PayloadTooLarge"
        if b'"aps"' not in body or _json_object(body) is None:
            return 400, "PayloadEmpty"
        return self._apns_jwt_fault(headers.get("authorization", ""))

    def _apns_jwt_fault(self, authorization: str) -> tuple[int, str] | None:
        if not authorization.lower().startswith("bearer "):
            return 403, "MissingProviderToken"
        issued = self._known_jwts.get(authorization)
        if issued is None:
            try:
                issued = self._read_apns_jwt(authorization[7:])
            except (jwt.PyJWTError, KeyError, TypeError, ValueError):
                return 403, "InvalidProviderToken"
            _remember(self._known_jwts, authorization, issued)
        if not -CLOCK_SKEW < self.clock() - issued < APNS_JWT_MAX_AGE:
            return 403, "ExpiredProviderToken"
        return None

    def _read_apns_jwt(self, token: str) -> float:
        head = jwt.get_unverified_header(token)
        options: Any = {"verify_signature": self.apns_key is not None, "verify_iat": False}
        claims = jwt.decode(token, self.apns_key or "", algorithms=["ES256"], options=options)
        if head["alg"] != "ES256" or not head["kid"] or not claims["iss"]:
            raise ValueError
        return float(claims["iat"])

    def _judge_oauth(self, headers: Headers, body: bytes) -> Verdict:
        form = urllib.parse.parse_qs(body.decode(errors="replace"))
        try:
            if form["grant_type"] != [OAUTH_GRANT]:
                raise ValueError
            options: Any = {"verify_signature": self.fcm_key is not None, "verify_aud": False}
            options |= {"verify_exp": False, "verify_iat": False}
            claims = jwt.decode(
                form["assertion"][0], self.fcm_key or "", algorithms=["RS256"], options=options
            )
            if claims["exp"] < self.clock() or not claims["iss"] or "messaging" not in claims["scope"]:
                raise ValueError
        except (jwt.PyJWTError, KeyError, TypeError, ValueError):
            return Verdict("oauth", "", "", 400, "invalid_grant")
        access_token = f"fake-{uuid.uuid4()}"
        _remember(self._access_tokens, access_token, self.clock() + ACCESS_TOKEN_LIFETIME)
        answer = {"access_token": access_token, "expires_in": ACCESS_TOKEN_LIFETIME, "token_type": "Bearer"}
        return Verdict("oauth", "", "", 200, body=json.dumps(answer).encode())

    def _judge_fcm(self, headers: Headers, body: bytes) -> Verdict:
        message = (_json_object(body) or {}).get("message")
        token = message.get("token", "") if isinstance(message, dict) else ""
        access_token = headers.get("authorization", "").removeprefix("Bearer ")
        if self._access_tokens.get(access_token, 0.0) < self.clock():
            return Verdict("fcm", token, "", 401, "UNAUTHENTICATED")
        data = message.get("data") if isinstance(message, dict) else None
        if not token or not _is_fcm_data(data):
            return Verdict("fcm", token, "", 400, "INVALID_ARGUMENT")
        return Verdict("fcm", token, "", 200, body=b'{"name":"projects/fake/messages/1"}')

    def _judge_webpush(self, path: str, headers: Headers, body: bytes) -> Verdict:
        status, reason = self._webpush_fault(headers, body) or (201, "")
        return Verdict("webpush", path, "", status, reason)

    def _webpush_fault(self, headers: Headers, body: bytes) -> tuple[int, str] | None:
        ttl = headers.get("ttl", "")
        if not ttl.isdigit() or int(ttl) > WEB_PUSH_MAX_TTL:
            return 400, "bad TTL"
        if headers.get("content-encoding") != "aes128gcm" or len(body) <= AES128GCM_OVERHEAD:
            return 400, "bad encoding"
        if self.body_limit is not None and len(body) > self.body_limit:
            return 413, "too large"
        try:
            self._check_vapid(headers.get("authorization", ""), headers.get(":authority", ""))
        except (jwt.PyJWTError, KeyError, TypeError, ValueError):
            return 403, "bad VAPID authorization"
        return None

    def _check_vapid(self, authorization: str, authority: str) -> None:
        scheme, _, rest = authorization.partition(" ")
        parts = dict(part.strip().split("=", 1) for part in rest.split(","))
        if scheme.lower() != "vapid":
            raise ValueError
        if self._known_jwts.get(authorization, 0.0) > self.clock():
            return
        point = base64.urlsafe_b64decode(parts["k"] + "=" * (-len(parts["k"]) % 4))
        key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
        options: Any = {"verify_exp": False}
        origin = f"https://{authority}"
        claims = jwt.decode(parts["t"], key, algorithms=["ES256"], audience=origin, options=options)
        if not 0 < claims["exp"] - self.clock() <= 24 * 3600:
            raise ValueError
        _remember(self._known_jwts, authorization, float(claims["exp"]))


def error_body(api: str, status: int, reason: str) -> bytes:
    """The text by which an API explains an error; nothing if there is no reason."""
    if not reason:
        return b""
    if api == "apns":
        return json.dumps({"reason": reason}).encode()
    if api == "fcm":
        return _fcm_error(status, *reason.split(maxsplit=1))
    if api == "oauth":
        return json.dumps({"error": reason}).encode()
    return reason.encode()


def _fcm_error(status: int, code: str, field_name: str | None = None) -> bytes:
    """A reason may have a second word: the field of the request that is wrong."""
    kind = "type.googleapis.com/google."
    details: list[dict[str, Any]] = [{"@type": kind + "firebase.fcm.v1.FcmError", "errorCode": code}]
    if field_name:
        details.append({"@type": kind + "rpc.BadRequest", "fieldViolations": [{"field": field_name}]})
    error = {"code": status, "message": "fake", "status": code, "details": details}
    return json.dumps({"error": error}).encode()


def _is_fcm_data(data: object) -> bool:
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        return False
    return sum(len(key) + len(value) for key, value in data.items()) <= FCM_DATA_LIMIT


def _json_object(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _remember(known: dict[str, float], key: str, value: float) -> None:
    if len(known) >= MAX_KNOWN_TOKENS:
        del known[next(iter(known))]
    known[key] = value
