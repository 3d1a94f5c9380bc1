"""What both APNs clients promise, whatever the service does."""

from __future__ import annotations

import asyncio
import gc
import json
import uuid
from collections import Counter
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from ntf_demo.fake_push.faults import REFUSED_STREAM, ConnectionSettings, Fault
from ntf_demo.fake_push.server import FakePushConfig, FakePushServer
from ntf_server.push import aioapns_client, http2
from ntf_server.push.apns import ANSWERS, ApnsProvider, push_error
from ntf_server.push.http2 import CurlHttp2, Response
from ntf_server.push.provider import (
    CheckMessages,
    DeviceGone,
    ProviderDown,
    ProviderRefusesUs,
    PushError,
    PushRefused,
    RetryLater,
    Verification,
)
from protocol.device_token import ApnsToken, Provider
from protocol.statuses import InvalidReason
from tests.ntf_server.push.builders import (
    MESSAGE,
    ManualClock,
    apns_token,
    make_provider,
    push,
    push_all,
    write_key,
)
from tests.waiting import until

BAD_TOKEN = apns_token(7).token.decode()


def accepted(fake: FakePushServer) -> Counter[str]:
    return Counter(p.token for p in fake.pushes if p.status == 200)


def assert_each_once(fake: FakePushServer, count: int) -> None:
    assert accepted(fake) == Counter({apns_token(n).token.decode(): 1 for n in range(count)})


async def test_request_of_a_message(fake: FakePushServer, apns: ApnsProvider) -> None:
    push_id = str(uuid.uuid4())
    await apns.deliver(apns_token(1), MESSAGE, push_id)
    (sent,) = fake.pushes
    assert sent.token == "0" * 63 + "1"
    assert sent.push_id == sent.headers["apns-id"] == push_id
    assert sent.headers["apns-topic"] == "chat.simplex.app"
    assert (sent.headers["apns-push-type"], sent.headers["apns-priority"]) == ("alert", "10")
    body = json.loads(sent.body)
    assert body["aps"]["mutable-content"] == 1
    assert body["aps"]["category"] == "NTF_CAT_CHECK_MESSAGE"
    assert len(sent.body) > 4200


@pytest.mark.parametrize("notification", [Verification(bytes(24), b"code"), CheckMessages()])
async def test_background_requests(
    fake: FakePushServer, apns: ApnsProvider, notification: Verification | CheckMessages
) -> None:
    await apns.deliver(apns_token(1), notification, str(uuid.uuid4()))
    (sent,) = fake.pushes
    assert (sent.headers["apns-push-type"], sent.headers["apns-priority"]) == ("background", "5")
    assert json.loads(sent.body)["aps"] == {"content-available": 1}


@pytest.mark.parametrize(
    ("status", "reason", "invalid"),
    [
        (400, "BadDeviceToken", InvalidReason.BAD),
        (400, "DeviceTokenNotForTopic", InvalidReason.TOPIC),
        (410, "ExpiredToken", InvalidReason.EXPIRED),
        (410, "Unregistered", InvalidReason.UNREGISTERED),
    ],
)
@pytest.mark.parametrize("split", [False, True])
async def test_invalid_tokens(
    fake: FakePushServer, apns: ApnsProvider, status: int, reason: str, invalid: InvalidReason, split: bool
) -> None:
    fake.add_fault(Fault(token=BAD_TOKEN, status=status, reason=reason, split=split))
    errors = await push_all(apns, 20)
    error = errors.pop(7)
    assert isinstance(error, DeviceGone)
    assert error.invalid is invalid
    assert errors == [None] * 19


