"""Topics of statements are shared by the daemons whose gateway is on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from store.interface import LeaseLost
from store.leases import GATEWAY, PUSH, PUSH_STATEMENTS, TOPIC_PARTS, Duty, Notice, of_topic
from store.records import TokenKey
from store.statement_records import PushKey, ReceivedStatement
from tests.postgres import PostgresCluster
from tests.store.test_leases import World, balanced, owned


@pytest.fixture
async def world(postgres: PostgresCluster) -> AsyncIterator[World]:
    made = World(postgres.new_database())
    yield made
    await made.close()


async def test_topics_are_shared_by_the_daemons_with_a_gateway(world: World) -> None:
    first, _ = await world.daemon("first"), await world.daemon("without", frozenset(Duty) - GATEWAY)
    await balanced(first)
    assert owned(first, Duty.TOPICS) == set(range(TOPIC_PARTS))
    second = await world.daemon("second")
    await balanced(first, second)
    assert len(owned(first, Duty.TOPICS)) == len(owned(second, Duty.TOPICS)) == TOPIC_PARTS // 2
    assert not owned(first, Duty.TOPICS) & owned(second, Duty.TOPICS)
    await first.leases.leave()
    await balanced(second)
    assert owned(second, Duty.TOPICS) == set(range(TOPIC_PARTS))


async def test_one_watched_topic_is_enough_to_accept_a_statement(world: World) -> None:
    """Another daemon watches its other topic, and decides the same."""
    first, second = await world.daemon("first"), await world.daemon("second")
    await balanced(first, second)
    topics = {first.leases.owns(of_topic(bytes([at]) * 32)): bytes([at]) * 32 for at in range(64)}
    came = ReceivedStatement(b"h" * 32, b"s" * 32, (topics[False], topics[True]), b"", 2**31)
    for store in (first, second):
        assert (await store.accept_statements([came], 1.0)).pushes == []
    only = came._replace(topics=(topics[False],))
    with pytest.raises(LeaseLost):
        await first.accept_statements([only], 1.0)


async def test_pushes_of_statements_are_told_to_others(world: World) -> None:
    first, second = await world.daemon("first"), await world.daemon("second")
    await second.leases.notices(0)
    first.leases.push_statements_elsewhere([PushKey(7)])
    first.leases.push_elsewhere([TokenKey(8)])
    await first.leases.tell()
    heard = [*await second.leases.notices(5), *await second.leases.notices(0)]
    assert set(heard) == {Notice(PUSH_STATEMENTS, ("7",)), Notice(PUSH, ("8",))}
