"""Devices that anybody can register: what they cost others, and how their owners get them back."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

from ntf_demo.fake_push.faults import Fault
from ntf_demo.statement_gateway import GatewayWorld, gateway_parts, gateway_world, key_pair, signed_statement
from ntf_server.config import FcmConfig
from ntf_server.push.lanes import BreakerState
from ntf_server.push.outcomes import STATEMENT_DEVICES_GONE
from ntf_server.push.provider import Destination
from ntf_server.statements.openapi import SUBSCRIPTIONS, VERIFY
from ntf_server.statements.pipeline import DEVICE_LIMITED
from protocol.device_token import Provider
from tests.waiting import DEADLINE, until

TOPIC = b"1" * 32
FOREIGN, HONEST = 40, 3
VICTIM = "a1" * 32


async def test_tokens_of_a_foreign_project_stop_nobody(tmp_path: Path) -> None:
    """Forty of them and one statement: each is asked about once, then it is gone."""
    async with gateway_parts(tmp_path) as world:
        for number in range(FOREIGN):
            token = f"foreign:{number}"
            world.push.add_fault(Fault(api="fcm", token=token, status=403, reason="SENDER_ID_MISMATCH"))
        async with world.serving():
            alice = key_pair("alice")
            mallory = replace(world.client("mallory"))
            before = STATEMENT_DEVICES_GONE._value.get()
            for number in range(FOREIGN):
                client = world.client(f"mallory {number // 20}")
                await client.allow(
                    await client.register("fcm", f"foreign:{number}"), (mallory.pair[0], TOPIC)
                )
            await world.node.submit(signed_statement(mallory.pair, TOPIC, data=b"attack"))
            await until(lambda: STATEMENT_DEVICES_GONE._value.get() == before + FOREIGN)
            for number in range(HONEST):
                bob = world.client(f"bob {number}")
                await bob.allow(await bob.register("fcm", f"honest:{number}"), (alice[0], TOPIC))
            await world.node.submit(signed_statement(alice, TOPIC, data=b"honest"))
            await until(lambda: len(world.accepted) == HONEST)
            state = world.server.dispatcher._scheduler.breaker_state(Destination(Provider.FCM))
            assert state is BreakerState.CLOSED
        async with world.serving():
            await world.node.submit(signed_statement(alice, TOPIC, data=b"after a restart"))
            await until(lambda: len(world.accepted) == 2 * HONEST)
        assert sum("foreign:" in push.token for push in world.push.pushes) == FOREIGN


async def test_a_provider_that_refuses_us_drops_nothing_of_a_new_device(tmp_path: Path) -> None:
    """A device that never took a push, while our key is refused: its push is made when the key is right."""
    async with gateway_world(tmp_path) as world:
        alice, bob = key_pair("alice"), world.client("bob")
        await bob.allow(await bob.register("fcm", "honest:1"), (alice[0], TOPIC))
        world.push.add_fault(Fault(api="fcm", status=401, reason="UNAUTHENTICATED", count=4))
        await world.node.submit(signed_statement(alice, TOPIC, data=b"patience"))
        await until(lambda: len(world.accepted) == 1)


async def test_a_dozen_senders_do_not_flood_a_device(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, device_pushes_per_minute=40) as world:
        mallory = world.client("mallory")
        senders = [key_pair(f"sender {number}") for number in range(12)]
        one = await mallory.register("voip", VICTIM)
        await mallory.allow(one, *((sender[0], TOPIC) for sender in senders))
        before = DEVICE_LIMITED._value.get()
        for number in range(10):
            for sender in senders:
                await world.node.submit(signed_statement(sender, TOPIC, data=b"%d" % number))
        await until(lambda: DEVICE_LIMITED._value.get() + len(world.accepted) == before + 120)
        assert len(world.accepted) <= 80  # a minute may end meanwhile
        assert DEVICE_LIMITED._value.get() - before >= 40


async def code_pushed_to(world: GatewayWorld, token: str, count: int) -> str:
    """The code of the newest push to the device."""
    await until(lambda: len([push for push in world.accepted if push.token == token]) == count)
    push = [push for push in world.accepted if push.token == token][-1]
    body = json.loads(push.body)
    if push.api == "fcm":
        return str(body["message"]["data"]["verification_code"])
    return str(body["verification"]["code"])


async def test_the_owner_takes_a_device_over(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, verify_devices=True) as world:
        alice, thief, owner = key_pair("alice"), world.client("thief"), world.client("owner")
        theirs = await thief.register("apns", VICTIM)
        stolen = await code_pushed_to(world, VICTIM, 1)  # the thief had the phone in hand once
        answer = await thief.ask("POST", VERIFY, {"subscription_id": theirs, "code": stolen})
        assert (answer.status, answer.body) == (200, {"subscription_id": theirs, "state": "active"})
        await thief.allow(theirs, (alice[0], TOPIC))

        answer = await owner.ask("POST", SUBSCRIPTIONS, {"notificationType": "apns", "token": VICTIM})
        assert (answer.status, answer.body["state"]) == (201, "pending")
        mine = answer.body["subscription_id"]
        (shown,) = (await owner.ask("GET", SUBSCRIPTIONS)).body
        assert (shown["state"], shown["subscription_id"], shown["rules"]) == ("pending", mine, [])
        wrong = await owner.ask("POST", VERIFY, {"subscription_id": mine, "code": stolen})
        assert (wrong.status, wrong.body["error"]) == (403, "wrong_code")
        code = await code_pushed_to(world, VICTIM, 2)
        assert (await owner.ask("POST", VERIFY, {"subscription_id": mine, "code": code})).status == 200
        assert (await thief.ask("GET", SUBSCRIPTIONS)).body == []
        await world.node.submit(signed_statement(alice, TOPIC, data=b"of the thief"))
        await owner.allow(mine, (alice[0], TOPIC))
        await world.node.submit(signed_statement(alice, TOPIC, data=b"of the owner"))
        await until(lambda: len(world.accepted) == 3)
        assert b"of the owner".hex() in world.accepted[-1].body


async def test_a_device_gets_nothing_before_it_showed_its_code(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, verify_devices=True) as world:
        mallory = world.client("mallory")
        one = await mallory.register("fcm", "victim:1")
        assert await code_pushed_to(world, "victim:1", 1)
        rules = [{"sender_pubkey": key_pair("alice")[0].hex(), "topic": TOPIC.hex()}]
        asked = {"subscription_id": one, "rules": rules}
        answer = await mallory.ask("PUT", "/v1/subscriptions/rules", asked)
        assert answer.status == 404
        codes = 1
        while (
            await mallory.ask("POST", SUBSCRIPTIONS, {"platform": "fcm", "token": "victim:1"})
        ).status == 201:
            codes += 1
        assert codes == world.config.LIMITS.device_verifications_per_hour


async def test_a_provider_that_is_not_configured_is_told(tmp_path: Path) -> None:
    async with gateway_parts(tmp_path) as world:
        world.config = replace(world.config, FCM=FcmConfig())
        async with world.serving():
            bob = world.client("bob")
            answer = await bob.ask("POST", SUBSCRIPTIONS, {"notificationType": "fcm", "token": "honest:1"})
            assert (answer.status, answer.body) == (422, {"error": "provider_not_configured"})
            assert (await bob.ask("GET", SUBSCRIPTIONS)).body == []
            assert await bob.register("apns", VICTIM)


async def test_a_device_that_is_gone_has_no_code(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, verify_devices=True) as world:
        world.push.add_fault(Fault(status=410, reason="Unregistered"))
        bob = world.client("bob")
        await bob.register("apns", VICTIM)
        async with asyncio.timeout(DEADLINE):
            while (await bob.ask("GET", SUBSCRIPTIONS)).body:
                await asyncio.sleep(0.02)
