"""What happens to all queues of a router at once writes none of them, and is told as if it had."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol.statuses import SUB_MOVES, SUBSCRIBABLE, SubInput, SubState
from store.interface import NtfStore
from store.records import Moved, NewSubscription, ServerKey
from store.sqlite import SqliteStore
from tests.store.builders import NOW, SERVICE_ID, find_subscription, happened
from tests.store.test_contract_subscriptions import make_queues


@dataclass(eq=False)
class Queue:
    """As it would be if every event of its router were written to it."""

    new: NewSubscription
    state: SubState = SubState.PENDING
    associated: bool = False

    def meets(self, event: SubInput) -> bool:
        """Whether it is in another state now."""
        before = self.state
        self.state = SUB_MOVES.get((before, event), before)
        self.associated &= self.state in SUBSCRIBABLE
        return self.state is not before


class Life:
    """A store, and beside it what its queues must be told to be."""

    def __init__(self, store: NtfStore, key: ServerKey, news: Sequence[NewSubscription], seed: int) -> None:
        self._store = store
        self._key = key
        self._chance = random.Random(seed)
        self.queues = [Queue(new) for new in news]

    async def step(self) -> None:
        steps: list[Callable[[], Awaitable[None]]] = [
            self.lose,
            self.lose,
            self.serve,
            self.serve,
            self.clear,
            self.delete,
            lambda: self.subscribe(associated=False),
            lambda: self.subscribe(associated=True),
            lambda: self.move(SubInput.ENDED),
            lambda: self.move(SubInput.HANDED_OVER),
        ]
        await self._chance.choice(steps)()

    def some(self) -> list[Queue]:
        return self._chance.sample(self.queues, min(5, len(self.queues)))

    async def lose(self) -> None:
        changed = await self._store.set_disconnected(self._key)
        assert changed == sum([queue.meets(SubInput.DISCONNECTED) for queue in self.queues])

    async def serve(self) -> None:
        changed = await self._store.set_service_subscribed(self._key)
        assert changed == sum([queue.meets(SubInput.SUBSCRIBED) for queue in self.queues if queue.associated])

    async def clear(self) -> None:
        changed = await self._store.clear_service(self._key)
        await self._store.set_service_id(self._key, SERVICE_ID)
        cleared = [queue for queue in self.queues if queue.associated]
        assert changed == sum(queue.state is SubState.ACTIVE for queue in cleared)
        for queue in cleared:
            queue.meets(SubInput.SERVICE_CLEARED)
            queue.associated = False

    async def delete(self) -> None:
        gone = self.queues.pop()
        found = await find_subscription(self._store, gone.new.subscription_id)
        assert found is not None
        await self._store.delete_subscription(found.key)

    async def subscribe(self, *, associated: bool) -> None:
        some = self.some()
        moves = await self._store.set_subscribed(
            self._key,
            [queue.new.notifier_id for queue in some],
            service_id=SERVICE_ID if associated else None,
        )
        self._check_moves(moves, some, SubInput.SUBSCRIBED)
        for queue in some:
            queue.associated = associated

    async def move(self, event: SubInput) -> None:
        some = self.some()
        events = [happened(queue.new.notifier_id, event) for queue in some]
        self._check_moves(await self._store.move_queues(self._key, events, now=NOW), some, event)

    def _check_moves(self, moves: Sequence[Moved], some: Sequence[Queue], event: SubInput) -> None:
        """What the journal is told."""
        expected = {
            (queue.new.subscription_id, before, queue.state)
            for queue in some
            for before in (queue.state,)
            if queue.meets(event)
        }
        assert {(move.subscription_id, move.before, move.after) for move in moves} == expected

    async def check(self) -> None:
        found = await self._store.subscriptions([queue.new.subscription_id for queue in self.queues])
        assert [(one.status.state, one.associated) for one in found if one is not None] == [
            (queue.state, queue.associated) for queue in self.queues
        ]
        active = sum(queue.state is SubState.ACTIVE for queue in self.queues)
        assert (await self._store.counts()).active_subscriptions == active


@pytest.mark.parametrize("seed", range(6))
async def test_states_are_told_as_if_each_row_had_been_written(store: NtfStore, seed: int) -> None:
    key, news = await make_queues(store, 40)
    await store.set_service_id(key, SERVICE_ID)
    life = Life(store, key, news, seed)
    for _ in range(40):
        await life.step()
        await life.check()


async def test_calls_of_one_transaction_are_counted_in_their_order(store: NtfStore) -> None:
    key, news = await make_queues(store, 5)
    ids = [new.notifier_id for new in news]
    await store.set_service_id(key, SERVICE_ID)
    results = await asyncio.gather(
        store.set_subscribed(key, ids, service_id=None),
        store.set_disconnected(key),
        store.set_subscribed(key, ids[:3], service_id=SERVICE_ID),
        store.set_disconnected(key),
        store.set_service_subscribed(key),
        store.set_subscribed(key, ids[3:4], service_id=None),
    )
    assert [results[1], results[3], results[4]] == [5, 3, 3]
    assert (await store.counts()).active_subscriptions == 4


def _rows(path: Path, table: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute(f"SELECT * FROM {table}").fetchall()


async def test_no_queue_is_written_when_a_router_is_lost_or_its_service_subscribed(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "ntf.db")
    await store.open()
    key, news = await make_queues(store, 300)
    await store.set_service_id(key, SERVICE_ID)
    await store.set_subscribed(key, [new.notifier_id for new in news], service_id=SERVICE_ID)
    written = _rows(tmp_path / "ntf.db", "subscriptions")
    assert await store.set_disconnected(key) == 300
    assert await store.set_service_subscribed(key) == 300
    assert _rows(tmp_path / "ntf.db", "subscriptions") == written
    quiet = _rows(tmp_path / "ntf.db", "smp_servers")
    assert await store.set_service_subscribed(key) == 0
    assert _rows(tmp_path / "ntf.db", "smp_servers") == quiet
    await store.close()
