"""Daemons that log in to routers as services: association, drift, refusals, takeover."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ntf_server import service_credentials
from ntf_server.clock import SECONDS_PER_DAY
from ntf_server.router import TAKEOVERS
from ntf_server.router_session import HEALED
from ntf_server.service_credentials import SERVICE_ID_CHANGES, SERVICE_RESETS
from ntf_server.subscriber import ACTIVE_SERVICE, SESSIONS
from protocol.connection import Received
from protocol.encoding import EntityId, b64
from protocol.errors import SERVICE, TE_BAD_SERVICE, HandshakeError, ProtocolError
from protocol.ids_hash import ids_hash
from protocol.smp_handshake import ServiceRole
from protocol.smp_messages import Nsub, Nsubs
from protocol.statuses import SubState
from protocol.versions import VersionRange
from smp_router.broker import Broker
from smp_router.client import Client
from smp_router.commands import HANDLERS, Response
from smp_router.load import LoadQueue
from smp_router.router import Router
from store.journal_schema import JournalEvent
from store.records import ServerKey
from store.sqlite import SqliteStore
from tests.ntf_server.subscriber.conftest import PATIENT, QUICK, Daemon, tune, watch_commands
from tests.smp_client.peer import scripted_router
from tests.smp_client.test_session import accept_all
from tests.waiting import until


def notifier_ids(queues: list[LoadQueue]) -> list[EntityId]:
    return [queue.notifier_id for queue in queues]


async def assert_associated(daemon: Daemon, key: ServerKey, queues: list[LoadQueue]) -> None:
    record = await daemon.store.server(key)
    assert record.associated_count == len(queues)
    assert record.associated_hash == ids_hash(notifier_ids(queues))


def drift_events(daemon: Daemon) -> list[tuple[object, object]]:
    return [
        (ours, routers) for event, routers, ours in daemon.journal.events if event is JournalEvent.SMP_DRIFT
    ]


async def test_first_association_and_one_command_after_a_restart(daemon: Daemon) -> None:
    async with Router.start() as router:
        queues = router.load.create_queues(20)
        async with daemon.running():
            key = await daemon.add(router.address, queues)
            await until(lambda: daemon.count(SubState.ACTIVE) == 20)
            await assert_associated(daemon, key, queues)
        await until(lambda: router.connections == 0)
        router.faults.answer_errors("NSUB", SERVICE)  # every NSUB would fail from now on
        daemon.configure(QUICK)
        async with daemon.running():
            await until(lambda: router.subscribed_notifiers() == set(notifier_ids(queues)))
            await until(lambda: (JournalEvent.SMP_SERVICE_SUBSCRIBED, 20, 20) in daemon.journal.events)
            await router.load.emit(queues, 20)
            await until(lambda: daemon.unsent() == 20)
        assert daemon.count(SubState.ACTIVE) == 20
        assert not drift_events(daemon)


@pytest.mark.parametrize("version", [16, 18])
async def test_routers_that_tell_no_hash_are_not_trusted_for_the_number(daemon: Daemon, version: int) -> None:
    """Another set of the same size: NSUBS comes first, and then every queue is bound again."""
    async with Router.start(versions=VersionRange(6, version)) as router, daemon.running():
        queues = router.load.create_queues(20)
        key = await daemon.add(router.address, queues[:18])
        await until(lambda: daemon.count(SubState.ACTIVE) == 18)
        router.faults.lose_associations(2)
        (service,) = router.services
        for queue in queues[18:]:
            router.services.associate(service, queue.notifier_id)
        await daemon.see_drop(router)
        await until(lambda: router.subscribed_notifiers() >= set(notifier_ids(queues[:18])))
        assert (JournalEvent.SMP_SERVICE_SUBSCRIBED, 18, 18) in daemon.journal.events
        await assert_associated(daemon, key, queues[:18])


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("version", [17, 19])
async def test_drift_is_healed_and_nothing_is_lost(daemon: Daemon, share: float, version: int) -> None:
    async with Router.start(versions=VersionRange(6, version)) as router, daemon.running():
        queues = router.load.create_queues(100)
        key = await daemon.add(router.address, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 100)
        healed = HEALED._value.get()
        router.faults.refuse()
        router.faults.drop_connections()
        lost = router.faults.lose_associations(share)
        await router.load.emit(queues, 100)  # stored by the router while nobody is there
        router.faults.refuse(False)
        await until(lambda: daemon.journal.count(JournalEvent.SMP_HEALED) == 1)
        assert router.subscribed_notifiers() == set(notifier_ids(queues))
        assert drift_events(daemon) == [(100, 100 - len(lost))]
        assert HEALED._value.get() == healed + len(lost)
        await until(lambda: daemon.unsent() == 100)
        await assert_associated(daemon, key, queues)


async def test_drift_in_the_middle_of_a_session_is_found_by_the_next_comparison(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, VERIFY_INTERVAL=0.3)
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(30)
        await daemon.add(router.address, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 30)
        router.faults.lose_associations(7)
        await until(lambda: len(router.subscribed_notifiers()) == 30)
        assert drift_events(daemon) == [(30, 23)]


async def test_queues_deleted_by_the_router_become_auth(daemon: Daemon) -> None:
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(20)
        key = await daemon.add(router.address, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 20)
        router.faults.delete_queues(notifier_ids(queues[:5]))
        router.faults.drop_connections()
        await until(lambda: daemon.count(SubState.AUTH) == 5)
        await until(lambda: daemon.journal.count(JournalEvent.SMP_HEALED) == 1)
        await assert_associated(daemon, key, queues[5:])


async def test_deleted_subscriptions_are_no_drift(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router keeps associations of queues that were given up here: known, and after a restart learnt."""
    async with Router.start() as router:
        queues = router.load.create_queues(20)
        async with daemon.running():
            await daemon.add(router.address, queues)
            await until(lambda: daemon.count(SubState.ACTIVE) == 20)
            for queue in queues[:3]:
                await daemon.delete(queue)
            router.faults.drop_connections()
            await until(lambda: (JournalEvent.SMP_SERVICE_SUBSCRIBED, 20, 17) in daemon.journal.events)
            await until(lambda: daemon.status().subscribed)
            assert not drift_events(daemon)
        daemon.configure(PATIENT)
        seen = watch_commands(router, monkeypatch)
        async with daemon.running():
            await until(lambda: seen.get(Nsubs) == 3)
            await until(lambda: daemon.status().subscribed)
            await daemon.see_drop(router)
            await until(lambda: seen.get(Nsubs) == 4)
            await daemon.see_drop(router)
            await until(lambda: seen.get(Nsubs) == 5)
            assert seen[Nsub] == 17, "the same surplus was taken for drift again"
        assert not drift_events(daemon)
        assert daemon.journal.count(JournalEvent.SMP_HEALED) == 0


