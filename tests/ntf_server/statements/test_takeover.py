"""Two daemons on one database share the topics, and when one is killed the other watches all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from ntf_demo.fake_push.faults import Fault
from ntf_demo.fake_push.server import wall_clock
from ntf_demo.statement_gateway import (
    GatewayWorld,
    gateway_parts,
    gateway_world,
    key_pair,
    signed_statement,
)
from ntf_server.statements import service
from store.leases import STATEMENTS, TOPIC_PARTS, Duty, Lease, of_topic, of_topic_part
from store.postgres_leases import PostgresLeases
from tests.ntf_server.statements.process import ALICE, DEVICES, daemon, of, register
from tests.postgres import PostgresCluster
from tests.waiting import DEADLINE, until

LEASE = 4.0
SENDERS = [key_pair(f"sender {number}") for number in range(8)]
"None of them has so many statements that a limit is met."
TOPICS = [bytes([number]) * 32 for number in range(40)]
MOST = 120
"Statements published while parts move: more of them would meet the limit of their senders."
TAKEN_OVER = 30.0
LONG = 600.0
"Seconds, of which a busy machine does not take so many."
_OWNER = "SELECT name FROM ntf.leases JOIN ntf.daemons ON daemon_id = owner WHERE duty = $1 AND id = $2"
_SHARES = """
SELECT array_agg(parts)
FROM (SELECT count(owner) AS parts FROM ntf.leases WHERE duty = $1 GROUP BY owner) shares
"""
_UNKNOWN = "SELECT count(*) FROM ntf.pending_statements"


async def test_the_watcher_is_killed(tmp_path: Path, postgres: PostgresCluster) -> None:
    assert await taken_over(tmp_path, postgres.new_database(), LEASE) < TAKEN_OVER


async def taken_over(folder: Path, url: str, lease_seconds: float) -> float:
    """Seconds from the watcher's death until what was published then reached every device; each push is made
    once, also that of which nobody knows whether it was."""
    async with gateway_parts(folder, postgres_url=url, call_max_age=LONG) as world:
        store = replace(world.config.STORE, lease_seconds=lease_seconds)
        world.config = replace(world.config, STORE=store)
        async with daemon(world, "one") as one, daemon(world, "two") as two:
            await until(lambda: _are_topics_shared(url))
            # One of the topics whose watcher is also the one that pushes.
            pusher = await _owner(url, STATEMENTS)
            owners = {topic: await _owner(url, of_topic(topic)) for topic in TOPICS}
            topic = next(topic for topic, owner in owners.items() if owner == pusher)
            watcher, other = (one, two) if pusher == "one" else (two, one)
            await register(world, other.port, topic)
            await until(lambda: world.node.subscriptions == 1)
            await world.node.submit(signed_statement(ALICE, topic, data=b"before"))
            await until(lambda: len(of(world, b"before")) == 3)
            await _outcomes_are_stored(url)
            for api in ("apns", "fcm"):
                world.push.add_fault(Fault(api=api, action="silence", processed=True))
            await world.node.submit(signed_statement(ALICE, topic, data=b"in flight"))
            await until(lambda: len(of(world, b"in flight")) == 3)
            watcher.process.kill()
            await watcher.process.wait()
            killed_at = wall_clock()
            world.push.clear_faults()
            await until(lambda: world.node.subscriptions == 0)
            await world.node.submit(signed_statement(ALICE, topic, data=b"while nobody watches"))
            await until(lambda: len(of(world, b"while nobody watches")) == 3)
            seconds = wall_clock() - killed_at
            await world.node.submit(signed_statement(ALICE, topic, data=b"after"))
            await until(lambda: len(of(world, b"after")) == 3)
            assert world.node.subscriptions == 1
    for data in (b"before", b"in flight", b"while nobody watches", b"after"):
        assert Counter(push.token for push in of(world, data)) == Counter(DEVICES.values())
    return seconds


async def test_leases_are_lost_for_a_moment(
    tmp_path: Path, postgres: PostgresCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after the start, before it is noted that the node is heard: calls ring all the same."""
    monkeypatch.setattr(service, "LISTENING_INTERVAL", LONG)
    async with gateway_world(tmp_path, postgres_url=postgres.new_database(), call_max_age=LONG) as world:
        bob = world.client("bob")
        for kind, token in DEVICES.items():
            await bob.allow(await bob.register(kind, token), (ALICE[0], TOPICS[0]))
        leases = world.server.store.ownership
        assert isinstance(leases, PostgresLeases)
        for part in range(TOPIC_PARTS):
            leases.refused(of_topic_part(part))
        await until(lambda: world.node.subscriptions == 0)
        await world.node.submit(signed_statement(ALICE, TOPICS[0], data=b"meanwhile"))
        await until(lambda: len(of(world, b"meanwhile")) == 3)


