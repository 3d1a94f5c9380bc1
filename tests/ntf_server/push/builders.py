"""Valid tokens, notifications and providers in one call."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from ntf_demo.fake_push.server import FakePushServer
from ntf_server.config import ApnsConfig
from ntf_server.push.apns import ApnsProvider, make_apns_client
from ntf_server.push.http2 import CurlHttp2
from ntf_server.push.provider import MessageList, PushError
from protocol.device_token import ApnsToken, Provider

MESSAGE = MessageList(bytes(range(24)), bytes(3088))
DEADLINE = 60.0


class ManualClock:
    """Wall time that moves only when told."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def write_key(path: Path, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> Path:
    path.write_bytes(pem(key))
    return path


def pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def make_provider(
    fake: FakePushServer,
    http: CurlHttp2,
    key_file: Path,
    clock: Callable[[], float],
    client: Literal["curl", "aioapns"],
    response_timeout: float = 10.0,
    **changes: Any,
) -> ApnsProvider:
    settings: dict[str, Any] = {
        "key_file": key_file,
        "key_id": "KEY1",
        "team_id": "TEAM1",
        "client": client,
        "allow_test_provider": True,
        "test_port": fake.port,
        "test_ca_file": fake.ca_file,
    }
    config = ApnsConfig(**(settings | changes))
    return ApnsProvider(config, make_apns_client(config, http), clock, response_timeout)


def apns_token(number: int) -> ApnsToken:
    return ApnsToken(Provider.APNS_TEST, b"%064x" % number)


async def push(provider: ApnsProvider, number: int, push_id: str | None = None) -> PushError | None:
    """Deliver a message; its error as a value."""
    try:
        async with asyncio.timeout(DEADLINE):
            await provider.deliver(apns_token(number), MESSAGE, push_id or str(uuid.uuid4()))
    except PushError as error:
        return error
    return None


async def push_all(provider: ApnsProvider, count: int) -> list[PushError | None]:
    """Deliver messages to the tokens 0 .. count - 1 at once."""
    return await asyncio.gather(*(push(provider, number) for number in range(count)))
