"""FCM: access tokens, messages, answers."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from ntf_demo.fake_push.faults import Fault
from ntf_demo.fake_push.server import FakePushConfig, FakePushServer
from ntf_server.config import FcmConfig
from ntf_server.push.credentials import KeyFileError
from ntf_server.push.fcm import FORCED_RENEWAL_INTERVAL, FcmProvider, load_service_account, split_url
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
    Verification,
    padded_size,
)
from protocol.device_token import FcmToken, Provider
from protocol.statuses import InvalidReason
from tests.ntf_server.push.builders import ManualClock, apns_token, pem

TOKEN = FcmToken(b"device:token-1")
MESSAGE = MessageList(bytes(range(24)), bytes(padded_size(Provider.FCM, 3072) + 16))


@pytest.fixture(scope="session")
def fcm_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


@pytest.fixture
async def fcm_fake(
    tmp_path: Path, clock: ManualClock, fcm_key: rsa.RSAPrivateKey
) -> AsyncIterator[FakePushServer]:
    config = FakePushConfig(folder=tmp_path / "fcm", clock=clock, fcm_key=fcm_key.public_key())
    async with FakePushServer(config) as server:
        yield server


@pytest.fixture
def config(tmp_path: Path, fcm_fake: FakePushServer, fcm_key: rsa.RSAPrivateKey) -> FcmConfig:
    origin = f"https://127.0.0.1:{fcm_fake.port}"
    account = {"client_email": "a@b.example", "project_id": "proj", "private_key_id": "k1"}
    account |= {"private_key": pem(fcm_key).decode(), "token_uri": f"{origin}/token"}
    path = tmp_path / "account.json"
    path.write_text(json.dumps(account))
    return FcmConfig(service_account_file=path, endpoint=origin, ca_file=fcm_fake.ca_file)


@pytest.fixture
def provider(config: FcmConfig, http: CurlHttp2, clock: ManualClock) -> FcmProvider:
    return FcmProvider(config, http, clock, 10.0)


async def deliver(provider: FcmProvider, notification: MessageList | CheckMessages = MESSAGE) -> None:
    await provider.deliver(TOKEN, notification, str(uuid.uuid4()))


async def test_message(fcm_fake: FakePushServer, provider: FcmProvider) -> None:
    await asyncio.gather(*(deliver(provider) for _ in range(10)))
    assert fcm_fake.requests == 11  # one for the access token
    sent = fcm_fake.pushes[0]
    assert sent.headers[":path"] == "/v1/projects/proj/messages:send"
    message = json.loads(sent.body)["message"]
    assert message["token"] == "device:token-1"
    assert message["android"] == {"priority": "high"}
    assert base64.urlsafe_b64decode(message["data"]["nonce"]) == MESSAGE.nonce
    assert base64.urlsafe_b64decode(message["data"]["message"]) == MESSAGE.boxed


async def test_other_notifications(fcm_fake: FakePushServer, provider: FcmProvider) -> None:
    await deliver(provider, CheckMessages())
    await provider.deliver(TOKEN, Verification(bytes(24), MESSAGE.boxed), str(uuid.uuid4()))
    check, verification = (json.loads(push.body)["message"] for push in fcm_fake.pushes)
    assert check["data"] == {"checkMessages": "true"}
    assert check["android"]["priority"] == "normal"
    assert verification["data"].keys() == {"nonce", "verification"}


async def test_access_token_is_renewed_in_time(
    fcm_fake: FakePushServer, provider: FcmProvider, clock: ManualClock
) -> None:
    for step in (0, 54 * 60, 2 * 60):
        clock.now += step
        await deliver(provider)
    first, second, third = (push.headers["authorization"] for push in fcm_fake.pushes)
    assert first == second != third


async def test_refused_access_token_is_renewed_once(
    fcm_fake: FakePushServer, provider: FcmProvider, clock: ManualClock
) -> None:
    await deliver(provider)
    fcm_fake.apis.expire_access_tokens()
    await asyncio.gather(*(deliver(provider) for _ in range(10)))
    assert [push.status for push in fcm_fake.pushes].count(200) == 11
    renewals = fcm_fake.requests - len(fcm_fake.pushes)
    assert renewals == 2
    clock.now += FORCED_RENEWAL_INTERVAL
    fcm_fake.add_fault(Fault(api="fcm", status=403, reason="PERMISSION_DENIED"))
    requests = fcm_fake.requests
    with pytest.raises(ProviderRefusesUs):
        await deliver(provider)
    assert fcm_fake.requests == requests + 3


async def test_refusals_do_not_exhaust_the_token_service(
    fcm_fake: FakePushServer, provider: FcmProvider, clock: ManualClock
) -> None:
    """Its refusal would stop the pushes to all devices."""
    await deliver(provider)
    fcm_fake.add_fault(Fault(api="fcm", status=403, reason="SOMETHING_NEW"))
    asked = fcm_fake.requests
    for _ in range(10):
        with pytest.raises(ProviderRefusesUs):
            await deliver(provider)
        clock.now += FORCED_RENEWAL_INTERVAL / 10 - 0.1
    assert fcm_fake.requests == asked + 10 + 2  # one renewal, and the push that it was for


@pytest.mark.parametrize(
    ("status", "reason", "expected", "detail"),
    [
        (404, "UNREGISTERED", DeviceGone, InvalidReason.UNREGISTERED),
        (404, "NOT_FOUND", RetryLater, None),
        (400, "INVALID_ARGUMENT message.token", DeviceGone, InvalidReason.BAD),
        (400, "INVALID_ARGUMENT message.data", RetryLater, None),
        (400, "", RetryLater, None),
        (401, "UNAUTHENTICATED", ProviderRefusesUs, None),
        (401, "THIRD_PARTY_AUTH_ERROR", RetryLater, None),
        (403, "SENDER_ID_MISMATCH", ProviderRefusesUs, None),
        (403, "PERMISSION_DENIED", ProviderRefusesUs, None),
        (403, "SOMETHING_NEW", ProviderRefusesUs, None),
        (413, "", PushRefused, None),
        (418, "", RetryLater, None),
        (429, "QUOTA_EXCEEDED", RetryLater, None),
        (500, "INTERNAL", ProviderDown, None),
        (503, "UNAVAILABLE", ProviderDown, None),
    ],
)
async def test_answers(
    fcm_fake: FakePushServer,
    provider: FcmProvider,
    status: int,
    reason: str,
    expected: type[PushError],
    detail: Any,
) -> None:
    fcm_fake.add_fault(Fault(api="fcm", status=status, reason=reason, retry_after=9))
    with pytest.raises(expected) as caught:
        await deliver(provider)
    if isinstance(caught.value, DeviceGone):
        assert caught.value.invalid is detail
    else:
        assert caught.value.after == 9


@pytest.mark.parametrize(
    ("status", "reason", "expected"),
    [(403, "SENDER_ID_MISMATCH", ProviderRefusesUs), (401, "THIRD_PARTY_AUTH_ERROR", RetryLater)],
)
async def test_a_token_that_is_none_of_ours_costs_no_access_token(
    fcm_fake: FakePushServer, provider: FcmProvider, status: int, reason: str, expected: type[PushError]
) -> None:
    """Anyone can register one: it is no reason to read the key again, or to ask for another access token."""
    await deliver(provider)
    asked = fcm_fake.requests
    fcm_fake.add_fault(Fault(api="fcm", status=status, reason=reason))
    with pytest.raises(expected) as caught:
        await deliver(provider)
    assert caught.value.is_answer
    assert getattr(caught.value, "is_mismatch", False) == (reason == "SENDER_ID_MISMATCH")
    assert fcm_fake.requests == asked + 1


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault(api="oauth", status=400, reason="invalid_grant"), ProviderRefusesUs),
        (Fault(api="oauth", status=503), ProviderDown),
        (Fault(api="oauth", action="drop"), ProviderDown),
        (Fault(api="fcm", action="reset"), RetryLater),
    ],
)
async def test_failures(
    fcm_fake: FakePushServer, provider: FcmProvider, fault: Fault, expected: type[PushError]
) -> None:
    fcm_fake.add_fault(fault)
    with pytest.raises(expected):
        await deliver(provider)
    fcm_fake.clear_faults()
    await deliver(provider)


async def test_silence(
    fcm_fake: FakePushServer, config: FcmConfig, http: CurlHttp2, clock: ManualClock
) -> None:
    provider = FcmProvider(config, http, clock, 0.3)
    fcm_fake.add_fault(Fault(action="silence"))
    with pytest.raises(ProviderDown):
        await deliver(provider)


@pytest.mark.parametrize("token", [b"", b"\xff\xfe", b"a\nb"])
async def test_unusable_tokens(fcm_fake: FakePushServer, provider: FcmProvider, token: bytes) -> None:
    with pytest.raises(DeviceGone) as caught:
        await provider.deliver(FcmToken(token), MESSAGE, str(uuid.uuid4()))
    assert caught.value.invalid is InvalidReason.BAD
    assert fcm_fake.requests == 0


async def test_what_fcm_cannot_carry(fcm_fake: FakePushServer, provider: FcmProvider) -> None:
    with pytest.raises(PushRefused):
        await deliver(provider, MessageList(bytes(24), bytes(3088)))
    with pytest.raises(PushRefused):
        await provider.deliver(apns_token(1), MESSAGE, str(uuid.uuid4()))
    assert fcm_fake.requests == 0


def test_bad_service_accounts(tmp_path: Path) -> None:
    path = tmp_path / "account.json"
    key = pem(ec.generate_private_key(ec.SECP256R1())).decode()
    names = {"client_email": "a", "project_id": "b", "token_uri": "https://c"}
    for text in ("", "[]", "{}", json.dumps({"private_key": "x"}), json.dumps(names | {"private_key": key})):
        path.write_text(text)
        with pytest.raises(KeyFileError) as caught:
            load_service_account(path)
        assert "BEGIN" not in str(caught.value)


def test_urls() -> None:
    assert split_url("https://host/token", None)[0].port == 443
    for url in ("http://host/", "host", "https:///x"):
        with pytest.raises(ValueError):
            split_url(url, None)
