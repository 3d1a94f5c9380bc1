"""The libcurl client on its own."""

from __future__ import annotations

import asyncio

import pytest

from ntf_demo.fake_push.faults import Fault
from ntf_demo.fake_push.server import FakePushServer
from ntf_server.push import http2
from ntf_server.push.http2 import CurlHttp2, NoAnswer, Origin, OriginLimits
from tests.waiting import until

HEADERS = ["ttl: 60", "content-encoding: aes128gcm"]
BODY = bytes(200)
FORBIDDEN = 403


@pytest.fixture
def origin(fake: FakePushServer) -> Origin:
    return Origin("127.0.0.1", fake.port, ca_file=str(fake.ca_file))


@pytest.mark.parametrize(("path", "headers"), [("/\x00", []), ("/", ["x: \ud800"]), ("/", [b"\xff", None])])
async def test_impossible_requests_fail_alone(
    http: CurlHttp2, origin: Origin, path: str, headers: list[str]
) -> None:
    good = asyncio.gather(*(http.post(origin, "/x", HEADERS, BODY, 10.0) for _ in range(5)))
    with pytest.raises(NoAnswer) as caught:
        await http.post(origin, path, headers, BODY, 10.0)
    assert not caught.value.whole_origin
    assert [response.status for response in await good] == [FORBIDDEN] * 5


async def test_origins_do_not_share_connections(fake: FakePushServer, http: CurlHttp2) -> None:
    for address in (None, "127.0.0.1"):
        origin = Origin("localhost", fake.port, address, str(fake.ca_file))
        for _ in range(3):
            assert (await http.post(origin, "/x", HEADERS, BODY, 10.0)).status == FORBIDDEN
    assert fake.connections_made == 2


async def test_idle_origins_are_closed(fake: FakePushServer) -> None:
    http = CurlHttp2(max_idle=3)
    for last in range(1, 9):  # eight origins: the whole of 127/8 is this machine
        origin = Origin("localhost", fake.port, "127.0.0.1", f"{fake.ca_file.parent}/{'./' * last}ca.pem")
        assert (await http.post(origin, "/x", HEADERS, BODY, 10.0)).status == FORBIDDEN
    assert fake.connections_made == 8
    await until(lambda: fake.connections <= 3)
    await http.close()


@pytest.mark.parametrize("warm", [False, True])
async def test_connection_that_ends_under_requests(
    fake: FakePushServer, http: CurlHttp2, origin: Origin, warm: bool
) -> None:
    """Closed in good order but without GOAWAY, as GOAWAY looks that comes before a stream was opened."""
    if warm:
        await http.post(origin, "/x", HEADERS, BODY, 10.0)
    fake.add_fault(Fault(action="drop", close=True, count=1))
    answers = await asyncio.gather(*(http.post(origin, "/x", HEADERS, BODY, 10.0) for _ in range(20)))
    assert [answer.status for answer in answers] == [FORBIDDEN] * 20
    assert fake.connections_made > 1


async def test_request_is_sent_again_once_only(fake: FakePushServer, http: CurlHttp2, origin: Origin) -> None:
    fake.add_fault(Fault(action="drop", close=True))
    with pytest.raises(NoAnswer) as caught:
        await http.post(origin, "/x", HEADERS, BODY, 10.0)
    assert caught.value.whole_origin
    assert fake.requests == 2


async def test_slow_origin_holds_up_only_its_own(fake: FakePushServer) -> None:
    http = CurlHttp2(max_in_flight=2)
    slow = Origin("localhost", fake.port, ca_file=str(fake.ca_file))
    fake.add_fault(Fault(action="silence", token="/slow"))
    stuck = [asyncio.ensure_future(http.post(slow, "/slow", HEADERS, BODY, 0.3)) for _ in range(6)]
    await asyncio.sleep(0)
    quick = Origin("127.0.0.1", fake.port, ca_file=str(fake.ca_file))
    for _ in range(5):
        assert (await http.post(quick, "/x", HEADERS, BODY, 10.0)).status == FORBIDDEN
    results = await asyncio.gather(*stuck, return_exceptions=True)
    assert all(isinstance(result, NoAnswer) for result in results)
    await http.close()


async def test_streams_are_spread_over_connections(
    fake: FakePushServer, http: CurlHttp2, origin: Origin
) -> None:
    """Each open stream is looked at whenever its connection can be read."""
    fake.add_fault(Fault(action="silence", token="/slow"))
    count = 2 * http2.MAX_STREAMS + 1
    slow = asyncio.gather(
        *(http.post(origin, "/slow", HEADERS, BODY, 60.0) for _ in range(count)), return_exceptions=True
    )
    await until(lambda: fake.requests == count)
    assert fake.connections == 3
    await http.close()
    assert all(isinstance(result, NoAnswer) for result in await slow)


async def test_answers_gather_when_many_streams_are_open(
    fake: FakePushServer, http: CurlHttp2, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(http2, "GATHER_PER_STREAM", 0.1 / http2.FEW_STREAMS)
    fake.add_fault(Fault(action="silence", token="/slow"))
    many = http2.FEW_STREAMS + 1
    slow = [asyncio.ensure_future(http.post(origin, "/slow", HEADERS, BODY, 60.0)) for _ in range(many)]
    await until(lambda: fake.requests == many)
    started = loop.time()
    answers = await asyncio.gather(*(http.post(origin, "/x", HEADERS, BODY, 10.0) for _ in range(50)))
    assert loop.time() - started > 0.1
    assert [answer.status for answer in answers] == [FORBIDDEN] * 50
    for push in slow:
        push.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_places_are_given_in_order_and_never_lost() -> None:
    limits, origin = OriginLimits(1), Origin("host", 1)
    deadline = asyncio.get_running_loop().time() + 5
    assert limits.take(origin)
    assert not limits.take(origin)
    waiters = [asyncio.ensure_future(limits.wait(origin, deadline)) for _ in range(3)]
    await asyncio.sleep(0)
    limits.release(origin)
    waiters[0].cancel()  # it has been given the place already
    await asyncio.gather(*waiters[:2], return_exceptions=True)
    assert waiters[0].cancelled()
    assert waiters[1].done()
    limits.release(origin)
    await waiters[2]
    with pytest.raises(NoAnswer):
        await limits.wait(origin, asyncio.get_running_loop().time())
    limits.release(origin)
    assert limits.take(origin)
