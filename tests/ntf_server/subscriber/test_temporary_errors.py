"""Routers that cannot serve requests for a while: nothing is destroyed, and everything resumes by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ntf_server.router_session import REFUSED
from ntf_server.service_credentials import SERVICE_RESETS
from protocol.errors import AUTH, INTERNAL, QUOTA, ErrorType, store_error
from protocol.smp_messages import Nsub, Nsubs
from protocol.statuses import SubState
from smp_client.backoff import Backoff
from smp_router.load import LoadQueue
from smp_router.router import Router
from store.journal_schema import JournalEvent
from tests.ntf_server.subscriber.conftest import PATIENT, Daemon, tune, watch_commands
from tests.ntf_server.subscriber.test_services import assert_associated, drift_events, notifier_ids
from tests.waiting import until

TEMPORARY = [INTERNAL, QUOTA, store_error("disk is full")]
FINAL_STATES = {SubState.ERR, SubState.AUTH, SubState.SERVICE, SubState.END, SubState.DELETED}


@pytest.fixture
def daemon(daemon: Daemon) -> Daemon:
    daemon.configure(PATIENT)
    return daemon


@pytest.fixture
def plain_daemon(plain_daemon: Daemon) -> Daemon:
    plain_daemon.configure(replace(PATIENT, use_service_credentials=False))
    return plain_daemon


def watch_delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays before attempts that are repeated from now on."""
    delays: list[float] = []
    original = Backoff.next

    def record(backoff: Backoff) -> float:
        delays.append(original(backoff))
        return delays[-1]

    monkeypatch.setattr(Backoff, "next", record)
    return delays


def is_watched(router: Router, daemon: Daemon, queues: list[LoadQueue]) -> bool:
    expected = set(notifier_ids(queues))
    return router.subscribed_notifiers() >= expected and daemon.count(SubState.ACTIVE) == len(expected)


async def subscribe_one_more(daemon: Daemon, router: Router) -> None:
    """Whatever the session had to do before is done by then."""
    active = daemon.count(SubState.ACTIVE)
    await daemon.add(router.address, router.load.create_queues(1))
    await until(lambda: daemon.count(SubState.ACTIVE) == active + 1)


@pytest.mark.parametrize("error", TEMPORARY, ids=str)
async def test_a_temporary_error_leaves_the_service_and_its_queues_as_they_are(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, error: ErrorType
) -> None:
    resets = SERVICE_RESETS._value.get()
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(10)
        key = await daemon.add(router.address, queues)
        await until(lambda: is_watched(router, daemon, queues))
        before = await daemon.store.server(key)
        router.faults.answer_errors("NSUBS", error, 3)
        router.faults.answer_errors("NSUB", error, 30)
        seen = watch_commands(router, monkeypatch)
        await daemon.see_drop(router)
        await until(lambda: is_watched(router, daemon, queues))
        assert seen == {Nsubs: 4}, "a busy router was asked for every queue"
        record = await daemon.store.server(key)
        assert (record.credentials, record.service_id) == (before.credentials, before.service_id)
        await assert_associated(daemon, key, queues)
    assert SERVICE_RESETS._value.get() == resets
    assert daemon.journal.count(JournalEvent.SMP_SERVICE_RESET) == 0
    assert not drift_events(daemon)


@pytest.mark.parametrize("error", TEMPORARY, ids=str)
async def test_queues_keep_their_state_until_the_router_can_serve_them(
    plain_daemon: Daemon, caplog: pytest.LogCaptureFixture, error: ErrorType
) -> None:
    """Queues never reach the slow retry, which starts at ten minutes; the operator learns of it once."""
    async with Router.start() as router, plain_daemon.running():
        router.faults.answer_errors("NSUB", error, 25)
        queues = router.load.create_queues(10)
        await plain_daemon.add(router.address, queues)
        await until(lambda: is_watched(router, plain_daemon, queues))
        assert not FINAL_STATES & set(plain_daemon.states().values())
    assert caplog.text.count("cannot subscribe, retrying: the router answered NSUB with") == 1


