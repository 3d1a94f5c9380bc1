"""Every endpoint, status and error of the gateway's API, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import re
import ssl
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ntf_demo.fake_push.certificates import make_certificates
from ntf_demo.statement_gateway import GatewayClient, GatewayWorld, gateway_parts, gateway_world, key_pair
from ntf_server.clock import SystemClock
from ntf_server.config import LimitsConfig, StatementsConfig
from ntf_server.limits import AddressLimits
from ntf_server.statements import http_server, listing
from ntf_server.statements.api import ADDRESS_SHARE, GatewayApi
from ntf_server.statements.bodies import MAX_REGISTRATION, most_rule_bytes
from ntf_server.statements.http_server import ADDRESS_PART, LONG_BODIES, SHORT_BODY
from ntf_server.statements.openapi import RULES, SPEC_PATH, SUBSCRIPTIONS, VERIFY
from ntf_server.statements.signed_requests import SCHEME, TOLERANCE
from store.interface import GatewayStore, StoreUnavailable
from tests.faults import StoreFaults, with_faults
from tests.waiting import until
from transport.budget import CpuBudget
from transport.limits import Rate

APNS = "a1" * 32
SENDER, TOPIC = "5e" * 32, "70" * 32
RULE = {"sender_pubkey": SENDER, "topic": TOPIC}
KEY = "ab" * 32
MAX_BODY = most_rule_bytes(3)
"With the limits of `world`."
LONG = 10 * SHORT_BODY


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with gateway_world(tmp_path, subscriptions_per_client=2, rules_per_subscription=3) as running:
        yield running


@pytest.fixture
def bob(world: GatewayWorld) -> GatewayClient:
    return world.client("bob")


def rules(subscription_id: str, *listed: dict[str, Any]) -> dict[str, Any]:
    return {"subscription_id": subscription_id, "rules": list(listed)}


def rule(number: int) -> dict[str, str]:
    return {"sender_pubkey": SENDER, "topic": f"{number:064x}"}


async def test_the_life_of_a_subscription(bob: GatewayClient) -> None:
    one = await bob.register("apns", APNS.upper())
    assert (await bob.ask("PUT", RULES, rules(one, rule(1)))) == (204, None)
    assert (await bob.ask("POST", RULES, rules(one, rule(2), rule(1)))) == (
        201,
        {"added": 1, "total_rules": 2},
    )
    assert (await bob.ask("DELETE", RULES, rules(one, rule(1), rule(3)))) == (
        200,
        {"removed": 1, "total_rules": 1},
    )
    status, (shown,) = await bob.ask("GET", SUBSCRIPTIONS)
    assert status == 200
    assert (shown["subscription_id"], shown["token"]) == (one, APNS)
    (made,) = shown["rules"]
    assert {name: made[name] for name in rule(2)} == rule(2)
    assert set(made) == {"id", "created_at", "state", *rule(2)}
    assert shown["notificationType"] == "apns"
    assert await bob.ask("DELETE", SUBSCRIPTIONS, {"subscription_ids": [one]}) == (204, None)
    assert await bob.ask("GET", SUBSCRIPTIONS) == (200, [])


async def test_a_token_is_registered_once(world: GatewayWorld, bob: GatewayClient) -> None:
    one = await bob.register("apns", APNS)
    asked = {"platform": "apns", "token": APNS}
    answer = await bob.ask("POST", SUBSCRIPTIONS, asked)
    assert answer == (409, {"error": "token_registered", "subscription_id": one})
    other = await world.client("mallory").ask("POST", SUBSCRIPTIONS, asked)
    assert other == (409, {"error": "token_registered"})


async def test_what_is_anothers_is_not_found(world: GatewayWorld, bob: GatewayClient) -> None:
    one = await bob.register("apns", APNS)
    mallory = world.client("mallory")
    for method in ("PUT", "POST", "DELETE"):
        answer = await mallory.ask(method, RULES, rules(one, RULE))
        assert (answer.status, answer.body["error"]) == (404, "unknown_subscription")
    ids = {"subscription_ids": [one]}
    assert (await mallory.ask("DELETE", SUBSCRIPTIONS, ids)).status == 404
    assert (
        await bob.ask("DELETE", SUBSCRIPTIONS, {"subscription_ids": [one, str(uuid.uuid4())]})
    ).status == 404
    assert (await mallory.ask("GET", SUBSCRIPTIONS)).body == []
    assert len((await bob.ask("GET", SUBSCRIPTIONS)).body) == 1


async def test_quotas(bob: GatewayClient) -> None:
    one = await bob.register("apns", APNS)
    await bob.register("voip", "b2" * 32)
    third = await bob.ask("POST", SUBSCRIPTIONS, {"platform": "fcm", "token": "t"})
    assert (third.status, third.body["error"]) == (403, "too_many")
    assert (await bob.ask("POST", RULES, rules(one, *map(rule, range(3))))).status == 201
    assert (await bob.ask("POST", RULES, rules(one, rule(4)))).status == 403
    assert (await bob.ask("PUT", RULES, rules(one, *map(rule, range(4))))).status == 400


BAD_REGISTRATIONS: list[Any] = [
    [],
    "text",
    {},
    {"token": APNS},
    {"notificationType": "sms", "token": APNS},
    {"notificationType": ["apns"], "token": APNS},
    {"notificationType": "apns", "platform": "fcm", "token": APNS},
    {"notificationType": "apns"},
    {"notificationType": "apns", "token": 5},
    {"notificationType": "apns", "token": ""},
    {"notificationType": "apns", "token": "xyz"},
    {"notificationType": "apns", "token": "ab cd"},
    {"notificationType": "apns", "token": "ab" * 101},
    {"notificationType": "apns", "token": APNS, "call": True},
    {"notificationType": "fcm", "token": ""},
    {"notificationType": "fcm", "token": "ü"},
    {"notificationType": "fcm", "token": "t" * 256},
    {"notificationType": "fcm", "token": "t", "call": 1},
    {"notificationType": "fcm", "token": "t", "more": 1},
]


@pytest.mark.parametrize("value", BAD_REGISTRATIONS, ids=range(len(BAD_REGISTRATIONS)))
async def test_registrations_that_are_none(bob: GatewayClient, value: Any) -> None:
    answer = await bob.ask("POST", SUBSCRIPTIONS, value)
    assert (answer.status, answer.body["error"]) == (400, "bad_request")
    assert answer.body["message"]


async def test_bodies_that_are_none(bob: GatewayClient) -> None:
    one = await bob.register("fcm", "t")
    bad: list[tuple[str, str, Any]] = [
        ("DELETE", SUBSCRIPTIONS, {"subscription_ids": []}),
        ("DELETE", SUBSCRIPTIONS, {"subscription_ids": "x"}),
        ("DELETE", SUBSCRIPTIONS, {"subscription_ids": [5]}),
        ("DELETE", SUBSCRIPTIONS, {"subscription_ids": ["{" + one + "}"]}),
        ("DELETE", SUBSCRIPTIONS, {"subscription_ids": [one.replace("-", "") + "----"]}),
        ("DELETE", SUBSCRIPTIONS, {"subscription_ids": ["\uff10" * 8 + one[8:]]}),
        *((method, RULES, {"rules": []}) for method in ("PUT", "POST", "DELETE")),
        ("PUT", RULES, rules(one, RULE, {"sender_pubkey": "0x" + SENDER, "topic": TOPIC.upper()})),
        ("PUT", RULES, rules(one, {"sender_pubkey": SENDER})),
        ("PUT", RULES, rules(one, {"sender_pubkey": SENDER, "topic": TOPIC[2:]})),
        ("PUT", RULES, rules(one, {"sender_pubkey": SENDER, "topic": TOPIC + "00"})),
        ("PUT", RULES, rules(one, {**RULE, "notify_type": "voip"})),
        ("PUT", RULES, {"subscription_id": one, "rules": {}}),
        ("PUT", RULES, {"subscription_id": one, "rules": [5]}),
    ]
    for method, path, value in bad:
        answer = await bob.ask(method, path, value)
        assert (answer.status, answer.body["error"]) == (400, "bad_request"), value
    right = json.dumps(rules(one, RULE)).encode()
    twice = right.replace(b'"topic"', b'"topic": 1, "topic"')
    for body in (b"", b"{", b"\xff", b"[" * 1500, twice, right.decode().encode("utf-16"), b"1" * 1500):
        headers = {"Authorization": bob.authorization("PUT", RULES, body)}
        assert (await bob.send("PUT", RULES, body, headers)).status == 400


async def test_other_methods_paths_and_sizes(bob: GatewayClient) -> None:
    assert await bob.ask("PATCH", SUBSCRIPTIONS) == (405, {"error": "method_not_allowed"})
    assert await bob.ask("GET", RULES) == (405, {"error": "method_not_allowed"})
    assert await bob.ask("GET", "/v1/other") == (404, {"error": "not_found"})
    assert await bob.send("PUT", RULES, bytes(MAX_BODY + 1), {}) == (413, {"error": "too_large"})


async def test_both_names_of_the_type(bob: GatewayClient) -> None:
    both = {"notificationType": "voip", "platform": "voip", "token": APNS}
    assert (await bob.ask("POST", SUBSCRIPTIONS, both)).status == 201
    assert (await bob.ask("GET", SUBSCRIPTIONS)).body[0]["notificationType"] == "voip"


async def test_headers_of_errors(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, requests_per_minute=1) as world, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{world.server.gateway_port}{SUBSCRIPTIONS}"
        async with session.get(url) as response:
            assert (response.status, response.headers["WWW-Authenticate"]) == (401, SCHEME)
        async with session.patch(url) as response:
            assert (response.status, response.headers["Allow"]) == (405, "DELETE,GET,POST")
        while response.status != 429:
            async with session.get(url) as response:
                continue
        assert response.headers["Retry-After"] == "60"


async def test_requests_that_prove_nothing(world: GatewayWorld, bob: GatewayClient) -> None:
    body = json.dumps({"platform": "fcm", "token": "t"}).encode()
    good = bob.authorization("POST", SUBSCRIPTIONS, body)
    mallory = world.client("mallory")
    scheme, _, rest = mallory.authorization("POST", SUBSCRIPTIONS, body).partition(" ")
    now = int(good.split(":")[1])
    refused = [
        {},
        {"Authorization": "Bearer x"},
        {"Authorization": bob.authorization("PUT", SUBSCRIPTIONS, body)},
        {"Authorization": bob.authorization("POST", RULES, body)},
        {"Authorization": bob.authorization("POST", SUBSCRIPTIONS + "?x=1", body)},
        {"Authorization": bob.authorization("POST", SUBSCRIPTIONS, body + b" ")},
        {"Authorization": bob.authorization("POST", SUBSCRIPTIONS, body, now - TOLERANCE - 30)},
        {"Authorization": bob.authorization("POST", SUBSCRIPTIONS, body, now + TOLERANCE + 30)},
        {"Authorization": f"{scheme} {bob.pair[0].hex()}:{rest.partition(':')[2]}"},
    ]
    for headers in refused:
        answer = await bob.send("POST", SUBSCRIPTIONS, body, headers)
        assert (answer.status, answer.body["error"]) == (401, "unauthenticated"), headers
    assert (await bob.send("POST", SUBSCRIPTIONS, body, {"Authorization": good})).status == 201
    again = await bob.send("POST", SUBSCRIPTIONS, body, {"Authorization": good})
    assert (again.status, again.body["error"]) == (401, "replayed")


async def test_the_document_is_served(bob: GatewayClient) -> None:
    answer = await bob.send("GET", SPEC_PATH, b"", {})
    assert answer.status == 200
    assert set(answer.body["paths"]) == {SUBSCRIPTIONS, VERIFY, RULES}


async def answer_to(world: GatewayWorld, sent: bytes) -> tuple[bytes, Any]:
    """The status line, and what stands in the body as JSON."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.server.gateway_port)
    writer.write(sent)
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"application/json" in head
    length = re.search(rb"Content-Length: (\d+)", head)
    assert length is not None
    body = await reader.readexactly(int(length[1]))
    writer.close()
    return head.partition(b"\r\n")[0].partition(b" ")[2], json.loads(body)


