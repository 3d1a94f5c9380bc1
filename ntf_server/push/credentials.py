"""Tokens by which push services know us: signed once, kept for long, shared by all requests."""

from __future__ import annotations

import base64
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeAlias, TypeVar

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

T = TypeVar("T")

log = logging.getLogger(__name__)

WallClock: TypeAlias = Callable[[], float]
"Seconds since 1970."

APNS_JWT_LIFETIME: Final = 30 * 60.0  # Apple: renewed not more often than every 20 minutes, at most 60 old
APNS_FORCED_RENEWAL_INTERVAL: Final = 60.0  # Apple answers 429 to a new token with every request
VAPID_JWT_LIFETIME: Final = 60 * 60.0  # RFC 8292 allows a day; a short one is worth less to a thief
VAPID_RENEW_BEFORE: Final = 10 * 60.0
VAPID_MAX_AUDIENCES: Final = 1024  # clients choose the hosts: the cache must not grow with them


class KeyFileError(ValueError):
    """A key file cannot be used."""


def read_key_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from None


def load_p256_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The P-256 private key of a PEM file (`.p8` or made by `make_vapid_key`)."""
    text = read_key_file(path)
    try:
        key = serialization.load_pem_private_key(text, password=None)
    except (ValueError, TypeError):
        raise KeyFileError(f"{path} holds no private key; it must be a PEM file without a password") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise KeyFileError(f"the key in {path} is not a P-256 private key")
    return key


class Reloading(Generic[T]):
    """What was made of a file. After a refusal, or when asked to, the file is read again: a key that was put
    right counts from the next request on, without a restart."""

    def __init__(self, path: Path, load: Callable[[Path], T]) -> None:
        self._path = path
        self._load = load
        self._value = load(path)
        self._text = path.read_bytes()
        self._doubted = False

    def current(self) -> T:
        if self._doubted:
            self._doubted = False
            self.read_again()
        return self._value

    def refused(self) -> None:
        """Somebody did not like it."""
        self._doubted = True

    def read_again(self) -> None:
        """Use what the file holds now, if it can be used."""
        try:
            text = self._path.read_bytes()
            if text == self._text:
                return
            self._value = self._load(self._path)
        except (OSError, KeyFileError) as error:
            log.error("%s cannot be used, the former key is used on: %s", self._path, error)
            return
        self._text = text
        log.info("%s has changed and was read again", self._path)


class ApnsJwt:
    """The `authorization` value of APNs requests: one per key, renewed every 30 minutes."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, key_id: str, team_id: str, clock: WallClock) -> None:
        self._key = key
        self._key_id = key_id
        self._team_id = team_id
        self._clock = clock
        self._issued = float("-inf")
        self._forced = float("-inf")
        self._header = ""

    def header(self) -> str:
        """`bearer <JWT>`."""
        now = self._clock()
        # A clock set back must not keep a token from the future, which Apple refuses.
        if not 0 <= now - self._issued < APNS_JWT_LIFETIME:
            self._sign(now)
        return self._header

    def renewed(self, refused: str) -> str | None:
        """Another value than the one that was refused as expired; None if it was renewed just now."""
        if refused != self._header:
            return self._header
        now = self._clock()
        if 0 <= now - self._forced < APNS_FORCED_RENEWAL_INTERVAL:
            return None
        self._forced = now
        self._sign(now)
        return self._header

    def _sign(self, now: float) -> None:
        import jwt  # here: making and reading key files needs none of it

        claims = {"iss": self._team_id, "iat": int(now)}
        token = jwt.encode(claims, self._key, algorithm="ES256", headers={"kid": self._key_id})
        self._issued = now
        self._header = f"bearer {token}"


class Vapid:
    """`authorization` values of Web Push requests (RFC 8292), one per push service."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, subject: str | None, clock: WallClock) -> None:
        self._key = key
        self._subject = subject
        self._clock = clock
        self._headers: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self.public_key = vapid_public_key(key)

    def header(self, audience: str) -> str:
        """`vapid t=<JWT>,k=<public key>` for an origin such as `https://host`."""
        now = self._clock()
        expires, header = self._headers.get(audience, (0.0, ""))
        if not VAPID_RENEW_BEFORE < expires - now <= VAPID_JWT_LIFETIME:
            expires = now + VAPID_JWT_LIFETIME
            header = self._sign(audience, int(expires))
            self._headers[audience] = (expires, header)
        self._headers.move_to_end(audience)
        if len(self._headers) > VAPID_MAX_AUDIENCES:
            self._headers.popitem(last=False)
        return header

    def _sign(self, audience: str, expires: int) -> str:
        import jwt

        claims: dict[str, str | int] = {"aud": audience, "exp": expires}
        if self._subject is not None:
            claims["sub"] = self._subject
        token = jwt.encode(claims, self._key, algorithm="ES256")
        return f"vapid t={token},k={self.public_key}"


def make_vapid_key(path: Path) -> str:
    """Make a VAPID key in a new file that only its owner may read; returns the public key's text."""
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(pem)
    return vapid_public_key(key)


def vapid_public_key(key: ec.EllipticCurvePrivateKey) -> str:
    """The uncompressed point in base64url without padding, as browsers and distributors take it."""
    point = key.public_key().public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
    )
    return base64.urlsafe_b64encode(point).rstrip(b"=").decode()