@pytest.mark.parametrize("count", [1, 2])
async def test_a_few_queues_with_a_temporary_error_wait_by_themselves(
    plain_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Also where the router can never serve them: the others are not subscribed again each time."""
    async with Router.start() as router, plain_daemon.running():
        queues = router.load.create_queues(10)
        await plain_daemon.add(router.address, queues[count:])
        await until(lambda: is_watched(router, plain_daemon, queues[count:]))
        seen, delays = watch_commands(router, monkeypatch), watch_delays(monkeypatch)
        router.faults.answer_errors("NSUB", INTERNAL, 4 * count)
        await plain_daemon.add(router.address, queues[:count])
        await until(lambda: is_watched(router, plain_daemon, queues))
        assert seen[Nsub] == 5 * count, "the other queues were subscribed again"
        assert len(delays) == 4
        assert delays == sorted(delays)
        router.faults.answer_errors("NSUB", INTERNAL, 1)
        await subscribe_one_more(plain_daemon, router)
        assert len(delays) == 5
        assert delays[4] < delays[1], "the delay does not start again"


async def test_a_router_that_serves_nothing_is_asked_for_one_batch_at_a_time(
    plain_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, BATCH_SIZE=5, FIRST_BUSY=60.0, LONGEST_BUSY=60.0)
    async with Router.start() as router, plain_daemon.running():
        queues = router.load.create_queues(50)
        await plain_daemon.add(router.address, queues, hand_over=False)
        seen = watch_commands(router, monkeypatch)
        router.faults.answer_errors("NSUB", INTERNAL, 5)
        await plain_daemon.add(router.address, router.load.create_queues(1))
        await until(lambda: seen.get(Nsub, 0) == 5)
        await plain_daemon.see_drop(router)  # a new connection does not wait
        await until(lambda: len(router.subscribed_notifiers()) == 51)
        assert seen[Nsub] == 5 + 51


async def test_a_router_that_served_queues_before_is_asked_for_one_batch_at_a_time_as_well(
    plain_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, BATCH_SIZE=5, FIRST_BUSY=60.0, LONGEST_BUSY=60.0)
    async with Router.start() as router, plain_daemon.running():
        queues = router.load.create_queues(31)
        await plain_daemon.add(router.address, queues[:1])
        await until(lambda: is_watched(router, plain_daemon, queues[:1]))
        seen = watch_commands(router, monkeypatch)
        router.faults.answer_errors("NSUB", INTERNAL, 5)
        await plain_daemon.add(router.address, queues[1:])
        await until(lambda: seen.get(Nsub, 0) >= 5)
        await plain_daemon.see_drop(router)
        await until(lambda: is_watched(router, plain_daemon, queues))
        assert seen[Nsub] == 5 + 31


async def test_queues_beyond_those_in_memory_wait_as_well(
    plain_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the answers are errors, and more than there is room for: no request is repeated at once."""
    tune(monkeypatch, WAITING_LIMIT=4, FIRST_BUSY=60.0, LONGEST_BUSY=60.0)
    async with Router.start() as router, plain_daemon.running():
        queues = router.load.create_queues(20)
        await plain_daemon.add(router.address, queues, hand_over=False)
        seen = watch_commands(router, monkeypatch)
        router.faults.answer_errors("NSUB", INTERNAL, 10)
        await plain_daemon.add(router.address, router.load.create_queues(1))
        await until(lambda: len(router.subscribed_notifiers()) == 11)
        await router.load.emit(queues, 40)
        await until(lambda: plain_daemon.unsent() >= 10)
        assert seen[Nsub] == 21
        await plain_daemon.see_drop(router)
        await until(lambda: len(router.subscribed_notifiers()) == 21)


@pytest.mark.parametrize("error", [AUTH, ErrorType(b"LATER")], ids=str)
async def test_a_router_that_rejects_nsubs_for_another_reason_keeps_its_service(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, error: ErrorType
) -> None:
    """Its queues are subscribed one by one in that session, also after an answer that cannot be read."""
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(10)
        key = await daemon.add(router.address, queues)
        await until(lambda: is_watched(router, daemon, queues))
        before = await daemon.store.server(key)
        router.faults.answer_errors("NSUBS", error)
        seen = watch_commands(router, monkeypatch)
        await daemon.see_drop(router)
        await until(lambda: is_watched(router, daemon, queues))
        tune(monkeypatch, VERIFY_INTERVAL=0.0)
        later = router.load.create_queues(1)
        await daemon.add(router.address, later)
        queues += later
        await until(lambda: is_watched(router, daemon, queues))
        assert seen[Nsubs] <= 3, "NSUBS was repeated after the queues were subscribed"
        assert (await daemon.store.server(key)).credentials == before.credentials
        await assert_associated(daemon, key, queues)
    assert daemon.journal.count(JournalEvent.SMP_SERVICE_RESET) == 0


async def test_deleted_queues_that_were_never_associated_are_no_surplus(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One dead and one live queue are deleted: the sets still agree, and no queue is subscribed again."""
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(20)
        router.faults.delete_queues(notifier_ids(queues[:1]))
        await daemon.add(router.address, queues)
        await until(lambda: daemon.count(SubState.ACTIVE) == 19 and daemon.count(SubState.AUTH) == 1)
        await daemon.delete(queues[0])
        await daemon.delete(queues[1])
        seen = watch_commands(router, monkeypatch)
        await daemon.see_drop(router)
        await until(lambda: (JournalEvent.SMP_SERVICE_SUBSCRIBED, 19, 18) in daemon.journal.events)
        await until(lambda: daemon.status().subscribed and daemon.count(SubState.ACTIVE) == 18)
        await subscribe_one_more(daemon, router)
        assert seen == {Nsubs: 1, Nsub: 1}
    assert not drift_events(daemon)


async def test_of_two_deleted_queues_the_router_keeps_one(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their owner also deletes one of them at the router, which tells so; another one is subscribed again."""
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(20)
        await daemon.add(router.address, queues)
        await until(lambda: is_watched(router, daemon, queues))
        for queue in queues[:3]:
            await daemon.delete(queue)
        deleted = REFUSED.labels(SubState.DELETED)
        told = deleted._value.get()
        router.faults.send_deld(notifier_ids(queues[:1]))
        await until(lambda: deleted._value.get() == told + 1)
        await daemon.add(router.address, queues[1:2])
        await until(lambda: daemon.count(SubState.ACTIVE) == 18)
        seen = watch_commands(router, monkeypatch)
        await daemon.see_drop(router)
        await until(lambda: (JournalEvent.SMP_SERVICE_SUBSCRIBED, 19, 18) in daemon.journal.events)
        await until(lambda: daemon.status().subscribed)
        await subscribe_one_more(daemon, router)
        assert seen == {Nsubs: 1, Nsub: 1}
    assert not drift_events(daemon)


async def test_a_deleted_queue_that_the_router_loses_unseen_is_no_drift(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two: the numbers cannot tell it from a queue of ours that is lost, a look at each queue can."""
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(20)
        await daemon.add(router.address, queues)
        await until(lambda: is_watched(router, daemon, queues))
        await daemon.see_drop(router)
        await until(lambda: (JournalEvent.SMP_SERVICE_SUBSCRIBED, 20, 20) in daemon.journal.events)
        await until(lambda: daemon.status().subscribed)
        for queue in queues[:2]:
            await daemon.delete(queue)
        router.faults.delete_queues(notifier_ids(queues[:1]))
        seen = watch_commands(router, monkeypatch)
        for drops, commands in ((1, 3), (2, 4)):
            await daemon.see_drop(router)
            await until(lambda commands=commands: seen.get(Nsubs) == commands)
            await until(lambda: daemon.status().subscribed)
            await until(lambda drops=drops: daemon.count(SubState.ACTIVE) == 17 + drops)
            await subscribe_one_more(daemon, router)
            assert (seen[Nsubs], seen[Nsub]) == (commands, 18 + drops)
    assert not drift_events(daemon)
    assert not daemon.journal.count(JournalEvent.SMP_HEALED)


async def test_a_different_set_of_the_same_size_is_logged_as_such(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    async with Router.start() as router, daemon.running():
        queues = router.load.create_queues(20)
        await daemon.add(router.address, queues[:18])
        await until(lambda: is_watched(router, daemon, queues[:18]))
        router.faults.lose_associations(2)
        (service,) = router.services
        for queue in queues[18:]:
            router.services.associate(service, queue.notifier_id)
        await daemon.see_drop(router)
        await until(lambda: daemon.journal.count(JournalEvent.SMP_HEALED) == 1)
    assert "has a different set of 18 queues of this service" in caplog.text
    assert "instead of" not in caplog.text