async def test_what_is_no_http_is_an_error_without_a_traceback(
    world: GatewayWorld, bob: GatewayClient, caplog: pytest.LogCaptureFixture
) -> None:
    lines = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
    for garbage in (
        b"\x00\xff\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        lines + b"X: \x00\r\n\r\n",
        lines + b"X: " + b"x" * 10_000 + b"\r\n\r\n",
        lines + b"X: x\r\n" * 1000 + b"\r\n",
        lines + b"Content-Length: -1\r\n\r\n",
        lines + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n",
    ):
        assert await answer_to(world, garbage) == (b"400 Bad Request", {"error": "bad_request"}), garbage
    assert not [record for record in caplog.records if record.exc_info]
    assert (await bob.ask("GET", SUBSCRIPTIONS)).status == 200


async def test_what_is_too_long_is_not_waited_for(world: GatewayWorld) -> None:
    most = MAX_REGISTRATION
    without_length = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    for begun in (head(most + 1), without_length + b"%x\r\n" % (2 * most) + bytes(most + 1)):
        status, body = await answer_to(world, begun)
        assert (status[:3], body) == (b"413", {"error": "too_large"})


async def test_what_nobody_expects(world: GatewayWorld) -> None:
    expecting = head(2).replace(b"Host: localhost", b"Host: localhost\r\nExpect: miracles")
    assert (await answer_to(world, expecting))[1] == {"error": "expectation_failed"}