ANSWERED: list[tuple[int, type[PushError], str]] = [
    (413, PushRefused, "PayloadTooLarge"),
    (413, PushRefused, ""),
    (400, ProviderRefusesUs, "BadTopic MissingTopic TopicDisallowed"),
    (403, ProviderRefusesUs, "BadCertificate BadCertificateEnvironment BadEnvironmentKeyInToken"),
    (403, ProviderRefusesUs, "BadEnvironmentKeyIdInToken ExpiredProviderToken Forbidden"),
    (403, ProviderRefusesUs, "InvalidProviderToken MissingProviderToken UnrelatedKeyIdInToken"),
    (403, ProviderRefusesUs, "SomethingNew"),
    (403, ProviderRefusesUs, ""),
    (400, RetryLater, "BadCollapseId BadExpirationDate BadMessageId BadPriority DuplicateHeaders"),
    (400, RetryLater, "IdleTimeout InvalidPushType MissingDeviceToken PayloadEmpty"),
    (400, RetryLater, "SomethingNew"),
    (400, RetryLater, ""),
    (404, RetryLater, "BadPath"),
    (405, RetryLater, "MethodNotAllowed"),
    (410, RetryLater, ""),
    (418, RetryLater, ""),
    (429, RetryLater, "TooManyRequests"),
    (429, RetryLater, ""),
    (429, ProviderDown, "TooManyProviderTokenUpdates"),
    (500, ProviderDown, "InternalServerError"),
    (503, ProviderDown, "ServiceUnavailable Shutdown"),
    (503, ProviderDown, ""),
]
CASES = [(status, reason, error) for status, error, reasons in ANSWERED for reason in reasons.split() or [""]]


def test_every_documented_answer_is_tested() -> None:
    about_devices = {
        answer for answer, meaning in ANSWERS.items() if meaning.name.endswith(("DEVICE", "TOPIC"))
    }
    assert {(status, reason) for status, reason, _ in CASES} >= ANSWERS.keys() - about_devices


@pytest.mark.parametrize(("status", "reason", "expected"), CASES)
def test_meaning_of_answers(status: int, reason: str, expected: type[PushError]) -> None:
    error = push_error(Response(status, json.dumps({"reason": reason}).encode() if reason else b"", 5.0))
    assert type(error) is expected
    assert f"{status} {reason}".rstrip() in str(error)
    assert error.after == 5.0


async def test_an_error_answer_concerns_its_push_only(fake: FakePushServer, apns: ApnsProvider) -> None:
    fake.add_fault(Fault(token=BAD_TOKEN, status=403, reason="InvalidProviderToken"))
    errors = await push_all(apns, 20)
    assert isinstance(errors.pop(7), ProviderRefusesUs)
    assert errors == [None] * 19


async def test_a_key_put_right_is_used_without_a_restart(
    fake: FakePushServer, http: CurlHttp2, tmp_path: Path, apns_key: ec.EllipticCurvePrivateKey
) -> None:
    wrong = ec.generate_private_key(ec.SECP256R1())
    path = write_key(tmp_path / "wrong.p8", wrong)
    apns = make_provider(fake, http, path, fake.config.clock, "curl")
    for text in (None, "no key at all"):
        assert isinstance(await push(apns, 1), ProviderRefusesUs)
        if text is not None:
            path.write_text(text)
    write_key(path, apns_key)
    assert await push(apns, 1) is None
    await apns.close()


async def test_retry_after_is_told(fake: FakePushServer, apns: ApnsProvider) -> None:
    fake.add_fault(Fault(status=429, reason="TooManyRequests", retry_after=17))
    error = await push(apns, 1)
    assert isinstance(error, RetryLater)
    assert error.after == 17


async def test_jwt_is_shared_and_renewed(
    fake: FakePushServer, apns: ApnsProvider, clock: ManualClock, apns_key: ec.EllipticCurvePrivateKey
) -> None:
    start = clock.now
    for age in (0, 29 * 60, 31 * 60):
        clock.now = start + age
        fake.drop_connections()
        await until(lambda: fake.connections == 0)
        assert await push(apns, age) is None
    first, second, third = (sent.headers["authorization"] for sent in fake.pushes)
    assert first == second != third
    token = first.removeprefix("bearer ")
    assert jwt.get_unverified_header(token)["kid"] == "KEY1"
    claims = jwt.decode(token, apns_key.public_key(), algorithms=["ES256"], options={"verify_iat": False})
    assert claims == {"iss": "TEAM1", "iat": int(start)}


