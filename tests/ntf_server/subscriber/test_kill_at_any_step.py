"""A process that ends between any two steps, while its router is busy and clients add and delete queues."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any, cast

import pytest

from protocol.errors import INTERNAL, store_error
from protocol.ids_hash import ids_hash
from protocol.statuses import SubState
from smp_router.load import LoadQueue
from smp_router.router import Router
from store.journal_schema import JournalEvent
from store.sqlite import SqliteStore
from tests.ntf_server.subscriber.conftest import PATIENT, Daemon, ListJournal
from tests.waiting import until


class MortalStore:
    """The store of a process that ends after some calls: at once, or when it makes the next one."""

    def __init__(self, store: SqliteStore, calls: int, *, at_once: bool) -> None:
        self._store = store
        self._left = calls
        self._at_once = at_once
        self.is_dead = False

    def __getattr__(self, call: str) -> Any:
        real = getattr(self._store, call)

        async def mortal(*arguments: Any, **options: Any) -> Any:
            if not self._left:
                await self._die()
            self._left -= 1
            answer = await real(*arguments, **options)
            if not self._left and self._at_once:
                await self._die()
            return answer

        return mortal

    async def _die(self) -> None:
        self.is_dead = True
        await asyncio.Event().wait()


class Lives:
    """Of a server with one router, one after the other."""

    def __init__(self, daemon: Daemon, router: Router, queues: list[LoadQueue]) -> None:
        self.first = daemon
        self.router = router
        self.journal = ListJournal()
        self._queues = {queue.notifier_id: queue for queue in queues}

    async def live(self, calls: int, *, at_once: bool) -> bool:
        """Until all is subscribed, or so many calls to the store are made; whether it came to its end."""
        store = MortalStore(self.first.store, calls, at_once=at_once)
        daemon = Daemon(
            self.first.path,
            cast("SqliteStore", store),
            PATIENT,
            journal=self.journal,
            token_key=self.first.token_key,
        )
        (new,) = self.router.load.create_queues(1)
        self._queues[new.notifier_id] = new
        old = self._queues[min(self.first.states())]
        async with daemon.running():
            client = asyncio.ensure_future(self._come_and_go(daemon, new, old))
            await until(lambda: store.is_dead or (client.done() and self.is_subscribed(daemon)))
            client.cancel()
        return not store.is_dead

    async def _come_and_go(self, daemon: Daemon, new: LoadQueue, old: LoadQueue) -> None:
        await daemon.add(self.router.address, [new])
        await daemon.delete(old)

    def is_subscribed(self, daemon: Daemon) -> bool:
        states, routers = daemon.states(), daemon.subscriber.status()
        is_done = len(routers) == 1 and routers[0].subscribed and not routers[0].waiting
        all_active = set(states.values()) == {SubState.ACTIVE}
        return is_done and all_active and self.router.subscribed_notifiers() >= states.keys()


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_server_killed_between_any_two_steps_keeps_its_service(daemon: Daemon, at_once: bool) -> None:
    daemon.configure(PATIENT)
    async with Router.start() as router:
        async with daemon.running():
            queues = router.load.create_queues(5)
            key = await daemon.add(router.address, queues)
            await until(lambda: daemon.count(SubState.ACTIVE) == 5)
        before, lives = await daemon.store.server(key), Lives(daemon, router, queues)
        for calls in count(1):
            router.faults.answer_errors("NSUBS", INTERNAL, 1)
            router.faults.answer_errors("NSUB", store_error("disk is full"), 2)
            survived = await lives.live(calls, at_once=at_once)
            assert await lives.live(-1, at_once=False)
            record, stored = await daemon.store.server(key), daemon.states().keys()
            assert (record.credentials, record.service_id) == (before.credentials, before.service_id)
            assert record.associated_count == len(stored)
            assert record.associated_hash == ids_hash(stored)
            if survived:
                break
    assert calls > 10, "it was never killed in the middle"
    assert not lives.journal.count(JournalEvent.SMP_DRIFT)
    assert not lives.journal.count(JournalEvent.SMP_SERVICE_RESET)
