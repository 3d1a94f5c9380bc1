"""Subscriptions through both stages, against real servers: every status, every kind of failure."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agent.duplex.events import Deleted
from agent.duplex.store import reading
from agent.notifications.records import Mode, SubAction, Subscription
from agent.notifications.rows import deleted_subscriptions, deleted_tokens
from agent.notifications.subscribing import NotificationConfig
from ntf_demo.demo import Playground
from ntf_server.setup import DATABASE
from protocol.addresses import SmpServer
from protocol.errors import AUTH, INTERNAL
from protocol.statuses import SUBSCRIBABLE, SubState, SubStatus, TokenStatus
from smp_router.queues import Queue
from smp_router.router import Router, make_credentials
from store.records import SubscriptionRecord
from tests.agent.duplex.world import DEADLINE, Person, connect
from tests.agent.notifications.world import (
    DEVICE,
    OTHER_DEVICE,
    Clock,
    known_token,
    message_push,
    phone,
    settle,
    until,
    verified,
    watched,
)
from tests.agent.proxy import lossy_proxy
from tests.store.builders import bring_to, find_subscription

BY_STATUS = [
    SubStatus(SubState.ERR, "something else") if state is SubState.ERR else SubStatus(state)
    for state in SubState
]
TIMES = NotificationConfig()


async def only_row(alice: Person) -> Subscription:
    (row,) = await alice.agent.notifications.subscriptions()
    return row


def queue_at_router(world: Playground) -> Queue:
    (queue,) = world.router.state.queues
    return queue


async def quiet_connection(alice: Person, server: SmpServer | None = None) -> int:
    """One that has been told not to notify."""
    connection, _ = await alice.agent.create_invitation(server=server, pq=False)
    await alice.agent.notifications.set_wanted(connection, False)
    await settle(alice)
    return connection


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


async def look_again(alice: Person, clock: Clock, seconds: float) -> None:
    """Let time pass for the agent: what is due is done when something wakes the workers."""
    clock.ahead += seconds
    rows = await alice.agent.notifications.subscriptions()
    alice.agent.notifications.wake(
        {str(row.ntf_server) for row in rows} | {str(row.smp_server) for row in rows}
    )
    await settle(alice)


async def one_watched(world: Playground, alice: Person) -> tuple[int, Subscription]:
    """A connection with a subscription that works."""
    await verified(world, alice.agent.notifications)
    connection, _ = await alice.agent.create_invitation(pq=False)
    await watched(world, alice)
    await settle(alice)
    return connection, await only_row(alice)


# The way to a subscription


async def test_new_connection_is_subscribed_and_checked_later(
    world: Playground, alice: Person, clock: Clock
) -> None:
    _, row = await one_watched(world, alice)
    assert row.action is SubAction.NTF_CHECK
    assert row.due > clock() + TIMES.first_check / 2
    notifier = queue_at_router(world).notifier
    assert notifier is not None
    assert notifier.notifier_id == row.notifier_id
    assert notifier.key == row.notifier_key.public
    assert notifier.secret == row.dh_secret
    assert await at_server(world, row) is not None


async def test_without_an_active_token_nothing_is_done(world: Playground, alice: Person) -> None:
    connection, _ = await alice.agent.create_invitation(pq=False)
    await alice.agent.notifications.register(DEVICE, Mode.INSTANT, world.server.address)
    await alice.agent.notifications.set_wanted(connection, True)
    await settle(alice)
    assert await alice.agent.notifications.subscriptions() == []
    assert queue_at_router(world).notifier is None


async def test_verification_subscribes_all_connections_in_few_blocks(
    world: Playground, tmp_path: Path
) -> None:
    async with (
        lossy_proxy(world.router.address) as proxy,
        phone(tmp_path / "alice.db", proxy.in_front_of(world.router.address)) as alice,
    ):
        for _ in range(20):
            await alice.agent.create_invitation(pq=False)
        before = proxy.commands
        await verified(world, alice.agent.notifications)
        rows = await watched(world, alice, 20)
        assert proxy.commands - before < len(rows)


async def test_planned_check_is_made_when_it_is_due(world: Playground, tmp_path: Path) -> None:
    """Nobody wakes the worker but the clock."""
    soon = NotificationConfig(first_check=1)
    async with phone(tmp_path / "alice.db", world.router.address, times=soon) as alice:
        await verified(world, alice.agent.notifications)
        await alice.agent.create_invitation(pq=False)

        async def checked() -> bool:
            rows = await alice.agent.notifications.subscriptions()
            return bool(rows) and rows[0].status in ("PENDING", "ACTIVE")

        await until(checked)


# Checks


@pytest.mark.parametrize("status", [s for s in BY_STATUS if s.state in SUBSCRIBABLE], ids=lambda s: s.text)
async def test_well_subscription_is_checked_again_later(
    world: Playground, tmp_path: Path, alice: Person, clock: Clock, status: SubStatus
) -> None:
    _, before = await one_watched(world, alice)
    await set_status(world, tmp_path / "servers", before, status)
    await look_again(alice, clock, TIMES.first_check + 1)
    after = await only_row(alice)
    assert after.status == status.text
    assert after.notifier_id == before.notifier_id
    assert after.due > clock() + TIMES.check_interval / 2


@pytest.mark.parametrize(
    "status", [s for s in BY_STATUS if s.state not in SUBSCRIBABLE], ids=lambda s: s.text
)
async def test_ended_subscription_is_made_anew(
    world: Playground, tmp_path: Path, alice: Person, clock: Clock, status: SubStatus
) -> None:
    _, before = await one_watched(world, alice)
    await set_status(world, tmp_path / "servers", before, status)
    await look_again(alice, clock, TIMES.first_check + 1)
    await _is_new(world, alice, before)


async def test_forgotten_subscription_is_made_anew(world: Playground, alice: Person, clock: Clock) -> None:
    _, before = await one_watched(world, alice)
    record = await at_server(world, before)
    assert record is not None
    await world.server.store.delete_subscription(record.key)
    await look_again(alice, clock, TIMES.first_check + 1)
    await _is_new(world, alice, before)


async def _is_new(world: Playground, alice: Person, before: Subscription) -> None:
    await settle(alice)
    (after,) = await watched(world, alice)
    assert after.action is SubAction.NTF_CHECK
    assert after.notifier_id != before.notifier_id
    assert after.notifier_key != before.notifier_key
    assert after.subscription_id != before.subscription_id


async def test_refused_subscription_is_tried_later_with_a_new_notifier(
    world: Playground, alice: Person, clock: Clock
) -> None:
    await verified(world, alice.agent.notifications)
    token = await known_token(alice.agent.notifications)
    record = await world.server.store.token_by_device(token.device_token, token.auth_key.public.der)
    assert record is not None
    await bring_to(world.server.store, record.key, TokenStatus.REGISTERED)
    await alice.agent.create_invitation(pq=False)
    await settle(alice)
    refused = await only_row(alice)
    assert (refused.action, refused.notifier_id) == (SubAction.SMP_KEY, None)
    assert refused.due > clock() + TIMES.recreate_delay / 2
    await bring_to(world.server.store, record.key, TokenStatus.ACTIVE)
    await look_again(alice, clock, TIMES.recreate_delay + 1)
    (row,) = await watched(world, alice)
    assert row.notifier_key == refused.notifier_key


# Failures


async def test_queue_that_is_gone_is_given_up(world: Playground, alice: Person) -> None:
    await alice.agent.create_invitation(pq=False)
    world.router.faults.delete_queues([queue_at_router(world).recipient_id])
    await verified(world, alice.agent.notifications)
    await settle(alice)
    row = await only_row(alice)
    assert (row.action, row.status) == (None, f"given up: {AUTH}")


async def test_notifier_of_a_queue_that_is_gone_needs_no_deletion(world: Playground, alice: Person) -> None:
    connection, _ = await one_watched(world, alice)
    world.router.faults.delete_queues([queue_at_router(world).recipient_id])
    await alice.agent.notifications.set_wanted(connection, False)
    await settle(alice)
    assert await alice.agent.notifications.subscriptions() == []


async def test_router_that_is_unwell_is_asked_again_with_the_same_keys(
    world: Playground, alice: Person
) -> None:
    await verified(world, alice.agent.notifications)
    world.router.faults.answer_errors("NKEY", INTERNAL)
    await alice.agent.create_invitation(pq=False)
    await settle(alice)
    waiting = await only_row(alice)
    assert waiting.action is SubAction.SMP_KEY
    world.router.faults.answer_errors("NKEY", None)
    (row,) = await watched(world, alice)
    assert row.notifier_key == waiting.notifier_key


@pytest.mark.parametrize("side", ["router", "server"])
async def test_lost_answer_is_repeated_with_the_same_keys(
    world: Playground, tmp_path: Path, side: str
) -> None:
    router, server = world.router.address, world.server.address
    async with (
        lossy_proxy(router) as to_router,
        lossy_proxy(server) as to_server,
        phone(tmp_path / "alice.db", to_router.in_front_of(router)) as alice,
    ):
        await verified(world, alice.agent.notifications, server=to_server.in_front_of(server))
        connection = await quiet_connection(alice)
        proxy = to_router if side == "router" else to_server
        proxy.lose()
        await alice.agent.notifications.set_wanted(connection, True)
        (row,) = await watched(world, alice)
        assert proxy.lost == 1
        notifier = queue_at_router(world).notifier
        assert notifier is not None
        assert notifier.key == row.notifier_key.public


async def test_router_that_is_away_holds_up_only_its_own_queues(world: Playground, alice: Person) -> None:
    await verified(world, alice.agent.notifications)
    async with Router.start() as other:
        away = await quiet_connection(alice, other.address)
        other.faults.refuse()
        other.faults.drop_connections()
        await alice.agent.notifications.set_wanted(away, True)
        await alice.agent.create_invitation(server=world.router.address, pq=False)
        await settle(alice)  # does not wait for the one that is away

        async def actions() -> list[SubAction | None]:
            return [row.action for row in await alice.agent.notifications.subscriptions()]

        assert await actions() == [SubAction.SMP_KEY, SubAction.NTF_CHECK]
        other.faults.refuse(False)

        async def both() -> bool:
            return await actions() == [SubAction.NTF_CHECK, SubAction.NTF_CHECK]

        await until(both)


async def test_impostor_is_not_given_keys(
    world: Playground, alice: Person, caplog: pytest.LogCaptureFixture
) -> None:
    await verified(world, alice.agent.notifications)
    connection = await quiet_connection(alice)
    world.router.faults.present_certificate(make_credentials("127.0.0.1"))
    world.router.faults.drop_connections()
    await alice.agent.notifications.set_wanted(connection, True)

    async def told() -> bool:
        return any(record.levelname == "WARNING" for record in caplog.records)

    await until(told)
    assert (await only_row(alice)).action is SubAction.SMP_KEY
    world.router.faults.present_certificate(None)
    await watched(world, alice)


# Modes and switches


async def test_periodic_mode_and_back(world: Playground, alice: Person) -> None:
    _, before = await one_watched(world, alice)
    notifications = alice.agent.notifications
    await notifications.register(DEVICE, Mode.PERIODIC, world.server.address)
    await settle(alice)
    assert await notifications.subscriptions() == []
    assert queue_at_router(world).notifier is None

    async def deleted_at_server() -> bool:
        record = await at_server(world, before)
        return record is not None and record.status.state is SubState.DELETED

    await until(deleted_at_server)  # the router told it
    await alice.agent.create_invitation(pq=False)
    await settle(alice)
    assert await notifications.subscriptions() == []
    await notifications.register(DEVICE, Mode.INSTANT, world.server.address)
    await watched(world, alice, 2)


async def test_mode_switched_while_the_router_thinks(world: Playground, alice: Person) -> None:
    await verified(world, alice.agent.notifications)
    connection = await quiet_connection(alice)
    world.router.faults.delay(0.2)
    await alice.agent.notifications.set_wanted(connection, True)
    await alice.agent.notifications.register(DEVICE, Mode.PERIODIC, world.server.address)
    await settle(alice)
    world.router.faults.delay(0)
    assert await alice.agent.notifications.subscriptions() == []
    assert queue_at_router(world).notifier is None


async def test_one_connection_switched_off_and_on(world: Playground, alice: Person, bob: Person) -> None:
    await verified(world, alice.agent.notifications)
    quiet, to_quiet = await connect(alice, bob, pq=False)
    noisy, to_noisy = await connect(alice, bob, pq=False)
    await watched(world, alice, 2)
    await alice.agent.notifications.set_wanted(quiet, False)
    await settle(alice)
    await watched(world, alice, 1)
    before = len(world.accepted())
    await bob.agent.send(to_quiet, b"unheard")
    await settle(bob)
    await bob.agent.send(to_noisy, b"heard")
    push = await message_push(world, before)
    infos = await alice.agent.notifications.announced(push.body)
    assert [info.connection_id for info in infos] == [noisy]
    await alice.agent.notifications.set_wanted(quiet, True)
    await watched(world, alice, 2)


async def test_deleted_connection_takes_its_subscription_along(world: Playground, alice: Person) -> None:
    connection, _ = await one_watched(world, alice)
    await alice.agent.delete(connection)
    await settle(alice)
    assert await alice.agent.notifications.subscriptions() == []
    assert await alice.agent.connections() == []
    assert len(world.router.state.queues) == 0


async def test_new_token_gets_new_notifiers(world: Playground, alice: Person) -> None:
    _, before = await one_watched(world, alice)
    token = await known_token(alice.agent.notifications)
    record = await world.server.store.token_by_device(token.device_token, token.auth_key.public.der)
    assert record is not None
    await world.server.store.delete_token(record.key)
    await verified(world, alice.agent.notifications)  # finds the old token forgotten
    (after,) = await watched(world, alice)
    assert after.token_id == (await known_token(alice.agent.notifications)).token_id != before.token_id
    assert after.notifier_key != before.notifier_key


# The end of a token


async def test_deleted_token_leaves_nothing_behind(world: Playground, alice: Person) -> None:
    await one_watched(world, alice)
    await alice.agent.notifications.delete()
    await settle(alice)
    assert await alice.agent.notifications.subscriptions() == []
    assert queue_at_router(world).notifier is None
    assert (await world.server.store.counts()).tokens == 0


async def test_after_a_move_the_old_server_forgets_the_token(world: Playground, alice: Person) -> None:
    """The new address is the same server, through a proxy: to the agent they are two. To the server the other
    device token makes them two: it forgets older tokens of a device by itself."""
    await one_watched(world, alice)
    old = await known_token(alice.agent.notifications)
    async with lossy_proxy(world.server.address) as proxy:
        moved = proxy.in_front_of(world.server.address)
        await verified(world, alice.agent.notifications, device=OTHER_DEVICE, server=moved)
        await settle(alice)
        new = await known_token(alice.agent.notifications)
        store = world.server.store
        assert await store.token_by_device(DEVICE, old.auth_key.public.der) is None
        assert await store.token_by_device(OTHER_DEVICE, new.auth_key.public.der) is not None
        (row,) = await watched(world, alice)
        assert row.token_id == new.token_id


async def test_a_dead_server_holds_up_nothing_and_is_told_when_it_lives(
    world: Playground, tmp_path: Path
) -> None:
    path, router, server = tmp_path / "alice.db", world.router.address, world.server.address
    async with lossy_proxy(server) as old:
        async with phone(path, router) as alice:
            await verified(world, alice.agent.notifications, server=old.in_front_of(server))
            await alice.agent.create_invitation(pq=False)
            await watched(world, alice)
            before = await known_token(alice.agent.notifications)
            old.cut()
            await verified(world, alice.agent.notifications, device=OTHER_DEVICE)
            await settle(alice)
            await watched(world, alice)
            assert await world.server.store.token_by_device(DEVICE, before.auth_key.public.der) is not None
        old.refusing = False
        async with phone(path, router) as alice:  # goes on with it at the start
            await settle(alice)
            assert await world.server.store.token_by_device(DEVICE, before.auth_key.public.der) is None


# Deletion


async def test_a_deleted_contact_is_silent_although_its_router_is_away(
    world: Playground, tmp_path: Path
) -> None:
    """Its subscription ends at once, and the deletion is told of when the router has done it, too."""
    async with (
        lossy_proxy(world.router.address) as proxy,
        phone(tmp_path / "alice.db", proxy.in_front_of(world.router.address)) as alice,
    ):
        connection, row = await one_watched(world, alice)
        proxy.cut()
        await alice.agent.delete(connection, wait=True)

        async def is_gone() -> bool:
            return await at_server(world, row) is None

        await until(is_gone)
        assert not any(isinstance(event, Deleted) for event in alice.agent.unread())
        assert len(world.router.state.queues) == 1
        proxy.refusing = False
        await alice.event(Deleted)
        assert len(world.router.state.queues) == 0


async def test_a_subscription_whose_id_is_not_known_is_deleted(world: Playground, tmp_path: Path) -> None:
    """The answer to its SNEW was lost."""
    async with (
        lossy_proxy(world.server.address) as proxy,
        phone(tmp_path / "alice.db", world.router.address) as alice,
    ):
        server = proxy.in_front_of(world.server.address)
        await verified(world, alice.agent.notifications, server=server)
        proxy.on_loss = proxy.cut
        proxy.lose()
        connection, _ = await alice.agent.create_invitation(pq=False)

        async def lost() -> bool:
            return bool(proxy.lost)

        await until(lost)
        row = await only_row(alice)
        assert row.action is SubAction.NTF_CREATE
        await alice.agent.delete(connection)
        await alice.event(Deleted)
        proxy.refusing = False

        async def is_done() -> bool:
            with reading(tmp_path / "alice.db") as db:
                return not deleted_subscriptions(db, server, 1)

        await until(is_done)
        with closing(sqlite3.connect(tmp_path / "servers" / "data" / DATABASE)) as db:
            assert db.execute("SELECT count(*) FROM subscriptions").fetchone() == (0,)


async def test_a_token_that_cannot_be_deleted_delays_no_subscription(
    world: Playground, tmp_path: Path
) -> None:
    async with phone(tmp_path / "alice.db", world.router.address) as alice:
        await verified(world, alice.agent.notifications)
        with closing(sqlite3.connect(tmp_path / "servers" / "data" / DATABASE, timeout=DEADLINE)) as db, db:
            db.execute(
                "CREATE TRIGGER undeletable BEFORE DELETE ON tokens BEGIN SELECT RAISE(ABORT, 'no'); END"
            )
        await alice.agent.notifications.delete()
        await verified(world, alice.agent.notifications, device=OTHER_DEVICE)
        await alice.agent.create_invitation(pq=False)
        await watched(world, alice, 1)
        with reading(tmp_path / "alice.db") as db:
            assert len(deleted_tokens(db, world.server.address)) == 1
