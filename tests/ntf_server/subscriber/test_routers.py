"""One daemon and one router that behaves badly, without services."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from ntf_server import subscriber
from ntf_server.router import MISBEHAVIOURS, WRONG_IDENTITIES
from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from protocol.errors import AUTH, CRYPTO, ErrorType
from protocol.smp_messages import End, Sok
from protocol.statuses import SubState
from protocol.versions import VersionRange
from smp_client.dialer import Dialer
from smp_router.router import Router, make_credentials
from store.interface import StoreUnavailable
from store.journal_schema import JournalEvent
from store.records import StoredRouter
from tests.ntf_server.subscriber.conftest import QUICK, Daemon, tune
from tests.smp_client.peer import PeerSession, scripted_router
from tests.waiting import until
from transport.address_guard import AddressGuard
from transport.certificates import KeyAlgorithm, make_ca, make_online
from transport.errors import TransportError


@pytest.mark.parametrize(
    "versions",
    [VersionRange(6, 6), VersionRange(6, 9), VersionRange(6, 15), VersionRange(6, 19), VersionRange(6, 20)],
)
async def test_new_subscription_becomes_active_and_its_notifications_arrive(
    plain_daemon: Daemon, versions: VersionRange
) -> None:
    daemon = plain_daemon
    async with Router.start(versions=versions) as router, daemon.running():
        queues = router.load.create_queues(3)
        await daemon.add(router.address, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 3)
        await router.load.emit(queues, 6, fresh=True)
        await until(lambda: daemon.sink.notified)
        (push,) = await daemon.store.pushes([daemon.sink.notified[0]])
        assert {entry.notifier_id for entry in push.entries} <= {queue.notifier_id for queue in queues}
        assert daemon.status().version == versions.max
        assert not daemon.status().service


async def test_a_new_queue_is_subscribed_as_it_was_stored(plain_daemon: Daemon) -> None:
    """Its row is neither read nor written between SNEW and the answer to its NSUB."""
    daemon = plain_daemon
    async with Router.start() as router, daemon.running():
        first, second = router.load.create_queues(2)
        await daemon.add(router.address, [first])
        await until(lambda: daemon.count(SubState.ACTIVE) == 1 and daemon.status().subscribed)
        daemon.faults.calls.clear()
        await daemon.add(router.address, [second])
        await until(lambda: daemon.count(SubState.ACTIVE) == 2)
        calls = daemon.faults.calls
        # The router's own row is looked at now and then, whatever is subscribed.
        assert set(calls[: calls.index("set_subscribed")]) <= {"next_retry", "server"}


async def test_everything_stored_is_subscribed_at_start_page_by_page(
    plain_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = plain_daemon
    tune(monkeypatch, BATCH_SIZE=50)
    async with Router.start() as router:
        queues = router.load.create_queues(230)
        await daemon.add(router.address, queues, hand_over=False)
        async with daemon.running():
            await until(lambda: daemon.count(SubState.ACTIVE) == 230)
            assert len(router.subscribed_notifiers()) == 230
            await until(lambda: daemon.status().subscribed)
            assert daemon.status().individual_queues == 230


async def test_a_burst_beyond_the_limit_is_found_in_the_store(
    plain_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = plain_daemon
    tune(monkeypatch, BATCH_SIZE=20, WAITING_LIMIT=30)
    async with Router.start() as router, daemon.running():
        await daemon.add(router.address, router.load.create_queues(1))
        await until(lambda: daemon.status().subscribed)
        await daemon.add(router.address, router.load.create_queues(200))
        assert daemon.status().waiting <= 30
        await until(lambda: daemon.count(SubState.ACTIVE) == 201)


async def test_refused_queues_are_auth_and_bad_keys_and_other_errors_err(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    async with Router.start() as router, daemon.running():
        good, refused, failing = router.load.create_queues(3)
        router.faults.delete_queues([refused.notifier_id])
        await daemon.add(router.address, [good, refused])
        await until(lambda: daemon.states()[refused.notifier_id] is SubState.AUTH)
        router.faults.answer_errors("NSUB", CRYPTO)
        await daemon.add(router.address, [failing])
        await until(lambda: daemon.states()[failing.notifier_id] is SubState.ERR)
        assert daemon.states()[good.notifier_id] is SubState.ACTIVE
        router.faults.answer_errors("NSUB", None)
        await asyncio.sleep(0.3)
        assert daemon.states()[failing.notifier_id] is SubState.ERR, "tried again without a pause"
        daemon.clock.ahead = 601
        await until(lambda: daemon.states()[failing.notifier_id] is SubState.ACTIVE)


async def test_an_unusable_notifier_key_is_an_error_of_its_queue_only(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    async with Router.start() as router, daemon.running():
        good, broken = router.load.create_queues(2)
        await daemon.add(router.address, [good])
        await daemon.add(router.address, [broken], notifier_key=b"no key")
        await until(lambda: daemon.states()[broken.notifier_id] is SubState.ERR)
        await until(lambda: daemon.states()[good.notifier_id] is SubState.ACTIVE)


async def test_single_queues_without_an_answer_are_asked_for_again(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    daemon.configure(replace(daemon.config, command_timeout=0.3, ping_interval=5.0))
    silent_about: set[bytes] = set()

    async def script(peer: PeerSession) -> None:
        while commands := await peer.receive():
            answered = [command for command in commands if command.entity_id not in silent_about]
            silent_about.clear()
            if answered:
                peer.answer([(command.corr_id, command.entity_id, Sok()) for command in answered])

    async with Router.start() as elsewhere:
        queues = elsewhere.load.create_queues(3)
    silent_about.add(queues[1].notifier_id)
    async with scripted_router(script) as server:
        await daemon.add(server, queues, hand_over=False)
        async with daemon.running():
            await until(lambda: daemon.count(SubState.ACTIVE) == 3)
            assert daemon.journal.count(JournalEvent.SMP_CONNECTED) == 1


async def test_an_end_that_overtakes_the_rest_of_its_batch_is_not_lost(plain_daemon: Daemon) -> None:
    daemon = plain_daemon

    async def script(peer: PeerSession) -> None:
        first, second = await peer.receive()
        peer.answer([(first.corr_id, first.entity_id, Sok())])
        peer.events([(first.entity_id, End())])
        peer.events([(second.entity_id, End())])  # about an older subscription: its answer follows
        peer.answer([(second.corr_id, second.entity_id, Sok())])
        await peer.receive()

    async with Router.start() as elsewhere:
        queues = elsewhere.load.create_queues(2)
    async with scripted_router(script) as server:
        await daemon.add(server, queues, hand_over=False)
        async with daemon.running():
            await until(lambda: daemon.states()[queues[0].notifier_id] is SubState.END)
            await until(lambda: daemon.states()[queues[1].notifier_id] is SubState.ACTIVE)
            assert daemon.states()[queues[0].notifier_id] is SubState.END


async def test_end_and_deld_of_the_current_session(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    async with Router.start() as router, daemon.running():
        kept, ended, deleted = router.load.create_queues(3)
        await daemon.add(router.address, [kept, ended, deleted])
        await until(lambda: daemon.count(SubState.ACTIVE) == 3)
        router.faults.send_end([ended.notifier_id])
        router.faults.send_deld([deleted.notifier_id])
        await until(lambda: daemon.states()[deleted.notifier_id] is SubState.DELETED)
        await until(lambda: daemon.states()[ended.notifier_id] is SubState.END)
        daemon.clock.ahead = 601
        await until(lambda: daemon.states()[ended.notifier_id] is SubState.ACTIVE)
        assert daemon.states()[deleted.notifier_id] is SubState.DELETED
        assert daemon.states()[kept.notifier_id] is SubState.ACTIVE


async def test_router_restart(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    async with daemon.running():
        async with Router.start() as router:
            queues = router.load.create_queues(5)
            port, state = router.port, router.state
            await daemon.add(router.address, queues)
            await until(lambda: daemon.count(SubState.ACTIVE) == 5)
        await until(lambda: daemon.count(SubState.INACTIVE) == 5)
        async with Router.start(port=port, state=state) as router:
            await until(lambda: daemon.count(SubState.ACTIVE) == 5)
            assert len(router.subscribed_notifiers()) == 5
        assert daemon.journal.events.count((JournalEvent.SMP_DISCONNECTED, None, 5)) == 1


async def test_dropped_connections(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    async with Router.start() as router, daemon.running():
        await daemon.add(router.address, router.load.create_queues(5))
        await until(lambda: daemon.count(SubState.ACTIVE) == 5)
        for _ in range(3):
            await daemon.see_drop(router)
            await until(lambda: daemon.status().subscribed and len(router.subscribed_notifiers()) == 5)
        await until(lambda: daemon.count(SubState.ACTIVE) == 5)
        assert daemon.journal.count(JournalEvent.SMP_CONNECTED) == 4


async def test_router_that_moved_to_another_address_is_found_by_its_name(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    addresses = ["127.0.0.1"]

    def resolve(host: str) -> list[str]:
        assert host == "router.example"
        return list(addresses)

    daemon.configure(
        daemon.config, Dialer(guard=AddressGuard(allow_private=True, resolve=resolve, cache_time=0))
    )
    credentials = make_credentials("router.example")
    async with daemon.running():
        async with Router.start(credentials=credentials) as router:
            port, state = router.port, router.state
            server = SmpServer(("router.example",), str(port), credentials.identity)
            queues = router.load.create_queues(5)
            await daemon.add(server, queues)
            await until(lambda: daemon.count(SubState.ACTIVE) == 5)
        await until(lambda: daemon.count(SubState.INACTIVE) == 5)
        async with Router.start(host="127.0.0.2", port=port, state=state) as router:
            addresses[:] = ["127.0.0.2"]
            await until(lambda: daemon.count(SubState.ACTIVE) == 5)
            await router.load.emit(queues, 5)
            await until(lambda: daemon.sink.notified)


async def test_half_open_connection_is_noticed(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    async with Router.start() as router, daemon.running():
        await daemon.add(router.address, router.load.create_queues(2))
        await until(lambda: daemon.count(SubState.ACTIVE) == 2)
        router.faults.black_hole()
        await until(lambda: daemon.count(SubState.INACTIVE) == 2)
        router.faults.black_hole(False)
        await until(lambda: daemon.count(SubState.ACTIVE) == 2)


async def test_refused_connections(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    async with Router.start() as router, daemon.running():
        router.faults.refuse()
        await daemon.add(router.address, router.load.create_queues(2))
        await until(lambda: daemon.status().last_error)
        assert not daemon.status().connected
        router.faults.refuse(False)
        await until(lambda: daemon.count(SubState.ACTIVE) == 2)
        assert daemon.status().last_error is None


async def test_router_that_accepts_and_says_nothing(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    async with Router.start() as router, daemon.running():
        router.faults.black_hole()
        await daemon.add(router.address, router.load.create_queues(2))
        await until(lambda: "in time" in (daemon.status().last_error or ""))
        router.faults.black_hole(False)
        await until(lambda: daemon.count(SubState.ACTIVE) == 2)


async def test_wrong_identity_is_never_subscribed_and_loud(
    plain_daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = plain_daemon
    before = WRONG_IDENTITIES._value.get()
    async with Router.start() as router, daemon.running():
        router.faults.present_certificate(make_credentials("127.0.0.1"))
        with caplog.at_level(logging.ERROR):
            await daemon.add(router.address, router.load.create_queues(2))
            await until(lambda: WRONG_IDENTITIES._value.get() >= before + 2)
        assert "does not match the pinned fingerprint" in caplog.text
        assert router.subscribed_notifiers() == set()
        assert daemon.count(SubState.ACTIVE) == 0
        router.faults.present_certificate(None)
        await until(lambda: daemon.count(SubState.ACTIVE) == 2)


async def test_certificate_rotated_under_the_same_identity(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    now = datetime.now(UTC)
    ca, ca_key = make_ca(KeyAlgorithm.ED448, "router", now)
    first, second = (make_online(ca, ca_key, KeyAlgorithm.ED448, "127.0.0.1", now) for _ in range(2))
    async with Router.start(credentials=first) as router, daemon.running():
        await daemon.add(router.address, router.load.create_queues(2))
        await until(lambda: daemon.count(SubState.ACTIVE) == 2)
        router.faults.present_certificate(second)
        router.faults.drop_connections()
        await until(lambda: daemon.journal.count(JournalEvent.SMP_CONNECTED) == 2)
        await until(lambda: len(router.subscribed_notifiers()) == 2)


async def test_a_router_that_does_not_answer_nsub_is_connected_to_again(plain_daemon: Daemon) -> None:
    """It is slower than our patience, but not silent."""
    daemon = plain_daemon
    daemon.configure(replace(QUICK, use_service_credentials=False, command_timeout=0.2, ping_interval=5.0))
    async with Router.start() as router, daemon.running():
        await daemon.add(router.address, router.load.create_queues(1))
        await until(lambda: daemon.count(SubState.ACTIVE) == 1)
        router.faults.delay(0.5)
        (queue,) = router.load.create_queues(1)
        await daemon.add(router.address, [queue])
        await until(lambda: daemon.status().last_error == "the router does not answer NSUB")
        assert daemon.states()[queue.notifier_id] is SubState.PENDING
        router.faults.delay(0)
        await until(lambda: daemon.count(SubState.ACTIVE) == 2)


async def test_a_router_without_subscriptions_is_disconnected_and_comes_back(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    async with Router.start() as router, daemon.running():
        first, second = router.load.create_queues(2)
        await daemon.add(router.address, [first])
        await until(lambda: daemon.count(SubState.ACTIVE) == 1)
        await daemon.delete(first)
        await until(lambda: not daemon.subscriber.status() and router.connections == 0)
        await daemon.add(router.address, [second])
        await until(lambda: daemon.count(SubState.ACTIVE) == 1)


async def test_notifications_without_subscription_are_counted_and_dropped(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    async with Router.start() as router, daemon.running():
        kept, forgotten = router.load.create_queues(2)
        await daemon.add(router.address, [kept, forgotten])
        await until(lambda: daemon.count(SubState.ACTIVE) == 2)
        await daemon.delete(forgotten)
        await router.load.emit([forgotten], 3)
        await until(lambda: (JournalEvent.NTF_RECEIVED, 3, None) in daemon.journal.events)
        assert daemon.sink.notified == []
        await router.load.emit([kept], 1)
        await until(lambda: daemon.sink.notified)


async def test_a_full_push_side_stops_the_router_and_loses_nothing(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(500)
        await daemon.add(router.address, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 500)
        daemon.sink.has_room.clear()
        await router.load.emit(queues, 500)
        await until(lambda: len(daemon.sink.notified) > 0)
        one_block = len(daemon.sink.notified)
        await asyncio.sleep(0.7)  # longer than PING's limits: our slowness is not the router's
        assert daemon.status().connected
        assert len(daemon.sink.notified) == one_block, "another block was read although the push side is full"
        daemon.sink.has_room.set()
        await until(lambda: daemon.unsent() == 500)


async def test_a_store_that_fails_for_a_while_loses_no_notification(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    daemon.faults.fail("add_notifications", *[StoreUnavailable("the disk is full")] * 3)
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(10)
        await daemon.add(router.address, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 10)
        await router.load.emit(queues, 10)
        await until(lambda: daemon.unsent() == 10)
        assert daemon.faults.failures["add_notifications"] == 3


async def test_a_store_that_fails_keeps_the_session_and_what_was_sent_in_it(plain_daemon: Daemon) -> None:
    """The reader waits for the store with a notification, and so does whoever looks for something to do."""
    daemon = plain_daemon
    calls = ("add_notifications", "server")
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(1)
        await daemon.add(router.address, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 1)
        for call in calls:
            daemon.faults.break_down(call)
        await router.load.emit(queues, 1)
        await until(lambda: all(daemon.faults.failures[call] > 1 for call in calls))
        for call in calls:
            daemon.faults.repair(call)
        await until(lambda: daemon.unsent() == 1)
        assert daemon.journal.count(JournalEvent.SMP_CONNECTED) == 1


async def test_a_router_is_given_up_when_what_it_sent_is_stored(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(1)
        key = await daemon.add(router.address, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 1)
        daemon.faults.break_down("add_notifications")
        await router.load.emit(queues, 1)
        await until(lambda: daemon.faults.failures["add_notifications"])
        async with asyncio.TaskGroup() as tasks:
            leaving = tasks.create_task(daemon.subscriber.unwatch(key))
            seen = daemon.faults.failures["add_notifications"]
            await until(lambda: daemon.faults.failures["add_notifications"] > seen)
            assert not leaving.done()
            daemon.faults.repair("add_notifications")
        assert daemon.unsent() == 1


async def test_a_daemon_that_stops_waits_for_the_store_but_not_for_ever(
    plain_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = plain_daemon
    tune(monkeypatch, STOP_PATIENCE=0.2)
    async with Router.start() as router, asyncio.timeout(20):
        async with daemon.running():
            queues = router.load.create_queues(1)
            await daemon.add(router.address, queues)
            await until(lambda: daemon.count(SubState.ACTIVE) == 1)
            daemon.faults.break_down("add_notifications")
            await router.load.emit(queues, 1)
            await until(lambda: daemon.faults.failures["add_notifications"])
        assert daemon.unsent() == 0


async def test_a_store_that_fails_while_subscribing_costs_only_time(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    daemon.faults.fail("set_subscribed", StoreUnavailable("the disk is full"), ValueError("a defect"))
    async with Router.start() as router, daemon.running():
        await daemon.add(router.address, router.load.create_queues(3))
        await until(lambda: daemon.count(SubState.ACTIVE) == 3)
        assert daemon.faults.failures["set_subscribed"] == 2


async def test_resubscribe_on_demand_and_unknown_routers(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    async with Router.start() as router, daemon.running():
        await daemon.add(router.address, router.load.create_queues(1))
        await until(lambda: daemon.count(SubState.ACTIVE) == 1)
        assert daemon.subscriber.resubscribe("127.0.0.1")
        assert not daemon.subscriber.resubscribe("somewhere.else")
        await until(lambda: daemon.journal.count(JournalEvent.SMP_CONNECTED) == 2)
        await until(lambda: daemon.count(SubState.ACTIVE) == 1 and router.subscribed_notifiers())


async def test_a_dead_router_does_not_hold_up_another(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    for_ever = 3600.0
    daemon.configure(replace(daemon.config, connect_timeout=for_ever, command_timeout=for_ever))
    async with Router.start() as dead, Router.start() as alive, daemon.running():
        dead.faults.black_hole()
        await daemon.add(dead.address, dead.load.create_queues(3))
        await daemon.add(alive.address, alive.load.create_queues(3))
        await until(lambda: len(alive.subscribed_notifiers()) == 3)


async def test_auth_revived_by_snew(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    async with Router.start() as router, daemon.running():
        (queue,) = router.load.create_queues(1)
        router.faults.answer_errors("NSUB", AUTH, 1)
        await daemon.add(router.address, [queue])
        await until(lambda: daemon.count(SubState.AUTH) == 1)
        await until(lambda: not daemon.subscriber.status())
        await daemon.add(router.address, [queue])
        await until(lambda: daemon.count(SubState.ACTIVE) == 1)


async def test_a_name_that_leads_into_our_own_network_is_never_dialled(plain_daemon: Daemon) -> None:
    """Whoever names it learns nothing of what listens there: the address is checked that would be dialled."""
    daemon = plain_daemon
    asked = 0

    def resolve(host: str) -> list[str]:
        nonlocal asked
        asked += 1
        return ["127.0.0.1"]

    daemon.configure(daemon.config, Dialer(guard=AddressGuard(resolve=resolve, cache_time=0)))
    async with Router.start() as router, daemon.running():
        server = SmpServer(("router.example",), router.address.port, router.address.key_hash)
        await daemon.add(server, router.load.create_queues(1))
        await until(lambda: asked > 2)
        assert "no public address" in (daemon.status().last_error or "")
        assert router.connections == 0


async def test_a_router_is_given_up_and_taken_back_at_any_time(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    async with Router.start() as router, daemon.running():
        key = await daemon.add(router.address, router.load.create_queues(3))
        await until(lambda: daemon.count(SubState.ACTIVE) == 3)
        await daemon.subscriber.unwatch(key)
        assert daemon.subscriber.status() == []
        await until(lambda: router.connections == 0)
        for _ in range(2):  # the second time it is watched already
            daemon.subscriber.watch(StoredRouter(key, router.address, was_there=True))
        await until(lambda: len(router.subscribed_notifiers()) == 3)
        assert router.connections == 1


async def test_more_routers_than_places_take_turns_until_all_that_are_there_are_watched(
    plain_daemon: Daemon,
) -> None:
    daemon = plain_daemon
    daemon.configure(daemon.config, max_routers=2)
    async with Router.start() as router:
        (queue,) = router.load.create_queues(1)
        for port in range(1, 6):  # nobody is there
            nobody = SmpServer(("127.0.0.1",), str(port), bytes(32))
            await daemon.add(nobody, router.load.create_queues(1), hand_over=False)
        await daemon.add(router.address, [queue], hand_over=False)
        async with daemon.running():
            await until(lambda: router.subscribed_notifiers() == {queue.notifier_id})
            assert len(daemon.subscriber.status()) <= 2
            assert subscriber.PARKED._value.get() >= 4


async def test_texts_of_a_router_do_not_reach_clients(plain_daemon: Daemon) -> None:
    daemon = plain_daemon
    async with Router.start() as router, daemon.running():
        (queue,) = router.load.create_queues(1)
        router.faults.answer_errors(
            "NSUB", ErrorType(b"PROXY PROTOCOL STORE /var/lib/router/store.log: \x1b[2Jfull")
        )
        await daemon.add(router.address, [queue])
        await until(lambda: daemon.count(SubState.ERR) == 1)
        with contextlib.closing(sqlite3.connect(daemon.path)) as db:
            details = db.execute("SELECT detail FROM subscriptions").fetchall()
        assert details == [("PROXY",)]


async def test_a_router_that_ends_unknown_queues_for_ever_is_left_alone(
    plain_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = plain_daemon
    before = MISBEHAVIOURS._value.get()

    async def script(peer: PeerSession) -> None:
        commands = await peer.receive()
        peer.answer([(command.corr_id, command.entity_id, Sok()) for command in commands])
        with contextlib.suppress(TransportError):
            while True:
                peer.events([(EntityId(os.urandom(24)), End()) for _ in range(300)])
                await peer.stream.drain()

    tune(monkeypatch, FIRST_LEAVE=60.0, LONGEST_LEAVE=60.0)
    async with Router.start() as elsewhere:
        queues = elsewhere.load.create_queues(1)
    async with scripted_router(script) as server:
        await daemon.add(server, queues, hand_over=False)
        async with daemon.running():
            await until(lambda: MISBEHAVIOURS._value.get() == before + 1, seconds=60)
            await until(lambda: daemon.count(SubState.INACTIVE) == 1)
            assert "nobody asked for" in (daemon.status().last_error or "")


@pytest.mark.parametrize("size", [0, 1, 250, 255])
async def test_ids_of_any_size_are_the_queues_own_problem(
    daemon: Daemon, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    async with Router.start() as router, daemon.running():
        good, odd = router.load.create_queues(2)
        await daemon.add(router.address, [good, replace(odd, notifier_id=EntityId(os.urandom(size)))])
        await until(lambda: daemon.states()[good.notifier_id] is SubState.ACTIVE)
        await until(lambda: daemon.count(SubState.AUTH) + daemon.count(SubState.ERR) == 1)
        assert "Traceback" not in caplog.text
        assert "failed with" not in caplog.text


async def test_a_router_whose_row_is_gone_is_left_alone(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Housekeeping may remove it before the session has noticed that nothing is left."""
    async with Router.start() as smp, daemon.running():
        await daemon.add(smp.address, smp.load.create_queues(2))
        await until(lambda: daemon.count(SubState.ACTIVE) == 2)
        assert daemon.token_key is not None
        deletion = await daemon.store.delete_token(daemon.token_key)
        assert deletion is not None
        assert await daemon.store.delete_unused_servers() == 1
        daemon.subscriber.forget(deletion.subscriptions)
        await until(lambda: not daemon.subscriber.status())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
