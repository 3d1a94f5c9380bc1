"""Subscriptions through both stages of workers, against real servers: every status, every kind of failure."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from agent.agent import Agent, open_agent
from agent.records import Mode, SubAction, Subscription
from ntf_demo.demo import Playground
from ntf_server.setup import DATABASE
from protocol.errors import AUTH, INTERNAL
from protocol.statuses import SUBSCRIBABLE, SubState, SubStatus, TokenStatus
from smp_router.queues import Queue
from smp_router.router import Router, make_credentials
from store.records import SubscriptionRecord
from tests.agent.proxy import lossy_proxy
from tests.agent.world import (
    DEADLINE,
    DEVICE,
    FAST,
    Clock,
    agent_config,
    arrives,
    known_token,
    subscribed,
    until,
    verified,
)
from tests.store.builders import bring_to, find_subscription

BY_STATUS = [
    SubStatus(SubState.ERR, "something else") if state is SubState.ERR else SubStatus(state)
    for state in SubState
]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def agent(tmp_path: Path, clock: Clock) -> AsyncIterator[Agent]:
    async with open_agent(agent_config(tmp_path / "agent", clock)) as opened:
        yield opened


async def only_row(agent: Agent) -> Subscription:
    (row,) = await agent.subscriptions()
    return row


async def settle(agent: Agent) -> None:
    async with asyncio.timeout(DEADLINE):
        await agent.settled()


async def queue_at_router(world: Playground, agent: Agent, connection: int) -> Queue:
    queue = await agent.store.receive_queue(connection)
    assert queue is not None
    assert queue.recipient_id is not None
    found = world.router.state.queues.by_recipient(queue.recipient_id)
    assert found is not None
    return found


async def at_server(world: Playground, row: Subscription) -> SubscriptionRecord | None:
    assert row.subscription_id is not None
    return await find_subscription(world.server.store, row.subscription_id)


async def set_status(world: Playground, servers: Path, row: Subscription, status: SubStatus) -> None:
    """In the server's database, behind its back: NEW, for one, lasts only moments there."""

    async def confirmed() -> bool:
        record = await at_server(world, row)
        return record is not None and record.status.state is SubState.ACTIVE

    await until(confirmed)  # the server has nothing more to write about it
    with closing(sqlite3.connect(servers / "data" / DATABASE, timeout=DEADLINE)) as db, db:
        changed = db.execute(
            "UPDATE subscriptions SET state = ?, detail = ? WHERE subscription_id = ?",
            (status.state, status.detail, row.subscription_id),
        )
        assert changed.rowcount == 1


async def look_again(agent: Agent, clock: Clock, seconds: float) -> None:
    """Let time pass for the agent."""
    clock.ahead += seconds
    for row in await agent.subscriptions():
        await agent.set_notifications(row.connection_id, True)
    await settle(agent)


async def watched(world: Playground, agent: Agent) -> tuple[int, Subscription]:
    """A connection with a subscription that works."""
    await verified(world, agent)
    connection = await agent.create_connection(world.router.address)
    await subscribed(world, agent, connection)
    return connection, await only_row(agent)


# The way to a subscription


async def test_new_connection_is_subscribed_and_checked_later(
    world: Playground, agent: Agent, clock: Clock
) -> None:
    connection, row = await watched(world, agent)
    assert row.action is SubAction.NTF_CHECK
    assert row.due > clock() + FAST.first_check / 2
    queue = await queue_at_router(world, agent, connection)
    assert queue.notifier is not None
    assert queue.notifier.notifier_id == row.notifier_id
    assert queue.notifier.key == row.notifier_key.public
    assert queue.notifier.secret == row.dh_secret
    assert await at_server(world, row) is not None


async def test_without_an_active_token_nothing_is_done(world: Playground, agent: Agent) -> None:
    connection = await agent.create_connection(world.router.address)
    await agent.register(DEVICE, Mode.INSTANT, world.server.address)
    await agent.set_notifications(connection, True)
    await settle(agent)
    assert await agent.subscriptions() == []
    assert (await queue_at_router(world, agent, connection)).notifier is None


async def test_verification_subscribes_all_connections_in_few_blocks(world: Playground, agent: Agent) -> None:
    async with lossy_proxy(world.router.address) as proxy:
        address = proxy.in_front_of(world.router.address)
        connections = [await agent.create_connection(address) for _ in range(20)]
        before = proxy.commands
        await verified(world, agent)
        await settle(agent)
        rows = await agent.subscriptions()
        assert [row.connection_id for row in rows] == connections
        assert {row.action for row in rows} == {SubAction.NTF_CHECK}
        assert proxy.commands - before < len(connections)


# Checks


