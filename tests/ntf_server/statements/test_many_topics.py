"""10,000 topics by way of the API: watched in subscriptions of at most 128, balanced as rules change."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

from ntf_demo.statement_gateway import GatewayWorld, gateway_parts, key_pair, signed_statement
from ntf_server.config import LimitsConfig
from ntf_server.statements.openapi import RULES
from ntf_server.statements.topic_groups import MAX_GROUP
from tests.ntf_server.statements.builders import topic
from tests.ntf_server.statements.process import of
from tests.waiting import until

TOPICS = 10_000
GROUPS = -(-TOPICS // MAX_GROUP)
ALICE = key_pair("alice")


async def test_topics_of_rules_are_watched_and_balanced(tmp_path: Path) -> None:
    async with gateway_parts(tmp_path, rules_per_subscription=TOPICS, topics_per_day=0) as world:
        world.config = replace(world.config, LIMITS=LimitsConfig(address_topics_per_day=0))
        async with world.serving():
            await watched_and_balanced(world)


async def watched_and_balanced(world: GatewayWorld) -> None:
    node, bob = world.node, world.client("bob")
    one = await bob.register("apns", "a1" * 32)
    await bob.replace_rules(one, *((ALICE[0], topic(number)) for number in range(TOPICS)))
    await settled(world, one)
    assert len(node.watched) == TOPICS
    assert node.subscriptions == GROUPS
    subscribed = node.subscribed

    async def edit(method: str, number: int) -> None:
        rule = {"sender_pubkey": ALICE[0].hex(), "topic": topic(number).hex()}
        answer = await bob.ask(method, RULES, {"subscription_id": one, "rules": [rule]})
        assert answer.status < 300

    await edit("DELETE", 0)
    await edit("POST", TOPICS)
    wanted = {topic(number) for number in range(1, TOPICS + 1)}
    await until(lambda: node.watched == wanted and node.subscriptions == GROUPS)
    await settled(world, one)
    # One group lost a topic, one got one; twice if the two changes were seen apart. And one for the new rule.
    assert node.subscribed - subscribed <= 5
    for number in (0, 1, TOPICS // 2, TOPICS):
        await node.submit(signed_statement(ALICE, topic(number), data=b"about %d." % number))
    for number in (1, TOPICS // 2, TOPICS):
        await until(lambda: len(of(world, b"about %d." % number)) == 1)  # noqa: B023
    assert len(world.accepted) == 3
    await bob.allow(one, *((ALICE[0], topic(number)) for number in range(0, TOPICS, 100)))
    few = {topic(number) for number in range(0, TOPICS, 100)}
    await until(lambda: node.watched == few and node.subscriptions <= 2)  # half full at least
    await settled(world, one)
    assert len(world.accepted) == 3  # the node had the statement about topic 0 before its rule
    await node.submit(signed_statement(ALICE, topic(0), data=b"more about 0."))
    await until(lambda: len(of(world, b"more about 0.")) == 1)
    assert len(world.accepted) == 4


async def settled(world: GatewayWorld, subscription: str) -> None:
    """Return when the node was asked what it has stored for all rules."""

    async def is_settled() -> bool:
        return not await world.server.store.has_new_rules(uuid.UUID(subscription).bytes)

    await until(is_settled)