async def test_what_a_router_lost_is_told_from_what_was_deleted_here(daemon: Daemon) -> None:
    """After a restart: 20 queues, 5 of them deleted here, and 2 of the rest lost by the router."""
    async with Router.start() as router:
        queues = router.load.create_queues(20)
        async with daemon.running():
            await daemon.add(router.address, queues)
            await until(lambda: daemon.count(SubState.ACTIVE) == 20)
            for queue in queues[:5]:
                await daemon.delete(queue)
        for queue in queues[5:7]:
            router.services.dissociate(queue.notifier_id)
        daemon.configure(PATIENT)
        async with daemon.running():
            await until(lambda: daemon.journal.count(JournalEvent.SMP_HEALED) == 1)
            assert router.subscribed_notifiers() >= set(notifier_ids(queues[5:]))
    assert drift_events(daemon) == [(15, 13)]
    assert (JournalEvent.SMP_HEALED, 2, None) in daemon.journal.events


async def test_service_id_changed(daemon: Daemon) -> None:
    changes = SERVICE_ID_CHANGES._value.get()
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(10)
        key = await daemon.add(router.address, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 10)
        before = (await daemon.store.server(key)).service_id
        router.faults.change_service_ids()
        router.faults.drop_connections()
        await until(lambda: SERVICE_ID_CHANGES._value.get() == changes + 1)
        await until(lambda: daemon.status().subscribed and daemon.count(SubState.ACTIVE) == 10)
        assert (await daemon.store.server(key)).service_id != before
        await assert_associated(daemon, key, queues)
        assert len(router.subscribed_notifiers()) == 10


