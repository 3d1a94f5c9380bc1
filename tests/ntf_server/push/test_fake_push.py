"""The fake push service as others use it: a process of its own, with records and commands."""

from __future__ import annotations

import asyncio
import json
import ssl
import uuid
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ntf_demo.fake_push.faults import ConnectionSettings, Fault, from_json
from ntf_demo.fake_push.program import fake_push_process
from ntf_demo.fake_push.server import FakePushConfig, FakePushServer, wall_clock
from ntf_server.push.apns import ApnsProvider
from ntf_server.push.credentials import ApnsJwt
from ntf_server.push.http2 import CurlHttp2, Origin, Response
from ntf_server.push.provider import DeviceGone, ProviderDown
from tests.ntf_server.push.builders import ManualClock, make_provider, push
from tests.waiting import until


async def test_process(
    tmp_path: Path, http: CurlHttp2, key_file: Path, apns_key: ec.EllipticCurvePrivateKey
) -> None:
    records, public = tmp_path / "pushes.jsonl", tmp_path / "public.pem"
    public.write_bytes(
        apns_key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    options = ("--record", str(records), "--apns-key", str(public))
    async with fake_push_process(tmp_path / "fake", *options) as fake:
        apns = make_provider(
            FakePushServer(FakePushConfig(folder=tmp_path / "fake")),
            http,
            key_file,
            wall_clock,
            "curl",
            test_port=fake.port,
        )
        assert await push(apns, 1) is None
        await fake.control(faults=[{"status": 410, "reason": "Unregistered", "count": 1}])
        assert isinstance(await push(apns, 2), DeviceGone)
        await fake.control(goaway="close")
        assert await push(apns, 3) is None
        await fake.control(settings={"max_streams": 1}, delay=0.001)
        assert await push(apns, 4) is None
        answer = await fake.control(faults=[{"action": "silence"}], clear=True)
        assert (answer["requests"], answer["accepted"]) == (4, 3)
        assert answer["statuses"] == {"apns 200": 3, "apns 410": 1}
        with pytest.raises(ValueError):
            await fake.control(nonsense=1)
        with pytest.raises(ValueError):
            await fake.control(faults=[{"action": "explode"}])
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert [line["status"] for line in lines] == [200, 410, 200, 200]
    assert lines[0]["token"] == "0" * 63 + "1"
    assert json.loads(lines[0]["body"])["aps"]["mutable-content"] == 1


async def test_dropped_by_command(fake: FakePushServer, apns: ApnsProvider) -> None:
    assert await push(apns, 1) is None
    fake.drop_connections()
    await until(lambda: fake.connections == 0)
    assert await push(apns, 2) is None
    fake.add_fault(Fault(action="drop"))
    assert isinstance(await push(apns, 3), ProviderDown)


REQUEST: dict[str, Any] = {
    "device_token": "ab" * 32,
    "apns-id": str(uuid.UUID(int=1)),
    "apns-topic": "chat.simplex.app",
    "apns-push-type": "alert",
    "apns-priority": 10,
    "body": b'{"aps":{}}',
}


async def post(http: CurlHttp2, origin: Origin, request: dict[str, Any]) -> Response:
    headers = [f"{name}: {value}" for name, value in request.items() if name not in ("device_token", "body")]
    return await http.post(origin, f"/3/device/{request['device_token']}", headers, request["body"], 5.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"device_token": "abc"}, "BadDeviceToken"),
        ({"apns-id": "1"}, "BadMessageId"),
        ({"apns-id": ""}, None),
        ({"apns-topic": ""}, "MissingTopic"),
        ({"apns-push-type": "voip"}, None),
        ({"apns-push-type": "location"}, "InvalidPushType"),
        ({"apns-push-type": "background"}, "BadPriority"),
        ({"apns-priority": 7}, "BadPriority"),
        ({"body": b"[]"}, "PayloadEmpty"),
        ({"body": b'{"aps"'}, "PayloadEmpty"),
        ({"body": b'{"aps":"' + b"x" * 5000 + b'"}'}, "PayloadTooLarge"),
        ({"authorization": "basic x"}, "MissingProviderToken"),
        ({"authorization": "bearer x.y.z"}, "InvalidProviderToken"),
    ],
)
async def test_wrong_apns_requests(
    tmp_path: Path,
    http: CurlHttp2,
    clock: ManualClock,
    apns_key: ec.EllipticCurvePrivateKey,
    change: dict[str, Any],
    reason: str | None,
) -> None:
    config = FakePushConfig(
        folder=tmp_path, clock=clock, apns_key=apns_key.public_key(), body_limit=4096, record_limit=5
    )
    async with FakePushServer(config) as fake:
        origin = Origin("127.0.0.1", fake.port, ca_file=str(fake.ca_file))
        authorization = ApnsJwt(apns_key, "K", "T", clock).header()
        response = await post(http, origin, {"authorization": authorization} | REQUEST | change)
        told = json.loads(response.body)["reason"] if response.body else None
        assert told == reason
        assert (response.status == 200) is (reason is None)


