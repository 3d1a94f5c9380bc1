"""Web Push (RFC 8030), encrypted for the device (RFC 8291): browsers and UnifiedPush distributors."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ntf_server.config import WebPushConfig
from ntf_server.push.credentials import Reloading, Vapid, WallClock, load_p256_key
from ntf_server.push.http2 import CurlHttp2, NoAnswer, Origin, Response
from ntf_server.push.provider import (
    DeviceGone,
    Meaning,
    ProviderDown,
    ProviderRefusesUs,
    PushError,
    PushNotification,
    PushRefused,
    error_for,
    notification_data,
    unanswered,
    usual_meaning,
)
from protocol.device_token import DeviceToken, WebPushToken
from protocol.statuses import InvalidReason
from transport.address_guard import AddressGuard, ForbiddenAddressError, UnresolvedError

DEFAULT_PORT: Final = 443
TTL: Final = 30 * 24 * 3600  # seconds that a push service keeps a push for a device that is offline
SALT_SIZE: Final = 16
RECORD_SIZE: Final = 4096  # what push services must accept; a longer text gets one longer record
LAST_RECORD: Final = b"\x02"
DELIVERED: Final = frozenset({200, 201, 202})
ANSWERS: Final[Mapping[int, Meaning]] = {
    404: Meaning.UNREGISTERED_DEVICE,
    410: Meaning.UNREGISTERED_DEVICE,
    413: Meaning.PUSH,
    401: Meaning.US,
    403: Meaning.US,
    429: Meaning.LATER,
}
"RFC 8030 and 8292."
ADVICE: Final = "check [WEBPUSH] vapid_key_file and subject, and this machine's clock"
NAME: Final = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?")
NUMERIC: Final = re.compile(
    r"[0-9a-f.]*:[0-9a-f:.]*|(.*\.)?([0-9]+|0x[0-9a-f]*)"
)  # would be read as IP address
PATH: Final = re.compile(r"/[!$-;=?-~]*")  # printable ASCII without space, quotes, <, > and #


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a token's pushes go."""

    host: str
    port: int
    path: str = field(repr=False)

    @property
    def audience(self) -> str:
        """The origin as VAPID names it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}" if self.port == DEFAULT_PORT else f"https://{host}:{self.port}"


@dataclass(slots=True)
class WebPushProvider:
    """Pushes to the endpoints that clients name."""

    config: WebPushConfig
    "With a VAPID key and a subject."
    http: CurlHttp2
    clock: WallClock
    response_timeout: float
    guard: AddressGuard = field(init=False)
    _signer: Reloading[Vapid] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.guard = AddressGuard(allow_private=self.config.allow_private_addresses)
        assert self.config.vapid_key_file is not None
        self._signer = Reloading(
            self.config.vapid_key_file,
            lambda path: Vapid(load_p256_key(path), self.config.subject, self.clock),
        )

    @property
    def public_key(self) -> str:
        """The VAPID key that clients subscribe with."""
        return self._signer.current().public_key

    async def deliver(self, token: DeviceToken, notification: PushNotification, push_id: str) -> None:
        """See PushProvider. Web Push has no place for the push id."""
        if not isinstance(token, WebPushToken):
            raise PushRefused(f"Web Push is not for tokens of provider {token.provider.tag}")
        endpoint = parse_endpoint(token)
        try:
            body = encrypt(notification_data(notification), p256dh=token.p256dh, auth=token.auth)
        except ValueError:
            raise DeviceGone(InvalidReason.BAD) from None
        response = await self._send(endpoint, body)
        if response.status in DELIVERED:
            return
        error = push_error(response)
        if isinstance(error, ProviderRefusesUs):
            self._signer.refused()
        raise error

    def read_key_again(self) -> None:
        """Its file may have changed."""
        self._signer.read_again()

    async def close(self) -> None:
        """See PushProvider; the HTTP client is closed by who made it."""
        self.guard.close()

    async def _send(self, endpoint: Endpoint, body: bytes) -> Response:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.response_timeout
        headers = [
            f"authorization: {self._signer.current().header(endpoint.audience)}",
            f"ttl: {TTL}",
            "urgency: high",
            "content-encoding: aes128gcm",
            "content-type: application/octet-stream",
        ]
        try:
            address = await self.guard.address(endpoint.host, self.response_timeout)
            host = address if ":" in endpoint.host else endpoint.host
            ca_file = None if self.config.ca_file is None else str(self.config.ca_file)
            origin = Origin(host, endpoint.port, address, ca_file)
            left = max(deadline - loop.time(), 0.001)
            return await self.http.post(origin, endpoint.path, headers, body, left)
        except ForbiddenAddressError:
            # A name may resolve to something else later; an address stays what it is.
            if NUMERIC.fullmatch(endpoint.host):
                raise DeviceGone(InvalidReason.BAD) from None
            raise ProviderDown("the Web Push endpoint has no public address") from None
        except UnresolvedError as error:
            raise ProviderDown(str(error)) from None
        except NoAnswer as error:
            self.guard.forget(endpoint.host)
            # What follows the colon may name the host, which is the device's secret.
            reason = error.reason.partition(":")[0]
            raise unanswered(reason, whole_origin=error.whole_origin) from None


def parse_endpoint(token: WebPushToken) -> Endpoint:
    """The endpoint of a token; DeviceGone BAD if it is none."""
    try:
        host, port, path = token.host.decode("ascii"), token.port.decode("ascii"), token.path.decode("ascii")
    except UnicodeDecodeError:
        raise DeviceGone(InvalidReason.BAD) from None
    if not _is_host(host) or not PATH.fullmatch(path):
        raise DeviceGone(InvalidReason.BAD)
    if port and not (port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise DeviceGone(InvalidReason.BAD)
    return Endpoint(host, int(port or DEFAULT_PORT), path)


def push_error(response: Response) -> PushError:
    """What an answer means that is not a success."""
    status = response.status
    meaning = ANSWERS.get(status) or usual_meaning(status)
    return error_for(meaning, f"the Web Push service answered {status}", response.retry_after, ADVICE)


def _is_host(host: str) -> bool:
    if not NUMERIC.fullmatch(host):
        return NAME.fullmatch(host) is not None
    try:
        ipaddress.ip_address(host)  # refuses the old spellings, which libraries read in different ways
    except ValueError:
        return False
    return True


def encrypt(
    text: bytes,
    *,
    p256dh: bytes,
    auth: bytes,
    salt: bytes | None = None,
    sender_key: ec.EllipticCurvePrivateKey | None = None,
) -> bytes:
    """The body of a push message in one record (content encoding aes128gcm of RFC 8188); ValueError if the
    device's key is no point of the curve."""
    salt = salt or os.urandom(SALT_SIZE)
    sender_key = sender_key or ec.generate_private_key(ec.SECP256R1())
    sender_point = sender_key.public_key().public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
    )
    device_key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), p256dh)
    shared = sender_key.exchange(ec.ECDH(), device_key)
    secret = _derive(auth, shared, b"WebPush: info\0" + p256dh + sender_point, 32)
    key = _derive(salt, secret, b"Content-Encoding: aes128gcm\0", 16)
    nonce = _derive(salt, secret, b"Content-Encoding: nonce\0", 12)
    record = AESGCM(key).encrypt(nonce, text + LAST_RECORD, None)
    size = max(RECORD_SIZE, len(record))
    return salt + size.to_bytes(4, "big") + bytes((len(sender_point),)) + sender_point + record


def _derive(salt: bytes, secret: bytes, info: bytes, size: int) -> bytes:
    return HKDF(hashes.SHA256(), size, salt, info).derive(secret)