async def test_one_queue_that_is_refused_for_ever_resets_the_service_once(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Router.start() as router, daemon.running():
        bad, *queues = router.load.create_queues(10)
        key = await daemon.add(router.address, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 9)
        refused = refuse_nsub(monkeypatch, bad)
        await daemon.add(router.address, [bad])
        await until(lambda: (daemon.count(SubState.SERVICE), daemon.count(SubState.ACTIVE)) == (1, 9))
        resets, attempts = SERVICE_RESETS._value.get(), len(refused)
        monkeypatch.setattr(service_credentials, "RESET_INTERVAL", 0.0)
        daemon.clock.ahead += SECONDS_PER_DAY
        await until(lambda: len(refused) > attempts and daemon.count(SubState.SERVICE) == 1)
        await assert_associated(daemon, key, queues)
        assert SERVICE_RESETS._value.get() == resets


def refuse_nsub(monkeypatch: pytest.MonkeyPatch, queue: LoadQueue) -> list[EntityId]:
    """Routers answer SERVICE to NSUB of one queue; a list that grows with every attempt."""
    refused: list[EntityId] = []
    handler = HANDLERS[Nsub]

    def run(broker: Broker, client: Client, request: Received[Nsub], subject: Any) -> Response:
        if request.entity_id == queue.notifier_id:
            refused.append(request.entity_id)
            raise ProtocolError(SERVICE)
        return handler.run(broker, client, request, subject)

    monkeypatch.setitem(HANDLERS, Nsub, handler._replace(run=run))
    return refused


async def test_the_end_of_another_service_is_not_the_end_of_ours(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, VERIFY_INTERVAL=0.1)
    takeovers = TAKEOVERS._value.get()
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(10)
        await daemon.add(router.address, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 10)
        router.faults.change_service_ids()
        router.faults.send_ends()
        await until(lambda: len(router.subscribed_notifiers()) == 10)
        await until(lambda: daemon.count(SubState.ACTIVE) == 10)
    assert TAKEOVERS._value.get() == takeovers


async def test_service_forgotten(daemon: Daemon) -> None:
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(10)
        key = await daemon.add(router.address, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 10)
        router.faults.forget_services()
        router.faults.drop_connections()
        await until(lambda: len(router.subscribed_notifiers()) == 10)
        await until(lambda: daemon.count(SubState.ACTIVE) == 10)
        await assert_associated(daemon, key, queues)


async def test_service_forgotten_again_and_again_in_the_middle_of_sessions(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, VERIFY_INTERVAL=0.1)
    async with Router.start() as router, daemon.running():
        await daemon.add(router.address, router.load.create_queues(10))
        for _ in range(4):
            await until(lambda: daemon.status().subscribed and len(router.subscribed_notifiers()) == 10)
            router.faults.forget_services()
        await until(lambda: len(router.subscribed_notifiers()) == 10)
        await until(lambda: daemon.count(SubState.ACTIVE) == 10)


async def test_service_subscription_refused_means_fresh_credentials(daemon: Daemon) -> None:
    resets = SERVICE_RESETS._value.get()
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(10)
        key = await daemon.add(router.address, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 10)
        before = (await daemon.store.server(key)).credentials
        router.faults.answer_errors("NSUBS", SERVICE)
        router.faults.drop_connections()
        await until(lambda: SERVICE_RESETS._value.get() == resets + 1)
        await until(lambda: len(router.subscribed_notifiers()) == 10 and daemon.count(SubState.ACTIVE) == 10)
        record = await daemon.store.server(key)
        assert record.credentials is not None
        assert record.credentials != before
        await assert_associated(daemon, key, queues)


async def test_a_queue_refused_because_of_the_service(daemon: Daemon) -> None:
    """Fresh credentials once; if that does not help, the queue waits in SERVICE and is tried again slowly."""
    async with Router.start() as router, daemon.running():
        (first,) = router.load.create_queues(1)
        await daemon.add(router.address, [first])
        await until(lambda: daemon.count(SubState.ACTIVE) == 1)
        router.faults.answer_errors("NSUB", SERVICE)
        (queue,) = router.load.create_queues(1)
        await daemon.add(router.address, [queue])
        await until(lambda: daemon.states()[queue.notifier_id] is SubState.SERVICE)
        router.faults.answer_errors("NSUB", None)
        daemon.clock.ahead = 601
        await until(lambda: daemon.count(SubState.ACTIVE) == 2)


async def test_services_unsupported(daemon: Daemon) -> None:
    async with Router.start(versions=VersionRange(6, 15)) as router, daemon.running():
        key = await daemon.add(router.address, router.load.create_queues(5))
        await until(lambda: daemon.count(SubState.ACTIVE) == 5)
        assert (await daemon.store.server(key)).associated_count == 0
        assert not daemon.status().service


async def test_services_no_longer_supported(daemon: Daemon) -> None:
    async with daemon.running():
        async with Router.start() as router:
            port, state = router.port, router.state
            queues = router.load.create_queues(5)
            key = await daemon.add(router.address, queues)
            await until(lambda: daemon.count(SubState.ACTIVE) == 5)
        async with Router.start(port=port, state=state, versions=VersionRange(6, 15)) as router:
            await until(lambda: daemon.status().version == 15)
            await until(lambda: daemon.status().subscribed and daemon.count(SubState.ACTIVE) == 5)
            record = await daemon.store.server(key)
            assert (record.service_id, record.credentials, record.associated_count) == (None, None, 0)
        async with Router.start(port=port, state=state) as router:
            await until(lambda: daemon.status().service and daemon.count(SubState.ACTIVE) == 5)
            await assert_associated(daemon, key, queues)


async def test_a_router_that_lets_no_service_in(daemon: Daemon) -> None:
    """Once with fresh credentials, then without any."""
    refused: set[bytes] = set()

    def refuse(fingerprint: bytes, _: ServiceRole) -> EntityId:
        refused.add(fingerprint)
        raise HandshakeError(TE_BAD_SERVICE)

    async with scripted_router(accept_all, service_id=refuse) as server, daemon.running():
        async with Router.start() as elsewhere:
            queues = elsewhere.load.create_queues(3)
        await daemon.add(server, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 3)
        assert len(refused) == 2
        assert not daemon.status().service


async def test_service_subscription_refused_again_means_queue_by_queue(daemon: Daemon) -> None:
    """Fresh credentials were made lately, so they are kept; the queues are subscribed one by one."""
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(10)
        await daemon.add(router.address, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 10)
        router.faults.answer_errors("NSUBS", SERVICE)
        resets = SERVICE_RESETS._value.get()
        for _ in range(2):
            await daemon.see_drop(router)
            await until(lambda: len(router.subscribed_notifiers()) == 10)
            await until(lambda: daemon.count(SubState.ACTIVE) == 10)
        assert SERVICE_RESETS._value.get() == resets + 1
        assert not drift_events(daemon)


async def test_credentials_are_stored_before_they_are_used(daemon: Daemon) -> None:
    async with Router.start() as router, daemon.running():
        router.faults.black_hole()  # TLS works, the handshake above it does not
        key = await daemon.add(router.address, router.load.create_queues(1))
        await until(lambda: router.connections == 1)
        assert (await daemon.store.server(key)).credentials is not None


async def test_two_daemons_with_the_same_credentials_do_not_fight(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, FIRST_LEAVE=1.0)
    daemon.configure(QUICK)
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(10)
        key = await daemon.add(router.address, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 10)
        await until(lambda: daemon.status().subscribed)
        copy = await copy_of(daemon, key, router, queues, tmp_path / "copy.db")
        try:
            async with copy.running():
                await until(lambda: copy.count(SubState.ACTIVE) == 10)
                await until(lambda: daemon.status().taken_over)
                await until(lambda: daemon.count(SubState.INACTIVE) == 10)
                connects = daemon.journal.count(JournalEvent.SMP_CONNECTED)
                await asyncio.sleep(0.4)
                assert daemon.journal.count(JournalEvent.SMP_CONNECTED) == connects, "it fought"
                assert copy.status().connected
            await until(lambda: daemon.count(SubState.ACTIVE) == 10)  # the other is gone
            assert len(router.subscribed_notifiers()) == 10
        finally:
            await copy.store.close()


async def copy_of(
    daemon: Daemon,
    key: ServerKey,
    router: Router,
    queues: list[LoadQueue],
    path: Path,
) -> Daemon:
    """A daemon with the same credentials and subscriptions, as after restoring a backup elsewhere."""
    store = SqliteStore(path)
    await store.open()
    copy = Daemon(path, store, daemon.config)
    other_key = await copy.add(router.address, queues, hand_over=False)
    record = await daemon.store.server(key)
    assert record.credentials is not None
    assert record.service_id is not None
    await store.set_credentials(other_key, record.credentials)
    await store.set_service_id(other_key, record.service_id)
    await store.set_subscribed(other_key, notifier_ids(queues), service_id=record.service_id)
    return copy


async def test_own_routers_are_counted_one_by_one(daemon: Daemon) -> None:
    daemon.configure(replace(QUICK, own_hosts=("127.0.0.1",)))
    async with Router.start() as own, Router.start(host="127.0.0.2") as other, daemon.running():
        await daemon.add(own.address, own.load.create_queues(4))
        await daemon.add(other.address, other.load.create_queues(3))
        counts = ACTIVE_SERVICE.queues_own.labels("127.0.0.1"), ACTIVE_SERVICE.queues_other
        await until(lambda: [count._value.get() for count in counts] == [4, 3])
        assert ACTIVE_SERVICE.servers_own.labels("127.0.0.1")._value.get() == 1
        assert ACTIVE_SERVICE.servers_other._value.get() == 1
        assert SESSIONS._value.get() == 2


async def test_logs_name_no_queue(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "ntf_server"):
        async with Router.start() as router, daemon.running():
            queues = router.load.create_queues(5)
            router.faults.delete_queues(notifier_ids(queues[:1]))
            await daemon.add(router.address, queues)
            await until(lambda: daemon.count(SubState.ACTIVE) == 4)
            router.faults.send_end(notifier_ids(queues[1:2]))
            await until(lambda: daemon.count(SubState.END) == 1)
            router.faults.lose_associations(2)  # one of them may be the ended one, which is no loss
            await daemon.see_drop(router)
            await until(lambda: daemon.journal.count(JournalEvent.SMP_HEALED) >= 1)
    assert "queues of this service" in caplog.text
    for queue in queues:
        for form in (queue.notifier_id.hex(), b64(queue.notifier_id).decode(), repr(queue.notifier_id)[2:-1]):
            assert form not in caplog.text