async def test_provider_tokens_are_checked(
    tmp_path: Path, http: CurlHttp2, clock: ManualClock, apns_key: ec.EllipticCurvePrivateKey
) -> None:
    config = FakePushConfig(folder=tmp_path, clock=clock, apns_key=apns_key.public_key())
    async with FakePushServer(config) as fake:
        origin = Origin("127.0.0.1", fake.port, ca_file=str(fake.ca_file))

        async def reason(authorization: str) -> str | None:
            response = await post(http, origin, {"authorization": authorization} | REQUEST)
            return json.loads(response.body)["reason"] if response.body else None

        header = ApnsJwt(apns_key, "K", "T", clock).header()
        other = ec.generate_private_key(ec.SECP256R1())
        assert await reason(ApnsJwt(other, "K", "T", clock).header()) == "InvalidProviderToken"
        assert await reason(ApnsJwt(apns_key, "", "T", clock).header()) == "InvalidProviderToken"
        assert await reason(header) is None
        clock.now += 3601
        assert await reason(header) == "ExpiredProviderToken"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 400),
        (["ttl: 60"], 400),
        (["ttl: 60", "content-encoding: aes128gcm"], 403),
        (["ttl: 60", "content-encoding: aes128gcm", "authorization: vapid t=x,k=y"], 403),
        (["ttl: 60", "content-encoding: aes128gcm", "authorization: bearer t=x,k=y"], 403),
    ],
)
async def test_wrong_web_push_requests(
    fake: FakePushServer, http: CurlHttp2, headers: list[str], status: int
) -> None:
    origin = Origin("127.0.0.1", fake.port, ca_file=str(fake.ca_file))
    response = await http.post(origin, "/any/path", headers, bytes(200), 5.0)
    assert response.status == status


async def test_records_are_bounded(tmp_path: Path, http: CurlHttp2, key_file: Path) -> None:
    async with FakePushServer(FakePushConfig(folder=tmp_path / "fake", record_limit=3)) as fake:
        apns = make_provider(fake, http, key_file, wall_clock, "curl")
        for number in range(5):
            assert await push(apns, number) is None
        assert [int(sent.token, 16) for sent in fake.pushes] == [2, 3, 4]
        assert fake.recorder.accepted == 5


def test_commands_are_checked() -> None:
    assert from_json(Fault, {"status": 410, "token": "ab"}).status == 410
    bad_faults: list[Any] = [[], {"unknown": 1}, {"action": "explode"}]
    for bad in bad_faults:
        with pytest.raises(ValueError):
            from_json(Fault, bad)
    with pytest.raises(ValueError):
        from_json(ConnectionSettings, {"streams": 1})


def test_faults_match_by_api_token_and_count() -> None:
    fault = Fault(api="apns", token="ab", skip=1, count=2)
    matched = [fault.matches(*x) for x in [("fcm", "ab"), ("apns", "cd"), *([("apns", "ab")] * 4)]]
    assert matched == [False, False, False, True, True, False]


@pytest.mark.parametrize("requires_alpn", [True, False])
async def test_clients_without_alpn(tmp_path: Path, requires_alpn: bool) -> None:
    """As providers do, connections that negotiate no HTTP/2 are closed, unless the setting allows them."""
    async with FakePushServer(FakePushConfig(folder=tmp_path, requires_alpn=requires_alpn)) as server:
        context = ssl.create_default_context(cafile=server.ca_file)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
        try:
            async with asyncio.timeout(10):
                settings = await reader.read(9)
        finally:
            writer.close()
        assert (settings[3:4] == b"\x04") is not requires_alpn  # SETTINGS comes first
        assert bool(settings) is not requires_alpn