def head(length: int) -> bytes:
    return f"POST {SUBSCRIPTIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


async def test_who_only_waits_is_let_go(world: GatewayWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SILENCE", 0.2)
    monkeypatch.setattr(http_server, "BODY_TIMEOUT", 0.2)
    for begun, answered in (
        (b"", b""),
        (b"GET / HT", b""),
        (head(10) + b"{", b"HTTP/1.1 408 Request Timeout"),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", world.server.gateway_port)
        writer.write(begun)
        assert (await reader.read()).partition(b"\r\n")[0] == answered
        writer.close()


async def test_who_does_not_take_a_long_answer_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    most = 20_000
    async with gateway_world(tmp_path, rules_per_subscription=most) as world:
        bob = world.client("bob")
        for number in range(4):  # more than the system buffers
            one = await bob.register("fcm", f"{number}")
            await bob.replace_rules(one, *((at.to_bytes(32, "big"), bytes(32)) for at in range(most)))

        async def begin() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            signed = f"Host: 127.0.0.1\r\nAuthorization: {bob.authorization('GET', SUBSCRIPTIONS, b'')}"
            reader, writer = await asyncio.open_connection("127.0.0.1", world.server.gateway_port, limit=1024)
            writer.write(f"GET {SUBSCRIPTIONS} HTTP/1.1\r\n{signed}\r\n\r\n".encode())
            await reader.readuntil(b"\r\n\r\n")  # and no more
            return reader, writer

        async def answers(status: int) -> bool:
            return (await bob.ask("GET", SUBSCRIPTIONS)).status == status

        _, writer = await begin()
        assert await answers(429)  # a second list at the same time
        writer.close()
        await until(partial(answers, 200))
        with monkeypatch.context() as patience:
            patience.setattr(listing, "SEND_TIMEOUT", 0.1)
            reader, writer = await begin()
        await until(partial(answers, 200))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(4 * most * len(json.dumps(RULE)))
        writer.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_who_goes_away_while_asking_is_no_error(
    world: GatewayWorld, bob: GatewayClient, caplog: pytest.LogCaptureFixture
) -> None:
    chunked = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"xyz\r\n"
    for begun in (head(10) + b"{", chunked):
        _, writer = await asyncio.open_connection("127.0.0.1", world.server.gateway_port)
        writer.write(begun)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    assert (await bob.ask("GET", SUBSCRIPTIONS)).status == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_body_does_not_unfold(bob: GatewayClient) -> None:
    body = gzip.compress(json.dumps({"platform": "apns", "token": APNS}).encode())
    signed = {"Authorization": bob.authorization("POST", SUBSCRIPTIONS, body)}
    answer = await bob.send("POST", SUBSCRIPTIONS, body, signed | {"Content-Encoding": "gzip"})
    assert answer == (400, {"error": "bad_request", "message": "the body is not JSON"})


def another_api(
    store: GatewayStore, config: StatementsConfig, *, most_connections: int = 0, reuse_port: bool = False
) -> GatewayApi:
    return GatewayApi(
        store,
        config,
        SystemClock(),
        os.urandom,
        addresses=AddressLimits(LimitsConfig()),
        budget=CpuBudget(),
        most_connections=most_connections,
        reuse_port=reuse_port,
    )


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(StoreUnavailable("away"), 503, "unavailable"), (RuntimeError("a mistake"), 500, "internal")],
)
async def test_what_fails_on_our_side(tmp_path: Path, error: Exception, status: int, code: str) -> None:
    asked = [
        ("add_gateway_subscription", "POST", SUBSCRIPTIONS, {"platform": "fcm", "token": "t"}),
        ("delete_gateway_subscriptions", "DELETE", SUBSCRIPTIONS, {"subscription_ids": [str(uuid.uuid4())]}),
        ("gateway_subscriptions", "GET", SUBSCRIPTIONS, None),
        *(
            ("edit_rules", method, RULES, rules(str(uuid.uuid4()), RULE))
            for method in ("PUT", "POST", "DELETE")
        ),
    ]
    faults = StoreFaults()
    async with gateway_parts(tmp_path) as world, world.serving() as app:
        api = another_api(with_faults(app.store, faults), replace(world.config.STATEMENTS, port=0))
        bob = world.client("bob", await api.open())
        try:
            for call, method, path, value in asked:
                faults.fail(call, error)
                assert await bob.ask(method, path, value) == (status, {"error": code}), (method, path)
        finally:
            await api.close()