@pytest.mark.parametrize("status", [s for s in BY_STATUS if s.state in SUBSCRIBABLE], ids=lambda s: s.text)
async def test_well_subscription_is_checked_again_later(
    world: Playground, tmp_path: Path, agent: Agent, clock: Clock, status: SubStatus
) -> None:
    _, before = await watched(world, agent)
    await set_status(world, tmp_path / "servers", before, status)
    await look_again(agent, clock, FAST.first_check + 1)
    after = await only_row(agent)
    assert after.status == status.text
    assert after.notifier_id == before.notifier_id
    assert after.due > clock() + FAST.check_interval / 2


@pytest.mark.parametrize(
    "status", [s for s in BY_STATUS if s.state not in SUBSCRIBABLE], ids=lambda s: s.text
)
async def test_ended_subscription_is_made_anew(
    world: Playground, tmp_path: Path, agent: Agent, clock: Clock, status: SubStatus
) -> None:
    connection, before = await watched(world, agent)
    await set_status(world, tmp_path / "servers", before, status)
    await look_again(agent, clock, FAST.first_check + 1)
    await _is_new(world, agent, connection, before)


async def test_forgotten_subscription_is_made_anew(world: Playground, agent: Agent, clock: Clock) -> None:
    connection, before = await watched(world, agent)
    record = await at_server(world, before)
    assert record is not None
    await world.server.store.delete_subscription(record.key)
    await look_again(agent, clock, FAST.first_check + 1)
    await _is_new(world, agent, connection, before)


async def _is_new(world: Playground, agent: Agent, connection: int, before: Subscription) -> None:
    await subscribed(world, agent, connection)
    after = await only_row(agent)
    assert after.action is SubAction.NTF_CHECK
    assert after.notifier_id != before.notifier_id
    assert after.notifier_key != before.notifier_key
    assert after.subscription_id != before.subscription_id


async def test_refused_subscription_is_tried_later_with_a_new_notifier(
    world: Playground, agent: Agent, clock: Clock
) -> None:
    await verified(world, agent)
    token = await known_token(agent)
    record = await world.server.store.token_by_device(token.device_token, token.auth_key.public.der)
    assert record is not None
    await bring_to(world.server.store, record.key, TokenStatus.REGISTERED)
    connection = await agent.create_connection(world.router.address)
    await settle(agent)
    refused = await only_row(agent)
    assert (refused.action, refused.notifier_id) == (SubAction.SMP_KEY, None)
    assert refused.due > clock() + FAST.recreate_delay / 2
    await bring_to(world.server.store, record.key, TokenStatus.ACTIVE)
    await look_again(agent, clock, FAST.recreate_delay + 1)
    await subscribed(world, agent, connection)
    assert (await only_row(agent)).notifier_key == refused.notifier_key


# Failures


async def test_queue_that_is_gone_is_given_up(world: Playground, agent: Agent) -> None:
    connection = await agent.create_connection(world.router.address)
    queue = await queue_at_router(world, agent, connection)
    world.router.faults.delete_queues([queue.recipient_id])
    await verified(world, agent)
    await settle(agent)
    row = await only_row(agent)
    assert (row.action, row.status) == (None, f"given up: {AUTH}")


async def test_notifier_of_a_queue_that_is_gone_needs_no_deletion(world: Playground, agent: Agent) -> None:
    connection, _ = await watched(world, agent)
    queue = await queue_at_router(world, agent, connection)
    world.router.faults.delete_queues([queue.recipient_id])
    await agent.set_notifications(connection, False)
    await settle(agent)
    assert await agent.subscriptions() == []


async def test_router_that_is_unwell_is_asked_again_with_the_same_keys(
    world: Playground, agent: Agent
) -> None:
    await verified(world, agent)
    world.router.faults.answer_errors("NKEY", INTERNAL)
    connection = await agent.create_connection(world.router.address)

    async def stored() -> list[Subscription]:
        return await agent.subscriptions()

    (waiting,) = await until(stored)
    assert waiting.action is SubAction.SMP_KEY
    world.router.faults.answer_errors("NKEY", None)
    await subscribed(world, agent, connection)
    assert (await only_row(agent)).notifier_key == waiting.notifier_key


@pytest.mark.parametrize("side", ["router", "server"])
async def test_lost_answer_is_repeated_with_the_same_keys(world: Playground, agent: Agent, side: str) -> None:
    router, server = world.router.address, world.server.address
    async with lossy_proxy(router) as to_router, lossy_proxy(server) as to_server:
        await agent.register(DEVICE, Mode.INSTANT, to_server.in_front_of(server))
        push = await arrives(world, lambda push: '"verification"' in push.body)
        await agent.on_push(push.body)
        connection = await agent.create_connection(to_router.in_front_of(router), wants_notifications=False)
        proxy = to_router if side == "router" else to_server
        proxy.lose()
        await agent.set_notifications(connection, True)
        await subscribed(world, agent, connection)
        assert proxy.lost == 1
        row = await only_row(agent)
        queue = await queue_at_router(world, agent, connection)
        assert queue.notifier is not None
        assert queue.notifier.key == row.notifier_key.public
        assert (await world.server.store.counts()).subscriptions == 1


