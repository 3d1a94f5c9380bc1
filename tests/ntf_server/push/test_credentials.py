"""JWTs, VAPID keys and key files."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from ntf_server.push.credentials import (
    APNS_JWT_LIFETIME,
    VAPID_MAX_AUDIENCES,
    ApnsJwt,
    KeyFileError,
    Vapid,
    load_p256_key,
    make_vapid_key,
    vapid_public_key,
)
from tests.ntf_server.push.builders import ManualClock, pem


def test_apns_jwt_lives_30_minutes(apns_key: ec.EllipticCurvePrivateKey, clock: ManualClock) -> None:
    signer = ApnsJwt(apns_key, "KEY", "TEAM", clock)
    first = signer.header()
    clock.now += APNS_JWT_LIFETIME - 1
    assert signer.header() == first
    clock.now += 1
    second = signer.header()
    assert second != first
    clock.now -= 3600  # the clock was set back: a token from the future would be refused
    assert signer.header() not in (first, second)


def test_refused_apns_jwt(apns_key: ec.EllipticCurvePrivateKey, clock: ManualClock) -> None:
    signer = ApnsJwt(apns_key, "KEY", "TEAM", clock)
    first = signer.header()
    second = signer.renewed(first)
    assert second not in (None, first)
    assert signer.renewed(first) == second  # others that were refused with the first share the second
    assert second is not None
    assert signer.renewed(second) is None  # renewed just now: another one would not help
    clock.now += 61
    assert signer.renewed(second) not in (None, first, second)


def test_vapid_cache_is_bounded(apns_key: ec.EllipticCurvePrivateKey, clock: ManualClock) -> None:
    vapid = Vapid(apns_key, None, clock)
    first = vapid.header("https://first")
    assert vapid.header("https://first") == first
    for number in range(VAPID_MAX_AUDIENCES):
        vapid.header(f"https://{number}")
    assert vapid.header("https://first") != first


def test_vapid_key_file(tmp_path: Path) -> None:
    path = tmp_path / "vapid.pem"
    public = make_vapid_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert vapid_public_key(load_p256_key(path)) == public
    point = base64.urlsafe_b64decode(public + "=")
    assert (len(point), point[0]) == (65, 4)
    with pytest.raises(FileExistsError):
        make_vapid_key(path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        pem(ec.generate_private_key(ec.SECP384R1())),
        pem(rsa.generate_private_key(65537, 2048)),
    ],
)
def test_bad_key_files(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "key.p8"
    path.write_bytes(text)
    with pytest.raises(KeyFileError) as caught:
        load_p256_key(path)
    assert str(path) in str(caught.value)


def test_missing_key_file(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError):
        load_p256_key(tmp_path / "none.p8")