async def test_expired_jwt_is_renewed_once(
    fake: FakePushServer, apns: ApnsProvider, clock: ManualClock
) -> None:
    assert await push(apns, 0) is None
    clock.now += 60
    fake.add_fault(Fault(status=403, reason="ExpiredProviderToken", count=1))
    assert await push(apns, 1) is None
    values = [sent.headers["authorization"] for sent in fake.pushes]
    assert values[0] == values[1] != values[2]
    fake.add_fault(Fault(status=403, reason="ExpiredProviderToken"))
    assert isinstance(await push(apns, 2), ProviderRefusesUs)


async def test_reset_stream_fails_that_push_only(fake: FakePushServer, apns: ApnsProvider) -> None:
    fake.add_fault(Fault(token=BAD_TOKEN, action="reset"))
    errors = await push_all(apns, 50)
    error = errors.pop(7)
    assert isinstance(error, RetryLater)
    assert errors == [None] * 49
    assert fake.connections_made == 1


async def test_refused_stream_is_sent_again(fake: FakePushServer, apns: ApnsProvider) -> None:
    fake.add_fault(Fault(action="reset", error_code=REFUSED_STREAM, count=3))
    assert await push_all(apns, 50) == [None] * 50
    assert_each_once(fake, 50)


async def test_silence_for_one_token(fake: FakePushServer, http: CurlHttp2, key_file: Path) -> None:
    for client in ("curl", "aioapns"):
        apns = make_provider(fake, http, key_file, fake.config.clock, client, response_timeout=1.0)
        fake.add_fault(Fault(token=BAD_TOKEN, action="silence"))
        async with asyncio.TaskGroup() as tasks:
            silent = tasks.create_task(push(apns, 7))
            while not silent.done():
                assert await push(apns, 1) is None
        error = silent.result()
        assert isinstance(error, RetryLater)
        await apns.close()


async def test_silent_connection_is_replaced(fake: FakePushServer, http: CurlHttp2, key_file: Path) -> None:
    for client in ("curl", "aioapns"):
        apns = make_provider(fake, http, key_file, fake.config.clock, client, response_timeout=1.0)
        before = fake.connections_made
        fake.add_fault(Fault(action="silence", count=20))
        for error in await push_all(apns, 20):
            assert isinstance(error, ProviderDown)
        made = fake.connections_made
        assert made > before
        assert await push(apns, 1) is None
        assert fake.connections_made == made + 1
        await apns.close()


async def test_failing_service_is_met_on_a_fresh_connection(
    fake: FakePushServer, apns: ApnsProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2, "MIN_CONNECTION_AGE", 0.0)
    monkeypatch.setattr(aioapns_client, "MIN_CONNECTION_AGE", 0.0)
    assert await push(apns, 1) is None
    fake.add_fault(Fault(status=503, reason="Shutdown", count=1))
    assert isinstance(await push(apns, 2), ProviderDown)
    assert fake.connections_made == 1
    assert await push(apns, 3) is None
    assert fake.connections_made == 2


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("close", [False, True])
async def test_goaway_loses_and_doubles_nothing(
    fake: FakePushServer, apns: ApnsProvider, processed: bool, close: bool
) -> None:
    for skip in (30, 20, 5):
        fake.add_fault(Fault(action="goaway", processed=processed, close=close, skip=skip, count=1))
    assert await push_all(apns, 200) == [None] * 200
    assert_each_once(fake, 200)
    assert fake.connections_made > 1


@pytest.mark.parametrize("close", [False, True])
async def test_goaway_while_answers_are_due(fake: FakePushServer, apns: ApnsProvider, close: bool) -> None:
    fake.delay = 0.1
    async with asyncio.TaskGroup() as tasks:
        pushes = tasks.create_task(push_all(apns, 100))
        await until(lambda: fake.requests >= 50)
        fake.go_away(close=close)
    assert pushes.result() == [None] * 100
    assert_each_once(fake, 100)


