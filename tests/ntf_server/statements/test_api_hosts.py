"""Whom the gateway answers to, and how many topics clients may add."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from ntf_demo.statement_gateway import GatewayClient, gateway_parts, gateway_world, key_pair
from ntf_server.config import LimitsConfig
from ntf_server.statements.openapi import RULES, SUBSCRIPTIONS
from tests.ntf_server.statements.test_api import answer_to, rule, rules
from tests.waiting import until


@pytest.mark.parametrize(
    ("hosts", "named", "status"),
    [
        ((), "127.0.0.1:8443", 401),
        ((), "LOCALHOST", 401),
        ((), "gateway.example", 421),
        ((), "127.0.0.2", 421),
        ((), "", 421),
        (("gateway.example", "[2001:db8::1]"), "Gateway.Example.:443", 401),
        (("gateway.example", "[2001:db8::1]"), "[2001:DB8::1]:443", 401),
        (("gateway.example",), "127.0.0.1", 421),
        (("gateway.example",), "gateway.example.evil.example", 421),
    ],
)
async def test_requests_for_another_gateway(
    tmp_path: Path, hosts: tuple[str, ...], named: str, status: int
) -> None:
    """A page of another site that resolves its own name to this machine gets nothing (DNS rebinding)."""
    async with gateway_world(tmp_path, hosts=hosts) as world:
        asked = f"GET {SUBSCRIPTIONS} HTTP/1.1\r\nHost: {named}\r\n\r\n".encode()
        answer, body = await answer_to(world, asked)
        assert (int(answer[:3]), body["error"]) == (
            status,
            {401: "unauthenticated", 421: "wrong_host"}[status],
        )


async def test_two_host_names_are_none(tmp_path: Path) -> None:
    asked = f"GET {SUBSCRIPTIONS} HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n".encode()
    async with gateway_world(tmp_path) as world:
        assert (await answer_to(world, asked))[0][:3] == b"400"


async def test_a_request_that_was_signed_for_another_gateway(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, hosts=("one.example", "two.example")) as world:
        async with aiohttp.ClientSession() as session:
            elsewhere = GatewayClient(session, "https://two.example", key_pair("bob"))
            signed = {"Authorization": elsewhere.authorization("GET", SUBSCRIPTIONS, b"")}
        bob = world.client("bob")
        for host, status in (("one.example", 401), ("two.example", 200)):
            assert (await bob.send("GET", SUBSCRIPTIONS, b"", signed | {"Host": host})).status == status


async def test_new_topics_of_a_client(tmp_path: Path) -> None:
    """Topics that the gateway watches anyway cost nothing; what is refused or known is given back."""
    async with gateway_world(tmp_path, topics_per_day=2) as world:
        bob, alice = world.client("bob"), world.client("alice")
        one, two = await bob.register("fcm", "1"), await alice.register("fcm", "2")
        three_rules = rules(one, rule(1), rule(2), rule(3))
        refused = await bob.ask("PUT", RULES, three_rules)
        assert (refused.status, refused.body["error"]) == (429, "too_many_topics")
        for _ in range(3):
            assert (await bob.ask("PUT", RULES, rules(one, rule(1), rule(2)))).status == 204
        assert (await bob.ask("POST", RULES, rules(one, rule(3)))).status == 429
        assert (await alice.ask("PUT", RULES, rules(two, rule(2), rule(3), rule(4)))).status == 204
        assert (await alice.ask("POST", RULES, rules(two, rule(5)))).status == 429
        assert (await bob.ask("PUT", RULES, three_rules)).status == 204
        wanted = {bytes.fromhex(rule(number)["topic"]) for number in range(1, 5)}
        await until(lambda: world.node.watched == wanted)


async def test_new_topics_of_an_address(tmp_path: Path) -> None:
    """However many keys it makes, and however many requests at once."""
    async with gateway_parts(tmp_path) as world:
        world.config = replace(world.config, LIMITS=LimitsConfig(address_topics_per_day=5))
        async with world.serving():
            clients = [world.client(f"{number}") for number in range(6)]
            made = [await client.register("fcm", str(n)) for n, client in enumerate(clients)]
            answers = await asyncio.gather(
                *(
                    client.ask("PUT", RULES, rules(one, rule(2 * n), rule(2 * n + 1)))
                    for n, (client, one) in enumerate(zip(clients, made, strict=True))
                )
            )
            assert sorted(answer.status for answer in answers) == [204] * 2 + [429] * 4
            assert (await clients[0].ask("POST", RULES, rules(made[0], rule(100)))).status == 201
            assert (await clients[1].ask("POST", RULES, rules(made[1], rule(101)))).status == 429