async def test_connections_are_counted(tmp_path: Path) -> None:
    async with gateway_parts(tmp_path) as world, world.serving() as app:
        config = replace(world.config.STATEMENTS, port=0)
        api = another_api(app.store, config, most_connections=4 * ADDRESS_PART)
        port = await api.open()
        asked = b"GET " + SPEC_PATH.encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"

        async def answers() -> bool:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            opened.append(writer)
            writer.write(asked)
            with contextlib.suppress(ConnectionError):
                return (await reader.read(8)) == b"HTTP/1.1"
            return False

        opened: list[asyncio.StreamWriter] = []
        try:
            assert [await answers() for _ in range(6)] == [True] * 4 + [False] * 2
            opened[0].close()
            await until(answers)
        finally:
            for writer in opened:
                writer.close()
            await api.close()


async def test_long_bodies_are_counted(tmp_path: Path) -> None:
    """Whoever sends them is not known until they are there."""
    most = LONG_BODIES // ADDRESS_PART
    path = f"POST {SUBSCRIPTIONS}".encode(), f"PUT {RULES}".encode()
    async with gateway_parts(tmp_path) as world, world.serving() as app:
        api = another_api(app.store, replace(world.config.STATEMENTS, port=0))
        port = await api.open()

        async def begin(size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head(size).replace(*path) + bytes(min(size, SHORT_BODY + 1)))
            opened.append(writer)
            return reader, writer

        async def status(size: int) -> bytes:
            return (await (await begin(size))[0].readline())[9:12]

        async def so_many(count: int) -> bool:
            return api._bodies.long.total == count

        opened: list[asyncio.StreamWriter] = []
        try:
            for number in range(most):
                await begin(LONG)
                await until(partial(so_many, number + 1))
            assert (await status(LONG), await status(SHORT_BODY)) == (b"429", b"401")
            opened[0].close()
            await until(partial(so_many, most - 1))
            assert await status(SHORT_BODY + 1) == b"401"
        finally:
            for writer in opened:
                writer.close()
            await api.close()