async def test_router_that_is_away_holds_up_only_its_own_queues(world: Playground, agent: Agent) -> None:
    await verified(world, agent)
    async with Router.start() as other:
        away = await agent.create_connection(other.address, wants_notifications=False)
        other.faults.refuse()
        other.faults.drop_connections()
        await agent.set_notifications(away, True)
        here = await agent.create_connection(world.router.address)

        async def here_only() -> bool:
            rows = {row.connection_id: row.action for row in await agent.subscriptions()}
            return rows == {away: SubAction.SMP_KEY, here: SubAction.NTF_CHECK}

        await until(here_only)
        other.faults.refuse(False)
        await settle(agent)
        assert {row.action for row in await agent.subscriptions()} == {SubAction.NTF_CHECK}


async def test_impostor_is_not_given_keys(
    world: Playground, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    await verified(world, agent)
    connection = await agent.create_connection(world.router.address, wants_notifications=False)
    world.router.faults.present_certificate(make_credentials("127.0.0.1"))
    world.router.faults.drop_connections()
    await agent.set_notifications(connection, True)

    async def told() -> bool:
        return any(record.levelname == "WARNING" for record in caplog.records)

    await until(told)
    assert (await only_row(agent)).action is SubAction.SMP_KEY
    world.router.faults.present_certificate(None)
    await subscribed(world, agent, connection)


# Modes and switches


async def test_periodic_mode_and_back(world: Playground, agent: Agent) -> None:
    connection, before = await watched(world, agent)
    await agent.register(DEVICE, Mode.PERIODIC, world.server.address)
    await settle(agent)
    assert await agent.subscriptions() == []
    assert (await queue_at_router(world, agent, connection)).notifier is None

    async def deleted_at_server() -> bool:
        record = await at_server(world, before)
        return record is not None and record.status.state is SubState.DELETED

    await until(deleted_at_server)  # the router told it
    another = await agent.create_connection(world.router.address)
    await settle(agent)
    assert await agent.subscriptions() == []
    await agent.register(DEVICE, Mode.INSTANT, world.server.address)
    await subscribed(world, agent, connection, another)


async def test_mode_switched_while_the_router_thinks(world: Playground, agent: Agent) -> None:
    await verified(world, agent)
    connection = await agent.create_connection(world.router.address, wants_notifications=False)
    world.router.faults.delay(0.2)
    await agent.set_notifications(connection, True)

    async def asked() -> bool:
        return bool(await agent.subscriptions())

    await until(asked)
    await agent.register(DEVICE, Mode.PERIODIC, world.server.address)
    await settle(agent)
    world.router.faults.delay(0)
    assert await agent.subscriptions() == []
    assert (await queue_at_router(world, agent, connection)).notifier is None


async def test_one_connection_switched_off_and_on(world: Playground, agent: Agent, bob: Agent) -> None:
    noisy, _ = await watched(world, agent)
    quiet = await agent.create_connection(world.router.address)
    await subscribed(world, agent, noisy, quiet)
    await agent.set_notifications(quiet, False)
    await settle(agent)
    assert (await only_row(agent)).connection_id == noisy
    await bob.send(await bob.join(await agent.link(quiet)), b"unheard")
    await bob.send(await bob.join(await agent.link(noisy)), b"heard")
    push = await arrives(world, lambda push: '"message"' in push.body)
    assert [message.body for message in await agent.on_push(push.body)] == [b"heard"]
    await agent.set_notifications(quiet, True)
    await subscribed(world, agent, noisy, quiet)


async def test_deleted_connection_takes_its_subscription_along(world: Playground, agent: Agent) -> None:
    connection, _ = await watched(world, agent)
    await agent.delete_connection(connection)
    assert await agent.subscriptions() == []
    assert await agent.connections() == []
    assert len(world.router.state.queues) == 0


async def test_deleted_token_leaves_no_notifier_behind(world: Playground, agent: Agent) -> None:
    connection, _ = await watched(world, agent)
    await agent.delete_token()
    await settle(agent)
    assert await agent.subscriptions() == []
    assert (await queue_at_router(world, agent, connection)).notifier is None
    assert (await world.server.store.counts()).tokens == 0


async def test_new_token_gets_new_notifiers(world: Playground, agent: Agent) -> None:
    connection, before = await watched(world, agent)
    token = await known_token(agent)
    record = await world.server.store.token_by_device(token.device_token, token.auth_key.public.der)
    assert record is not None
    await world.server.store.delete_token(record.key)
    await verified(world, agent)  # finds the old token forgotten
    await subscribed(world, agent, connection)
    after = await only_row(agent)
    assert after.token_id == (await known_token(agent)).token_id != before.token_id
    assert after.notifier_key != before.notifier_key