async def test_dropped_connection(fake: FakePushServer, apns: ApnsProvider) -> None:
    """What was not answered is either told as failed or sent again; afterwards all is well."""
    fake.add_fault(Fault(action="drop", skip=20, count=1))
    errors = await push_all(apns, 100)
    for number, error in enumerate(errors):
        if error is None:
            assert accepted(fake)[apns_token(number).token.decode()] >= 1
        else:
            assert isinstance(error, ProviderDown)
    fake.recorder.pushes.clear()
    assert await push_all(apns, 100) == [None] * 100
    assert_each_once(fake, 100)


async def test_no_service(fake: FakePushServer, http: CurlHttp2, key_file: Path, tmp_path: Path) -> None:
    for client in ("curl", "aioapns"):
        apns = make_provider(fake, http, key_file, fake.config.clock, client, test_port=1)
        for error in await push_all(apns, 20):
            assert isinstance(error, ProviderDown)
        await apns.close()


async def test_fewer_streams(fake: FakePushServer, apns: ApnsProvider) -> None:
    """The limit falls to one stream while hundreds are under way; the fixture checks that it is kept."""
    fake.delay = 0.02
    async with asyncio.TaskGroup() as tasks:
        pushes = tasks.create_task(push_all(apns, 150))
        await until(lambda: fake.requests >= 20)
        fake.change_settings(ConnectionSettings(max_streams=1))
        fake.delay = 0.001
    assert pushes.result() == [None] * 150
    assert_each_once(fake, 150)


@pytest.mark.parametrize(
    "settings",
    [
        ConnectionSettings(window=100, connection_window=1000),
        ConnectionSettings(connection_window=65535, window_delay=0.02),
        ConnectionSettings(window=2000, window_delay=0.005),
    ],
)
async def test_small_windows(fake: FakePushServer, apns: ApnsProvider, settings: ConnectionSettings) -> None:
    fake.change_settings(settings)
    assert await push_all(apns, 60) == [None] * 60
    assert_each_once(fake, 60)


async def test_window_shrinks_under_way(fake: FakePushServer, apns: ApnsProvider) -> None:
    async with asyncio.TaskGroup() as tasks:
        pushes = tasks.create_task(push_all(apns, 200))
        await until(lambda: fake.requests >= 1)
        fake.change_settings(ConnectionSettings(window=500))
    assert pushes.result() == [None] * 200
    assert_each_once(fake, 200)


async def test_cancelled_pushes_disturb_no_other(fake: FakePushServer, apns: ApnsProvider) -> None:
    assert await push(apns, 1000) is None
    fake.delay = 0.1
    tasks = [asyncio.ensure_future(push(apns, number)) for number in range(100)]
    await until(lambda: fake.requests > 50)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    assert results[1::2] == [None] * 50
    assert fake.connections_made == 1


async def test_more_pushes_than_places(fake: FakePushServer, key_file: Path) -> None:
    http = CurlHttp2(max_in_flight=5)
    for few in (http, aioapns_client.AioapnsClient(5)):
        apns = make_provider(fake, http, key_file, fake.config.clock, "curl", response_timeout=1.0)
        apns.client = few
        fake.recorder.pushes.clear()
        assert await push_all(apns, 30) == [None] * 30
        assert_each_once(fake, 30)
        fake.add_fault(Fault(action="silence", count=5))
        waiting = [asyncio.ensure_future(push(apns, number)) for number in range(10)]
        requests = fake.requests
        await until(lambda requests=requests: fake.requests == requests + 5)
        waiting[7].cancel()  # one that waits for a place
        waiting[2].cancel()  # one that has one: the next takes it
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert sum(result is None for result in results) == 4
        assert await push(apns, 1) is None
        await apns.close()
    await http.close()


async def test_nobody_is_overtaken_for_ever(fake: FakePushServer, apns: ApnsProvider) -> None:
    """More senders than a connection has streams, each starting anew at once: all get their turn."""
    left = iter(range(900))
    rounds: Counter[int] = Counter()

    async def sender(number: int) -> None:
        for _ in left:
            assert await push(apns, number) is None
            rounds[number] += 1

    await asyncio.gather(*(sender(number) for number in range(300)))
    assert len(rounds) == 300


