"""The gateway from a client's request to a push, over real HTTP, WebSocket and HTTP/2."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ntf_demo.fake_push.faults import Fault
from ntf_demo.fake_push.recorder import RecordedPush
from ntf_demo.statement_gateway import GatewayWorld, gateway_parts, gateway_world, key_pair, signed_statement
from ntf_server.clock import SystemClock
from ntf_server.statements.payloads import APNS_LIMIT, FCM_LIMIT, VOIP_LIMIT
from ntf_server.statements.pipeline import DROPPED, LIMITED, REPEATED
from protocol.statements import Signed, decode_statement, statement_hash
from store.statement_rate import COOL_DOWN, LIMIT, WINDOW
from tests.waiting import until

DEADLINE = 40.0
APNS, VOIP, FCM = "a1" * 32, "b2" * 32, "fcm:token"
ALICE, BOB = key_pair("alice"), key_pair("bob")
T1, T2 = b"1" * 32, b"2" * 32


async def pushed(world: GatewayWorld, count: int) -> list[RecordedPush]:
    await until(lambda: len(world.accepted) >= count)
    return world.accepted


def body(push: RecordedPush) -> Any:
    return json.loads(push.body)


async def test_a_statement_reaches_all_devices_of_a_client(tmp_path: Path, postgres_url: str) -> None:
    async with gateway_world(tmp_path, postgres_url=postgres_url) as world:
        bob = world.client("bob")
        ids = [
            await bob.register("apns", APNS),
            await bob.register("voip", VOIP),
            await bob.register("fcm", FCM, call=True),
        ]
        for one in ids:
            await bob.allow(one, (ALICE[0], T1), (ALICE[0], T2))
        statement = signed_statement(ALICE, T1, T2, data=b"hello")
        await world.node.submit(statement)
        pushes = {push.token: push for push in await pushed(world, 3)}
        assert len(world.accepted) == 3
        decoded = decode_statement(statement)
        assert isinstance(decoded.proof, Signed)
        told = {
            "data": b"hello".hex(),
            "topic": T1.hex(),
            "sender_pubkey": ALICE[0].hex(),
            "signature": decoded.proof.signature.hex(),
            "expiry": str(decoded.expiry),
        }

        alert = pushes[APNS]
        assert body(alert) == {
            "aps": {"alert": {"title": "Notification"}, "mutable-content": 1},
            "statement": told,
            "truncated": False,
            "notify_type": "alert",
        }
        assert (alert.headers["apns-push-type"], alert.headers["apns-priority"]) == ("alert", "10")
        assert alert.headers["apns-collapse-id"] == statement_hash(statement).hex()

        call = pushes[VOIP]
        assert body(call) == {"aps": {}, "statement": told, "truncated": False, "notify_type": "voip"}
        assert call.headers["apns-topic"] == alert.headers["apns-topic"] + ".voip"
        assert (call.headers["apns-push-type"], call.headers["apns-priority"]) == ("voip", "10")
        assert call.headers["apns-expiration"] == "0"

        message = body(pushes[FCM])["message"]
        assert message["android"] == {"priority": "high", "ttl": "0s"}
        assert message["data"] == {
            "statement_data": b"hello".hex(),
            "statement_topic": T1.hex(),
            "sender_pubkey": ALICE[0].hex(),
            "statement_signature": decoded.proof.signature.hex(),
            "statement_expiry": str(decoded.expiry),
            "truncated": "false",
            "notify_type": "voip",
        }


async def test_forged_and_unknown_senders_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_world(tmp_path) as world:
        forgeries = DROPPED.labels("forged")._value.get()
        bob = world.client("bob")
        await bob.allow(await bob.register("apns", APNS), (ALICE[0], T1))
        genuine = signed_statement(ALICE, T1, data=b"genuine")
        forged = bytearray(genuine)
        forged[-1] ^= 1
        for encoded in (bytes(forged), signed_statement(key_pair("mallory"), T1)):
            await world.node.submit(encoded)
        await world.node.submit(signed_statement(ALICE, T2))
        await world.node.submit(signed_statement(ALICE, T1, expires_at=1))
        await world.node.submit(genuine)
        (push,) = await pushed(world, 1)
        assert body(push)["statement"]["data"] == b"genuine".hex()
        assert DROPPED.labels("forged")._value.get() == forgeries + 1
        assert [record.message for record in caplog.records if "forged" in record.message] == [
            "1 statements with forged signatures were dropped"
        ]


def payload_of(push: RecordedPush, *, with_proof: bool = True) -> bytes:
    """What counts for the limit: all for Apple; for Google the message, but for its address."""
    message = body(push)
    statement = message.get("statement")
    if push.api != "apns":
        message = message["message"]
        statement = message["data"]
        del message["token"]
    if not with_proof:
        for name in ("signature", "expiry", "statement_signature", "statement_expiry"):
            statement.pop(name, None)
    return json.dumps(message, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("kind", "token", "limit"),
    [("apns", APNS, APNS_LIMIT), ("voip", VOIP, VOIP_LIMIT), ("fcm", FCM, FCM_LIMIT)],
)
async def test_the_longest_statement_that_fits(tmp_path: Path, kind: str, token: str, limit: int) -> None:
    """With its signature, without it, and neither."""
    async with gateway_world(tmp_path) as world:
        bob = world.client("bob")
        await bob.allow(await bob.register(kind, token), (ALICE[0], T1))
        await world.node.submit(signed_statement(ALICE, T1, data=b""))
        (empty,) = await pushed(world, 1)
        most = (limit - len(payload_of(empty, with_proof=False))) // 2
        most_signed = (limit - len(payload_of(empty))) // 2
        for size in (most_signed, most_signed + 1, most, most + 1):
            await world.node.submit(signed_statement(ALICE, T1, data=bytes(size)))
        signed, bare, longest, cut = (await pushed(world, 5))[1:]
        for fits in (signed, longest):
            assert limit - 1 <= len(payload_of(fits)) <= limit
        assert ["signature" in push.body for push in (signed, bare, longest, cut)] == [True, *[False] * 3]
        assert (bytes(most).hex() in longest.body, bytes(most_signed).hex() in cut.body) == (True, False)


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at = float(int(SystemClock().now()))

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return SystemClock().monotonic()


async def test_the_limit_to_the_millisecond_and_over_a_restart(tmp_path: Path) -> None:
    clock = Hand()
    start = clock.at

    async def limited(world: GatewayWorld, data: bytes, count: int) -> None:
        before = LIMITED._value.get()
        await world.node.submit(signed_statement(ALICE, T1, data=data))
        await until(lambda: LIMITED._value.get() == before + count)

    async with gateway_parts(tmp_path) as world:
        async with world.serving(clock):
            bob = world.client("bob")
            await bob.allow(await bob.register("apns", APNS), (ALICE[0], T1))
            for number in range(LIMIT):
                await world.node.submit(signed_statement(ALICE, T1, data=b"%d" % number))
            await pushed(world, LIMIT)
            clock.at = start + WINDOW - 0.001
            await limited(world, b"a millisecond too early", 1)
        silent_until = clock.at + COOL_DOWN
        clock.at = silent_until - 0.001
        subscribed, before = world.node.subscribed, REPEATED._value.get()
        async with world.serving(clock):
            await until(lambda: world.node.subscribed > subscribed)
            # What was dropped before the restart is dropped.
            await until(lambda: REPEATED._value.get() == before + LIMIT + 1)
            await limited(world, b"still silent", 1)
            clock.at = silent_until
            await world.node.submit(signed_statement(ALICE, T1, data=b"in time"))
            await pushed(world, LIMIT + 1)
    assert len(world.accepted) == LIMIT + 1
    assert b"in time".hex() in world.accepted[-1].body


async def test_room_for_one_when_the_first_leaves_the_window(tmp_path: Path) -> None:
    clock = Hand()
    async with gateway_parts(tmp_path) as world, world.serving(clock):
        bob = world.client("bob")
        await bob.allow(await bob.register("apns", APNS), (ALICE[0], T1))
        for number in range(LIMIT):
            await world.node.submit(signed_statement(ALICE, T1, data=b"%d" % number))
        await pushed(world, LIMIT)
        clock.at += WINDOW
        await world.node.submit(signed_statement(ALICE, T1, data=b"next"))
        await pushed(world, LIMIT + 1)
        assert b"next".hex() in world.accepted[-1].body


async def test_a_statement_that_is_too_long_is_fetched_by_the_app(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        bob = world.client("bob")
        await bob.allow(await bob.register("apns", APNS), (ALICE[0], T1))
        await world.node.submit(signed_statement(ALICE, T1, data=bytes(10_000)))
        (push,) = await pushed(world, 1)
        assert (body(push)["truncated"], body(push)["statement"]["data"]) == (True, None)
        assert body(push)["aps"]["content-available"] == 1


async def test_replays_restarts_and_changes_of_rules_push_nothing_twice(tmp_path: Path) -> None:
    async with gateway_parts(tmp_path) as world:
        node = world.node
        async with world.serving():
            bob = world.client("bob")
            one = await bob.register("apns", APNS)
            await bob.allow(one, (ALICE[0], T1))
            await node.submit(signed_statement(ALICE, T1, data=b"1"))
            await pushed(world, 1)
            subscribed = node.subscribed
            await node.drop_clients()
            await until(lambda: node.subscribed > subscribed)
            await bob.allow(one, (ALICE[0], T1), (ALICE[0], T2))
            await node.submit(signed_statement(ALICE, T2, data=b"2"))
            await pushed(world, 2)
        await node.submit(signed_statement(ALICE, T1, data=b"3"))  # while the server is away
        async with world.serving():
            await pushed(world, 3)
            await node.submit(signed_statement(ALICE, T1, data=b"4"))
            pushes = await pushed(world, 4)
    assert [bytes.fromhex(body(push)["statement"]["data"]) for push in pushes] == [b"1", b"2", b"3", b"4"]


async def test_a_rule_taken_back_silences_its_sender_only(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        bob = world.client("bob")
        one = await bob.register("apns", APNS)
        await bob.allow(one, (ALICE[0], T1), (BOB[0], T1))
        await bob.allow(one, (BOB[0], T1))
        await world.node.submit(signed_statement(ALICE, T1, data=b"no"))
        await world.node.submit(signed_statement(BOB, T1, data=b"yes"))
        (push,) = await pushed(world, 1)
        assert body(push)["statement"]["data"] == b"yes".hex()


async def test_a_loud_sender_is_silenced(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        bob = world.client("bob")
        await bob.allow(await bob.register("apns", APNS), (ALICE[0], T1), (BOB[0], T2))
        for number in range(LIMIT + 5):
            await world.node.submit(signed_statement(ALICE, T1, data=b"%d" % number))
        await world.node.submit(signed_statement(BOB, T2, data=b"calm"))
        await until(lambda: any(b"calm".hex() in push.body for push in world.accepted))
        await pushed(world, LIMIT + 1)
        assert len(world.accepted) == LIMIT + 1


async def test_a_device_that_is_gone_loses_its_subscription(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        bob = world.client("bob")
        await bob.allow(await bob.register("apns", "abc0"), (ALICE[0], T1))
        world.push.add_fault(Fault(status=410, reason="Unregistered"))
        await world.node.submit(signed_statement(ALICE, T1))

        async def gone() -> bool:
            return bool((await bob.ask("GET", "/v1/subscriptions")).body == [])

        async with asyncio.timeout(DEADLINE):
            while not await gone():
                await asyncio.sleep(0.05)