async def test_bytes_of_bodies_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an address, whoever has signed them."""
    monkeypatch.setattr(http_server, "BODY_BYTES", Rate(per_second=1e-6, burst=2 * SHORT_BODY))
    async with gateway_world(tmp_path) as world:
        bob, alice = world.client("bob"), world.client("alice")
        body = bytes(SHORT_BODY)
        statuses = [(await one.send("PUT", RULES, body, {})).status for one in (bob, alice, bob)]
        assert statuses == [401, 401, 429]
        assert (await bob.ask("GET", SUBSCRIPTIONS)).status == 200


async def test_handshakes_are_counted(tmp_path: Path) -> None:
    """A connection counts when it is accepted, and until it has gone, however its handshake ends."""
    ca_file, server_file = make_certificates(tmp_path / "tls")
    context = ssl.create_default_context(cafile=ca_file)
    async with gateway_parts(tmp_path) as world, world.serving() as app:
        config = replace(world.config.STATEMENTS, port=0, cert_file=server_file, key_file=server_file)
        api = another_api(app.store, config, most_connections=4 * ADDRESS_PART)
        port = await api.open()

        async def shakes_hands() -> bool:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
                writer.close()
                return True
            return False

        async def is_refused(sent: bytes) -> bool:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
            return True

        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        try:
            assert await is_refused(b"")
            assert not await shakes_hands()
            silent.pop()[1].close()
            await until(shakes_hands)
            for _ in range(6):
                assert await is_refused(b"GET / HTTP/1.1\r\n\r\n")
            await until(shakes_hands)
        finally:
            for _, writer in silent:
                writer.close()
            await api.close()


async def test_a_client_that_asks_too_often(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, requests_per_minute=3) as world:
        bob = world.client("bob")
        statuses = [(await bob.ask("GET", f"{SUBSCRIPTIONS}?{number}")).status for number in range(4)]
        assert statuses == [200, 200, 200, 429]
        assert (await world.client("alice").ask("GET", SUBSCRIPTIONS)).status == 200
        for _ in range(60):
            last = await bob.send("GET", SUBSCRIPTIONS, b"", {})
        assert last == (429, {"error": "too_often"})


async def test_what_one_address_may_add(tmp_path: Path) -> None:
    """However many keys it makes."""
    async with gateway_parts(tmp_path) as world:
        limits = LimitsConfig(address_tokens_per_day=2, address_rules_per_day=3)
        world.config = replace(world.config, LIMITS=limits)
        async with world.serving():
            bob, alice, carol = map(world.client, ("bob", "alice", "carol"))
            one, two = await bob.register("fcm", "1"), await alice.register("fcm", "2")
            third = await carol.ask("POST", SUBSCRIPTIONS, {"platform": "fcm", "token": "3"})
            assert third == (429, {"error": "too_often"})
            assert (await bob.ask("PUT", RULES, rules(one, rule(1), rule(2)))).status == 204
            assert (await alice.ask("PUT", RULES, rules(two, rule(1), rule(2)))).status == 429
            assert (await alice.ask("POST", RULES, rules(two, rule(1)))).status == 201
            assert (await alice.ask("DELETE", RULES, rules(two, rule(1)))).status == 200


async def test_a_proxy_names_the_client(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, client_header="X-Client") as world:
        bob = world.client("bob")
        body = json.dumps({"platform": "fcm", "token": "t"}).encode()
        for headers in ({}, {"X-Client": "ab"}, {"X-Client": "x" * 64}):
            assert (await bob.send("POST", SUBSCRIPTIONS, body, headers)).status == 401
        assert (await bob.ask("GET", SUBSCRIPTIONS)).status == 401  # a signature is not what it trusts
        named = {"X-Client": KEY}
        assert (await bob.send("POST", SUBSCRIPTIONS, body, named)).status == 201
        assert len((await bob.send("GET", SUBSCRIPTIONS, b"", named)).body) == 1


async def test_the_clients_of_a_proxy_have_no_limit_in_common(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, client_header="X-Client", requests_per_minute=1) as world:
        bob = world.client("bob")
        for number in range(2 * ADDRESS_SHARE):
            named = {"X-Client": f"{number:064x}"}
            assert (await bob.send("GET", SUBSCRIPTIONS, b"", named)).status == 200
        assert (await bob.send("GET", SUBSCRIPTIONS, b"", named)).status == 429


async def test_tls(tmp_path: Path) -> None:
    ca_file, server_file = make_certificates(tmp_path / "tls")
    async with gateway_world(tmp_path, cert_file=server_file, key_file=server_file) as world:
        context = ssl.create_default_context(cafile=ca_file)
        url = f"https://127.0.0.1:{world.server.gateway_port}"
        connector = aiohttp.TCPConnector(ssl=context)
        async with aiohttp.ClientSession(connector=connector) as session:
            client = GatewayClient(session, url, key_pair("bob"))
            assert (await client.ask("GET", SUBSCRIPTIONS)) == (200, [])
        with pytest.raises(aiohttp.ClientError):
            await world.client("bob").ask("GET", SUBSCRIPTIONS)


async def test_daemons_of_one_machine_share_the_port(tmp_path: Path) -> None:
    async with gateway_parts(tmp_path) as world:
        world.config = replace(world.config, TRANSPORT=replace(world.config.TRANSPORT, reuse_port=True))
        async with world.serving() as first:
            config = replace(world.config.STATEMENTS, port=first.gateway_port)
            second = another_api(first.store, config, reuse_port=True)
            try:
                assert await second.open() == first.gateway_port
            finally:
                await second.close()
