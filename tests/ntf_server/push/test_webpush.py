"""Web Push: encryption, VAPID, endpoints, and the way through real HTTP/2 to a device that decrypts."""

from __future__ import annotations

import base64
import dataclasses
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ntf_demo.fake_push.faults import Fault
from ntf_demo.fake_push.server import FakePushServer
from ntf_server.config import WebPushConfig
from ntf_server.push.credentials import make_vapid_key
from ntf_server.push.http2 import CurlHttp2
from ntf_server.push.provider import (
    CheckMessages,
    DeviceGone,
    MessageList,
    ProviderDown,
    ProviderRefusesUs,
    PushError,
    PushRefused,
    RetryLater,
    padded_size,
)
from ntf_server.push.webpush import WebPushProvider, encrypt, parse_endpoint
from protocol.device_token import FcmToken, Provider, WebPushToken
from protocol.statuses import InvalidReason
from tests.ntf_server.push.builders import MESSAGE, ManualClock


def unbase64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def private_key(text: str) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(unbase64(text), "big"), ec.SECP256R1())


def point(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
    )


class Device:
    """The receiving side, written from the RFC and not from our sender."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.auth = bytes(range(16))

    def token(self, port: int, host: bytes = b"127.0.0.1", path: bytes = b"/push/abc?x=1") -> WebPushToken:
        return WebPushToken(host, str(port).encode(), path, self.auth, point(self.key))

    def decrypt(self, body: bytes) -> bytes:
        salt, record_size, sender = body[:16], int.from_bytes(body[16:20], "big"), body[21:86]
        assert body[20] == 65
        record = body[86:]
        assert len(record) <= record_size
        shared = self.key.exchange(
            ec.ECDH(), ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), sender)
        )
        info = b"WebPush: info\0" + point(self.key) + sender
        secret = HKDF(hashes.SHA256(), 32, self.auth, info).derive(shared)
        key = HKDF(hashes.SHA256(), 16, salt, b"Content-Encoding: aes128gcm\0").derive(secret)
        nonce = HKDF(hashes.SHA256(), 12, salt, b"Content-Encoding: nonce\0").derive(secret)
        padded = AESGCM(key).decrypt(nonce, record, None).rstrip(b"\0")
        assert padded.endswith(b"\x02")
        return padded[:-1]


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def config(tmp_path: Path, fake: FakePushServer) -> WebPushConfig:
    key_file = tmp_path / "vapid.pem"
    make_vapid_key(key_file)
    return WebPushConfig(
        vapid_key_file=key_file,
        subject="mailto:op@example.org",
        allow_private_addresses=True,
        ca_file=fake.ca_file,
    )


@pytest.fixture
async def provider(
    config: WebPushConfig, http: CurlHttp2, clock: ManualClock
) -> AsyncIterator[WebPushProvider]:
    provider = WebPushProvider(config, http, clock, 10.0)
    yield provider
    await provider.close()


def test_rfc_8291_example() -> None:
    body = encrypt(
        b"When I grow up, I want to be a watermelon",
        p256dh=unbase64(
            "BCVxsr7N_eNgVRqvHtD0zTZsEc6-VV-JvLexhqUzORcxaOzi6-AYWXvTBHm4bjyPjs7Vd8pZGH6SRpkNtoIAiw4"
        ),
        auth=unbase64("BTBZMqHH6r4Tts7J_aSIgg"),
        salt=unbase64("DGv6ra1nlYgDCS1FRnbzlw"),
        sender_key=private_key("yfWPiYE-n46HLnH0KqZOF1fJJU3MYrct3AELtAQ-oRw"),
    )
    assert body == unbase64(
        "DGv6ra1nlYgDCS1FRnbzlwAAEABBBP4z9KsN6nGRTbVYI_c7VJSPQTBtkgcy27mlmlMoZIIgDll6e3vCYLocInmYWAmS6Tlz"
        "AC8wEqKK6PBru3jl7A_yl95bQpu6cVPTpK4Mqgkf1CXztLVBSt2Ks3oZwbuwXPXLWyouBWLVWGNWQexSgSxsj_Qulcy4a-fN"
    )


async def test_push_reaches_the_device(
    fake: FakePushServer, provider: WebPushProvider, device: Device, clock: ManualClock
) -> None:
    await provider.deliver(device.token(fake.port), MESSAGE, str(uuid.uuid4()))
    await provider.deliver(device.token(fake.port), CheckMessages(), str(uuid.uuid4()))
    first, second = fake.pushes
    assert first.status == second.status == 201
    assert first.headers[":path"] == "/push/abc?x=1"
    assert (first.headers["ttl"], first.headers["urgency"]) == ("2592000", "high")
    text = json.loads(device.decrypt(base64.urlsafe_b64decode(first.body)))
    assert base64.urlsafe_b64decode(text["nonce"]) == MESSAGE.nonce
    assert base64.urlsafe_b64decode(text["message"]) == MESSAGE.boxed
    assert device.decrypt(base64.urlsafe_b64decode(second.body)) == b'{"checkMessages":true}'
    assert fake.connections_made == 1
    scheme, _, fields = first.headers["authorization"].partition(" ")
    token, key = (part.partition("=")[2] for part in fields.split(","))
    assert scheme == "vapid"
    assert key == provider.public_key
    claims = jwt.decode(token, options={"verify_signature": False})
    assert claims["aud"] == f"https://127.0.0.1:{fake.port}"
    assert claims["sub"] == "mailto:op@example.org"
    assert clock.now < claims["exp"] <= clock.now + 3600


async def test_vapid_is_cached_and_renewed(
    fake: FakePushServer, provider: WebPushProvider, device: Device, clock: ManualClock
) -> None:
    for step in (0, 49 * 60, 2 * 60):
        clock.now += step
        await provider.deliver(device.token(fake.port), MESSAGE, str(uuid.uuid4()))
    first, second, third = (push.headers["authorization"] for push in fake.pushes)
    assert first == second != third


def test_padded_text_fits_every_push_service(device: Device) -> None:
    size = padded_size(Provider.WEB_PUSH, 3072)
    boxed = MessageList(bytes(24), bytes(size + 16)).boxed
    text = json.dumps(
        {"nonce": base64.b64encode(bytes(24)).decode(), "verification": base64.b64encode(boxed).decode()}
    )
    assert len(encrypt(text.encode(), p256dh=point(device.key), auth=device.auth)) <= 4096
    assert padded_size(Provider.WEB_PUSH, 1000) == 1000
    assert padded_size(Provider.APNS_PROD, 3072) == 3072


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        *((200, None), (202, None), (404, DeviceGone), (410, DeviceGone), (413, PushRefused)),
        *((401, ProviderRefusesUs), (403, ProviderRefusesUs), (301, RetryLater), (400, RetryLater)),
        *((406, RetryLater), (429, RetryLater), (500, ProviderDown), (503, ProviderDown)),
    ],
)
async def test_answers(
    fake: FakePushServer,
    provider: WebPushProvider,
    device: Device,
    status: int,
    expected: type[PushError] | None,
) -> None:
    location = f"https://127.0.0.1:{fake.port}/elsewhere"
    fake.add_fault(Fault(status=status, retry_after=30, location=location))
    if expected is None:
        await provider.deliver(device.token(fake.port), MESSAGE, str(uuid.uuid4()))
        return
    with pytest.raises(expected) as caught:
        await provider.deliver(device.token(fake.port), MESSAGE, str(uuid.uuid4()))
    if isinstance(caught.value, DeviceGone):
        assert caught.value.invalid is InvalidReason.UNREGISTERED
    else:
        assert caught.value.after == (30 if status >= 400 else None)
    assert fake.requests == 1


async def test_no_answer_names_no_host(
    fake: FakePushServer, provider: WebPushProvider, device: Device
) -> None:
    with pytest.raises(ProviderDown) as caught:
        await provider.deliver(device.token(1, host=b"localhost"), MESSAGE, str(uuid.uuid4()))
    assert "localhost" not in caught.value.reason


async def test_name_is_pinned_to_the_checked_address(
    fake: FakePushServer, config: WebPushConfig, http: CurlHttp2, clock: ManualClock, device: Device
) -> None:
    """The request reaches the address that was checked, though no real resolver knows the name."""
    provider = WebPushProvider(config, http, clock, 10.0)
    provider.guard._resolve = lambda host: ["127.0.0.1"]
    with pytest.raises(ProviderDown) as caught:
        await provider.deliver(device.token(fake.port, host=b"push.invalid"), MESSAGE, str(uuid.uuid4()))
    assert "certificate" in caught.value.reason  # connected, but the certificate is not for that name
    assert fake.connections_made >= 1
    await provider.close()


@pytest.mark.parametrize("host", [b"127.0.0.1", b"localhost", b"::1", b"::ffff:127.0.0.1", b"10.0.0.1"])
async def test_private_endpoints_are_refused(
    fake: FakePushServer,
    config: WebPushConfig,
    http: CurlHttp2,
    clock: ManualClock,
    device: Device,
    host: bytes,
) -> None:
    provider = WebPushProvider(dataclasses.replace(config, allow_private_addresses=False), http, clock, 10.0)
    with pytest.raises(ProviderDown if host == b"localhost" else DeviceGone):
        await provider.deliver(device.token(fake.port, host=host), MESSAGE, str(uuid.uuid4()))
    assert fake.connections_made == 0
    await provider.close()


@pytest.mark.parametrize(
    ("host", "port", "path"),
    [
        (b"", b"", b"/"),
        (b"a b", b"", b"/"),
        (b"user@host", b"", b"/"),
        (b"host/x", b"", b"/"),
        (b"h\xc3\xb6st", b"", b"/"),
        (b"127.1", b"", b"/"),
        (b"0x7f000001", b"", b"/"),
        (b"2130706433", b"", b"/"),
        (b"0177.0.0.1", b"", b"/"),
        (b"host.", b"", b"/"),
        (b"host", b"0", b"/"),
        (b"host", b"65536", b"/"),
        (b"host", b"8e1", b"/"),
        (b"host", b"", b""),
        (b"host", b"", b"no-slash"),
        (b"host", b"", b"/a b"),
        (b"host", b"", b"/a\r\nx: y"),
        (b"host", b"", b"/a#b"),
    ],
)
def test_bad_endpoints(host: bytes, port: bytes, path: bytes) -> None:
    with pytest.raises(DeviceGone) as caught:
        parse_endpoint(WebPushToken(host, port, path, bytes(16), bytes(65)))
    assert caught.value.invalid is InvalidReason.BAD


def test_endpoints() -> None:
    endpoint = parse_endpoint(WebPushToken(b"Push.Example", b"", b"/a%20b?c=d", bytes(16), bytes(65)))
    assert (endpoint.host, endpoint.port, endpoint.path) == ("push.example", 443, "/a%20b?c=d")
    assert endpoint.audience == "https://push.example"
    ipv6 = parse_endpoint(WebPushToken(b"2001:db8::1", b"8443", b"/", bytes(16), bytes(65)))
    assert ipv6.audience == "https://[2001:db8::1]:8443"
    assert parse_endpoint(WebPushToken(b"8.8.8.8", b"", b"/", bytes(16), bytes(65))).host == "8.8.8.8"
    assert "a%20b" not in repr(endpoint)


async def test_unusable_tokens(fake: FakePushServer, provider: WebPushProvider) -> None:
    no_point = WebPushToken(b"127.0.0.1", str(fake.port).encode(), b"/", bytes(16), b"\x04" + bytes(64))
    with pytest.raises(DeviceGone):
        await provider.deliver(no_point, MESSAGE, str(uuid.uuid4()))
    with pytest.raises(PushRefused):
        await provider.deliver(FcmToken(b"token"), MESSAGE, str(uuid.uuid4()))
    assert fake.requests == 0


async def test_endless_answer_is_cut(fake: FakePushServer, provider: WebPushProvider, device: Device) -> None:
    fake.add_fault(Fault(status=500, reason="x" * 200_000))
    with pytest.raises(RetryLater):
        await provider.deliver(device.token(fake.port), MESSAGE, str(uuid.uuid4()))