async def test_closing_ends_pushes(fake: FakePushServer, http: CurlHttp2, apns: ApnsProvider) -> None:
    fake.add_fault(Fault(action="silence"))
    pushes = asyncio.ensure_future(push_all(apns, 20))
    await until(lambda: fake.requests == 20)
    await apns.close()
    await http.close()
    assert all(isinstance(error, ProviderDown) for error in await pushes)
    await apns.close()
    await http.close()
    assert isinstance(await push(apns, 1), ProviderDown)


@pytest.mark.parametrize("token", [b"", b"../../x", b"abc\r\nx: y", b"a" * 201, b"\xff"])
async def test_token_that_is_no_hex_text(fake: FakePushServer, apns: ApnsProvider, token: bytes) -> None:
    with pytest.raises(DeviceGone) as caught:
        await apns.deliver(ApnsToken(Provider.APNS_PROD, token), MESSAGE, str(uuid.uuid4()))
    assert caught.value.invalid is InvalidReason.BAD
    assert fake.requests == 0


@pytest.mark.parametrize("token", [b"Any Text", b"../../x", b"abc\r\nx: y", b"%41", "gerät".encode()])
async def test_tokens_of_the_test_provider_are_any_text(
    fake: FakePushServer, apns: ApnsProvider, token: bytes
) -> None:
    await apns.deliver(ApnsToken(Provider.APNS_TEST, token), MESSAGE, str(uuid.uuid4()))
    assert [push.token for push in fake.pushes] == [token.decode()]


async def test_untrusted_certificate(
    fake: FakePushServer, http: CurlHttp2, key_file: Path, tmp_path: Path
) -> None:
    other = FakePushServer(FakePushConfig(folder=tmp_path / "other"))
    async with other:
        for client in ("curl", "aioapns"):
            for ca_file in (other.ca_file, None):
                apns = make_provider(fake, http, key_file, fake.config.clock, client, test_ca_file=ca_file)
                error = await push(apns, 1)
                assert isinstance(error, ProviderDown)
                assert error.reason.startswith("certificate refused")
                await apns.close()
    assert fake.requests == 0


async def test_certificate_of_another_host(http: CurlHttp2, key_file: Path, tmp_path: Path) -> None:
    config = FakePushConfig(folder=tmp_path / "names", names=("push.example",))
    async with FakePushServer(config) as fake:
        for client in ("curl", "aioapns"):
            apns = make_provider(fake, http, key_file, config.clock, client)
            error = await push(apns, 1)
            assert isinstance(error, ProviderDown)
            assert error.reason.startswith("certificate refused")
            await apns.close()
        assert fake.requests == 0


async def test_memory_stays_flat(fake: FakePushServer, apns: ApnsProvider) -> None:
    fake.recorder.pushes = type(fake.recorder.pushes)(maxlen=10)
    fake.add_fault(Fault(token=BAD_TOKEN, status=410, reason="Unregistered"))

    async def objects_after(rounds: int) -> int:
        for _ in range(rounds):
            await push_all(apns, 100)
        gc.collect()
        return len(gc.get_objects())

    early = await objects_after(5)
    assert await objects_after(15) < early + 500
    assert fake.connections_made == 1


async def test_outage_ends_by_itself(
    http: CurlHttp2, key_file: Path, tmp_path: Path, clock: ManualClock
) -> None:
    config = FakePushConfig(folder=tmp_path / "fake", clock=clock)
    async with FakePushServer(config) as first:
        port = first.port
        providers = [make_provider(first, http, key_file, clock, client) for client in ("curl", "aioapns")]
        for apns in providers:
            assert await push(apns, 1) is None
    for apns in providers:
        for _ in range(10):
            assert isinstance(await push(apns, 2), ProviderDown)
    again = FakePushConfig(folder=tmp_path / "fake", clock=clock, port=port)
    async with FakePushServer(again) as second:
        for apns in providers:
            assert await push(apns, 3) is None
            await apns.close()
        assert accepted(second) == Counter({apns_token(3).token.decode(): 2})
