"""A fake push service per test, and providers that push to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from ntf_demo.fake_push.server import FakePushConfig, FakePushServer
from ntf_server.push.apns import ApnsProvider
from ntf_server.push.http2 import CurlHttp2
from tests.ntf_server.push.builders import ManualClock, make_provider, write_key


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(scope="session")
def apns_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def key_file(tmp_path: Path, apns_key: ec.EllipticCurvePrivateKey) -> Path:
    return write_key(tmp_path / "key.p8", apns_key)


@pytest.fixture
async def fake(
    tmp_path: Path, clock: ManualClock, apns_key: ec.EllipticCurvePrivateKey
) -> AsyncIterator[FakePushServer]:
    config = FakePushConfig(folder=tmp_path / "fake", clock=clock, apns_key=apns_key.public_key())
    async with FakePushServer(config) as server:
        yield server
        assert server.violations == []


@pytest.fixture
async def http() -> AsyncIterator[CurlHttp2]:
    client = CurlHttp2()
    yield client
    await client.close()


@pytest.fixture(params=["curl", "aioapns"])
async def apns(
    request: pytest.FixtureRequest, fake: FakePushServer, http: CurlHttp2, key_file: Path, clock: ManualClock
) -> AsyncIterator[ApnsProvider]:
    provider = make_provider(fake, http, key_file, clock, request.param)
    yield provider
    await provider.close()