async def test_topics_move_between_daemons_while_statements_come(
    tmp_path: Path, postgres: PostgresCluster
) -> None:
    """A daemon joins and is killed: each statement is pushed once, whoever watches its topics."""
    url = postgres.new_database()
    settings = {"device_pushes_per_minute": 100_000, "call_max_age": 600.0}
    async with gateway_parts(tmp_path, postgres_url=url, **settings) as world:
        world.config = replace(world.config, STORE=replace(world.config.STORE, lease_seconds=LEASE))
        published = 0

        async def publish(count: int) -> None:
            """About topics that different daemons watch."""
            nonlocal published
            for _ in range(count):
                about = TOPICS[published % len(TOPICS)], TOPICS[(published * 7 + 1) % len(TOPICS)]
                sender = SENDERS[published % len(SENDERS)]
                await world.node.submit(signed_statement(sender, *about, data=b"number %d." % published))
                published += 1

        async with daemon(world, "one") as one:
            bob = world.client("bob", one.port)
            subscription = await bob.register("voip", DEVICES["voip"])
            await bob.allow(subscription, *((sender[0], topic) for sender in SENDERS for topic in TOPICS))
            await publish(20)
            await until(lambda: len(world.accepted) == published)
            async with daemon(world, "two") as two:
                while published < MOST and not await _are_topics_shared(url):
                    await publish(1)
                await until(lambda: _are_topics_shared(url))
                await until(lambda: _watchers(world) == dict.fromkeys(TOPICS, 1))
                assert len(world.node._clients) == 2
                await publish(20)
                await until(lambda: len(world.accepted) >= published)
                two.process.kill()
                await two.process.wait()
                await publish(20)
            await until(lambda: len(world.accepted) >= published)
            await until(lambda: _watchers(world) == dict.fromkeys(TOPICS, 1))
            await publish(20)
            await until(lambda: len(world.accepted) >= published)
        for number in range(published):
            assert len(of(world, b"number %d." % number)) == 1, number
        assert len(world.accepted) == published


def _watchers(world: GatewayWorld) -> dict[bytes, int]:
    """How many subscriptions name each topic."""
    filters = [wanted for client in world.node._clients for wanted in client.filters.values()]
    return dict(Counter(topic for wanted in filters for topic in wanted.topics))


async def _are_topics_shared(url: str) -> bool:
    return bool(await _ask(url, _SHARES, Duty.TOPICS) == [TOPIC_PARTS // 2] * 2)


async def _owner(url: str, lease: Lease) -> Any:
    return await _ask(url, _OWNER, lease.duty, lease.id)


async def _outcomes_are_stored(url: str) -> None:
    """A kill before that would have them pushed again."""
    async with asyncio.timeout(DEADLINE):
        while await _ask(url, _UNKNOWN):
            await asyncio.sleep(0.01)


async def _ask(url: str, sql: str, *arguments: object) -> Any:
    db = await asyncpg.connect(url)
    try:
        return await db.fetchval(sql, *arguments)
    finally:
        await db.close()
